"""The KV pool as a round writes to it: rows that have no slot leave slot 0 clean (`clean_slot.py`)."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dflash.clean_slot import without_slotless
from sglang_dflash.two_pools import is_sliding


def has_kernels(rows: torch.Tensor) -> bool:
    """Whether Triton's kernels run where some rows are."""
    return rows.is_cuda


class CleanPool:
    """A KV pool during a round in which a row may have no slot; all but writes is the pool's own."""

    # The release writes K/V from its RoPE kernel, around `set_kv_buffer`, where this is bfloat16.
    dtype = None

    def __init__(self, pool: Any, sliding: torch.Tensor | None = None):
        """
        Args:
            sliding: slots of the sliding layers' own pool, of all rows; None if they have none.
        """
        self._pool, self._sliding = pool, sliding

    def set_kv_buffer(
        self, layer: Any, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **more
    ) -> None:
        own = slots if self._sliding is None else self._sliding
        if has_kernels(k) and self._holds(layer.layer_id, k, v):
            from sglang_dflash.gpu.kernels.store_rows import store_rows

            caches = self._pool.get_kv_buffer(layer.layer_id)
            at = own if is_sliding(self._pool, layer.layer_id) else slots
            store_rows(k, v, at, *caches, own)
            return
        self._pool.set_kv_buffer(layer, slots, *without_slotless(own, k, v), *rest, **more)

    def _holds(self, layer_id: int, *values: torch.Tensor) -> bool:
        """Whether values ([n, ...] each) are stored as they are, in rows of their own size."""
        caches = self._pool.get_kv_buffer(layer_id)
        return all(
            cache.dtype == value.dtype
            and cache.is_contiguous()
            and cache[0].numel() == value[0].numel()
            for cache, value in zip(caches, values, strict=True)
        )

    def set_mla_kv_buffer(
        self, layer: Any, slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor
    ) -> None:
        self._pool.set_mla_kv_buffer(layer, slots, *without_slotless(slots, latent, rope))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)
