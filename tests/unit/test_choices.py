"""What a round can be, and what each of that takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sglang_dflash.round.costs import Curve, Staircase
from sglang_dflash.scheduler.choices import (
    NARROW,
    PLAIN,
    RAGGED,
    Plan,
    choices_of,
    time_of_all,
)
from tests.unit.test_plan import SIZES, WIDTH, costs


def test_what_is_chosen_from_is_what_there_is() -> None:
    """Sizes of passes without the prompts' rows, by their own times; whole blocks only if they fit beside."""
    narrow = {8: Staircase([32, 128], [0.2, 0.3])}
    heads = Staircase(SIZES, [0.1 * n for n in range(len(SIZES))])
    all_costs = replace(costs(0.02, draft=0.5), head=heads, narrow=narrow)
    alone, beside = (choices_of(all_costs, WIDTH, 40, rows) for rows in (0, 1500))
    plans = [alone.plan(i) for i in range(len(alone.widths))]
    assert plans[0] == Plan(WIDTH) and plans[-1] == Plan(1, reason=PLAIN)
    ragged = [plan.total for plan in plans if plan.reason == RAGGED]
    assert ragged == [64, 128, 256, 512]
    assert [p.total for p in plans if p.width == 8] == [64, 128, 256, 320]
    assert alone.times[0] == pytest.approx(0.5 + all_costs.whole.at(40))
    assert alone.times[-1] == pytest.approx(all_costs.plain.at(40))
    assert alone.times[1] == pytest.approx(0.5 + all_costs.ragged.at(64))
    assert alone.times[plans.index(Plan(8, 320, NARROW))] == pytest.approx(
        0.3 + all_costs.ragged.at(320) + heads.at(320)
    )
    plans = [beside.plan(i) for i in range(len(beside.widths))]
    assert {(p.width, p.total) for p in plans} == {(WIDTH, 548), (8, 320), (1, None)}
    assert beside.times[-1] == pytest.approx(all_costs.ragged.at(1540) + heads.at(40))


def test_all_rows_of_narrower_blocks() -> None:
    """From so many requests on as have graphs of them, and where no prompts are in the pass."""
    drafts, rounds = Staircase([32, 128], [0.2, 0.3]), Staircase([32, 128], [4.0, 5.0])
    given = replace(costs(0.02, draft=0.5), narrow={8: drafts}, uniform={8: rounds})

    def times(requests: int, prompt_rows: int = 0) -> list[float]:
        made = choices_of(given, WIDTH, requests, prompt_rows)
        plans = [made.plan(i) for i in range(len(made.widths))]
        return [made.times[i] for i, plan in enumerate(plans) if plan == Plan(8, None, NARROW)]

    assert times(31) == [] and times(40, 64) == []
    assert times(32) == [4.0] and times(40) == [5.0]
    assert time_of_all(given, 8, 40, 0) == 5.0 and time_of_all(given, 8, 40, 64) is None


def test_passes_of_few_requests() -> None:
    """What was measured of as few counts as far as it goes; a prompt beside blocks is a request."""
    few = {30: Staircase([64, 128], [1.0, 2.0]), 92: Staircase([64, 128], [1.5, 2.5])}
    given = replace(costs(0.02, draft=0.0), by_requests=few)

    def times(requests: int, prompt_rows: int) -> dict[int, float]:
        made = choices_of(given, WIDTH, requests, prompt_rows)
        at = np.flatnonzero((made.totals > 0) & (made.rows + prompt_rows <= 256))
        return dict(
            zip((made.rows + prompt_rows)[at].tolist(), made.times[at].tolist(), strict=True)
        )

    usual = {rows: costs(0.02, draft=0.0).ragged.at(rows) for rows in (128, 256)}
    assert times(30, 0) == pytest.approx({64: 1.0, 128: 2.0, 256: usual[256]})
    assert times(29, 40) == pytest.approx({128: 2.0, 256: usual[256]})
    assert times(30, 40) == pytest.approx({128: 2.5, 256: usual[256]})
    assert times(92, 0) == pytest.approx({128: 2.5, 256: usual[256]})
    assert times(93, 0) == pytest.approx(usual)


def test_what_sharing_adds() -> None:
    """Where requests have different numbers of rows, or prompts are beside them; by how many requests there are."""
    without = costs(0.02, draft=0.5)
    given = replace(without, sharing={WIDTH: Curve([32, 128], [0.25, 0.75])})
    for requests, prompt_rows, added in ((30, 0, 0.25), (80, 0, 0.5), (80, 64, 0.5)):
        more, less = (choices_of(c, WIDTH, requests, prompt_rows) for c in (given, without))
        in_pass = (more.totals > 0) | (prompt_rows > 0)
        assert in_pass.any() and (prompt_rows or not in_pass.all())
        assert more.times - less.times == pytest.approx(np.where(in_pass, added, 0.0))


def test_a_probe_tries_few_drafts() -> None:
    choices = choices_of(costs(0.02), WIDTH, 40, 0)
    assert choices.rows[choices.least(40)] == 128
    all_rows = choices_of(costs(0.02), WIDTH, 2000, 0)  # no graph holds so many requests
    assert all_rows.plan(all_rows.least(2000)) == Plan(WIDTH)
