"""Slot 0 stays clean: rows that have no slot of their own leave no K/V behind.

SGLang keeps slot 0 for padding, and rows of a block beyond a request's last slot use it, several requests
at once. What one of them wrote there, the others would read: masked, but NaN times a weight of zero is NaN.
Zero is what the pool holds there from its beginning, so zeros are what such rows write.

Where sliding layers have a pool of their own, a round in vain may find no slot there although it has one of the
others': its request has gone. Such rows write zeros everywhere.
"""

from __future__ import annotations

from typing import Any

import torch


def without_slotless(slots: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """K and V ([n, ...] each), zero where a row's slot ([n] int64) is 0."""
    slotless = slots == 0
    return tuple(
        value.masked_fill(slotless.view(-1, *[1] * (value.dim() - 1)), 0) for value in values
    )


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
        self._pool.set_kv_buffer(layer, slots, *without_slotless(own, k, v), *rest, **more)

    def set_mla_kv_buffer(
        self, layer: Any, slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor
    ) -> None:
        self._pool.set_mla_kv_buffer(layer, slots, *without_slotless(slots, latent, rope))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)
