"""How a trace of a server that is asked is split into rounds, rounds in vain, prefills and idle time."""

from __future__ import annotations

import pytest

from benchmark.errors import CannotMeasure
from benchmark.traces import Activity
from benchmark.traffic.profile import split


def trace(*spans: tuple[str, float, float]) -> list[Activity]:
    return sorted((Activity(*span) for span in spans), key=lambda a: (a.start, a.end))


ROUNDS = [
    *(("_open_round", 0, 1), ("gemm", 1, 8), ("_accept", 9, 10)),  # 9 of 10 busy
    ("prefill", 12, 20),
    *(("_open_round", 20, 21), ("gemm", 21, 29), ("side stream", 22, 25), ("_accept", 29, 30)),
    *(("_open_round", 30, 31), ("gemm", 31, 39), ("_accept", 39, 40), ("copy", 40, 50)),
]


def test_shares() -> None:
    """Streams that run at once count once; what lies between rounds is not theirs."""
    found = split(trace(*ROUNDS), in_vain=0.25)
    assert found.seconds == pytest.approx(50e-6) and found.round_ms == pytest.approx(0.01)
    assert found.rounds_s == pytest.approx(3 / 50e-6)
    assert found.rounds == pytest.approx(29 / 50 * 0.75)
    assert found.in_vain == pytest.approx(29 / 50 * 0.25)
    assert found.prefills == pytest.approx(18 / 50)
    assert found.idle == pytest.approx(3 / 50)


def test_a_trace_that_begins_in_a_round() -> None:
    """The end of a round whose begin was not traced is not the end of another."""
    found = split(trace(("gemm", -9, -2), ("_accept", -2, -1), *ROUNDS), in_vain=0.0)
    assert found.seconds == pytest.approx(50e-6)
    assert found.rounds == pytest.approx(29 / 50)


def test_without_rounds() -> None:
    with pytest.raises(CannotMeasure, match="only 1 rounds"):
        split(trace(*ROUNDS[:4]), in_vain=0.0)
