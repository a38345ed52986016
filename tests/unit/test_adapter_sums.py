"""What adapters add to products that came with the first half of it, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.gpu.kernels.adapter_sums import (
    Owners,
    Wide,
    add_second_halves,
    add_second_halves_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies bfloat16 as the integers in which it keeps them.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
# At the second place is none, and at the last one, which stands for no adapter.
RANKS, SCALINGS = [3, 0, 5, 1, 0], [2.0, 9.0, 0.5, -1.0, 7.0]
PLACES, NONE = 4, 4


def wide_of(sizes: list[int], most: int, dtype: torch.dtype) -> Wide:
    """What is behind a smaller rank is of an adapter that was there before."""
    begins = tuple(sum(sizes[:n]) for n in range(len(sizes)))
    b = torch.randn(PLACES, sum(sizes), most).to(dtype)
    rows = -(-(sum(sizes) + PLACES * len(sizes) * most) // 64) * 64
    return Wide(torch.empty(rows, 0), b, begins, 16)


def on_device(wide: Wide, owners: Owners) -> tuple[Wide, Owners]:
    return wide._replace(b=wide.b.to(DEVICE)), Owners(
        *(each.to(DEVICE) if isinstance(each, torch.Tensor) else each for each in owners)
    )


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("parts", [None, 1, 3])
@pytest.mark.parametrize("most", [5, 20])
@pytest.mark.parametrize(
    ("sizes", "swiglu"), [([48], False), ([96, 16, 32], False), ([48, 48], True)]
)
@pytest.mark.parametrize(("requests", "width"), [(7, 1), (90, 1), (5, 16)])
def test_as_pytorch(
    dtype: torch.dtype,
    parts: int | None,
    most: int,
    sizes: list[int],
    swiglu: bool,
    requests: int,
    width: int,
) -> None:
    """Whole products and parts of them; rows one by one and in blocks, of requests with adapters and without."""
    torch.manual_seed(requests)
    wide = wide_of(sizes, most, dtype)
    places = torch.randint(0, NONE + 1, (requests,), dtype=torch.int32)
    owners = Owners(places, width, torch.tensor(RANKS, dtype=torch.int32), torch.tensor(SCALINGS))
    shape = (requests * width, len(wide.weight))
    y = torch.randn(shape).to(dtype) if parts is None else torch.randn(parts, *shape)
    expected = add_second_halves_reference(y, wide, owners, swiglu=swiglu)
    found = add_second_halves(y.to(DEVICE), *on_device(wide, owners), swiglu=swiglu).cpu()
    assert found.dtype == dtype
    error = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found.float(), expected.float(), rtol=error, atol=error)


def test_rows_without_adapters_stay() -> None:
    """Bit by bit, whatever the adapters at all places made of them."""
    wide = wide_of([64], 5, HALF)
    ranks = torch.tensor(RANKS, dtype=torch.int32)
    owners = Owners(torch.tensor([1, NONE, -1] * 7).int(), 1, ranks, torch.tensor(SCALINGS))
    y = torch.randn(21, len(wide.weight)).to(HALF)
    found = add_second_halves(y.to(DEVICE), *on_device(wide, owners), swiglu=False)
    assert torch.equal(found.cpu(), y[:, :64])
