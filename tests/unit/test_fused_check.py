"""Which way models run in rounds: the fused one where it gives what the release's gives, else the next."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import nn

from sglang_dflash.gpu import qwen3
from sglang_dflash.gpu.kernels import block_attention
from sglang_dflash.gpu.kernels.block_tiles import WHOLE
from sglang_dflash.gpu.targets import Body, fused_body
from sglang_dflash.gpu.tilings import Tilings
from sglang_dflash.gpu.triton_attention import TritonBlockAttention
from sglang_dflash.round.fused import LAYERS, PARTS, RELEASE, draft_ways, target_ways
from sglang_dflash.round.fused_check import MIDDLE, WORST, TrialBlocks, difference, first_right
from sglang_dflash.round.fused_check import trial_blocks as make_trials
from tests.unit.drafters import DraftRunner, TargetStub, random_weights, save_random, zlab_config
from tests.unit.targets import SMALL, make_target

WIDTH, CONTEXT = 3, SMALL["max_position_embeddings"]
pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="computes on the CPU, where a GPU's kernels do not run"
    ),
]


@pytest.fixture(autouse=True)
def whole_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are not split for a GPU's multiprocessors, of which the interpreter has none."""
    monkeypatch.setattr(block_attention, "choose_split", lambda *_: WHOLE)


def no_tilings() -> Tilings:
    """For products of float32, which have none."""
    return Tilings("CPU", 1, lambda *_: pytest.fail("nothing is to be timed"))


def trials_of(
    model: nn.Module, pool: MHATokenToKVPool, causal: bool, requests: int = 8
) -> list[TrialBlocks]:
    """On a runner that has what trials read."""
    runner = SimpleNamespace(
        attention_chunk_size=None,
        model=model,
        page_size=pool.page_size,
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(
            size=requests, req_to_token=torch.zeros(1, CONTEXT, dtype=torch.int32)
        ),
        model_config=SimpleNamespace(vocab_size=SMALL["vocab_size"]),
        attn_backend=None,
        spec_algorithm=None,
    )
    return make_trials(runner, TritonBlockAttention, causal, WIDTH, CONTEXT)


class Target:
    """A small target, and its trials on a pool of pages."""

    def __init__(self, page_size: int = 1):
        self.model = make_target(
            "qwen3", num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
        )
        self.model.set_eagle3_layers_to_capture([-1, 0])
        attention = self.model.model.layers[0].self_attn.attn
        self.pool = MHATokenToKVPool(
            size=4 * page_size * WIDTH,
            page_size=page_size,
            dtype=torch.float32,
            head_num=attention.tp_k_head_num,
            head_dim=attention.head_dim,
            layer_num=len(self.model.model.layers),
            device="cpu",
            enable_memory_saver=False,
        )
        self.body = fused_body(self.model, no_tilings(), None)

    def choose(self, body: Body | None) -> str:
        ways = target_ways(self.model, body)
        trials = trials_of(self.model, self.pool, True)
        return first_right("target", ways, trials, get_tp_group()).name

    @property
    def attention_is_fused(self) -> bool:
        kinds = {type(layer.self_attn) for layer in self.model.model.layers}
        assert len(kinds) == 1
        return kinds == {qwen3.FusedQwen3Attention}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


@pytest.mark.parametrize("page_size", [2, 16])
def test_what_is_right_is_used(page_size: int, caplog: pytest.LogCaptureFixture) -> None:
    """And leaves no K/V behind."""
    target = Target(page_size)
    assert target.choose(target.body) == LAYERS
    assert not target.attention_is_fused and not warnings(caplog)
    assert not any(each.any() for each in (*target.pool.k_buffer, *target.pool.v_buffer))


def test_a_target_that_is_not_fused_whole(caplog: pytest.LogCaptureFixture) -> None:
    target = Target()
    assert target.choose(None) == PARTS
    assert target.attention_is_fused and not warnings(caplog)


def other_states(states: torch.Tensor, taps: list[torch.Tensor]):
    return states.roll(1, 0), taps


def other_taps(states: torch.Tensor, taps: list[torch.Tensor]):
    return states, [taps[0], taps[1] * 1.5]


def fewer_taps(states: torch.Tensor, taps: list[torch.Tensor]):
    return states, taps[:1]


def not_a_number(states: torch.Tensor, taps: list[torch.Tensor]):
    return states.index_fill(0, torch.tensor([2]), torch.nan), taps


def raises(*_):
    raise RuntimeError("no kernel image")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (other_states, "rows were off by "),
        (other_taps, "rows were off by 0.5 of their length in the middle"),
        (not_a_number, "by inf at the worst"),
        (fewer_taps, "it raised ValueError"),
        (raises, "it raised RuntimeError('no kernel image')"),
    ],
)
def test_what_is_wrong_is_not(change: Callable, why: str, caplog: pytest.LogCaptureFixture) -> None:
    """One sentence says so; what remains is right."""
    target = Target()
    body = target.body
    assert target.choose(lambda *block: change(*body(*block))) == PARTS
    assert target.attention_is_fused
    (said,) = warnings(caplog)
    assert said.startswith(f"DFLASH runs the target with {PARTS} instead of {LAYERS}, because ")
    assert why in said and said.endswith(".")


def test_a_body_that_writes_no_keys(caplog: pytest.LogCaptureFixture) -> None:
    """It must not find those that the release's layers have just written."""
    target = Target()
    body = target.body

    def forgets(ids, positions, batch):
        batch.out_cache_loc = torch.zeros_like(batch.out_cache_loc)
        return body(ids, positions, batch)

    assert target.choose(forgets) == PARTS and len(warnings(caplog)) == 1


def test_attention_that_is_wrong_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(qwen3, "fused_attention", lambda attention, positions, x, batch: 0 * x)
    target = Target()
    assert target.choose(raises) == RELEASE
    assert not target.attention_is_fused and len(warnings(caplog)) == 2


def test_a_release_that_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is nothing to compare with; the server goes on with what it knows best."""
    target = Target()
    monkeypatch.setattr(target.model.model, "forward", raises)
    assert target.choose(target.body) == RELEASE
    assert all("nothing to compare it with" in said for said in warnings(caplog))


@pytest.fixture
def draft(tmp_path: Path) -> DraftRunner:
    raw = zlab_config(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    folder = save_random(tmp_path, raw)
    embedding = random_weights({"embedding": (raw["vocab_size"], raw["hidden_size"])})["embedding"]
    draft = DraftRunner(folder, TargetStub(embedding))
    draft.model.fuse(no_tilings(), None)
    return draft


def test_a_drafter(draft: DraftRunner, caplog: pytest.LogCaptureFixture) -> None:
    model, group = draft.model, get_tp_group()
    trials = trials_of(model, draft.token_to_kv_pool, False)
    layers = model.fused
    assert layers is not None
    assert first_right("drafter", draft_ways(model), trials, group).name == LAYERS
    assert model.fused is layers and not warnings(caplog)

    wrong = SimpleNamespace(run=lambda x, positions, batch: (torch.zeros_like(x), []))
    model.use(wrong, attention=True)
    assert first_right("drafter", draft_ways(model), trials, group).name == PARTS
    assert model.fused is None and all(layer.self_attn.fuses for layer in model.layers)
    (said,) = warnings(caplog)
    assert said.startswith(f"DFLASH runs the drafter with {PARTS} instead of {LAYERS}, because ")


def test_no_more_requests_than_can_run() -> None:
    """States of linear attention have places for so many."""
    target = Target()
    assert [len(each.round.rows) for each in trials_of(target.model, target.pool, True)] == [1, 3]
    (one,) = trials_of(target.model, target.pool, True, requests=2)
    assert len(one.round.rows) == 1


def test_difference() -> None:
    """The bounds are between what bfloat16 rounds in many layers and another result."""
    torch.manual_seed(0)
    rows = torch.randn(16, 512)
    rounded = rows * (1 + 0.004 * torch.randn_like(rows))
    for _ in range(10):
        rounded = (rounded * (1 + 0.004 * torch.randn_like(rows))).bfloat16().float()
    middle, worst = difference([rows, rounded], [rows, rows])
    assert 0.005 < middle <= worst < MIDDLE
    middle, worst = difference([torch.cat([rows[:1] + rows[1:2], rows[1:]])], [rows])
    assert middle == 0 and worst > WORST
    assert difference([torch.zeros(2, 3)], [torch.zeros(2, 3)]) == (0, 0)
