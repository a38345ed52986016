"""What is planned for the draft model against what the release's layers and pools allocate."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.qwen3_next import Qwen3NextConfig
from sglang.srt.mem_cache.memory_pool import MambaPool

from sglang_dflash.block_rows import BlockRows
from sglang_dflash.checkpoint.load import load_config
from sglang_dflash.errors import DFlashError
from sglang_dflash.gpu.pass_sizes import LINEAR_ROWS, row_sizes
from sglang_dflash.serving.linear_attention import reserve_rows, rows_of_linear_attention
from sglang_dflash.serving.memory import (
    GIB,
    draft_memory,
    model_bytes,
    pool_bytes,
    round_buffers,
)
from tests.unit.decoders import DELTA_NETS
from tests.unit.drafters import CONTEXT, DraftRunner, TargetStub, save_random, zlab_config

VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "deep": {"num_hidden_layers": 5},
    "one KV head": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 64},
    "half of a head rotated": {"partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_one_rank(one_rank: None, tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = save_random(tmp_path / "drafter", zlab_config(**changes))
    config = load_config(str(folder))
    target = TargetStub(torch.randn(config.vocab_size, config.hidden_size))
    runner = DraftRunner(folder, target)
    planned = draft_memory(config, 1, 4, CONTEXT)
    assert planned.weights == pytest.approx(model_bytes(runner.model), rel=0.01)
    pool = runner.token_to_kv_pool
    assert planned.kv * (pool.size + pool.page_size) == pool_bytes(pool)


@pytest.mark.parametrize("ratio", [1, 5])
def test_rows_of_linear_attention(one_rank: None, ratio: int) -> None:
    """As many requests may run as there is room for beside their states, and not one more."""
    params = Qwen3NextConfig(**DELTA_NETS, num_hidden_layers=6).mamba2_cache_params
    args = SimpleNamespace(
        speculative_num_draft_tokens=8,
        max_running_requests=1000,
        max_mamba_cache_size=None,
        mamba_full_memory_ratio=0.25,
    )
    runner = SimpleNamespace(
        server_args=args,
        mambaish_config=SimpleNamespace(mamba2_cache_params=params),
        device="cuda",
        dtype=torch.bfloat16,
        _calculate_mamba_ratio=lambda: ratio,
    )
    pool = MambaPool(
        size=2,
        spec_state_size=0,
        cache_params=params,
        mamba_layer_ids=params.layers,
        device="cpu",
    )
    made = BlockRows.reserve(pool.mamba_cache, 8, runner.dtype)
    rows = sum(getattr(made, field.name).nbytes for field in fields(made))
    each = rows + ratio * params.mamba_cache_per_req
    prompts = LINEAR_ROWS * rows / 8
    rest = (5 * 400.5 * each + prompts) / GIB
    left = reserve_rows(runner, rest)
    assert args.max_running_requests == 400
    assert left == pytest.approx(rest - (400 * rows + prompts) / GIB)
    assert rows_of_linear_attention(args, 400) == 400 * 8 + LINEAR_ROWS
    for asked, may in ((7, 7), (None, 256)):
        args.max_running_requests = asked
        reserve_rows(runner, rest)
        assert args.max_running_requests == may
    args.max_mamba_cache_size = 30 * ratio + ratio - 1
    reserve_rows(runner, rest)
    assert args.max_running_requests == 30
    args.max_mamba_cache_size = None
    with pytest.raises(DFlashError, match="^--mamba-full-memory-ratio 0.25 leaves"):
        reserve_rows(runner, (4 * each + prompts) / GIB)


def test_convolutions_without_kernels(one_rank: None) -> None:
    sizes = DELTA_NETS | {"linear_conv_kernel_dim": 3}
    params = Qwen3NextConfig(**sizes, num_hidden_layers=6).mamba2_cache_params
    runner = SimpleNamespace(
        server_args=SimpleNamespace(model_path="it"),
        mambaish_config=SimpleNamespace(mamba2_cache_params=params),
        device="cuda",
    )
    with pytest.raises(
        DFlashError, match="^it has convolutions of 3 rows, and DFLASH knows those of 4"
    ):
        reserve_rows(runner, 1.0)


def test_ranks_share(tmp_path: Path) -> None:
    """What is split is counted in parts, what is not in full; KV heads cannot be fewer than one."""
    config = load_config(str(save_random(tmp_path / "drafter", zlab_config())))
    one, two, many = (draft_memory(config, tp_size, 2, 64) for tp_size in (1, 2, 8))
    kv_heads = config.num_key_value_heads
    assert two.kv == one.kv // 2 if kv_heads % 2 == 0 else one.kv
    assert many.kv == one.kv // min(kv_heads, 8)
    replicated = config.hidden_size * len(config.target_layer_ids) * config.target_hidden_size * 2
    assert replicated < two.weights < one.weights < 2 * two.weights


def test_captured_rounds() -> None:
    config = SimpleNamespace(taps=(1, 9, 17), target_hidden_size=4096)
    args = SimpleNamespace(
        device="cuda",
        disable_cuda_graph=False,
        cuda_graph_bs=[1, 8, 32],
        speculative_num_draft_tokens=16,
        tp_size=2,
        piecewise_cuda_graph_max_tokens=None,
        speculative_dflash_verify="all",
        enable_lora=None,
    )
    more = round_buffers(args, config, 150_000, 2, 4096)
    args.cuda_graph_bs = [1, 8, 16]
    half = round_buffers(args, config, 150_000, 2, 4096)
    tensors = 256 * (75_000 + 2 * 3 * 4096) * 2
    assert more - half == tensors
    passes = row_sizes(16 * 16, None)
    assert half - tensors - passes[-1] * 4096 * 2 == (96 + 3 * 14 + len(passes) * 11) << 20
    longer = round_buffers(args, config, 150_000, 2, 40_960)
    assert longer - half == len(passes) * 11 << 20
    args.enable_lora = True
    adapted = round_buffers(args, config, 150_000, 2, 4096)
    assert adapted - half == (3 * 14 + len(passes) * 11) << 20
    args.enable_lora = None
    args.piecewise_cuda_graph_max_tokens = 0
    assert round_buffers(args, config, 150_000, 2, 4096) - tensors == (96 + 3 * 14) << 20
    args.speculative_dflash_verify, args.cuda_graph_bs = "auto", [1, 8, 16]
    assert round_buffers(args, config, 150_000, 2, 4096) - tensors == (96 + 6 * 14) << 20
    # With linear attention and without such passes, rounds of blocks of 8, 4 and 2, too.
    linear = round_buffers(args, config, 150_000, 2, 4096, linear=True)
    assert linear - tensors == (96 + 15 * 14) << 20
    args.piecewise_cuda_graph_max_tokens = None
    # Drafts of blocks of 8 for 16 requests; narrower ones are as dear as these.
    drafts = round_buffers(args, config, 150_000, 2, 4096) - half - (3 * 14 << 20)
    assert drafts == (14 << 20) // 6
    # With linear attention, fewer rows of prompts, so fewer passes.
    fewer = row_sizes(16 * 16, None, linear=True)
    assert fewer[-1] == 16 * 16 + LINEAR_ROWS and fewer == passes[: len(fewer)]
    linear = round_buffers(args, config, 150_000, 2, 4096, linear=True)
    hidden = (passes[-1] - fewer[-1]) * 4096 * 2
    more = (3 * 14 << 20) + drafts - ((len(passes) - len(fewer)) * 11 << 20) - hidden
    assert linear == half + more
    args.piecewise_cuda_graph_max_tokens = 0
    args.enable_lora = True
    assert round_buffers(args, config, 150_000, 2, 4096) - tensors == (96 + 9 * 14) << 20
    args.disable_cuda_graph = True
    assert round_buffers(args, config, 150_000, 2, 4096) == 0
