"""Passes over prompts, alone and beside blocks: what they hold, compute and take, for how many rows there is time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dflash.gpu.narrow_attention import NarrowBlockAttention
from sglang_dflash.gpu.pass_sizes import MOST_ROWS, PROMPT_ROWS, row_sizes
from sglang_dflash.round import prompt_graphs
from sglang_dflash.round.costs import Staircase
from sglang_dflash.round.prompt_graphs import PromptGraphs
from sglang_dflash.round.run import RoundRunner


def timed(sizes: list[int], times: list[float]) -> PromptGraphs:
    """Graphs that were captured elsewhere, and how long they take."""
    graphs = object.__new__(PromptGraphs)
    graphs.sizes, graphs.passes = sizes, Staircase(sizes, times)
    graphs.inputs = SimpleNamespace(most=4)
    return graphs


GRAPHS = timed([64, 128, 192, 256], [1.0, 1.1, 1.5, 2.0])
GRAPHS.parts = SimpleNamespace(linear_states=None)


@pytest.mark.parametrize(
    ("block_rows", "slowdown", "rows"),
    [
        (8, 0.05, 56),  # what the smallest pass has room for costs nothing
        (8, 0.1, 120),
        (8, 0.49, 120),
        (8, 0.5, 184),
        (8, 9.0, 248),
        (64, 0.05, 0),
        (65, 0.05, 63),
        (256, 9.0, 0),
        (257, 9.0, 0),
    ],
)
def test_prompt_rows(block_rows: int, slowdown: float, rows: int) -> None:
    assert GRAPHS.prompt_rows(block_rows, slowdown, backlog=0) == rows


@pytest.mark.parametrize(("besides", "rows"), [(0.0, 56), (0.9, 56), (1.1, 120), (100.0, 248)])
def test_prompts_make_all_of_a_round_longer(besides: float, rows: int) -> None:
    """What it takes besides the target's pass, as the drafter's, takes as long with prompts as without."""
    assert GRAPHS.prompt_rows(8, 0.05, 0, besides) == rows


@pytest.mark.parametrize(
    ("host", "besides", "rows"),
    [
        (0.9, 0.0, 56),
        (1.1, 0.0, 120),
        (1.49, 0.0, 120),
        (1.5, 0.0, 184),
        (1.5, 0.3, 120),
        (9.0, 0.0, 248),
    ],
)
def test_prompts_while_the_host_is_at_work(host: float, besides: float, rows: int) -> None:
    """They cost nothing as long as the device is through with its round before the host is with the step."""
    assert GRAPHS.prompt_rows(8, 0.05, 0, besides, host) == rows


@pytest.mark.parametrize(("backlog", "rows"), [(0, 56), (56 * 8, 56), (100 * 8, 100), (1e6, 248)])
def test_prompts_that_wait_in_numbers(backlog: int, rows: int) -> None:
    assert GRAPHS.prompt_rows(8, 0.05, int(backlog)) == rows


def test_holds() -> None:
    assert GRAPHS.holds(256, 4)
    assert not GRAPHS.holds(257, 4) and not GRAPHS.holds(256, 5)


def test_what_prompts_take_in_a_pass_of_their_own() -> None:
    """Where the table of costs is asked for, and where a graph holds them."""
    passes = SimpleNamespace(
        passes=Staircase([64, 256], [1.0, 3.0]), holds=GRAPHS.holds, computes=lambda prompts: True
    )
    rounds = RoundRunner(None, None, passes)

    def takes(rows: int, requests: int = 1) -> float | None:
        return rounds.milliseconds_of(SimpleNamespace(input_ids=[0] * rows, reqs=[0] * requests))

    assert takes(60) is None  # all rows are verified
    rounds.survival = object()
    assert takes(60) == 1.0 and takes(65) == 3.0
    assert takes(300) is None and takes(60, requests=5) is None
    passes.computes = lambda prompts: False
    assert takes(60) is None
    rounds.prompt_graphs = None
    assert takes(60) is None


ASKED = dict(
    forward_mode=ForwardMode.EXTEND,
    input_embeds=None,
    multimodal_inputs=[None, None],
    lora_ids=[None, None],
    input_ids=[0] * 100,
    batch_size=2,
    is_prefill_only=False,
    return_hidden_states_before_norm=False,
)


def test_what_a_pass_computes() -> None:
    """Plain causal attention over tokens; anything else is the release's."""

    def can_run(delimiter: int | None = None, **other: Any) -> bool:
        args = SimpleNamespace(multi_item_scoring_delimiter=delimiter)
        GRAPHS.runner = SimpleNamespace(server_args=args)
        return GRAPHS.can_run(SimpleNamespace(**ASKED | other))

    assert can_run() and can_run(is_prefill_only=True) and can_run(delimiter=7)
    assert not can_run(delimiter=7, is_prefill_only=True)
    assert not can_run(forward_mode=ForwardMode.TARGET_VERIFY)
    assert not can_run(input_embeds=torch.zeros(1))
    assert not can_run(multimodal_inputs=[None, object()]) and can_run(multimodal_inputs=None)
    assert not can_run(input_ids=[0] * 300) and not can_run(batch_size=5)
    assert not can_run(return_hidden_states_before_norm=True)
    assert not can_run(lora_ids=[None, "adapter"]) and can_run(lora_ids=None)


def test_row_sizes() -> None:
    sizes = row_sizes(0, None)
    assert sizes[0] == 64 and sizes[-1] == MOST_ROWS == 2048
    assert sizes == sorted(set(sizes)) and {960, 1024, 1152} < set(sizes)
    assert row_sizes(0, 4096) == sizes
    assert row_sizes(0, 200) == [64, 96, 128, 160, 192]
    assert row_sizes(0, 63) == [] and row_sizes(0, -1) == sizes
    assert row_sizes(2048, None)[-1] == 2048 + PROMPT_ROWS


def test_blocks_that_did_not_run_are_not_taken_for_verified() -> None:
    graphs = timed([64], [1.0])
    graphs._blocks, graphs._last = object(), None
    with pytest.raises(RuntimeError, match="without the blocks"):
        graphs.leave()


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("auto", [True, False])
def test_passes_over_narrow_blocks(block: int, auto: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as hold blocks of up to 4 rows of 32 requests; prompts beside them, few, and wide ones have others."""

    def narrowed(own: type, runner: object, width: int, requests: int) -> type:
        return NarrowBlockAttention if width <= 4 and requests >= 25 else own

    monkeypatch.setattr(prompt_graphs, "narrowed", narrowed)
    passes = timed([64, 96, 128, 160, 256], [1.0] * 5)
    passes.runner = None
    passes._rounds = SimpleNamespace(
        sizes=[16, 32],
        widths=[1, block] if auto else [block],
        narrow=[block // 2, block // 4] if auto else [],
        survival=object() if auto else None,
        attention=SimpleNamespace(target=object),
    )
    passes.parts, passes._rooms = (
        SimpleNamespace(context_len=4096),
        dict.fromkeys(passes.sizes, [96]),
    )
    keys, played = passes._keys(), []
    narrow = [key for key in keys if key.narrow]
    assert [key.rows for key in narrow] == ([128, 96, 64] if auto else [])
    assert all(key.requests == 32 for key in narrow) and len(keys) == len(narrow) + 5

    class Graph(SimpleNamespace):
        def replay(self) -> None:
            played.append(self.key)

    passes._graphs = {key: SimpleNamespace(graph=Graph(key=key), rows=None) for key in keys}
    passes.inputs = SimpleNamespace(fill=lambda *given: None)

    def takes(requests: int, width: int, rows: int, prompts: object = None) -> bool:
        drafts = torch.zeros(requests, width - 1)
        blocks = SimpleNamespace(
            draft_tokens=drafts, round=SimpleNamespace(width=width), adapters=None
        )
        passes._pass(rows, 100, blocks, prompts)
        assert played[-1].rows >= rows
        return played[-1].narrow

    assert takes(30, 4, 100) == takes(30, 2, 50) == auto
    assert not takes(24, 4, 90) and not takes(30, 16, 100)
    assert not takes(30, 4, 100, SimpleNamespace(batch_size=1, lora_ids=None))
