"""Kernels compiled for GPUs that are not here: `TRITON_INTERPRET=0 python -m tests.unit.compiled`.

Triton's interpreter runs what its compiler refuses. Prints the shared memory of each program, which must fit.
"""

from __future__ import annotations

import itertools
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dflash.gpu.kernels import (
    accept,
    adapter_products,
    adapter_rows,
    argmax,
    delta_net_rows,
    delta_net_states,
    fill_pass,
    share_rows,
    shared_gate,
    side_by_side,
    start_requests,
    store_rows,
    survival,
    tile_plan,
)
from sglang_dflash.gpu.kernels.add_norm import _add_norm
from sglang_dflash.gpu.kernels.block_attention import _attend, _combine
from sglang_dflash.gpu.kernels.block_tiles import LONG, Tile, choose_tile
from sglang_dflash.gpu.kernels.penalties import END, PRESENT, _count, _penalize
from sglang_dflash.gpu.kernels.swiglu import _swiglu_fp8
from sglang_dflash.gpu.narrow_attention import TILE as NARROW

# Compute capability → shared memory that a program may have: A100, RTX 4090, H200.
MEMORY = {80: 166_912, 89: 101_376, 90: 232_448}
KV_HEADS, GROUP, WIDTH = 8, 4, 16
ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2}
CASES: list[tuple[int, str, dict[str, Any]]] = [
    (90, "bf16", {}),
    (90, "bf16", {"DIM": 80, "WINDOW": 100, "HAS_CAP": True, "HAS_SINKS": True}),
    (80, "fp32", {"CAUSAL": False, "PAGE_SIZE": 64, "FORMAT": "e5m2"}),
    (89, "bf16", {"DIM": 256, "FORMAT": "e4m3"}),
    (90, "bf16", {"CHUNK": 8192, "PAGE_SIZE": 64}),
]


def compiled(kernel: Any, capability: int, constants: dict, types: dict[str, str], warps: int):
    """A kernel with the aligned pointers that tensors have."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*"
    }
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": warps})


def attention(
    capability: int, dtype: str, changes: dict[str, Any], tile: Tile | None = None
) -> int:
    """Compiles the launches of blocks and of rows side by side; the shared memory of the largest."""
    options = dict(DIM=128, PAGE_SIZE=1, CAUSAL=True, HAS_CAP=False, HAS_SINKS=False)
    options |= dict(WINDOW=-1, CHUNK=0, FORMAT="") | changes
    dim, early = options["DIM"], capability >= 90
    tile = tile or choose_tile(dim, WIDTH * GROUP, ITEMSIZE[dtype], MEMORY[capability])
    heads = dict(KV_HEADS=KV_HEADS, GROUP=GROUP, V_DIM=dim, V_DIM_POW2=triton.next_power_of_2(dim))
    heads |= dict(WINDOW=options["WINDOW"], CHUNK=options["CHUNK"], KEYS=tile.keys)
    blocks = heads | dict(WIDTH=WIDTH, LONGEST=LONG, EARLY=early)
    rest = options | dict(ROWS=tile.rows, STAGES=tile.stages, DIM_POW2=triton.next_power_of_2(dim))
    if not options["HAS_SINKS"]:
        rest["sinks_ptr"] = None
    numbers = "*u8" if options["FORMAT"] else f"*{dtype}"
    types = dict.fromkeys(("q_ptr", "out_ptr"), f"*{dtype}")
    types |= dict.fromkeys(("k_ptr", "v_ptr"), numbers)
    types |= dict.fromkeys(("parts_ptr", "weights_ptr", "sinks_ptr"), "*fp32")
    types |= dict.fromkeys(("page_table_ptr", "lengths_ptr", "ends_ptr", "plan_ptr"), "*i32")
    types |= dict.fromkeys(("page_table_stride", "fill", "most"), "i32")
    types |= dict.fromkeys(("requests", "room", "shortest"), "i32")
    types |= dict.fromkeys(("scale", "cap", "v_scale"), "fp32")
    combined = dict(CAUSAL=options["CAUSAL"], ROWS=tile.rows, COMBINED=16)
    planned = dict(GROUP=GROUP, ROWS=tile.rows, KEYS=tile.keys, WHOLE=False)
    made = [
        compiled(_attend, capability, blocks | rest, types, tile.warps),
        compiled(_combine, capability, blocks | dict(MOST=16, ROWS=2), types, 4),
        compiled(tile_plan._plan, capability, planned | dict(REQUESTS=512, ENTRIES=16), types, 4),
        compiled(side_by_side._attend, capability, heads | rest, types, tile.warps),
        compiled(side_by_side._combine, capability, heads | combined, types, 4),
    ]
    return max(each.metadata.shared for each in made)


def penalties(capability: int) -> int:
    """Compiles both launches; the shared memory of the larger."""
    numbers = ("logits_ptr", "sums_ptr", "rates_ptr")
    types = dict.fromkeys(("rows_ptr", "drafts_ptr", "places_ptr"), "*i64")
    types |= dict.fromkeys(("tokens_ptr", "lengths_ptr"), "*i64") | dict.fromkeys(numbers, "*fp32")
    types |= {"marks_ptr": "*u8", "output_ptr": "*i32"}
    types |= dict.fromkeys(("logits_stride", "drafts_stride", "tokens_stride", "vocabulary"), "i32")
    marks = dict(PRESENT=PRESENT, END=END)
    first = compiled(_penalize, capability, marks | dict(WIDTH=WIDTH, TILE=1024), types, 4)
    second = compiled(_count, capability, dict(PRESENT=PRESENT, TILE=32), types, 1)
    return max(first.metadata.shared, second.metadata.shared)


def delta_nets(capability: int, dtype: str) -> int:
    """Compiles linear attention of Qwen3.5-27B's shape, with every option; the shared memory of the largest."""
    types = dict.fromkeys(("slots_ptr", "bounds_ptr"), "*i32")
    types |= dict.fromkeys(("begins_ptr", "counts_ptr"), "*i64")
    types |= dict.fromkeys(("tracked_ptr", "on_the_way_ptr"), "*i64")
    floats = ("gates_ptr", "states_ptr", "rate_ptr", "dt_bias_ptr")
    numbers = ("mixed_ptr", "a_ptr", "b_ptr", "windows_ptr", "weight_ptr", "bias_ptr")
    numbers += ("kept_ptr", "convolved_ptr")
    types |= dict.fromkeys(floats, "*fp32") | dict.fromkeys(numbers, f"*{dtype}")
    types |= dict.fromkeys(("mixed_stride", "a_stride", "b_stride", "rows"), "i32")
    types["layer_stride"] = "i64"
    channels, block = dict(CHANNELS=10_240), dict(BLOCK=256)
    first = channels | block | dict(HEADS=48, HEADS_POW2=64, BIAS=True, PARTS=40)
    heads = dict(K_HEADS=16, V_HEADS=48, K_DIM=128, V_DIM=128, K_POW2=128, V_BLOCK=32)
    types |= {"out_ptr": f"*{dtype}", "scale": "fp32"}
    made = [compiled(delta_net_rows._convolve, capability, first, types, 2)]
    for block in (8, 16, 32):
        heads["V_BLOCK"] = block
        made.append(compiled(delta_net_rows._recur, capability, channels | heads, types, 1))
    block = dict(BLOCK=256)
    for track in (
        {"TRACK": True},
        {"TRACK": False, "tracked_ptr": None, "on_the_way_ptr": None},
    ):
        states, windows = channels | heads | track, channels | block | track
        made.append(compiled(delta_net_states._bring_states, capability, states, types, 1))
        made.append(compiled(delta_net_states._bring_windows, capability, windows, types, 2))
    return max(each.metadata.shared for each in made)


def small(capability: int, dtype: str) -> int:
    """Compiles what writes K/V of gpt-oss-20b's rows, and Qwen3.5-35B-A3B's gates; the shared memory of the larger."""
    numbers = ("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr", "x_ptr", "weight_ptr", "made_ptr")
    types = dict.fromkeys(numbers, f"*{dtype}") | {"slots_ptr": "*i64", "own_ptr": "*i32"}
    types |= dict.fromkeys(("k_stride", "v_stride", "x_stride", "made_stride"), "i32")
    sizes = dict(K_SIZE=512, V_SIZE=512, K_POW2=512, V_POW2=512)
    gate = dict(SIZE=2048, MADE=2048, SIZE_POW2=2048, TILE=2048)
    made = [
        compiled(store_rows._store_rows, capability, sizes, types, 4),
        compiled(shared_gate._gate_shared, capability, gate, types, 4),
    ]
    return max(each.metadata.shared for each in made)


def of_rounds(capability: int) -> int:
    """Compiles what shares out rows, fills passes and starts requests; the shared memory of the largest."""
    names = {*fill_pass._fill.arg_names, *start_requests._start.arg_names}
    names |= set(share_rows._share.arg_names)
    types = {name: "*i64" if name.endswith("_ptr") else "i32" for name in names}
    types |= dict.fromkeys(("prompt_begins_ptr", "ended_ptr"), "*i32")
    filled = types | {"lengths_ptr": "*i32", "ends_ptr": "*i32"}
    shared, chances = dict(REQUESTS_POW2=256, WIDEST_POW2=16), {"chances_ptr": "*fp32"}
    made = [
        compiled(share_rows._share, capability, shared, types | chances, 8),
        compiled(start_requests._start, capability, dict(ENDS=4), types, 1),
    ]
    for ragged, mrope in itertools.product((False, True), repeat=2):
        options = dict(RAGGED=ragged, MROPE=mrope, TILE=256)
        made.append(compiled(fill_pass._fill, capability, options, filled, 4))
    return max(each.metadata.shared for each in made)


def of_tokens(capability: int) -> int:
    """Compiles what finds the likeliest tokens, accepts drafts and learns of it; the shared memory of the largest."""
    made, types = [], dict.fromkeys(("index_ptr", "indices_ptr"), "*i64") | {"stride": "i32"}
    for parts, rest in itertools.product((1, 2, None), (False, True)):
        way = argmax.WITH_REST if rest else argmax.ALONE
        parts = parts or way.most_parts
        options = dict(SIZE=151_936, PARTS=parts, REST=rest)
        types |= {"x_ptr": "*bf16", "rest_ptr": "*fp32", "masses_ptr": "*fp32"}
        types |= dict.fromkeys(("value_ptr", "values_ptr"), "*fp32" if rest else "*bf16")
        first = options | {"TILE": way.tile} | ({} if rest else {"rest_ptr": None})
        made.append(compiled(argmax._part_of_row, capability, first, types, way.warps))
        if parts > 1:
            whole = options if rest else options | {"rest_ptr": None, "masses_ptr": None}
            made.append(compiled(argmax._of_parts, capability, whole, types, 1))
    types = {name: "*i64" for name in accept._accept.arg_names if name.endswith("_ptr")}
    types |= {"ended_ptr": "*i32", "padding_row": "i32"}
    for ragged in (False, True):
        options = dict(ENDS=4, WIDTH=16, WIDTH_POW2=16, RAGGED=ragged)
        made.append(compiled(accept._accept, capability, options, types, 1))
    kernels = survival._expect, survival._count, survival._update
    names = {name for kernel in kernels for name in kernel.arg_names}
    types = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in names}
    types |= dict.fromkeys(("kinds_ptr", "rows_ptr", "cells_ptr", "lengths_ptr"), "*i64")
    drafted = dict(FIRST=-2.5, PER_NAT=2.0, WIDEST=15, DRAFTS=7, DRAFTS_POW2=8, BINS=16)
    learned = dict(KINDS=4, WIDEST=15, WIDEST_POW2=16, BINS=16, LEAST=0.5, GUESS=8.0, POOLED=16.0)
    counted = dict(SIZE=960, WIDEST_POW2=16)
    expected = types | {"ended_ptr": "*i32"}
    made.append(compiled(survival._expect, capability, drafted, expected, 1))
    made.append(compiled(survival._count, capability, counted, types, 1))
    made.append(compiled(survival._update, capability, learned, types, 4))
    return max(each.metadata.shared for each in made)


def in_fp8(capability: int) -> int:
    """Compiles what quantizes rows of Qwen3-8B's shape on the way; the shared memory of the larger."""
    names = ("x_ptr", "residual_ptr", "weight_ptr", "sum_ptr", "gate_up_ptr")
    types = dict.fromkeys(names, "*bf16") | {"y_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
    types |= {"eps": "fp32", "rows": "i32"}
    early = capability >= 90
    norm = dict(LARGEST=448.0, PARTS=1, SIZE=4096, SIZE_POW2=4096, EARLY=early)
    swiglu = dict(LARGEST=448.0, SIZE=12288, SIZE_POW2=16384, EARLY=early)
    made = [
        compiled(_add_norm, capability, norm, types, 8),
        compiled(_add_norm, capability, norm | {"PARTS": 2}, types | {"x_ptr": "*fp32"}, 8),
        compiled(_swiglu_fp8, capability, swiglu, types, 16),
    ]
    return max(each.metadata.shared for each in made)


def adapters(capability: int, dtype: str) -> int:
    """Compiles what adapters of Qwen3-8B's rank 16 and 256 add to its products; the shared memory of the largest."""
    names = ("x_ptr", "a_ptr", "b_ptr", "y_ptr", "out_ptr")
    types = dict.fromkeys(names, f"*{dtype}") | {"rows": "i32"}
    types |= dict.fromkeys(("parts_ptr", "scalings_ptr"), "*fp32")
    types |= dict.fromkeys(
        ("ends_ptr", "places_ptr", "ranks_ptr", "bounds_ptr", "segment_rows_ptr"), "*i32"
    )
    types |= dict.fromkeys(("segment_places_ptr", "segment_ranks_ptr"), "*i32")
    types |= {"segment_scalings_ptr": "*fp32"}
    types |= dict.fromkeys(("requests", "segments"), "i32")
    sizes = dict(ROWS_POW2=4096, STEPS=8, NONE=9, MOST=32, SEGMENTS_POW2=256)
    made = [compiled(adapter_rows._group, capability, sizes, types, 8)]
    for most, tile, share in ((16, 64, 512), (16, 16, 1024), (256, 64, 4096)):
        rest = dict(COLUMNS=3 * most, LONGEST=32, EARLY=capability >= 90)
        step = 256 if tile == 16 else 128
        shrink = rest | dict(DEPTH=4096, SLICES=3, SHARE=share, TILE=tile, STEP=step)
        expand = rest | dict(SIZE=6144, MOST=most, MOST_POW2=most, PARTS=4096 // share, TILE=128)
        made.append(compiled(adapter_products._shrink, capability, shrink, types, 4))
        made.append(compiled(adapter_products._expand, capability, expand, types, 4))
        parts = types | {"y_ptr": "*fp32"}
        made.append(compiled(adapter_products._expand, capability, expand, parts, 4))
        made.append(compiled(adapter_products._expand_swiglu, capability, expand, types, 4))
    return max(each.metadata.shared for each in made)


def main() -> None:
    for capability, dtype, changes in CASES:
        used = attention(capability, dtype, changes)
        print(capability, dtype, changes, f"{used:,} bytes", flush=True)
        assert used <= MEMORY[capability]
    used = attention(90, "bf16", {}, NARROW)
    print(90, "bf16", NARROW, f"{used:,} bytes", flush=True)
    assert 2 * used <= MEMORY[90]  # two programs are to be on a multiprocessor
    for capability in MEMORY:
        print(capability, "penalties", f"{penalties(capability):,} bytes", flush=True)
        dtype = "fp16" if capability < 90 else "bf16"
        print(capability, "adapters", f"{adapters(capability, dtype):,} bytes", flush=True)
        print(
            capability, "linear attention", f"{delta_nets(capability, dtype):,} bytes", flush=True
        )
        print(capability, "rounds", f"{of_rounds(capability):,} bytes", flush=True)
        print(capability, "tokens", f"{of_tokens(capability):,} bytes", flush=True)
        print(capability, "small", f"{small(capability, dtype):,} bytes", flush=True)
        if capability >= 89:
            print(capability, "FP8", f"{in_fp8(capability):,} bytes", flush=True)


if __name__ == "__main__":
    main()
