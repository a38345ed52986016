"""Traffic that changes: tokens a second after each change, from answers whose tokens came at known times."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmark import serving
from benchmark.traffic.answers import Answer
from benchmark.traffic.changing import Change, draw, parser, rates, table
from benchmark.traffic.clients import Job, Phase, _shares

PHASES = [Change("chat", "greedy", 4), Change("gsm8k", "sampled", 8), Change("chat", "greedy", 4)]
OPTIONS = SimpleNamespace(phases=PHASES, seconds=6.0, settle=2.0)


def answer(began: float, ended: float, tokens: int) -> Answer:
    """Its text comes evenly, from its beginning to its end."""
    times = np.linspace(began, ended, 2001)[1:]
    return Answer(0, began, ended, times, range(1, 2001), tokens, 5, "stop", "abcd")


def test_rates() -> None:
    """One answer goes over a change, one over the end; each token counts where it came."""
    found = rates(
        [answer(100, 103, 300), answer(103, 108, 500), answer(110, 120, 4000)], 100, OPTIONS
    )
    assert found["phases"] == ["chat c=4", "gsm8k sampled c=8", "chat c=4"]
    assert found["at_first_tok_s"] == pytest.approx([100, 100, 400], rel=0.01)
    assert found["later_tok_s"] == pytest.approx([100, 200, 400], rel=0.01)
    assert len(found["over_time_tok_s"]) == 36
    assert found["over_time_tok_s"][15:20] == pytest.approx([100, 0, 0, 0, 0], abs=2)
    assert sum(found["over_time_tok_s"]) / 2 == pytest.approx(300 + 500 + 8 * 400, rel=0.01)
    at_once = rates(
        [answer(100, 118, 1800)], 100, SimpleNamespace(**vars(OPTIONS) | {"settle": 0.0})
    )
    assert at_once["at_first_tok_s"] is None
    assert at_once["later_tok_s"] == pytest.approx([100] * 3, rel=0.01)


def test_table_and_picture(tmp_path: Path) -> None:
    """The first system beside the best of the others in each phase."""
    rows = [
        {"system": name} | rates([answer(100, 118, tokens)], 100, OPTIONS)
        for name, tokens in (("auto", 1800), ("w4", 900), ("w16", 2000))
    ]
    lines = table(rows).splitlines()
    assert lines[0].split() == ["output", "tok/s", "auto", "w4", "w16", "auto", "/", "best"]
    assert len(lines) == 1 + 2 * len(PHASES)
    assert lines[4].split() == ["gsm8k", "sampled", "c=8", "later", "100", "50", "111", "0.90"]
    assert table(rows[:1]).splitlines()[2].split() == ["chat", "c=4", "later", "100"]
    pytest.importorskip("matplotlib")
    draw(rows, tmp_path / "it.png")
    assert (tmp_path / "it.png").stat().st_size > 1000


def test_clients_are_shared_in_each_phase() -> None:
    phases = [Phase([b"a"], 4, 1.0), Phase([b"b"], 1, 2.0)]
    shares = list(_shares(Job("http://127.0.0.1:9", (), phases=phases), 3))
    counts = [[phase.clients for phase in share.phases] for share in shares]
    assert counts == [[2, 1], [1, 0], [1, 0]]
    assert all([phase.seconds for phase in share.phases] == [1.0, 2.0] for share in shares)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--url", "auto"], "auto is not NAME=URL"),
        (["--url", "a=http://h", "--phases", "chat"], "chat is not WORKLOAD/CLIENTS"),
        (["--url", "a=http://h", "--phases", "chat/none/8"], "chat/none/8 is not WORKLOAD/CLIENTS"),
        (["--url", "a=http://h", "--phases", "chat/8,gsm8k/0"], "gsm8k/0 has no clients"),
    ],
)
def test_bad_options(given: list[str], told: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(given)
    assert told in capsys.readouterr().err


def test_what_cannot_be_measured(capsys: pytest.CaptureFixture) -> None:
    for given, told in (
        (["--seconds", "2", "--settle", "2"], "--settle 2 leaves nothing of --seconds 2"),
        (["--url", "a=http://127.0.0.1:9"], "give each server a name of its own"),
        ([], "no SGLang answers at http://127.0.0.1:9"),
    ):
        assert serving.main(["changing", "--url", "a=http://127.0.0.1:9", *given]) == 2
        assert told in capsys.readouterr().err
