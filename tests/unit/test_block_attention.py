"""Attention on a CPU against softmax written out."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dflash.cpu.block_attention import attention, computes

HEADS, DIM, SLOTS, COLUMNS = 4, 8, 64, 40


def dense(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None
) -> torch.Tensor:
    """One row of one head over some keys, and one that has no value."""
    scores = keys @ query / DIM**0.5
    scores = scores if sink is None else torch.cat([scores, sink[None]])
    return torch.softmax(scores, dim=0)[: len(keys)] @ values


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("width", [2, 5])
def test_against_softmax(causal: bool, kv_heads: int, width: int) -> None:
    check(Blocks(width, kv_heads), causal)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    "mode", [ForwardMode.TARGET_VERIFY, ForwardMode.DECODE, ForwardMode.EXTEND]
)
def test_windows(mode: ForwardMode, sinks: bool) -> None:
    """Rows see the window alone, whose slots are in a pool of their own; keys before it have none."""
    blocks = Blocks(1 if mode.is_decode() else 4, 2, mode)
    check(blocks, True, window=6, sinks=torch.randn(HEADS) if sinks else None, two_pools=True)


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize(
    "mode", [ForwardMode.TARGET_VERIFY, ForwardMode.DECODE, ForwardMode.EXTEND]
)
def test_chunks(mode: ForwardMode, chunk: int) -> None:
    """Rows of one block in several chunks, and chunks that nobody leaves."""
    check(Blocks(1 if mode.is_decode() else 5, 2, mode), True, chunk=chunk)


@pytest.mark.parametrize(
    ("window", "irope", "sinks", "needed"),
    [
        (-1, False, None, False),
        (6, False, None, True),
        (-1, True, None, True),
        (-1, False, torch.ones(HEADS), True),
    ],
)
def test_where_the_release_is_right(
    window: int, irope: bool, sinks: torch.Tensor | None, needed: bool
) -> None:
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE)
    layer = SimpleNamespace(sliding_window_size=window, use_irope=irope)
    assert computes(layer, batch, sinks, 8) is needed
    assert computes(layer, batch, sinks, None) is (needed and not irope)


class Blocks:
    """Rows of three requests, behind contexts of different lengths."""

    starts = (0, 3, 20)

    def __init__(self, width: int, kv_heads: int, mode: ForwardMode = ForwardMode.TARGET_VERIFY):
        torch.manual_seed(0)
        self.width, self.kv_heads = width, kv_heads
        self.keys, self.values = torch.randn(2, SLOTS, kv_heads, DIM)
        self.table = torch.randint(1, SLOTS, (5, COLUMNS), dtype=torch.int32)
        self.rows = torch.tensor([4, 0, 2])
        self.query = torch.randn(len(self.starts) * width, HEADS, DIM)
        starts, widths = torch.tensor(self.starts), torch.full((3,), width)
        verifies = mode.is_target_verify()
        self.batch = SimpleNamespace(
            forward_mode=mode,
            spec_info=SimpleNamespace(draft_token_num=width),
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            req_pool_indices=self.rows,
            seq_lens=starts if verifies else starts + widths,
            extend_prefix_lens=starts,
            extend_seq_lens=widths,
        )

    def pool(self, two_pools: bool) -> SimpleNamespace:
        """Sliding layers have every token elsewhere."""
        if not two_pools:
            return SimpleNamespace(
                get_key_buffer=lambda _: self.keys, get_value_buffer=lambda _: self.values
            )
        elsewhere = torch.randperm(SLOTS)
        moved = torch.empty_like(self.keys), torch.empty_like(self.values)
        moved[0][elsewhere], moved[1][elsewhere] = self.keys, self.values
        return SimpleNamespace(
            swa_kv_pool=None,
            layers_mapping={0: (0, True)},
            translate_loc_from_full_to_swa=lambda slots: elsewhere[slots].int(),
            get_key_buffer=lambda _: moved[0],
            get_value_buffer=lambda _: moved[1],
        )


def check(
    blocks: Blocks,
    causal: bool,
    window: int = -1,
    sinks: torch.Tensor | None = None,
    two_pools: bool = False,
    chunk: int | None = None,
) -> None:
    blocks.batch.token_to_kv_pool = blocks.pool(two_pools)
    layer = SimpleNamespace(
        layer_id=0,
        scaling=DIM**-0.5,
        tp_q_head_num=HEADS,
        tp_k_head_num=blocks.kv_heads,
        sliding_window_size=window,
        use_irope=True,
    )
    query, width = blocks.query, blocks.width
    output = torch.empty(len(query), HEADS * DIM)
    result = attention(query, output, layer, blocks.batch, causal, sinks, chunk)
    for i, start in enumerate(blocks.starts):
        slots = blocks.table[blocks.rows[i], : start + width]
        for row in range(width):
            end = start + row + 1 if causal else start + width
            begin = 0 if window < 0 else max(0, start + row - window)
            begin = max(begin, (start + row) // chunk * chunk) if chunk else begin
            for head in range(HEADS):
                kv_head = head * blocks.kv_heads // HEADS
                expected = dense(
                    query[i * width + row, head],
                    blocks.keys[slots[begin:end], kv_head],
                    blocks.values[slots[begin:end], kv_head],
                    None if sinks is None else sinks[head],
                )
                actual = result[i * width + row, head * DIM : (head + 1) * DIM]
                torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
