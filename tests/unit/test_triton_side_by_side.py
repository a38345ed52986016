"""Triton's attention of rows side by side against the PyTorch code that it stands for, on random input.

Without a GPU it runs in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType

from sglang_dflash.gpu import triton_side_by_side
from sglang_dflash.gpu.kernels.block_attention import block_attention
from sglang_dflash.gpu.kernels.block_tiles import TILES, WHOLE, Tile, choose_tile
from sglang_dflash.gpu.kernels.over_keys import FP8
from sglang_dflash.gpu.kernels.side_by_side import side_by_side_attention, side_by_side_reference
from sglang_dflash.gpu.kernels.tile_plan import make_plan
from sglang_dflash.gpu.triton_side_by_side import TritonSideBySide
from tests.unit import test_side_by_side as buffers
from tests.unit.paged_keys import DEVICE, DTYPES, SMALL, TOLERANCE, pool

# Rows of each request, and keys that its last row sees: blocks, prompts with and without a prefix, nobody.
REQUESTS = ((4, 60), (4, 4), (0, 0), (1, 33), (37, 37), (20, 70), (0, 0))
PADDING = 6  # rows of a request whose keys all lie in slot 0
ROOMS = [0, 10, 40]  # no parts, a few, and as many as there can be


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def on_device(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def compare(
    requests: Sequence[tuple[int, int]] = REQUESTS,
    padding: int = PADDING,
    page_size: int = 1,
    kv_heads: int = 1,
    group: int = 2,
    dim: int = 64,
    v_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    room: int = 10,
    tile: Tile | None = SMALL,
    sinks: bool = False,
    **options: Any,
) -> None:
    """The kernel and its reference on the same input."""
    lengths = [length for _, length in requests]
    k, v, table = pool(lengths, page_size, kv_heads, dim, v_dim or dim, kv_dtype or dtype)
    for cache in (k, v):
        cache[:page_size] = 1
    table = torch.cat([table, torch.zeros_like(table[:1])])
    # The first that has no request of its own in the pass gets the rows that fill it up.
    widths, lengths = [n for n, _ in requests] + [padding], on_device([*lengths, padding])
    ends = on_device(list(accumulate(widths, initial=0)))
    rows = sum(widths)
    q = torch.randn(rows, kv_heads * group, dim, device=DEVICE).to(dtype)
    tile = tile or choose_tile(max(dim, v_dim or dim), rows * group, q.itemsize, 232_448)
    plan = make_plan(ends, lengths, rows, group, tile, room, shortest=16)
    options = {"causal": True, "scale": dim**-0.5, "page_size": page_size} | options
    if sinks:
        options["sinks"] = torch.randn(kv_heads * group, device=DEVICE)
    made = side_by_side_attention(q, k, v, table, plan, **options)
    expected = side_by_side_reference(q, k, v, table, ends, lengths, **options)
    assert made.isfinite().all()
    torch.testing.assert_close(made, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths(dtype: torch.dtype, room: int) -> None:
    compare(dtype=dtype, room=room)


@pytest.mark.parametrize("number", range(8))
def test_random_mixes(number: int) -> None:
    """With many requests and with few, of which none, one or all have rows."""
    requests = []
    for _ in range(int(torch.randint(1, 12, ()))):
        width = int(torch.randint(0, 40, ())) * int(torch.randint(0, 2, ()))
        requests.append((width, width + int(torch.randint(0, 90, ())) * (number % 2)))
    padding = int(torch.randint(0, 20, ()))
    compare(requests, padding or 1, page_size=4, room=number * 5, group=1 + number % 3)


def test_one_request_has_all_rows() -> None:
    compare([(70, 300)], padding=0, room=30)
    compare([(64, 64), *[(0, 0)] * 9], padding=0)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("room", ROOMS)
def test_pages(page_size: int, room: int) -> None:
    compare(page_size=page_size, room=room)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (2, 4), (3, 7), (1, 5), (1, 24)])
def test_heads(kv_heads: int, group: int) -> None:
    """Tokens that fill tiles, that do not, and that are in two."""
    compare([(3, 40), (9, 30)], 2, kv_heads=kv_heads, group=group)


@pytest.mark.parametrize("room", ROOMS[:2])
@pytest.mark.parametrize(
    ("dim", "v_dim"), [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (64, 96)]
)
def test_sizes_of_heads(dim: int, v_dim: int, room: int) -> None:
    """As they run: with the tile that is chosen for them."""
    for dtype in (torch.float16, torch.float32):
        compare(dim=dim, v_dim=v_dim, room=room, dtype=dtype, tile=None)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 0},
        {"window": 20},
        {"cap": 0.5},
        {"cap": 30.0, "window": 33},
        {"sinks": True},
        {"sinks": True, "window": 10, "cap": 2.0},
        {"chunk": 32},
        {"chunk": 7, "sinks": True},
        {"causal": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("room", ROOMS)
def test_windows_caps_and_sinks(options: dict[str, Any], room: int) -> None:
    compare(page_size=4, room=room, **options)


@pytest.mark.parametrize("kv_dtype", FP8, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    compare(dtype=dtype, kv_dtype=kv_dtype)
    compare(dtype=dtype, kv_dtype=kv_dtype, k_scale=0.5, v_scale=1.5)


# Rows and keys of requests, as passes have them.
PASSES = {
    "64 rows of 4 long contexts": [(16, 30_000)] * 4,
    "a chunk": [(2000, 32_000), *[(0, 0)] * 60, (48, 48)],
    "128 blocks": [(16, 200 + i) for i in range(128)],
    "blocks and prompts": [(16, 1000)] * 32 + [(300, 9000), (1, 1), (0, 0), (35, 35)],
    "of a row each": [(1, 1 + 5000 * (i % 7 == 0)) for i in range(64)],
    "a million keys": [(16, 1_000_000), (48, 100)],
    "padding": [(0, 0)] * 95 + [(2048, 2048)],
}


@pytest.mark.parametrize("room", [0, 33, 264])
@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize("name", PASSES)
def test_plan(name: str, group: int, room: int) -> None:
    """Each part of the keys of each tile once, those of a tile side by side, and no more than there is room for."""
    requests, tile = PASSES[name], TILES[128][-1]
    ends = list(accumulate((width for width, _ in requests), initial=0))
    lengths = on_device([length for _, length in requests])
    plan = make_plan(on_device(ends), lengths, ends[-1], group, tile, room)
    entries = [entry[:7] for entry in plan.entries.tolist()]
    (size,) = {entry[3] for entry in entries}
    assert size % tile.keys == 0
    expected = {
        (i, first, part, size, ends[i], width, length)
        for i, (width, length) in enumerate(requests)
        for first in range(0, width * group, tile.rows)
        for part in range(max(1, -(-length // size)))
    }
    made = [tuple(entry) for entry in entries if entry[0] >= 0]
    assert len(made) == len(expected) and set(made) == expected
    for at, (i, first, part, *_, length) in enumerate(made):
        assert part == 0 or made[at - 1][:3] == (i, first, part - 1)
        assert length <= size or at < plan.split
    assert room or plan.split == 0
    assert len(entries) <= ends[-1] * group // tile.rows + len(requests) + room


def test_few_rows_occupy_the_device() -> None:
    """Four blocks of long contexts, and a prompt beside them that has none, are parts of alike many keys."""
    requests = [(16, 30_000)] * 4 + [(64, 64)]
    ends = on_device(list(accumulate((width for width, _ in requests), initial=0)))
    plan = make_plan(ends, on_device([n for _, n in requests]), 128, 4, TILES[128][-1], 33)
    entries = [entry for entry in plan.entries.tolist() if entry[0] >= 0]
    assert len(entries) == 4 * 9 + 4 and entries[0][3] <= 4000


def test_one_order_of_sums() -> None:
    """Without parts a row's result is the same to the bit: beside others, alone, in chunks, and in a round's block."""
    window = {"window": 20}
    for options in ({}, window):
        options = dict(page_size=1, scale=0.1, causal=True) | options
        lengths = (70, 40, 21)
        k, v, table = pool(lengths, 1, 2, 64, 64, torch.float32)
        widths = (4, 40, 20)
        ends = list(accumulate(widths, initial=0))
        q = torch.randn(ends[-1], 4, 64, device=DEVICE)

        def attend(queries, rows, widths, lengths, options=options, k=k, v=v) -> torch.Tensor:
            ends = on_device(list(accumulate(widths, initial=0)))
            plan = make_plan(ends, on_device(lengths), len(queries), 2, SMALL, 0)
            return side_by_side_attention(queries, k, v, rows, plan, **options)

        together = attend(q, table, widths, lengths)
        for i, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
            alone = attend(q[begin:end], table[i : i + 1], widths[i : i + 1], lengths[i : i + 1])
            assert torch.equal(together[begin:end], alone)
            chunk = attend(
                q[begin : begin + 3], table[i : i + 1], [3], [lengths[i] - widths[i] + 3]
            )
            assert torch.equal(together[begin : begin + 3], chunk)
        given = (q[:4], k, v, table[:1], on_device(lengths[:1]))
        block = block_attention(*given, width=4, split=WHOLE, tile=SMALL, **options)
        assert torch.equal(together[:4], block)


def test_tiles_step_alike() -> None:
    """Whatever tile a row is in, in a round or beside prompts, its keys are summed in steps of one size."""
    for tiles in TILES.values():
        assert len({tile.keys for tile in tiles}) == 1


@pytest.mark.parametrize(
    ("kv_dtype", "deterministic"), [(torch.float32, False), (torch.float8_e5m2, True)], ids=str
)
def test_layers(
    kv_dtype: torch.dtype, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a graph runs them: buffers that are filled anew for each pass, layers of different kinds and heads."""
    monkeypatch.setattr(
        triton_side_by_side, "is_batch_invariant_mode_enabled", lambda: deterministic
    )
    page_size, kv_heads, dim = 4, 2, 16
    k, v, table = pool((100, 60, 40), page_size, kv_heads, dim, dim, kv_dtype)
    k[:page_size], v[:page_size] = 1, 1
    page_table, lengths, ends = torch.zeros_like(table), on_device([0] * 3), on_device([0] * 4)
    runner = SimpleNamespace(page_size=page_size, token_to_kv_pool=None, attention_chunk_size=24)
    attention = TritonSideBySide(runner, lengths, page_table, ends, 32)
    layers = [
        SimpleNamespace(
            layer_id=0,
            attn_type=AttentionType.DECODER,
            tp_q_head_num=heads,
            head_dim=dim,
            v_head_dim=dim,
            scaling=0.2,
            logit_cap=cap,
            sliding_window_size=window,
            use_irope=window == -1,
            k_scale=torch.tensor(0.5),
            v_scale=torch.tensor(2.0),
            k_scale_float=0.5,
            v_scale_float=2.0,
        )
        for heads, cap, window in ((4, 0.0, None), (2, 30.0, 50), (4, 0.0, -1))
    ]
    batch = SimpleNamespace(token_to_kv_pool=SimpleNamespace(get_kv_buffer=lambda layer: (k, v)))
    for widths, seen in (((4, 20, 8), (100, 60, 8)), ((32, 0, 0), (90, 0, 0))):
        ends.copy_(on_device(list(accumulate(widths, initial=0))))
        lengths.copy_(on_device(seen))
        page_table.copy_(table)
        attention.prepare()
        for layer in layers:
            q = torch.randn(32, layer.tp_q_head_num * dim, device=DEVICE)
            made = attention.forward(q, None, None, layer, batch)
            scaled = kv_dtype != torch.float32
            expected = side_by_side_reference(
                q.view(32, -1, dim),
                *(k, v, page_table, ends, lengths),
                page_size=page_size,
                scale=0.2 * (0.5 if scaled else 1),
                causal=True,
                window=-1 if layer.sliding_window_size is None else layer.sliding_window_size,
                chunk=24 if layer.use_irope else 0,
                cap=layer.logit_cap,
                v_scale=2.0 if scaled else 1.0,
            )
            torch.testing.assert_close(made, expected.flatten(1), rtol=0, atol=2e-4)


@pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu/test_prompts.py does this, as triton")
@pytest.mark.parametrize("page_size", [1, 16])
def test_as_buffers_are_filled(page_size: int) -> None:
    """Blocks, prompts and rows that fill a pass up, from what rounds put side by side: each over its own keys."""
    world, heads, dim, size = buffers.World(page_size), 4, 16, 48
    inputs, slots = world.inputs, int(world.table.max()) + page_size
    k, v = torch.randn(2, slots, heads // 2, dim)
    runner = SimpleNamespace(page_size=page_size, token_to_kv_pool=None, attention_chunk_size=None)
    attention = TritonSideBySide(runner, inputs.cache_lengths, inputs.page_table, inputs.ends, size)
    layer = SimpleNamespace(
        scaling=0.2, logit_cap=0.0, sliding_window_size=None, k_scale=None, v_scale=None
    )
    for blocks in (world.blocks(), None):
        inputs.fill(size, blocks, world.prompts())
        inputs.look_up(inputs.page_table)
        attention.prepare()
        q = torch.randn(size, heads, dim)
        made = attention.attend(q, k, v, layer, causal=True)
        for row, (_, _, seen) in enumerate(world.seen()):
            keys, values = (x[seen].repeat_interleave(2, dim=1) for x in (k, v))
            weights = torch.einsum("hd,khd->hk", q[row] * 0.2, keys).softmax(dim=-1)
            expected = torch.einsum("hk,khd->hd", weights, values)
            torch.testing.assert_close(made[row], expected, rtol=0, atol=1e-4)
