"""What planned rounds give clients, beside blocks of one width, by times of an H200."""

from __future__ import annotations

from functools import cache, partial
from statistics import mean

import pytest

from sglang_dflash.scheduler.plan import BestRows
from tests.unit.served_traffic import BUNDLED, DRAFTERS, WIDTH, AllRows, Host, Served, Traffic, h200

CHAT = 76  # tokens of an answer
USUAL = Host()
WIDTHS = (2, 4, 6, 8, 12, 16)


@cache
def served(
    tokens: float,
    clients: int,
    width: int | None,
    answer: int = CHAT,
    host: Host = USUAL,
    several: bool = False,
) -> Served:
    """`width` of all blocks, all of whose rows are verified; None for what is planned.

    Args:
        several: whether steps may have several rounds.
    """
    traffic = Traffic(clients, DRAFTERS[tokens], answer, host)
    if width is None:
        return traffic.serve(partial(BestRows, WIDTH, h200()), 400, several)
    return traffic.serve(lambda pace: AllRows(width, h200()), 400)


@pytest.mark.parametrize(
    ("tokens", "clients", "width", "measured"),
    [
        # benchmark/results/serving/h200-widths-low.jsonl
        (2.5, 1, None, 434),
        (2.5, 8, None, 2920),
        (2.5, 8, 16, 2734),
        (2.5, 128, None, 15665),
        (2.5, 128, 2, 15088),
        # h200-widths-planned.jsonl, -again.jsonl and h200-widths-trained-256.jsonl
        (4.0, 1, None, 675),
        (4.0, 8, 16, 4174),
        (4.0, 64, None, 16238),
        (4.0, 64, 4, 15630),
        (4.0, 128, None, 20437),
        (4.0, 128, 4, 18104),
        (4.0, 256, None, 20546),
        (4.0, 256, 2, 19129),
        # h200-widths-trained-again.jsonl
        (4.0, 64, 16, 7778),
    ],
)
def test_as_measured(tokens: float, clients: int, width: int | None, measured: float) -> None:
    """`chat`, tokens a second; else what follows would say nothing."""
    assert served(tokens, clients, width).tokens_s == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("clients", [1, 8, 32, 64, 128, 256])
@pytest.mark.parametrize("tokens", DRAFTERS)
def test_no_width_is_better(tokens: float, clients: int) -> None:
    """Where rows cost most, none is as good."""
    best = max(served(tokens, clients, width).tokens_s for width in WIDTHS)
    assert served(tokens, clients, None).tokens_s >= (1.01 if clients >= 32 else 0.99) * best


@pytest.mark.parametrize("factor", [0.5, 1.5])
@pytest.mark.parametrize("clients", [64, 256])
def test_hosts_of_other_speeds(factor: float, clients: int) -> None:
    """What a slow host leaves the device time for is verified, and what a fast one does not is not."""
    host = Host(*(factor * part for part in vars(USUAL).values()))
    planned = served(4.0, clients, None, host=host)
    best = max(served(4.0, clients, width, host=host).tokens_s for width in (2, 4, 6, 8))
    assert planned.tokens_s >= 1.01 * best
    wider = planned.accept_length > served(4.0, clients, None).accept_length
    assert wider == (factor > 1)


@pytest.mark.parametrize("clients", [8, 64])
def test_long_answers(clients: int) -> None:
    best = max(served(4.0, clients, width, answer=1161).tokens_s for width in WIDTHS)
    assert served(4.0, clients, None, answer=1161).tokens_s >= 0.99 * best


@pytest.mark.parametrize("clients", [1, 16, 64, 128, 256])
@pytest.mark.parametrize("tokens", DRAFTERS)
@pytest.mark.parametrize("answer", [CHAT, 1161])
def test_several_rounds_in_a_step(tokens: float, clients: int, answer: int) -> None:
    """Where the device is the slower one, steps have one, and nothing is lost anywhere."""
    one, several = (served(tokens, clients, None, answer, several=more) for more in (False, True))
    assert several.tokens_s >= 0.99 * one.tokens_s
    if clients <= 16:
        assert several.rounds == several.steps


@pytest.mark.parametrize("clients", [8, 16, 64])
def test_a_host_that_is_slower_than_the_device(clients: int) -> None:
    """As with a small model: rounds are launched together, and more is answered."""
    host = Host(*(4 * part for part in vars(USUAL).values()))
    one, several = (
        served(2.5, clients, None, 1161, host=host, several=more) for more in (False, True)
    )
    assert several.rounds > 1.3 * several.steps
    assert several.tokens_s > 1.1 * one.tokens_s


def test_prompts_do_not_wait_for_a_slow_host() -> None:
    """How much longer rounds become by prompts does not matter where the host takes longer still.

    Else who asks waits, so fewer are served at once, whose rounds are shorter and have time for fewer prompts yet.
    """
    found = chat_of_128(Host(*(1.5 * part for part in vars(USUAL).values())))
    assert found.queued < found.steps
    assert mean(found.waited) < 80


def test_many_prompts_do_not_wait() -> None:
    """Nor where the device is the slower one."""
    found = chat_of_128(USUAL)
    assert found.queued < 15 * found.steps
    assert mean(found.waited) < 100


def chat_of_128(host: Host) -> Served:
    return Traffic(128, BUNDLED, CHAT, host).serve(partial(BestRows, WIDTH, h200()), 400)
