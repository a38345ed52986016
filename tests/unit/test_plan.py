"""How many rows a round has, by what is expected of drafts and what rounds take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sglang_dflash.round.costs import Costs, Staircase
from sglang_dflash.scheduler.choices import NARROW, PLAIN, PROBE, RAGGED, WHOLE, Load, Plan
from sglang_dflash.scheduler.fixed_plans import WholeBlocks
from sglang_dflash.scheduler.plan import BestRows

WIDTH, SIZES = 16, [64, 128, 256, 512, 1024, 2048]


def costs(per_row: float, base: float = 5.0, draft: float = 0.5, sizes: list[int] = SIZES) -> Costs:
    """Rounds that read weights, and then take longer with each row."""
    requests = [1, 8, 32, 128]

    def stairs(sizes: list[int], rows: int) -> Staircase:
        return Staircase(sizes, [base + per_row * n * rows for n in sizes])

    return Costs(
        draft=Staircase(requests, [draft] * len(requests)),
        whole=stairs(requests, WIDTH),
        plain=stairs(requests, 1),
        ragged=stairs(sizes, 1),
        head=Staircase(sizes, [0.0] * len(sizes)),
        context=1e-5,
    )


def chances(rate: float, requests: int = 64) -> np.ndarray:
    return np.full((requests, WIDTH - 1), rate).cumprod(axis=1)


def test_whole_until_anything_is_known() -> None:
    assert BestRows(WIDTH, costs(1.0)).next(Load(64)).reason == WHOLE


def test_what_the_pass_of_the_target_does_not_take() -> None:
    """The drafter's time, that of narrower blocks where they are, and the head's."""
    heads = Staircase(SIZES, [0.1 * n for n in range(len(SIZES))])
    narrow = {8: Staircase([32, 128], [0.2, 0.3])}
    plans = BestRows(WIDTH, replace(costs(0.02, draft=0.5), head=heads, narrow=narrow))
    assert plans.besides(Plan(WIDTH), Load(8)) == pytest.approx(0.5 + 0.1)
    assert plans.besides(Plan(8, 250, NARROW), Load(40)) == pytest.approx(0.3 + 0.2)
    assert plans.besides(Plan(1, reason=PLAIN), Load(40)) == 0.0
    assert WholeBlocks(WIDTH).besides(Plan(WIDTH), Load(8)) == 0.0  # is not known


def test_rounds_that_adapters_make_longer() -> None:
    """What each round takes more makes rows in it pay that others would not have."""
    plans = BestRows(WIDTH, replace(costs(0.1), adapters=20.0))
    plans.note(chances(0.7))
    for at in ({}, {"prompt_rows": 100}):
        without, adapted = (
            plans.plan(Load(20, adapted=adapted, **at)) for adapted in (False, True)
        )
        assert adapted.rows(20) > without.rows(20)
        assert (
            plans.besides(without, Load(20, adapted=True)) - plans.besides(without, Load(20))
            == 20.0
        )


@pytest.mark.parametrize("rate", [0.3, 0.7, 0.9, 0.97])
def test_free_rows(rate: float) -> None:
    """Where rows cost nothing, all are verified, unless not even drafting pays."""
    plans = BestRows(WIDTH, costs(0.0))
    plans.note(chances(rate))
    assert plans.next(Load(1)).reason == WHOLE
    plans.note(chances(0.0))
    assert plans.next(Load(1)).reason == PLAIN


@pytest.mark.parametrize("rate", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("requests", [8, 32, 100])
def test_dear_rows(rate: float, requests: int) -> None:
    """The number that promises most; verified by trying all."""
    table = costs(0.02)
    plans = BestRows(WIDTH, table)
    plans.note(chances(rate))
    plan = plans.next(Load(requests))
    worth = np.sort(chances(rate, requests), axis=None)[::-1]

    def speed(rows: int) -> float:
        time = table.whole.at(requests) if rows == requests * WIDTH else table.ragged.at(rows)
        return (requests + float(worth[: rows - requests].sum())) / (0.5 + time)

    rows = [n for n in SIZES if requests < n < requests * WIDTH]
    best = max([*map(speed, rows), speed(requests * WIDTH), requests / table.plain.at(requests)])
    assert plan.reason in (RAGGED, WHOLE)
    assert speed(plan.rows(requests)) >= 0.98 * best


def test_long_contexts_make_rows_cheaper() -> None:
    """What their keys take is taken whatever the number of rows."""
    plans = BestRows(WIDTH, costs(0.02))
    plans.note(chances(0.8))
    assert plans.plan(Load(32, keys=10_000_000)).rows(32) > plans.plan(Load(32)).rows(32)


def test_prompts_take_rows() -> None:
    """What is planned and prompts beside it are no more than the largest pass, and fill one up."""
    plans = BestRows(WIDTH, costs(1e-6))
    plans.note(chances(0.95))
    assert plans.plan(Load(100, prompt_rows=100)).rows(100) == 1600
    beside = plans.plan(Load(100, prompt_rows=600))
    assert beside.reason == RAGGED and beside.rows(100) + 600 == 2048
    plans.note(chances(0.0))
    assert plans.plan(Load(100, prompt_rows=600)).rows(100) == 100


@pytest.mark.parametrize("requests", [8, 32])
def test_rows_are_as_dear_beside_prompts(requests: int) -> None:
    """Those of a prompt make a round longer, which is no reason to verify drafts that did not pay without."""
    plans = BestRows(WIDTH, costs(0.02, sizes=[*range(16, 2049, 16)]))
    plans.note(chances(0.8))
    alone = plans.plan(Load(requests)).rows(requests)
    beside = [plans.plan(Load(requests, prompt_rows=n)).rows(requests) for n in (64, 256, 512)]
    assert requests < alone < requests * WIDTH
    assert beside == [alone] * 3


def test_more_requests_than_a_graph_holds() -> None:
    """They run kernel by kernel, and all rows are verified, whatever is expected of them."""
    plans = BestRows(WIDTH, costs(0.02))
    plans.note(chances(0.0))
    assert plans.next(Load(128)).reason == PLAIN
    assert (
        plans.next(Load(129)).reason == WHOLE
        and plans.plan(Load(129, prompt_rows=64)).rows(129) == 2064
    )


def test_probes() -> None:
    """While nothing is drafted, few drafts are tried now and then, and rarely at last."""
    plans = BestRows(WIDTH, costs(0.02))
    plans.note(chances(0.0))
    made = [plans.next(Load(32)) for _ in range(400)]
    at = [i for i, plan in enumerate(made) if plan.reason == PROBE]
    assert {plan.reason for plan in made} == {PLAIN, PROBE}
    assert all(plan.width == WIDTH and plan.total == 64 for plan in made if plan.reason == PROBE)
    assert at[0] < 10 and 4 <= len(at) <= 10 and at[-1] - at[-2] == 64
    plans.note(chances(0.9))
    assert plans.next(Load(32)).reason in (WHOLE, RAGGED)
    plans.note(chances(0.0))
    again = [plans.next(Load(32)).reason for _ in range(10)]
    assert again[0] == PLAIN and PROBE in again


def whole_or_plain(per_row: float) -> BestRows:
    """Where all requests of a round have as many rows, as with linear attention."""
    return BestRows(WIDTH, costs(per_row, sizes=[]))


def test_whole_or_plain() -> None:
    """Whichever is faster; prompts run by themselves and change nothing."""
    plans = whole_or_plain(0.1)
    assert plans.next(Load(64)).reason == WHOLE
    plans.note(chances(0.5))
    for requests, reason in ((1, WHOLE), (8, PLAIN), (64, PLAIN)):
        assert plans.plan(Load(requests)).reason == reason
        assert plans.plan(Load(requests, prompt_rows=500)) == plans.plan(Load(requests))
    plans.note(chances(0.99))
    assert plans.plan(Load(64, prompt_rows=2000)).reason == WHOLE


def test_uniform_blocks() -> None:
    """With linear attention: blocks of another width for all, where these promise more."""
    requests = [1, 8, 32, 128]
    uniform = {
        width: Staircase(requests, [5.5 + 0.02 * n * width for n in requests])
        for width in (8, 4, 2)
    }
    plans = BestRows(WIDTH, replace(costs(0.02, sizes=[]), uniform=uniform))
    plans.note(chances(0.7))
    found = {n: plans.plan(Load(n)) for n in requests}
    assert all(plan.total is None for plan in found.values())
    for n, plan in found.items():
        speeds = {
            w: n * float(1 + chances(0.7)[0, : w - 1].sum()) / uniform[w].at(n) for w in uniform
        }
        speeds[WIDTH] = n * float(1 + chances(0.7)[0].sum()) / (5.5 + 0.02 * n * WIDTH)
        speeds[1] = n / (5 + 0.02 * n)
        assert speeds[plan.width] >= 0.98 * max(speeds.values())
    assert len({plan.width for plan in found.values()}) >= 3
    plans.note(chances(0.0))
    (probe,) = [plan for plan in (plans.next(Load(32)) for _ in range(10)) if plan.reason == PROBE]
    assert probe == Plan(2, reason=PROBE)


def test_dear_probes_are_rare() -> None:
    """Rounds that only look whether drafts pay take about 3% of the time at last."""
    plans = whole_or_plain(0.5)
    plans.note(chances(0.0))
    made = [plans.next(Load(128)) for _ in range(3000)]
    at = [i for i, plan in enumerate(made) if plan.reason == PROBE]
    assert all(made[i].width == WIDTH and made[i].total is None for i in at)
    longer = (0.5 + 5 + 0.5 * 128 * WIDTH) / (5 + 0.5 * 128)
    assert at[-1] - at[-2] == pytest.approx(33 * longer, abs=1)


def test_whole_blocks_are_left_for_something_better_only() -> None:
    plans = BestRows(WIDTH, costs(1e-5))
    plans.note(chances(0.9))
    assert plans.next(Load(8)).reason == WHOLE


def test_what_is_measured_again() -> None:
    plans = BestRows(WIDTH, costs(0.02))
    plans.note(chances(0.5))
    assert plans.next(Load(64)).reason == RAGGED
    plans.take(costs(0.0))
    assert plans.next(Load(64)).reason == WHOLE


def test_one_bad_block_is_no_reason() -> None:
    """A request that is alone is judged by more than its last block."""
    plans = BestRows(WIDTH, costs(0.0))
    for number in range(300):
        plans.note(chances(0.02 if number % 7 == 6 else 0.9, requests=1))
        assert plans.next(Load(1)).reason == WHOLE


@pytest.mark.parametrize("requests", [1, 32])
def test_drafts_that_pay_again(requests: int) -> None:
    """The first probe that finds it is enough."""
    plans = BestRows(WIDTH, costs(0.02))
    for _ in range(100):
        plans.note(chances(0.0, requests))
        plans.next(Load(requests))
    rounds = 0
    while plans.next(Load(requests)).reason == PLAIN:
        rounds += 1
    assert rounds <= 64
    plans.note(chances(0.9, requests))
    assert plans.next(Load(requests)).width == WIDTH


def dear_drafts() -> Costs:
    """Drafts that take longer with each row, and from 16 requests on are made faster of narrower blocks."""
    requests, table = [1, 16, 32, 64, 128], costs(0.02)
    draft = Staircase(requests, [1 + 0.004 * n * WIDTH for n in requests])
    narrow = {
        width: Staircase(requests[least:], [1 + 0.004 * n * width for n in requests[least:]])
        for width, least in ((8, 1), (4, 2), (2, 3))
    }
    return replace(table, draft=draft, narrow=narrow)


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("requests", [8, 20, 40, 64, 128])
def test_narrower_blocks(rate: float, requests: int) -> None:
    """The width and the number of rows that promise most together; verified by trying all."""
    table = dear_drafts()
    plans = BestRows(WIDTH, table)
    plans.note(chances(rate))
    worth = chances(rate, requests)

    def speed(width: int, rows: int) -> float:
        best = np.sort(worth[:, : width - 1], axis=None)[::-1]
        if rows == requests * WIDTH:
            time = table.whole.at(requests)
        else:
            time = table.ragged.at(rows)
        draft = table.narrow.get(width, table.draft).at(requests)
        return (requests + float(best[: rows - requests].sum())) / (draft + time)

    widths = [WIDTH, *(w for w, stairs in table.narrow.items() if requests >= stairs.sizes[0])]
    rows = [n for n in (*SIZES, *(requests * w for w in widths)) if n > requests]
    best = max(speed(w, n) for w in widths for n in rows if n <= requests * w)
    best = max(best, requests / table.plain.at(requests))
    plan = plans.next(Load(requests))
    assert plan.reason == PLAIN or plan.width in widths
    found = requests / table.plain.at(requests)
    if plan.reason != PLAIN:
        found = speed(plan.width, plan.rows(requests))
    assert found >= 0.98 * best
    assert (plan.reason == NARROW) == (1 < plan.width < WIDTH)


def test_narrower_blocks_pay_and_are_left_now_and_then() -> None:
    """Wider ones are drafted rarely at last; often enough to see when more pays."""
    plans = BestRows(WIDTH, dear_drafts())
    plans.note(chances(0.6))
    widths = []
    for _ in range(1000):
        plan = plans.next(Load(64))
        widths.append(plan.width)
        plans.note(chances(0.6)[:, : plan.width - 1])
    wider = [i for i, width in enumerate(widths) if width > plan.width]
    assert set(widths) == {plan.width, 2 * plan.width} and 2 * plan.width < WIDTH
    assert wider[0] < 20 and wider[-1] - wider[-2] == 128 and len(wider) < 12
    for _ in range(200):
        plans.note(chances(0.99)[:, : plans.next(Load(64)).width - 1])
    easy = BestRows(WIDTH, dear_drafts())
    easy.note(chances(0.99))
    assert plans.plan(Load(64)).width == easy.plan(Load(64)).width > plan.width


def test_what_is_behind_narrower_blocks() -> None:
    """Is expected to fall as it did in the last whole ones."""
    plans = BestRows(WIDTH, dear_drafts())
    plans.note(chances(0.8))
    known = plans.plan(Load(8))
    for _ in range(20):
        plans.note(chances(0.8)[:, :3])
    assert plans.plan(Load(8)) == known


def test_narrower_blocks_beside_prompts() -> None:
    """They and the prompts are no more than the largest pass."""
    plans = BestRows(WIDTH, dear_drafts())
    plans.note(chances(0.6))
    for rows in (10, 500, 1500, 1900):
        plan = plans.plan(Load(64, prompt_rows=rows))
        assert plan.rows(64) + rows <= 2048
        if plan.reason == NARROW:
            assert plan.rows(64) <= 64 * plan.width


def test_a_probe_is_as_cheap_as_can_be() -> None:
    plans = BestRows(WIDTH, dear_drafts())
    plans.note(chances(0.0))
    (probe,) = [plan for plan in (plans.next(Load(64)) for _ in range(10)) if plan.reason == PROBE]
    assert (probe.width, probe.total) == (2, 128)


def test_other_times_while_a_probe_is_on_its_way() -> None:
    """What rounds take is measured anew when what was seen before the probe is forgotten and its result not there."""
    plans = BestRows(WIDTH, costs(0.1))
    plans.note(chances(0.0))
    while plans.next(Load(64)).reason != PROBE:
        pass
    plans.take(costs(0.1))
    assert plans.next(Load(64)).reason == PLAIN
