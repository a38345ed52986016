"""Products by algorithms of cuBLASLt's that are named, on a GPU: what PyTorch computes, also from a graph."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from sglang_dflash.gpu import cublas_lt
from sglang_dflash.gpu.cublas_lt import Algorithm
from sglang_dflash.gpu.products import multiply
from sglang_dflash.gpu.tiling_times import time_tilings
from sglang_dflash.gpu.tilings import ALGORITHMS, Key, Kind, Tilings

# bfloat16 rounds what comes out by up to 0.4%.
ROUNDING = 0.01
SHAPES = [(192, 1536, 512), (160, 512, 2048), (1000, 4096, 4096)]


def tensors(rows: int, size: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    given = {"dtype": torch.bfloat16, "device": "cuda"}
    return torch.randn(rows, depth, **given), torch.randn(size, depth, **given)


def off(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    expected = x.float() @ weight.float().t()
    return float((y.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_computed(shape: tuple[int, int, int]) -> None:
    """By each algorithm that the library offers or this project knows; those it cannot run it says."""
    x, weight = tensors(*shape)
    ran, algorithms = 0, [*cublas_lt.offered(*shape), *ALGORITHMS]
    for algorithm in algorithms:
        try:
            y = cublas_lt.multiply(x, weight, algorithm)
        except RuntimeError as reason:
            assert "cuBLASLt" in str(reason)
            continue
        ran += 1
        assert off(y, x, weight) < ROUNDING, algorithm
    assert ran >= 8
    print(f"{shape}: {ran} of {len(algorithms)} run")


def test_from_a_graph() -> None:
    """With parts of the product in memory of the graph's own, which later launches use again."""
    x, weight = tensors(*SHAPES[1])
    in_parts = [each for each in ALGORITHMS if each.splits > 1]
    graph, made = torch.cuda.CUDAGraph(), []
    for algorithm in in_parts:
        cublas_lt.multiply(x, weight, algorithm)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for algorithm in in_parts:
            made.append(cublas_lt.multiply(x, weight, algorithm))
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert max(off(y, x, weight) for y in made) < ROUNDING


def test_what_it_cannot_run() -> None:
    x, weight = tensors(*SHAPES[0])
    for wrong in (ALGORITHMS[0]._replace(id=9999), ALGORITHMS[0]._replace(tile=9999)):
        with pytest.raises(RuntimeError, match="cuBLASLt"):
            cublas_lt.multiply(x, weight, wrong)


@pytest.mark.parametrize("kind", [Kind.WHOLE, Kind.SWIGLU])
def test_the_search(kind: Kind, tmp_path: Path) -> None:
    """What it finds is no slower than cuBLAS's own choice, remembered, and right."""
    key = Key(4096, 4096, kind, 192)
    size = key.size * (2 if kind is Kind.SWIGLU else 1)
    weights = [tensors(1, size, key.depth)[1] for _ in range(6)]
    name = torch.cuda.get_device_name()
    begin = time.monotonic()
    found = Tilings(name, 132, time_tilings, tmp_path / "tilings.json")
    found.find({key: weights})
    print(f"{key}: {found.get(key)} in {time.monotonic() - begin:.1f} s")
    again = Tilings(name, 132, lambda *_: pytest.fail("it is known"), tmp_path / "tilings.json")
    again.find({key: weights})
    assert again.get(key) == found.get(key)
    if (choice := found.get(key)) is not None:
        assert isinstance(choice, Algorithm)
        x, _ = tensors(key.rows, size, key.depth)
        y = multiply(x, weights[0], choice, kind is Kind.SWIGLU)
        expected = linear(x, weights[0])
        if kind is Kind.SWIGLU:
            gate, up = expected.float().chunk(2, dim=1)
            expected = torch.nn.functional.silu(gate) * up
        assert (y.float() - expected.float()).norm() / expected.float().norm() < 0.02
