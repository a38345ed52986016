"""Slots from a paged allocator on a CPU, where the release's Triton kernels cannot run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator


def alloc_extend(
    allocator: PagedTokenToKVPoolAllocator,
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
) -> torch.Tensor | None:
    """Extends each sequence from `prefix_lens` to `seq_lens` slots.

    A sequence first fills its last page, then takes new pages from the front of the free list, in
    the order of the batch: what `alloc_extend_kernel` of the release gives.

    Args:
        allocator: its `free_pages` shrinks by the pages taken.
        prefix_lens, seq_lens: [bs] int64, tokens before and after.
        last_loc: [bs] int64, slot of the last token before (-1: none).

    Returns:
        [sum(seq_lens - prefix_lens)] int64 slots, or None if too few pages are free.
    """
    page = allocator.page_size
    pages_before = (prefix_lens + page - 1) // page
    pages_after = (seq_lens + page - 1) // page
    new_pages = pages_after - pages_before
    total = int(new_pages.sum())
    if allocator.need_sort and total > len(allocator.free_pages):
        allocator.merge_and_sort_free()
    if total > len(allocator.free_pages):
        return None

    first_new = torch.cumsum(new_pages, 0) - new_pages  # [bs], index into free_pages
    slots = []
    for i in range(len(seq_lens)):
        position = torch.arange(int(prefix_lens[i]), int(seq_lens[i]))
        in_last_page = position < pages_before[i] * page
        old = last_loc[i] + 1 + position - prefix_lens[i]
        page_index = (first_new[i] + position // page - pages_before[i]).clamp(min=0)
        page_index = page_index.clamp(max=max(len(allocator.free_pages) - 1, 0))
        new = allocator.free_pages[page_index] * page + position % page if total else old
        slots.append(torch.where(in_last_page, old, new))
    allocator.free_pages = allocator.free_pages[total:]
    return torch.cat(slots).to(torch.int64) if slots else torch.empty(0, dtype=torch.int64)
