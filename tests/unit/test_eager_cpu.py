"""A server on a CPU compiles nothing in the middle of serving."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.cpu.eager import compile_only_when_asked


@pytest.fixture
def stance() -> Iterator[None]:
    yield
    torch.compiler.set_stance("default")


@pytest.mark.parametrize(
    "device, asked, compiled", [("cpu", False, 0), ("cpu", True, 1), ("cuda", False, 1)]
)
def test_who_compiles(stance: None, device: str, asked: bool, compiled: int) -> None:
    compile_only_when_asked(SimpleNamespace(device=device, enable_torch_compile=asked))
    graphs = []

    @torch.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
    def double(x: torch.Tensor) -> torch.Tensor:
        return x + x

    assert double(torch.ones(2)).tolist() == [2, 2]
    assert len(graphs) == compiled
