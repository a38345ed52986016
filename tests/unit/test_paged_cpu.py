"""Slots on a CPU against the release's plain version of its Triton kernel."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, alloc_extend_naive

from sglang_dflash.cpu.paged_slots import alloc_extend


def allocator(pages: int, page_size: int, need_sort: bool = False) -> PagedTokenToKVPoolAllocator:
    size = pages * page_size
    return PagedTokenToKVPoolAllocator(size, page_size, torch.float32, "cpu", None, need_sort)


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]], int]:
    """Page size, (prefix, extension) of each request, and a seed that shuffles the free pages."""
    span = st.tuples(st.integers(0, 40), st.integers(0, 40))
    return (
        draw(st.sampled_from([2, 4, 16])),
        draw(st.lists(span, min_size=1, max_size=5)),
        draw(st.integers(0, 9)),
    )


@settings(deadline=None)
@given(batches())
def test_against_the_release(case: tuple[int, list[tuple[int, int]], int]) -> None:
    page_size, spans, seed = case
    pool = allocator(120, page_size)
    shuffled = torch.randperm(120, generator=torch.Generator().manual_seed(seed))
    pool.free_pages = pool.free_pages[shuffled]
    prefix = torch.tensor([begin for begin, _ in spans])
    length = prefix + torch.tensor([extension for _, extension in spans])
    # Each request's last page lies somewhere of its own, beyond the free ones.
    last = torch.tensor(
        [(200 + i) * page_size + (p - 1) % page_size for i, (p, _) in enumerate(spans)]
    )
    last[prefix == 0] = -1

    expected = torch.zeros(int((length - prefix).sum()), dtype=torch.int64)
    alloc_extend_naive(prefix, length, last, pool.free_pages, expected, page_size, "cpu")
    taken = ((length + page_size - 1) // page_size - (prefix + page_size - 1) // page_size).sum()
    remaining = pool.free_pages[int(taken) :].clone()

    assert alloc_extend(pool, prefix, length, last).tolist() == expected.tolist()
    assert pool.free_pages.tolist() == remaining.tolist()


def test_too_few_pages_take_nothing() -> None:
    pool = allocator(2, 4)
    assert alloc_extend(pool, torch.tensor([0]), torch.tensor([9]), torch.tensor([-1])) is None
    assert pool.available_size() == 8


def test_released_pages_are_found() -> None:
    """With `need_sort`, freed pages wait in a second list."""
    pool = allocator(2, 4, need_sort=True)
    slots = alloc_extend(pool, torch.tensor([0]), torch.tensor([8]), torch.tensor([-1]))
    assert pool.available_size() == 0
    pool.free(slots)
    assert len(pool.free_pages) == 0
    again = alloc_extend(pool, torch.tensor([0]), torch.tensor([8]), torch.tensor([-1]))
    assert sorted(again.tolist()) == sorted(slots.tolist())


@pytest.mark.parametrize("steps", [40])
def test_decode_of_the_release_uses_it(steps: int) -> None:
    """The release's own `alloc_decode` gives consecutive slots within a page on the CPU."""
    pool = allocator(8, 4)
    last = alloc_extend(pool, torch.tensor([0]), torch.tensor([1]), torch.tensor([-1]))
    slots = last.tolist()
    for length in range(2, 30):
        lengths = torch.tensor([length])
        last = pool.alloc_decode(lengths, lengths, last)
        slots += last.tolist()
    assert len(set(slots)) == 29
    assert all(
        slot // 4 == slots[i - i % 4] // 4 and slot % 4 == i % 4 for i, slot in enumerate(slots)
    )
