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
from sglang_dflash.gpu import pass_sizes
from sglang_dflash.gpu.pass_sizes import LINEAR_ROWS
from sglang_dflash.serving import memory
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


def asked(buckets: list[int], **changes: Any) -> SimpleNamespace:
    own = dict(
        device="cuda",
        disable_cuda_graph=False,
        cuda_graph_bs=buckets,
        max_running_requests=None,
        speculative_num_draft_tokens=16,
        tp_size=1,
        piecewise_cuda_graph_max_tokens=None,
        speculative_dflash_verify="auto",
        enable_lora=None,
    )
    return SimpleNamespace(**own | changes)


QWEN3_8B = SimpleNamespace(taps=range(5), target_hidden_size=4096)
UP_TO_16 = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]
UP_TO_32 = [*UP_TO_16, *range(18, 33, 2)]
UP_TO_64 = [*UP_TO_32, 40, 44, 48, 52, 56, 60, 64]
UP_TO_128 = [*UP_TO_64, *range(72, 129, 8)]
UP_TO_256 = [*UP_TO_128, *range(144, 257, 16)]
EACH_8_TO_256 = [*UP_TO_64, *range(72, 257, 8)]
LORA = (0.33, 0.12, 0.52, 0.28, 0.43)


@pytest.mark.parametrize(
    ("few", "narrow", "buckets", "changes", "context", "found"),
    [
        ((30, 92), 0, EACH_8_TO_256, {}, 4096, (3.07, 1.64, 1.07)),
        ((30, 92), 0, UP_TO_64, {}, 4096, (0.87, 0.58, 0.51)),
        ((30, 92), 4, UP_TO_128, {}, 4096, (1.71, 0.85, 0.65)),
        ((), 0, UP_TO_16, {"enable_lora": True}, 4096, (0.33, 0.12, 0.52, 0.26, 0.49)),
        ((), 0, UP_TO_256, {"max_running_requests": 16, "enable_lora": True}, 4096, LORA),
        ((), 0, UP_TO_32, {"tp_size": 2, "speculative_dflash_verify": "all"}, 40_960, (0.37, 0.61)),
    ],
)
def test_captured_rounds_as_an_h200_had_them(
    few: tuple[int, ...],
    narrow: int,
    buckets: list[int],
    changes: dict[str, Any],
    context: int,
    found: tuple[float, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GiB that the log of servers of Qwen3-8B's shape said of rounds, those of narrower blocks, and prompts.

    Args:
        few: requests that passes were captured for, too, when that server ran.
        narrow: rows of blocks that had passes of their own then.
    """
    monkeypatch.setattr(pass_sizes, "FEW", few)
    monkeypatch.setattr(pass_sizes, "CHEAP_ROWS", 128)
    monkeypatch.setattr(memory, "NARROW", narrow)
    planned = round_buffers(asked(buckets, **changes), QWEN3_8B, 151_936, 2, context)
    # 256 requests keep 0.44 GiB more of rounds than is planned.
    near = 0.11 if buckets is EACH_8_TO_256 else 0.07
    assert planned / GIB == pytest.approx(sum(found), rel=near)


def test_captured_rounds() -> None:
    """What is there counts, and nothing else."""

    def planned(linear: bool = False, context: int = 4096, **changes: Any) -> int:
        given = asked([1, 8, 16], **{"speculative_dflash_verify": "all"} | changes)
        return round_buffers(given, QWEN3_8B, 150_000, 2, context, linear)

    some = planned()
    rows = asked([1, 8, 32], speculative_dflash_verify="all")
    assert round_buffers(rows, QWEN3_8B, 150_000, 2, 4096) - some > 256 * 150_000 * 2
    assert planned(disable_cuda_graph=True) == planned(device="cpu") == 0
    assert planned(piecewise_cuda_graph_max_tokens=0) < some < planned(context=40_960)
    assert planned(tp_size=2) < some < planned(enable_lora=True)
    # One row each, and drafts of blocks of 8 for 16 requests; narrower ones are as dear as these.
    auto = planned(speculative_dflash_verify="auto")
    assert auto - some > 128 * 150_000 * 2
    # With linear attention fewer rows of prompts, and without such passes rounds of blocks of 8, 4 and 2, too.
    assert planned(linear=True) < some
    without = dict(piecewise_cuda_graph_max_tokens=0, speculative_dflash_verify="auto")
    assert planned(linear=True, **without) - planned(**without) == 3 * 3 * (7 << 20)
