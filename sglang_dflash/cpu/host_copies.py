"""K/V between a pool and its host tier on a CPU, where both are memory of the host: plain copies.

They stand in for the kernels of sgl_kernel with which the release's `direct` transfers run, under the same names and
with the same arguments, as far as its pools give them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copies slots of layers ([slots, ...] each) to slots of as many others; indices are [n] int64."""
    for source, destination in zip(src_layers, dst_layers, strict=True):
        destination[dst_indices] = source[src_indices]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copies slots of all layers to pages that hold all layers.

    Args:
        src_ptrs: [slots, ...] each: all layers' K and then, but with MLA, all layers' V.
        dst_ptrs: [pages, layers, page_size, ...] each: K, and V.
        src_indices, dst_indices: [n] int64, whole pages of both.
    """
    layers = dst_ptrs[0].shape[1]
    for number, source in enumerate(src_ptrs):
        kind, layer = divmod(number, layers)
        pages, offsets = dst_indices // page_size, dst_indices % page_size
        dst_ptrs[kind][pages, layer, offsets] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copies one layer back, of what `transfer_kv_all_layer_direct_lf_pf` has written.

    Args:
        src_ptrs: [pages, layers, page_size, ...] each: K, and V.
        dst_ptrs: [slots, ...] each: the layer's K, and V.
        src_indices, dst_indices: [n] int64.
    """
    for source, destination in zip(src_ptrs, dst_ptrs, strict=True):
        pages, offsets = src_indices // page_size, src_indices % page_size
        destination[dst_indices] = source[pages, layer_id, offsets]
