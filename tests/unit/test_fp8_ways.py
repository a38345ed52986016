"""How products in FP8 are run: the fastest way of each step of rows, whatever ways there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.gpu import fp8_times
from sglang_dflash.gpu.fp8 import Fp8Rows, Fp8Weight, quantize_rows
from sglang_dflash.gpu.fp8_times import fastest, find_ways
from sglang_dflash.gpu.fp8_ways import FIRST, STEPS, TILE, WAYS, Operands, Way, filled_up, step_of

# What is compared are kernels of a GPU; without one, products are sums in float32, which `test_fp8.py` looks at.
needs_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="no GPU here that multiplies FP8: compute capability 8.9 or newer",
)
FILLED = Way(FIRST.kernel, True)


def test_fastest() -> None:
    """A way that is hardly faster than the first is noise; where that cannot run, any is."""
    other, third = WAYS[1:3]
    assert fastest({FIRST: 10.0, other: 9.0, third: 8.0}) == third
    assert fastest({FIRST: 10.0, other: 9.9}) == FIRST
    assert fastest({other: 100.0, third: 99.0}) == third
    assert fastest({}) == FIRST


class Weight:
    """One whose products take what `cost` says, or cannot run."""

    def __init__(self, size: int, cost: Callable[[int, Way], float]) -> None:
        self.values, self.ways = SimpleNamespace(shape=(size, 32), is_cuda=True, device="cpu"), {}
        self._cost, self.took = cost, 0.0

    def multiply(self, rows: Fp8Rows, way: Way) -> None:
        assert rows.values.shape[1] == 32 and not (way.filled and len(rows) % TILE == 0)
        if (cost := self._cost(len(rows), way)) < 0:
            raise (ValueError if len(rows) == 7 else RuntimeError)("no such kernel")
        self.took = cost


def test_each_step_has_its_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where few rows beyond whole tiles fit badly, and PyTorch's kernel, best for one tile, wants more than 16."""

    def cost(rows: int, way: Way) -> float:
        if way.kernel != FIRST.kernel:
            return -1.0 if rows < 16 else 250.0 + 10 * (rows > TILE)
        badly = rows > 64 and rows % TILE < 90
        return 255.0 if way.filled else 350.0 if badly else 200.0

    def microseconds(weights: Sequence[Weight], run: Callable[[Weight], object]) -> float:
        assert len({weight.values.shape for weight in weights}) == 1
        for weight in weights:
            run(weight)
        return weights[0].took

    monkeypatch.setattr(fp8_times, "microseconds", microseconds)
    alike, other = [Weight(64, cost) for _ in range(3)], Weight(48, lambda *_: 1.0)
    find_ways([*alike, other], torch.bfloat16)
    ways = alike[0].ways
    assert all(weight.ways == ways for weight in alike) and tuple(ways) == STEPS
    for rows in (5, 60, 112, 250, 370, 500, 1020):
        assert ways[step_of(rows)] == FIRST
    assert ways[step_of(84)] == Way("PyTorch", False)
    for rows in (150, 270, 390, 560, 700, 960):  # of them 270 and more once ran as they are
        assert ways[step_of(rows)] == FILLED
    assert set(other.ways.values()) == {FIRST}


def test_steps() -> None:
    """Each number of rows belongs to the least step that holds it; more than any has have no way of their own."""
    for rows in (1, 8, 9, 256, 257, 272, 500, 530, 1024):
        step = step_of(rows)
        assert step == min(each for each in STEPS if each >= rows)
    assert step_of(1025) is None and list(STEPS) == sorted(set(STEPS))
    assert {TILE, 2 * TILE, 4 * TILE, 8 * TILE} <= set(STEPS)


def test_nothing_is_looked_for_without_a_gpu() -> None:
    weight = Fp8Weight(torch.randn(32, 16))
    weight.values = weight.values.cpu()
    find_ways([weight], torch.float32)
    assert weight.ways == {}


def test_filled_up() -> None:
    rows = quantize_rows(torch.randn(TILE + 3, 16))
    given = Operands(rows.values, rows.scales, rows.values[:4], rows.scales[:4])
    made = filled_up(given)
    assert len(made.rows) == len(made.row_scales) == 2 * TILE
    assert torch.equal(made.rows[: TILE + 3].float(), rows.values.float())
    assert torch.equal(made.row_scales[: TILE + 3], rows.scales) and made.weight is given.weight


@needs_fp8
@pytest.mark.parametrize("count", [1, 15, 84, 112, 128, 180])
@pytest.mark.parametrize("way", WAYS)
def test_ways_are_the_same_product(way: Way, count: int) -> None:
    x = torch.randn(count, 256, dtype=torch.bfloat16, device="cuda")
    weight = Fp8Weight(torch.randn(512, 256, dtype=torch.bfloat16, device="cuda"))
    rows = quantize_rows(x)
    expected = rows.values.float() * rows.scales @ (weight.values.float() * weight.scales).t()
    made = weight.multiply(rows, way)
    torch.testing.assert_close(made.float(), expected, atol=0.5, rtol=2**-7)
