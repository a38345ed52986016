"""What adapters add to products, in Triton's interpreter and on a GPU, beside PyTorch."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.gpu.kernels import adapter_products as kernels
from sglang_dflash.gpu.kernels.adapter_products import Adapted
from sglang_dflash.gpu.kernels.adapter_rows import Segments
from sglang_dflash.gpu.kernels.swiglu import swiglu_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLACES, MOST = 4, 5
RANKS, SCALINGS = [0, 3, 5, 1], [9.0, 2.0, 0.5, -1.0]
# Counts of rows by segment: blocks of a round, and a pass in which requests have few rows, none, or a chunk.
COUNTS = {"blocks": [5, 5, 5], "pass": [16, 2, 0, 9, 1], "wide": [20, 20]}


def segments_of(counts: list[int]) -> Segments:
    """Rows in any order; segments of the adapters at these places, one after the other."""
    most = 32 if max(counts) > 16 else 16
    rows = torch.full((len(counts), most), -1)
    for own, its in zip(rows, torch.randperm(sum(counts)).split(counts), strict=True):
        own[: len(its)] = its
    places = torch.tensor([(1, 0, 2, 3, 1)[n] for n in range(len(counts))])
    ranks, scalings = torch.tensor(RANKS)[places], torch.tensor(SCALINGS)[places]
    integers = (each.to(DEVICE, torch.int32) for each in (rows, places, ranks))
    return Segments(*integers, scalings.to(DEVICE))


def adapted_of(depth: int, sizes: list[int], dtype: torch.dtype) -> Adapted:
    """What is behind a smaller rank is of an adapter that was there before."""
    made = torch.randn(PLACES, len(sizes) * MOST, depth), torch.randn(PLACES, sum(sizes), MOST)
    made[0].mul_(depth**-0.5)
    bounds = torch.tensor([0, *sizes]).cumsum(0).to(DEVICE, torch.int32)
    return Adapted(*(each.to(DEVICE, dtype) for each in made), bounds, max(sizes))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(
    ("depth", "sizes"), [(64, [40]), (300, [150, 20, 20]), (1100, [64, 64]), (2200, [130])]
)
def test_as_pytorch(counts: str, depth: int, sizes: list[int]) -> None:
    """One slice and several, of one step and many, whatever rows requests have; the rest of the rows stay."""
    torch.manual_seed(0)
    segments, adapted = segments_of(COUNTS[counts]), adapted_of(depth, sizes, torch.float32)
    rows = sum(COUNTS[counts]) + 3
    x, y = torch.randn(rows, depth, device=DEVICE), torch.randn(rows, sum(sizes), device=DEVICE)
    expected, before = y.clone(), y.clone()
    kernels.add_adapted_reference(expected, x, adapted, segments)
    kernels.add_expanded(y, kernels.shrink(x, adapted, segments), adapted, segments)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(y[-3:], before[-3:])
    changed = (y != before).any(1)
    has_adapter = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    for own, rank in zip(segments.rows, segments.ranks, strict=True):
        has_adapter[own[own >= 0].long()] = rank > 0
    assert torch.equal(changed, has_adapter)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("depth", "size"), [(64, 40), (700, 150)])
def test_swiglu(counts: str, depth: int, size: int) -> None:
    """Of all rows, whether they have an adapter or none."""
    torch.manual_seed(0)
    segments, adapted = segments_of(COUNTS[counts]), adapted_of(depth, 2 * [size], torch.float32)
    rows = sum(COUNTS[counts])
    x, y = torch.randn(rows, depth, device=DEVICE), torch.randn(rows, 2 * size, device=DEVICE)
    before = y.clone()
    found = kernels.expanded_swiglu(y, kernels.shrink(x, adapted, segments), adapted, segments)
    assert torch.equal(y, before)
    kernels.add_adapted_reference(y, x, adapted, segments)
    torch.testing.assert_close(found, swiglu_reference(y), rtol=1e-4, atol=1e-4)


def test_parts_of_a_product() -> None:
    """In float32, of which rounded numbers are added to one part."""
    torch.manual_seed(0)
    segments, adapted = segments_of([16, 2, 9]), adapted_of(512, [96], torch.float16)
    x = torch.randn(27, 512, device=DEVICE, dtype=torch.float16)
    parts = torch.randn(3, 27, 96, device=DEVICE)
    expected, before = parts.clone(), parts.clone()
    kernels.add_adapted_reference(expected[0], x, adapted, segments)
    kernels.add_expanded(parts[0], kernels.shrink(x, adapted, segments), adapted, segments)
    torch.testing.assert_close(parts[0], expected[0], rtol=1e-3, atol=2e-3)
    assert torch.equal(parts[1:], before[1:]) and not torch.equal(parts[0], before[0])


def test_rounds_as_the_release() -> None:
    """The inner product and what is added, as its kernels do. The interpreter multiplies no bfloat16."""
    torch.manual_seed(0)
    segments, adapted = segments_of([16, 2, 9]), adapted_of(512, [96, 32], torch.float16)
    x = torch.randn(27, 512, device=DEVICE, dtype=torch.float16)
    y = torch.randn(27, 128, device=DEVICE, dtype=torch.float16)
    expected = y.clone()
    kernels.add_adapted_reference(expected, x, adapted, segments)
    kernels.add_expanded(y, kernels.shrink(x, adapted, segments), adapted, segments)
    off = (y.float() - expected.float()).norm() / expected.float().norm()
    assert off < 3e-4, off


@pytest.mark.parametrize("depth", [64, 128, 640, 4096, 12288, 14336])
@pytest.mark.parametrize("programs", [1, 16, 48, 200, 1000])
def test_split(depth: int, programs: int) -> None:
    """All columns are in a part, none of which is empty; few programs have more."""
    parts, share = kernels.split(depth, programs, 132)
    assert (parts - 1) * share < depth <= parts * share and 1 <= parts <= 8
    assert parts == 1 or programs < 132
    if depth >= 4096 and programs <= 16:
        assert parts * programs >= 8 * min(programs, 16)
