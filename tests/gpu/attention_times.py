"""Times of attention of blocks, FA3's and Triton's: `python -m tests.gpu.attention_times`.

Microseconds of a layer, in a graph of eight with K/V of their own, for Qwen3-8B's heads and blocks of 16, or of
`--width`: up to 4 also of what narrow blocks have. With `--side-by-side` of passes over blocks and prompts. With
`--tiles 64,64,8,2 …` (rows, keys, warps, stages) Triton is timed with these, too, instead of its own table's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import accumulate
from types import SimpleNamespace

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_dflash.gpu.block_attention import BlockAttention
from sglang_dflash.gpu.choose_attention import SIDE_BY_SIDE
from sglang_dflash.gpu.fa3_attention import SHORT_CONTEXT, Fa3BlockAttention
from sglang_dflash.gpu.kernels.block_tiles import TILES, Tile
from sglang_dflash.gpu.narrow_attention import TILE, NarrowBlockAttention
from sglang_dflash.gpu.triton_attention import TritonBlockAttention

HEADS, KV_HEADS, DIM, WIDTH, LAYERS = 32, 8, 128, 16, 8
LONGEST = 40_960


class Blocks:
    """Blocks of random queries over random contexts.

    Attributes:
        layers: of the model; they are not causal where the draft model's are not.
    """

    def __init__(
        self,
        lengths: list[int],
        causal: bool = True,
        page_size: int = 1,
        kv_dtype: torch.dtype = torch.bfloat16,
        layers: int = LAYERS,
        longest: int = LONGEST,
        width: int = WIDTH,
    ):
        """
        Args:
            lengths: keys of each request, its block included.
            width: of a block.
        """
        torch.manual_seed(0)
        self.causal, self.page_size, self.longest = causal, page_size, longest
        self.width = width
        config = SimpleNamespace(
            num_attention_heads=HEADS,
            head_dim=DIM,
            v_head_dim=DIM,
            get_num_kv_heads=lambda tp_size: KV_HEADS,
        )
        self.runner = SimpleNamespace(
            token_to_kv_pool=None,
            page_size=page_size,
            tp_size=1,
            attention_chunk_size=None,
            kv_cache_dtype=kv_dtype,
            model_config=config,
        )
        pages = [-(-length // page_size) for length in lengths]
        size = sum(pages) * page_size
        self.pool = MHATokenToKVPool(
            size, page_size, kv_dtype, KV_HEADS, DIM, layers, "cuda", enable_memory_saver=False
        )
        for i in range(layers):
            for cache in self.pool.get_kv_buffer(i):
                cache.copy_(torch.randn(cache.shape, device="cuda", dtype=torch.bfloat16))
        self.page_table = torch.zeros(
            len(lengths), -(-longest // page_size), dtype=torch.int32, device="cuda"
        )
        order = 1 + torch.randperm(sum(pages), device="cuda").to(torch.int32)
        for row, own in zip(self.page_table, order.split(pages), strict=True):
            row[: len(own)] = own
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        kind = AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY
        self.layers = [
            RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, i, attn_type=kind)
            for i in range(layers)
        ]
        self.q = torch.randn(len(lengths) * width, HEADS * DIM, device="cuda", dtype=torch.bfloat16)

    def attention(self, kind: type[BlockAttention]) -> BlockAttention:
        """As a graph for such contexts has it."""
        short = int(self.lengths.max()) <= SHORT_CONTEXT
        short = short and kind.short_contexts_gain(self.runner, len(self.lengths))
        pages = -(-(SHORT_CONTEXT if short else self.longest) // self.page_size)
        table = self.page_table[:, :pages]
        return kind(self.runner, self.lengths, table, self.width, self.causal, short)

    def run(self, attention: BlockAttention) -> torch.Tensor:
        """A round of all layers; what the last gives."""
        batch = SimpleNamespace(token_to_kv_pool=self.pool)
        attention.prepare()
        for layer in self.layers:
            y = attention.forward(self.q, None, None, layer, batch)
        return y

    def microseconds(self, kind: type[BlockAttention], replays: int = 50) -> float:
        """Of one layer."""
        attention, graph = self.attention(kind), torch.cuda.CUDAGraph()
        self.run(attention)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self.run(attention)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1000 / replays / len(self.layers)


class Passes(Blocks):
    """Random queries of requests that have different numbers of them."""

    def __init__(self, requests: list[tuple[int, int]], page_size: int = 1, layers: int = LAYERS):
        """
        Args:
            requests: rows of each, and keys that its last row sees.
        """
        widths, lengths = zip(*requests, strict=True)
        super().__init__(list(lengths), True, page_size, layers=layers, width=max(widths))
        ends = list(accumulate(widths, initial=0))
        self.ends = torch.tensor(ends, dtype=torch.int32, device="cuda")
        self.q = torch.randn(ends[-1], HEADS * DIM, device="cuda", dtype=torch.bfloat16)

    def attention(self, kind: type[BlockAttention]) -> BlockAttention:
        given = (self.runner, self.lengths, self.page_table, self.ends, len(self.q))
        return SIDE_BY_SIDE[kind](*given)


# With as many requests as a server's graphs have room for, most of them without rows.
SIDE_BY_SIDE_PASSES = {
    "64 rows: 4 blocks, contexts of 1,000": [(16, 1000)] * 4,
    "64 rows: 4 blocks, contexts of 30,000": [(16, 30_000)] * 4,
    "256 rows: 8 blocks, contexts of 1,000, and a prompt": [(16, 1000)] * 8 + [(128, 128)],
    "512 rows: 8 blocks, contexts of 400, and 4 prompts": [(16, 400)] * 8 + [(96, 96)] * 4,
    "256 rows: 1 to 4 of 96 blocks, contexts of 250": [(1 + i % 4, 250) for i in range(96)],
    "2,048 rows: 128 blocks, contexts of 400": [(16, 400)] * 128,
    "2,048 rows: prompts": [(256, 256)] * 8,
    "2,048 rows: a chunk behind 30,000": [(2048, 32_048)],
}


def cases(options: argparse.Namespace) -> Iterator[tuple[str, Blocks]]:
    """What is timed, and its name."""
    if options.side_by_side:
        for name, requests in SIDE_BY_SIDE_PASSES.items():
            yield name, Passes(requests + [(0, 0)] * (96 - len(requests)), options.page_size)
        return
    for requests in options.requests:
        for context in options.contexts:
            lengths, width = [context + options.width] * requests, options.width
            blocks = Blocks(lengths, not options.not_causal, options.page_size, width=width)
            yield f"{requests} × {context}", blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[200, 1000, 4000])
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--not-causal", action="store_true")
    parser.add_argument("--side-by-side", action="store_true")
    parser.add_argument("--tiles", nargs="+", default=[])
    options = parser.parse_args()
    tiles = [Tile(*map(int, tile.split(","))) for tile in options.tiles]
    own = TILES[DIM]
    for name, blocks in cases(options):
        fa3 = blocks.microseconds(Fa3BlockAttention)
        line = f"{name}: fa3 {fa3:.1f} µs"
        if blocks.width * HEADS // KV_HEADS <= TILE.rows:
            narrow = blocks.microseconds(NarrowBlockAttention)
            line += f", narrow {narrow:.1f} ({narrow / fa3:.2f} ×)"
        for tile in (None, *tiles):
            TILES[DIM] = own if tile is None else (tile,)
            triton = blocks.microseconds(TritonBlockAttention)
            label = "" if tile is None else f" {','.join(map(str, tile))}"
            line += f", triton{label} {triton:.1f} ({triton / fa3:.2f} ×)"
        print(line, flush=True)


if __name__ == "__main__":
    main()
