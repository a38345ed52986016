"""How many rows a round has, and how many rounds a step, where the host takes longer than the device."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from sglang_dflash.scheduler.choices import Load
from sglang_dflash.scheduler.fixed_plans import WholeBlocks
from sglang_dflash.scheduler.pace import Pace
from sglang_dflash.scheduler.plan import BestRows
from tests.unit.test_plan import SIZES, WIDTH, chances, dear_drafts


def paced(alone: float, with_prompts: float) -> Pace:
    pace = Pace(SimpleNamespace(world_size=1))
    pace.alone, pace.with_prompts = np.array([alone]), np.array([with_prompts])
    return pace


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("requests", [8, 64, 128])
def test_rows_that_the_host_pays(rate: float, requests: int) -> None:
    """What fits into the host's time costs nothing; verified by trying all."""
    table, host = dear_drafts(), 12.0
    plans = BestRows(WIDTH, table, paced(host, 0.0))
    plans.note(chances(rate))
    worth = chances(rate, requests)

    def speed(width: int, rows: int) -> float:
        best = np.sort(worth[:, : width - 1], axis=None)[::-1]
        whole = rows == requests * WIDTH
        time = table.whole.at(requests) if whole else table.ragged.at(rows)
        time += table.narrow.get(width, table.draft).at(requests)
        return (requests + float(best[: rows - requests].sum())) / max(host, time)

    widths = [WIDTH, *(w for w, stairs in table.narrow.items() if requests >= stairs.sizes[0])]
    rows = [n for n in (*SIZES, *(requests * w for w in widths)) if n > requests]
    best = max(speed(w, n) for w in widths for n in rows if n <= requests * w)
    plan = plans.next(Load(requests))
    assert speed(plan.width, plan.rows(requests)) >= 0.98 * best
    unhurried = BestRows(WIDTH, table)
    unhurried.note(chances(rate))
    assert plan.rows(requests) >= unhurried.next(Load(requests)).rows(requests)


def test_the_host_takes_longer_with_prompts() -> None:
    """Each kind of step has its own time."""
    rows = {}
    for name, pace in {
        "none": None,
        "prompts": paced(0.0, 18.0),
        "alone": paced(18.0, 0.0),
    }.items():
        plans = BestRows(WIDTH, dear_drafts(), pace)
        plans.note(chances(0.6))
        rows[name] = [plans.plan(Load(64, prompt_rows=at)).rows(64) for at in (0, 100)]
    assert rows["prompts"][0] == rows["none"][0] and rows["prompts"][1] > rows["none"][1]
    assert rows["alone"][0] > rows["none"][0]


def test_what_rounds_in_steps_of_several_promise() -> None:
    """The best for its time, of which the host takes less the more of them a step has."""
    plans = BestRows(WIDTH, dear_drafts(), paced(24.0, 0.0))
    assert plans.promise(Load(64)) is None  # nothing was seen
    assert WholeBlocks(WIDTH).promise(Load(64)) is None
    plans.note(chances(0.6))
    one, two = (plans.promise(Load(64, 6400, rounds=rounds)) for rounds in (1, 2))
    assert one.step >= 24.0 and one.device <= one.step
    # Further rounds cost the host a quarter until they are measured: 30 ms for two.
    assert 15.0 <= two.step < one.step and two.tokens <= one.tokens
    assert two.tokens / two.step > one.tokens / one.step
    plan = plans.plan(Load(64, 6400, rounds=2))
    assert plan.rows(64) <= plans.plan(Load(64, 6400)).rows(64)
