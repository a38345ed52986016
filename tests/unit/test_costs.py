"""What rounds take is measured once for a machine and a pair."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_dflash.round.costs import Costs, Curve, Staircase, orderly, remembered
from sglang_dflash.round.prompt_graphs import PromptGraphs

pytestmark = pytest.mark.usefixtures("one_rank")


def costs(base: float = 1.0) -> Costs:
    return Costs(
        **{
            name: Staircase([1, 8, 64], [base, base + 0.25, base + 1])
            for name in ("draft", "whole", "plain", "ragged", "head")
        },
        context=1e-6,
        by_requests={2: Staircase([1], [base - 0.25]), 5: Staircase([1], [base - 0.125])},
        narrow={8: Staircase([16, 64], [base, base + 0.5]), 4: Staircase([64], [base])},
        uniform={8: Staircase([1, 8, 64], [base, base + 1, base + 2])},
        sharing={4: Curve([16], [-base]), 16: Curve([16, 24], [base, base + 1])},
        adapters=0.125,
    )


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sglang_dflash" / "costs.json"


def test_staircase() -> None:
    """Never more than what more rows take; between two sizes what the larger takes."""
    stairs = Staircase([64, 128, 256], [9.0, 4.5, 8.0])
    assert [stairs.at(n) for n in (1, 64, 65, 128, 200, 256, 512)] == [4.5] * 4 + [8, 8, 16]
    assert str(stairs) == "64: 4.50, 128: 4.50, 256: 8.00 ms"


def test_passes_of_few() -> None:
    """What was measured of few requests counts as far as it goes."""
    found = costs()
    assert [found.passes(2).at(rows) for rows in (1, 2, 64)] == [0.75, 1.25, 2.0]
    assert [found.passes(n).at(1) for n in (1, 3, 5)] == [0.75, 0.875, 0.875]
    assert found.passes(6) == found.ragged


def test_sharing_by_width() -> None:
    """What was measured of blocks that are no narrower; nothing where nothing was."""
    found = costs()
    assert [found.shared(width, 20) for width in (2, 4, 5, 16)] == [-1.0, -1.0, 1.5, 1.5]
    assert found.shared(17, 20) == 0.0 and replace(found, sharing={}).shared(4, 20) == 0.0


def test_orderly() -> None:
    """What took much longer than something larger was waited for."""
    assert orderly([4.7, 5.0, 5.2, 5.1, 8.0]) and orderly([])
    assert orderly([0.03, 0.01, 0.02])  # a kernel or two
    assert not orderly([4.7, 5.0, 11.6, 8.9, 10.3])


def test_measured_once(file: Path) -> None:
    assert remembered("this pair", lambda: (costs(), True)) == (costs(), True)
    assert remembered("that pair", lambda: (costs(2.0), True)) == (costs(2.0), True)

    def again() -> tuple[Costs, bool]:
        raise AssertionError("measured again")

    assert remembered("this pair", again) == (costs(), True)
    assert remembered("that pair", again) == (costs(2.0), True)
    assert json.loads(file.read_text()).keys() == {"this pair", "that pair"}


def test_what_was_disturbed_is_not_kept(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert remembered("this pair", lambda: (costs(9.0), False)) == (costs(9.0), False)
    assert "something else used the GPU" in caplog.text and not file.exists()
    assert remembered("this pair", lambda: (costs(), True)) == (costs(), True)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"this pair": {"draft": {"1": 2.0}}}'])
def test_a_file_that_is_broken(file: Path, content: str) -> None:
    file.parent.mkdir()
    file.write_text(content)
    assert remembered("this pair", lambda: (costs(), True)) == (costs(), True)
    assert remembered("this pair", lambda: (costs(3.0), True)) == (costs(), True)


def test_nowhere_to_write(file: Path) -> None:
    file.parent.write_text("a file where a folder would be")
    assert remembered("this pair", lambda: (costs(), True)) == (costs(), True)


def test_what_adapters_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of the passes that rounds have, measured while requests have some."""
    having: list[bool] = []

    @contextmanager
    def random_adapters() -> Iterator[None]:
        having.append(True)
        yield
        having.pop()

    graphs = object.__new__(PromptGraphs)
    graphs.sizes, graphs.adapted = [64, 256, 512, 1024, 2048], True
    graphs.passes = Staircase(graphs.sizes, [4.0, 6.0, 10.0, 20.0, 40.0])
    buffers = SimpleNamespace(random_adapters=random_adapters)
    graphs.parts = SimpleNamespace(adapters=SimpleNamespace(buffers=buffers))

    def measure(run: Callable[..., object]) -> tuple[Staircase, bool]:
        assert having and run.keywords == {"adapted": True}
        return Staircase(graphs.sizes, [6.0, 8.5, 13.0, 30.0, 60.0]), False

    monkeypatch.setattr(graphs, "_measure", measure, raising=False)
    assert graphs._adapters_add() == (2.5, False)
    graphs.adapted = False
    assert graphs._adapters_add() == (0.0, True)


def test_times_of_many_sizes() -> None:
    """As those of one, between what was measured and beyond it."""
    stairs = Staircase([1, 8, 32], [2.0, 3.0, 5.0])
    sizes = np.array([1, 2, 8, 9, 32, 64])
    assert stairs.of(sizes).tolist() == [stairs.at(size) for size in sizes.tolist()]
