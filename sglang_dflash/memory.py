"""The draft model in the memory budget, before the KV pool is sized."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from sglang_dflash.checkpoint import load_config
from sglang_dflash.formats.config import DraftConfig
from sglang_dflash.formats.weights import expected_weights

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_REPLICATED = ("fc.weight",)


def draft_kv_bytes_per_token(config: DraftConfig, tp_size: int, itemsize: int) -> int:
    """Bytes of draft K and V that one KV slot costs on one rank."""
    return (
        2
        * config.num_hidden_layers
        * config.kv_heads_per_rank(tp_size)
        * config.head_dim
        * itemsize
    )


def draft_weight_bytes(config: DraftConfig, tp_size: int, itemsize: int) -> int:
    """Bytes of the draft model's weights on one rank, the stacked K/V weights included."""
    kv_rows = 2 * config.num_hidden_layers * config.kv_heads_per_rank(tp_size) * config.head_dim
    total = kv_rows * config.hidden_size
    for name, shape in expected_weights(config).items():
        size = 1
        for dimension in shape:
            size *= dimension
        split = len(shape) == 2 and name not in _REPLICATED
        total += size // tp_size if split else size
    return total * itemsize


def budget_draft_model(runner: ModelRunner, rest_gib: float, cell_size: int) -> tuple[float, int]:
    """Adds the draft model to the budget from which SGLang sizes the pool.

    Args:
        runner: the target's; the draft model is not loaded yet.
        rest_gib: memory for the KV pool, GiB on this rank.
        cell_size: bytes of target KV in one slot on this rank.

    Returns:
        Memory that is left for the pool, and bytes of target and draft KV in one slot.
    """
    args = runner.server_args
    config = load_config(args.speculative_draft_model_path, args.speculative_draft_model_revision)
    # The draft model runs and stores its K/V in the target's dtype (see worker.py).
    itemsize = torch.finfo(runner.model_config.dtype).bits // 8
    weights = draft_weight_bytes(config, runner.tp_size, itemsize) / (1 << 30)
    draft_cell = draft_kv_bytes_per_token(config, runner.tp_size, itemsize)
    logger.info(
        "DFLASH memory: %d bytes of target KV and %d of draft KV a token, draft weights %.3f GiB, %.2f GiB left for KV",
        cell_size,
        draft_cell,
        weights,
        rest_gib - weights,
    )
    return rest_gib - weights, cell_size + draft_cell
