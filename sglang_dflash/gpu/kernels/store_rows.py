"""The KV write of rows, of which some have no slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _store_rows(
    k_ptr,
    v_ptr,
    slots_ptr,
    own_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_stride,
    v_stride,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    K_POW2: tl.constexpr,
    V_POW2: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    own = tl.load(own_ptr + row) != 0
    i, j = tl.arange(0, K_POW2), tl.arange(0, V_POW2)
    k_inside, v_inside = (i < K_SIZE) & own, (j < V_SIZE) & own
    k = tl.load(k_ptr + row * k_stride + i, mask=k_inside)
    v = tl.load(v_ptr + row * v_stride + j, mask=v_inside)
    tl.store(k_cache_ptr + slot * K_SIZE + i, k, mask=k_inside)
    tl.store(v_cache_ptr + slot * V_SIZE + j, v, mask=v_inside)


def store_rows(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    own: torch.Tensor,
) -> None:
    """Writes K and V of those rows that have slots of their own (`clean_slot.py`).

    Args:
        k, v: [n, ...], of the dtype of the caches; rows may lie apart.
        slots: [n] int32 or int64.
        k_cache, v_cache: [slots, ...], contiguous, as many numbers in a slot as in a row.
        own: [n] int32 or int64, 0 for a row that is not written.
    """
    # Parts of one product lie in its rows, side by side.
    k, v = k.flatten(1), v.flatten(1)
    sizes = k.shape[1], v.shape[1]
    _store_rows[(len(k),)](
        k,
        v,
        slots,
        own,
        k_cache,
        v_cache,
        k.stride(0),
        v.stride(0),
        *sizes,
        *map(triton.next_power_of_2, sizes),
        num_warps=4,
    )
