"""Which attention a model's blocks get in graphs: by what the GPU can do and how K/V are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from sglang_dflash.gpu.block_attention import BlockAttention
from sglang_dflash.gpu.fa3_attention import Fa3BlockAttention
from sglang_dflash.gpu.fa3_latents import (
    LATENT,
    ROTATED,
    Fa3LatentAttention,
    Fa3LatentSideBySide,
)
from sglang_dflash.gpu.fa3_side_by_side import Fa3SideBySide
from sglang_dflash.gpu.kernels.launch import device_of
from sglang_dflash.gpu.kernels.over_keys import FP8
from sglang_dflash.gpu.narrow_attention import (
    PROGRAMS,
    TILE,
    TILE_HEAD,
    NarrowBlockAttention,
    NarrowSideBySide,
)
from sglang_dflash.gpu.triton_attention import TritonBlockAttention
from sglang_dflash.gpu.triton_side_by_side import TritonSideBySide
from sglang_dflash.two_pools import single_pools

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

AUTO, FA3, TRITON, BACKEND = CHOICES = ("auto", "fa3", "triton", "backend")

# What computes attention of blocks → what computes that of blocks and prompts in one pass.
SIDE_BY_SIDE = {
    Fa3BlockAttention: Fa3SideBySide,
    Fa3LatentAttention: Fa3LatentSideBySide,
    NarrowBlockAttention: NarrowSideBySide,
    TritonBlockAttention: TritonSideBySide,
}

HOPPER = 9  # compute capability that FA3 is written for
LARGEST_HEAD = 256  # of both


def why_not_fa3(capability: tuple[int, int], dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """What FA3 lacks for a model, to stand behind "because"; empty if nothing.

    Args:
        capability: of the GPU.
        dtype: of the model.
        kv_dtype: of its K/V as they are stored.
    """
    if capability[0] != HOPPER:
        return "this GPU is not a Hopper"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it does not compute in {_name(dtype)}"
    if kv_dtype not in (dtype, torch.float8_e4m3fn):
        return f"it does not read K/V in {_name(kv_dtype)}"
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def choose(
    asked: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    decode_backend: str,
) -> type[BlockAttention]:
    """The attention of a model's blocks.

    FA3 reads FP8 only beside queries that are rounded to FP8, as the release's own fa3 backend does. Where that is
    what decodes, blocks must do the same to answer the same; other backends leave queries as they are, and so does
    Triton's attention.

    Args:
        asked: `FA3`, `TRITON`, or `AUTO`.
        decode_backend: with which the release decodes.
    """
    if asked == AUTO:
        alike = kv_dtype not in FP8 or decode_backend == FA3
        asked = FA3 if alike and not why_not_fa3(capability, dtype, kv_dtype) else TRITON
    return Fa3BlockAttention if asked == FA3 else TritonBlockAttention


def prompts_in_graphs(
    attention: type[BlockAttention], prefill_backend: str, deterministic: bool
) -> bool:
    """Whether prompts run in graphs, where these have room for them.

    A pass for which they have none runs with the release's backend. Which of both it is depends on who else is
    served, so with deterministic inference both must be the same kernel, as FA3's are.

    Args:
        attention: of the target's blocks.
        prefill_backend: with which the release runs prompts.
    """
    return not deterministic or (attention is Fa3BlockAttention and prefill_backend == FA3)


def block_attention_of(runner: ModelRunner) -> type[BlockAttention] | None:
    """The attention of a model's blocks in graphs; None for the backend's own, kernel by kernel.

    K and V lie in the pool alike whatever backend reads them, so what is chosen for prompts does not matter.
    """
    args, config = runner.server_args, runner.model_config
    asked = args.speculative_dflash_attention
    if runner.use_mla_backend:
        return Fa3LatentAttention if asked in (AUTO, FA3) and _reads_latents(runner) else None
    pools = single_pools(runner.token_to_kv_pool)
    readable = {torch.bfloat16, torch.float16, torch.float32, *FP8}
    if (
        asked == BACKEND
        or any(type(pool) is not MHATokenToKVPool for pool in pools)
        or runner.kv_cache_dtype not in readable
        or any(max(pool.head_dim, pool.v_head_dim) > LARGEST_HEAD for pool in pools)
    ):
        return None
    if runner.attention_chunk_size:  # FA3 knows no chunks
        asked = TRITON
    _, decode_backend = args.get_attention_backends()
    capability = torch.cuda.get_device_capability()
    return choose(asked, capability, config.dtype, runner.kv_cache_dtype, decode_backend)


def narrowed(
    attention: type[BlockAttention], runner: ModelRunner, width: int, requests: int
) -> type[BlockAttention]:
    """What computes attention of blocks of so many rows: `attention`, or `NarrowBlockAttention` where that is faster.

    Args:
        attention: of a model's blocks.
        requests: in a graph.
    """
    if attention is not Fa3BlockAttention:
        return attention
    args, config = runner.server_args, runner.model_config
    kv_heads = config.get_num_kv_heads(runner.tp_size)
    group = config.num_attention_heads // runner.tp_size // kv_heads
    device = device_of(torch.device("cuda", torch.cuda.current_device()))
    faster = (
        args.speculative_dflash_attention == AUTO
        # Deterministic inference wants one kernel whoever else is served.
        and not is_batch_invariant_mode_enabled()
        and runner.kv_cache_dtype == config.dtype
        and max(config.head_dim, config.v_head_dim) <= TILE_HEAD
        and width * group <= TILE.rows
        and requests * kv_heads >= PROGRAMS * device.multiprocessors
    )
    return NarrowBlockAttention if faster else attention


def _reads_latents(runner: ModelRunner) -> bool:
    """Whether FA3 computes attention of blocks over a model's latents of MLA, of all tokens in a pool."""
    pool, dtype = runner.token_to_kv_pool, runner.model_config.dtype
    return (
        type(pool) is MLATokenToKVPool
        and (pool.kv_lora_rank, pool.qk_rope_head_dim) == (LATENT, ROTATED)
        and runner.kv_cache_dtype == dtype
        and not why_not_fa3(torch.cuda.get_device_capability(), dtype, dtype)
    )
