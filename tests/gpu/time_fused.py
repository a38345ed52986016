"""Microseconds of a layer in captured rounds: the release's layers with our attention, and fused ones.

    python -m tests.gpu.time_fused --shapes qwen3-8b,llama-3.1-8b,qwen3-30b-a3b --ranks 1
    python -m tests.gpu.time_fused --shapes qwen3-8b --ranks 2

Random weights, blocks of 16 rows on contexts of 400 tokens, one graph of all layers. Embedding and last norm
are spread over the layers; both ways have them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.cuda_graph_runner import model_capture_mode
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from torch import nn
from transformers import AutoConfig

from benchmark.shapes import SHAPES, target_config
from sglang_dflash.gpu.fa3_attention import Fa3BlockAttention
from sglang_dflash.gpu.rank_sums import RankSums, open_rank_sums
from sglang_dflash.gpu.targets import fused_body
from sglang_dflash.gpu.tiling_times import time_tilings
from sglang_dflash.gpu.tilings import tilings_of_process
from sglang_dflash.round.verify_input import DFlashVerifyInput
from tests.server.ports import free_port
from tests.unit.targets import NOTHING, TARGETS, rank_of

ROOT = Path(__file__).parents[2]
WIDTH, CONTEXT, REPLAYS = 16, 400, 30
CLASSES = {model_class.__name__: model_class for model_class, _, _ in TARGETS.values()}
Run = Callable[[], object]


def make_model(shape: str, layers: int) -> nn.Module:
    """A target of a shape with random weights, with fewer layers."""
    fields = target_config(SHAPES[shape]) | {"num_hidden_layers": layers}
    model_class = CLASSES[fields["architectures"][0]]
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = model_class(config).eval()
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=0.02)
    return model


def make_batch(model: nn.Module, rows: int, ranks: int) -> SimpleNamespace:
    """What a captured round of so many rows gives its models."""
    attention, config = model.model.layers[0].self_attn.attn, model.config
    requests, length = rows // WIDTH, CONTEXT + WIDTH
    table = 1 + torch.arange(requests * length, device="cuda", dtype=torch.int32)
    table = table.view(requests, length)
    runner = SimpleNamespace(
        model_config=SimpleNamespace(
            num_attention_heads=config.num_attention_heads,
            get_num_kv_heads=lambda size: max(1, config.num_key_value_heads // size),
            head_dim=attention.head_dim,
            v_head_dim=attention.head_dim,
            dtype=torch.bfloat16,
        ),
        kv_cache_dtype=torch.bfloat16,
        tp_size=ranks,
        token_to_kv_pool=None,
        page_size=1,
    )
    lengths = torch.full((requests,), length, dtype=torch.int32, device="cuda")
    backend = Fa3BlockAttention(runner, lengths, table, WIDTH, causal=True, short=True)
    positions = torch.arange(CONTEXT, length, device="cuda").repeat(requests)
    pool = MHATokenToKVPool(
        size=requests * length,
        page_size=1,
        dtype=torch.bfloat16,
        head_num=attention.tp_k_head_num,
        head_dim=attention.head_dim,
        layer_num=len(model.model.layers),
        device="cuda",
        enable_memory_saver=False,
    )
    return SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        input_ids=torch.randint(0, 1000, (rows,), device="cuda"),
        out_cache_loc=table[:, CONTEXT:].flatten().to(torch.int64),
        positions=positions,
        spec_info=DFlashVerifyInput(WIDTH, positions, CaptureHiddenMode.FULL),
        attn_backend=backend,
        token_to_kv_pool=pool,
        **NOTHING,
    )


@torch.no_grad()
def microseconds(batch: SimpleNamespace, run: Run) -> float:
    """Of one run in a graph: the median of many."""

    def whole() -> None:
        batch.attn_backend.prepare()
        run()

    graph, times = torch.cuda.CUDAGraph(), []
    with model_capture_mode(), graph_capture() as context:
        for _ in range(2):
            whole()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=context.stream):
            whole()
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return sorted(times)[REPLAYS // 2]


def time_shape(shape: str, layers: int, rows: list[int], ranks: int, say: Callable) -> None:
    model = make_model(shape, layers)
    sums: dict[str, RankSums | None] = {"fused": None}
    if ranks > 1:
        opened = open_rank_sums(model.config.hidden_size, max(rows), torch.bfloat16)
        sums = {"fused, all-reduce": RankSums(get_tp_group(), None, 0)}
        if opened.shared is not None:
            sums["fused, shared memory"] = opened
    tilings = tilings_of_process(time_tilings)
    bodies = {name: fused_body(model, tilings, ranks_of) for name, ranks_of in sums.items()}
    for n in rows:
        batch = make_batch(model, n, ranks)
        inputs = (batch.input_ids, batch.positions, batch)
        ways: dict[str, Run] = {"release": lambda inputs=inputs: model.model(*inputs)}
        for name, body in bodies.items():
            ways[name] = lambda body=body, inputs=inputs: body(*inputs)
        found = {name: microseconds(batch, run) / layers for name, run in ways.items()}
        each = ", ".join(f"{name} {time:.1f}" for name, time in found.items())
        say(f"{shape}, {ranks} rank(s), {n} rows: µs a layer: {each}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--shapes", default="qwen3-8b,llama-3.1-8b,qwen3-30b-a3b")
    made.add_argument("--rows", default="16,128,512")
    made.add_argument("--layers", type=int, default=8)
    made.add_argument("--ranks", type=int, default=1)
    made.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    made.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return made


def main() -> None:
    args = parser().parse_args()
    if args.rank is None:
        command = [sys.executable, "-m", "tests.gpu.time_fused", *sys.argv[1:]]
        command += ["--port", str(free_port()), "--rank"]
        started = [subprocess.Popen([*command, str(r)], cwd=ROOT) for r in range(args.ranks)]
        sys.exit(max(process.wait() for process in started))
    say = (lambda text: print(text, flush=True)) if args.rank == 0 else (lambda text: None)
    rows = [int(part) for part in args.rows.split(",")]
    with rank_of(args.ranks, args.rank, args.port, "cuda"):
        for shape in args.shapes.split(","):
            time_shape(shape, args.layers, rows, args.ranks, say)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
