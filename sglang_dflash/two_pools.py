"""Targets whose sliding layers keep K/V in a pool of their own, as the release does for some.

A token has a slot of the other layers' pool, by which everybody knows it, and while windows reach it a slot of the
sliding layers', to which a table leads. A token behind all windows has none: the table says 0 then, the slot that the
release keeps for padding.
"""

from __future__ import annotations

from typing import Any

import torch


def has_two(pool: Any) -> bool:
    """Whether a KV pool is such a pair."""
    return hasattr(pool, "swa_kv_pool")


def single_pools(pool: Any) -> tuple[Any, ...]:
    """Both parts of a pair, or a pool itself; of a target with linear attention, that of its other layers."""
    if has_two(pool):
        return (pool.full_kv_pool, pool.swa_kv_pool)
    return (getattr(pool, "full_kv_pool", pool),)


def is_sliding(pool: Any, layer_id: int) -> bool:
    """Whether a layer's K/V lies in the sliding layers' part of a pair; never in a single pool."""
    return has_two(pool) and pool.layers_mapping[layer_id][1]


def sliding_slots(pool: Any, slots: torch.Tensor) -> torch.Tensor | None:
    """Where sliding layers have the tokens of some slots (both int, [n] and [n] int32); None in a single pool."""
    return pool.translate_loc_from_full_to_swa(slots) if has_two(pool) else None


def move_sliding(allocator: Any, given: torch.Tensor, kept: torch.Tensor) -> None:
    """Tokens behind all windows that were run once more: slots of sliding layers' go over, the others are given back.

    The release puts `given` where the prefix cache had `kept`, and frees that, though requests that decode may read it
    (github.com/sgl-project/sglang/pull/29352). Both have the K/V of the same tokens.

    Args:
        allocator: of a pair of pools.
        given: [n] int64, slots of both pools.
        kept: [n] int64, slots of the other layers' pool alone.
    """
    sliding = allocator.full_to_swa_index_mapping
    sliding[kept], sliding[given] = sliding[given], 0
    allocator.free(given)
