"""Which tiling a product gets, and what is remembered: with times given, without a GPU."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sglang_dflash.gpu import tilings
from sglang_dflash.gpu.cublas_lt import Algorithm
from sglang_dflash.gpu.kernels.skinny_matmul import MOST_ROWS, ROOMS, Tiling
from sglang_dflash.gpu.tilings import (
    ALGORITHMS,
    KNOWN,
    QWEN3_8B,
    Key,
    Kind,
    Tilings,
    candidates,
    fastest,
)

GPU, MULTIPROCESSORS = "NVIDIA H100", 132
DOWN, GATE_UP = Key(4096, 14336, Kind.SUMMED, 16), Key(14336, 4096, Kind.SWIGLU, 16)
LARGE = Key(4096, 14336, Kind.WHOLE, 192)
# As H200s took for products of these shapes, in the order of magnitude.
CUBLAS, FASTER, SLOWER = 32.0, 29.0, 40.0


class Gpu:
    """Stands for the clock of a GPU: one tiling of each product is the fastest.

    Attributes:
        asked: products that were timed.
    """

    def __init__(self, best: dict[Key, float], seconds: float = 1.0):
        self.best, self.seconds, self.asked, self.now = best, seconds, [], 0.0

    def __call__(self, key, weights, choices, seconds):
        assert weights and all(tiling.fits(key.size, key.depth) for tiling in choices)
        self.asked.append(key)
        self.now += self.seconds
        times = dict.fromkeys(choices, SLOWER)
        times[choices[1]] = self.best.get(key, SLOWER)
        return times | {None: CUBLAS}

    def clock(self) -> float:
        return self.now


def weights_of(*keys: Key) -> dict[Key, list[torch.Tensor]]:
    return {key: [torch.zeros(1)] for key in keys}


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Tilings]:
    """Starts a server, as far as this goes."""

    def made(gpu: Gpu, name: str = GPU, file: Path | None = None, **options) -> Tilings:
        file = tmp_path / "cache" / "tilings.json" if file is None else file
        return Tilings(name, MULTIPROCESSORS, gpu, file, gpu.clock, **options)

    return made


def test_the_fastest_wins(start) -> None:
    """And cuBLAS, unless a tiling is faster than it by more than noise."""
    gpu = Gpu({DOWN: FASTER, GATE_UP: 0.99 * CUBLAS})
    found = start(gpu)
    assert found.get(DOWN) is None  # nobody looked
    found.find(weights_of(DOWN, GATE_UP))
    assert found.get(DOWN) == candidates(DOWN, MULTIPROCESSORS)[1]
    assert found.get(GATE_UP) is None
    assert fastest({None: CUBLAS}) is None


def test_the_next_start_measures_nothing(start, caplog: pytest.LogCaptureFixture) -> None:
    """Where cuBLAS was faster, too."""
    caplog.set_level(logging.INFO)
    first = Gpu({DOWN: FASTER})
    once = start(first)
    once.find(weights_of(DOWN, GATE_UP))
    once.find(weights_of(DOWN))
    assert first.asked == [DOWN, GATE_UP] and len(caplog.records) == 1
    again = Gpu({})
    found = start(again)
    found.find(weights_of(DOWN, GATE_UP))
    assert again.asked == [] and found.found == once.found and len(caplog.records) == 1


def test_many_rows(start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Run by an algorithm of cuBLAS's, which is remembered; what is no algorithm is not taken for one."""
    caplog.set_level(logging.INFO)
    file = tmp_path / "tilings.json"
    found = start(Gpu({LARGE: FASTER}), file=file)
    found.find(weights_of(LARGE))
    assert found.get(LARGE) == ALGORITHMS[1] and isinstance(found.get(LARGE), Algorithm)
    assert "1 with other algorithms than cuBLAS takes; tilings: none" in caplog.text
    again = start(Gpu({}), file=file)
    again.find(weights_of(LARGE))
    assert again.found == found.found
    (content,) = json.loads(file.read_text()).values()
    content[str(DOWN)], content[str(LARGE)] = ALGORITHMS[0], Tiling(64, 128, 128, 1, 5, 4)
    file.write_text(json.dumps({found._machine: content}))
    gpu = Gpu({})
    start(gpu, file=file).find(weights_of(DOWN, LARGE))
    assert gpu.asked == [DOWN, LARGE]


def test_algorithms_are_different() -> None:
    assert len(set(ALGORITHMS)) == len(ALGORITHMS)
    assert all((each.splits > 1) == (each.reduction > 0) for each in ALGORITHMS)


def test_another_machine_measures_itself(start, monkeypatch: pytest.MonkeyPatch) -> None:
    start(Gpu({DOWN: FASTER})).find(weights_of(DOWN))
    other = Gpu({})
    start(other, "NVIDIA H20").find(weights_of(DOWN))
    assert other.asked == [DOWN]
    monkeypatch.setattr(tilings.triton, "__version__", "9.9.9")
    newer = Gpu({})
    start(newer).find(weights_of(DOWN))
    assert newer.asked == [DOWN]


def test_known_ones_are_not_measured(start) -> None:
    name = "NVIDIA H200"
    gpu = Gpu({})
    found = start(gpu, name)
    found.find(weights_of(*KNOWN[name]))
    assert gpu.asked == [] and found.found == KNOWN[name]
    assert all(tiling.fits(key.size, key.depth) for key, tiling in KNOWN[name].items() if tiling)


def test_a_start_has_an_end(start) -> None:
    """What there was no time for runs with cuBLAS, and is measured by the next start."""
    keys = [Key(4096, depth, Kind.SUMMED, 16) for depth in range(1024, 1024 * 8, 1024)]
    slow = Gpu(dict.fromkeys(keys, FASTER), seconds=6.0)
    found = start(slow)
    found.find(weights_of(*keys))
    assert len(slow.asked) == 3  # more than 15 s only by the last
    assert [found.get(key) is not None for key in keys] == [True] * 3 + [False] * 4
    found.find(weights_of(DOWN))
    assert DOWN not in slow.asked
    quick = Gpu(dict.fromkeys(keys, FASTER))
    start(quick).find(weights_of(*keys))
    assert quick.asked == keys[3:]


def test_where_nothing_was_measured(start) -> None:
    """For lack of time: what is known to be good on such a GPU runs."""
    keys = [Key(4096, depth, Kind.SUMMED, 16) for depth in range(1024, 1024 * 4, 1024)]
    found = start(Gpu({}, seconds=20.0), defaults=QWEN3_8B)
    found.find(weights_of(*keys, *QWEN3_8B))
    assert found.found == dict.fromkeys(keys) | QWEN3_8B


@pytest.mark.parametrize("name", [GPU, "NVIDIA H200"])
def test_a_search_that_raises(start, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """One line says so, and what is known runs."""

    class Broken(Gpu):
        def __call__(self, *_):
            raise RuntimeError("out of memory")

    found = start(Broken({}), name, defaults=QWEN3_8B)
    found.find(weights_of(DOWN, *QWEN3_8B))
    assert found.found == {DOWN: None} | QWEN3_8B
    (record,) = caplog.records
    assert "raised RuntimeError('out of memory')" in record.getMessage()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": {"b": [1]}}', "folder"])
def test_a_file_that_says_nothing(start, tmp_path: Path, content: str) -> None:
    """Starts all the same, and is written anew where it can be."""
    file = tmp_path / "tilings.json"
    if content == "folder":
        file.mkdir()
    else:
        file.write_text(content)
    gpu = Gpu({DOWN: FASTER})
    found = start(gpu, file=file)
    found.find(weights_of(DOWN))
    assert found.get(DOWN) is not None
    if content != "folder":
        assert len(json.loads(file.read_text())) == 1


def test_a_folder_that_cannot_be_made(start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = start(Gpu({DOWN: FASTER}), file=tmp_path / "file" / "cache" / "tilings.json")
    found.find(weights_of(DOWN))
    assert found.get(DOWN) is not None


def test_a_remembered_tiling_that_does_not_fit(start, tmp_path: Path) -> None:
    """It would leave a part of the product out."""
    file = tmp_path / "tilings.json"
    start(Gpu({DOWN: FASTER}), file=file).find(weights_of(DOWN))
    content = json.loads(file.read_text())
    (machine,) = content
    bad, old = Tiling(64, 128, 128, 5, 5, 4), "4096x14336 summed"
    content[machine] = {str(DOWN): bad, "nonsense": None, old: None}
    file.write_text(json.dumps(content))
    gpu = Gpu({})
    start(gpu, file=file).find(weights_of(DOWN))
    assert gpu.asked == [DOWN]


@pytest.mark.parametrize(
    "key",
    [DOWN, GATE_UP, Key(5120, 2048, Kind.SUMMED, 16), Key(4096, 2048, Kind.WHOLE, 16)],
    ids=str,
)
@pytest.mark.parametrize("rows", ROOMS)
def test_candidates(key: Key, rows: int) -> None:
    key = key._replace(rows=rows)
    found = candidates(key, MULTIPROCESSORS)
    fewest = 0 if rows == MOST_ROWS and key.kind is Kind.SWIGLU else 2
    assert fewest <= len(found) <= 6 and len(set(found)) == len(found)
    assert all(tiling.fits(key.size, key.depth) for tiling in found)
    assert key.kind is Kind.SUMMED or all(tiling.parts == 1 for tiling in found)


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tilings.cache_folder() == tmp_path / "sglang_dflash"
    for value in ("", "relative"):  # which the specification says to ignore
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert tilings.cache_folder() == tmp_path / ".cache" / "sglang_dflash"
