"""The draft model in the memory budget, before the KV pool is sized, and what it came to afterwards.

`--mem-fraction-static` keeps its meaning: the part of the memory for weights and KV, here of both
models. What captured rounds keep besides is counted, too, so that it does not come out of the rest.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.vocab_parallel_embedding import pad_vocab_size
from sglang.srt.utils import ceil_align
from torch import nn

from sglang_dflash.checkpoint.formats.config import DraftConfig
from sglang_dflash.checkpoint.formats.weights import EMBEDDING, HEAD, expected_weights
from sglang_dflash.checkpoint.load import load_config
from sglang_dflash.gpu.fp8 import head_bytes
from sglang_dflash.gpu.pass_sizes import (
    NARROW,
    PROMPTS,
    SHORT_TABLE,
    dear_sizes,
    narrow_sizes,
    narrower,
    rooms,
    row_sizes,
    sizes_to_capture,
)
from sglang_dflash.two_pools import single_pools

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

GIB = 1 << 30

# What capturing takes of the device beside tensors, as found on an H200 with the shape of Qwen3-8B: kernels, and for
# each graph its nodes. Most buckets have two sets of graphs, of which one is counted; of narrower blocks each counts
# for more. LoRA layers have as many as a round has without them.
_GRAPHS, _BUCKET, _NARROW, _PASS = 96 << 20, 7 << 20, 9 << 20, 5 << 20
# Of what layers keep of a row for each other, in hidden sizes: on every rank, and of what ranks have their parts of.
_WHOLE, _PARTS = 4, 9

# Of which each rank holds its part; the rest, norms and products of features, is on every rank.
_SPLIT = ("q_proj", "gate_proj", "up_proj", "o_proj.weight", "down_proj.weight")


@dataclass(frozen=True)
class DraftMemory:
    """What the draft model needs on one rank, in bytes.

    Attributes:
        weights: parameters, K/V weights stacked for the context, and the table of RoPE.
        kv: K and V of one token in all layers.
        rounds: what the graphs of captured rounds keep.
    """

    weights: int
    kv: int
    rounds: int = 0


def draft_memory(
    config: DraftConfig, tp_size: int, itemsize: int, positions: int, rounds: int = 0
) -> DraftMemory:
    """What a draft model needs on one of `tp_size` ranks.

    Args:
        itemsize: bytes of an element of its weights and of its K/V.
        positions: how many a sequence can have, and so the table of RoPE.
    """
    kv_size = config.kv_heads_per_rank(tp_size) * config.head_dim
    kv_rows = 2 * config.num_hidden_layers * kv_size
    weights = kv_rows * config.hidden_size
    weights += kv_rows if config.attention_bias else 0
    weights += config.num_hidden_layers * config.head_dim if config.qk_norm else 0
    for name, shape in expected_weights(config).items():
        weights += _elements_on_rank(name, shape, kv_size, tp_size)
    rotary = int(config.head_dim * config.rope.get("partial_rotary_factor", 1.0))
    table = max(positions, config.max_position_embeddings) * rotary
    # The release keeps the table in float32 on a GPU.
    table *= 4 if torch.cuda.is_available() else itemsize
    return DraftMemory(weights * itemsize + table, kv_rows * itemsize, rounds)


def _elements_on_rank(name: str, shape: tuple[int, ...], kv_size: int, tp_size: int) -> int:
    if name in (EMBEDDING, HEAD):
        return pad_vocab_size(shape[0]) // tp_size * shape[1]
    if "k_proj" in name or "v_proj" in name:
        return kv_size * math.prod(shape[1:])
    return math.prod(shape) // (tp_size if any(part in name for part in _SPLIT) else 1)


def round_buffers(
    args: ServerArgs,
    config: DraftConfig,
    vocab_size: int,
    itemsize: int,
    context_len: int,
    linear: bool = False,
) -> int:
    """About how many bytes captured rounds, and passes over prompts, keep on one rank; 0 without graphs.

    Graphs of rounds share one pool, so the largest decides: logits of all its rows, the hidden states that
    the draft model taps, once from each layer and once side by side, and what is between layers. What the largest
    pass keeps is not there yet, nor are logits of narrower blocks. The graphs themselves and the
    kernels that are loaded for them come on top.

    Args:
        linear: whether layers of the target have linear attention.
    """
    if args.device != "cuda" or args.disable_cuda_graph:
        return 0
    # How many requests run is known by now unless the user leaves it to the size of the pool.
    sizes = args.cuda_graph_bs or [1]
    buckets = sizes_to_capture(sizes, args.max_running_requests or max(sizes))
    block, auto = args.speculative_num_draft_tokens, args.speculative_dflash_verify != "all"
    rows, narrow = max(buckets) * block, narrower(block) if auto else []
    size, lora = config.target_hidden_size, bool(args.enable_lora)
    logits = -(-vocab_size // args.tp_size)
    layers = 2 * len(config.taps) * size + _WHOLE * size + _PARTS * size // args.tp_size
    passes = row_sizes(rows, args.piecewise_cuda_graph_max_tokens, linear)
    # Without passes over rows of any numbers, all of narrower blocks are verified instead.
    narrow_rounds = len(narrow) if linear and not passes else 0
    # Those of bonus tokens alone, and of the target with its LoRA layers, too.
    kinds = 1 + auto + 2 * lora + narrow_rounds
    rounds = (1 + lora) * _GRAPHS + kinds * len(buckets) * _BUCKET
    rounds += rows * (logits + layers) * itemsize
    if not passes:
        return rounds
    if narrow_rounds := sum(len(dear_sizes(buckets, width)) for width in narrow):
        rounds += narrow_rounds * _NARROW + max(buckets) * narrow[0] * logits * itemsize
    graphs = sum(len(rooms(size, max(buckets) + PROMPTS)) for size in passes)
    if auto:
        graphs += len(narrow_sizes(passes, max(buckets), min(block, NARROW)))
    graphs *= (1 + (context_len > SHORT_TABLE)) * _PASS
    # Beside what passes leave to those who draw and to the drafter.
    return (
        rounds
        + (1 + lora) * (graphs + passes[-1] * layers * itemsize)
        + (passes[-1] * size * itemsize)
    )


def rope_positions(args: ServerArgs, context_len: int) -> int:
    """Rows of the RoPE table once SGLang has extended it (its reserve_rope_cache_for_long_sequences)."""
    block = args.speculative_num_steps * args.speculative_num_draft_tokens
    beyond = block * envs.SGLANG_SPEC_EXPANSION_SAFETY_FACTOR.get()
    longest = context_len + beyond + envs.SGLANG_ROPE_CACHE_SAFETY_MARGIN.get()
    return ceil_align(longest, envs.SGLANG_ROPE_CACHE_ALIGN.get())


def budget_draft_model(runner: ModelRunner, rest_gib: float, cell_size: int) -> tuple[float, int]:
    """Adds the draft model to the budget from which SGLang sizes the pool.

    Args:
        runner: the target's; the draft model is not loaded yet.
        rest_gib: memory for the KV pool, GiB on this rank.
        cell_size: bytes of target KV in one slot on this rank.

    Returns:
        Memory that is left for the pool, and bytes of target and draft KV in one slot.
    """
    args, target = runner.server_args, runner.model_config
    config = load_config(args.speculative_draft_model_path, args.speculative_draft_model_revision)
    # The draft model runs and stores its K/V in the target's dtype (see drafter/load.py).
    itemsize = torch.finfo(target.dtype).bits // 8
    linear = runner.mambaish_config is not None
    rounds = round_buffers(args, config, target.vocab_size, itemsize, target.context_len, linear)
    positions = rope_positions(args, target.context_len)
    rounds += head_bytes(args, config.hidden_size, target.vocab_size)
    needs = draft_memory(config, runner.tp_size, itemsize, positions, rounds)
    left = rest_gib - (needs.weights + needs.rounds) / GIB
    draft_kv = needs.kv
    if target.is_hybrid_swa:
        draft_kv *= slots_for_one(args, target, runner.tp_size)
    logger.info(
        "DFLASH memory, planned: %d bytes of target KV and %d of draft KV a slot, %d bytes of draft weights, %d of "
        "captured rounds; %.2f GiB for KV",
        cell_size,
        needs.kv,
        needs.weights,
        needs.rounds,
        left,
    )
    return left, cell_size + math.ceil(draft_kv)


def slots_for_one(args: ServerArgs, target: ModelConfig, tp_size: int) -> float:
    """How many slots the release makes of one, where sliding layers have a pool of their own.

    It counts slots as if all layers had as many, and then gives sliding layers fewer and the others more; the drafter
    has as many as those.
    """
    full = target.get_num_kv_heads(tp_size) * (target.head_dim + target.v_head_dim)
    sliding = target.get_swa_num_kv_heads(tp_size) * (target.swa_head_dim + target.swa_v_head_dim)
    full *= len(target.full_attention_layer_ids)
    sliding *= len(target.swa_attention_layer_ids)
    return (full + sliding) / (full + args.swa_full_tokens_ratio * sliding)


def report_memory(target: ModelRunner, draft: ModelRunner) -> None:
    """Says what was allocated, as `budget_draft_model` says what was planned."""
    free = ""
    if target.device == "cuda":
        free = f"; {torch.cuda.mem_get_info()[0] / GIB:.2f} GiB free"
    slots = target.token_to_kv_pool.size + target.page_size
    logger.info(
        "DFLASH memory, allocated: %d bytes of target KV and %d of draft KV in %d slots, %d bytes of draft weights%s",
        pool_bytes(target.token_to_kv_pool),
        pool_bytes(draft.token_to_kv_pool),
        slots,
        model_bytes(draft.model),
        free,
    )


def pool_bytes(pool: KVCache) -> int:
    """Bytes of the K and V buffers of a pool, or of two."""
    return sum(map(_bytes_of_one, single_pools(pool)))


def _bytes_of_one(pool: KVCache) -> int:
    layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
    buffers = [pool.get_key_buffer(i) for i in layers] + [pool.get_value_buffer(i) for i in layers]
    return _storage_bytes(buffers)


def model_bytes(model: nn.Module) -> int:
    """Bytes of a draft model's parameters and tables, and of what it stacked of them."""
    stacked = (model._kv_weight, model._kv_bias, model.k_norm_weight)
    tensors = [*model.parameters(), *model.buffers(), *(t for t in stacked if t is not None)]
    return _storage_bytes(tensors)


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Of distinct memory: K and V of MLA are views of one buffer."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
