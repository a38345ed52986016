"""Rows that are given out by worth, and what drafts are worth."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from sglang_dflash.gpu.kernels import survival as survival_kernels
from sglang_dflash.gpu.kernels.share_rows import share_rows
from sglang_dflash.gpu.kernels.survival import count_and_update, expect
from sglang_dflash.round.accept import accept
from sglang_dflash.round.ragged import Ragged
from sglang_dflash.round.survival import BINS, KINDS, Estimate, Kinds, Survival

WIDTH = 6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("total", [7, 8, 20, 41, 42])
def test_the_likeliest_drafts_get_rows(total: int) -> None:
    torch.manual_seed(total)
    chances = torch.rand(7, WIDTH - 1).cumprod(dim=1)
    chances[3] = chances[2]  # equal ones
    ragged = Ragged.share(chances, total)
    counts = ragged.counts.tolist()
    assert sum(counts) == total and all(1 <= count <= WIDTH for count in counts)
    taken = [row[: n - 1] for row, n in zip(chances.tolist(), counts, strict=True)]
    left = [row[n - 1 :] for row, n in zip(chances.tolist(), counts, strict=True)]
    assert min(sum(taken, []), default=1.0) >= max(sum(left, []), default=0.0)


@pytest.mark.parametrize("width", [2, WIDTH])
@pytest.mark.parametrize("requests", [1, 7, 300])
def test_the_kernel_shares_rows_as_tensors_do(requests: int, width: int) -> None:
    """None but the first, some, and all; many are as likely as others, certain, or of requests that have ended."""
    torch.manual_seed(requests)
    rates = torch.rand(12)[torch.randint(12, (requests, width - 1))]
    rates[::5], rates[1::5, 0] = 0.0, 1.0
    chances = rates.cumprod(dim=1)
    for total in {requests, requests + 1, requests * width // 2 + 1, requests * width}:
        expected = Ragged.share(chances, total)
        shared = share_rows(chances.to(DEVICE), total, 300, 2 * WIDTH)
        for made, name in zip(shared, ("counts", "begins", "source"), strict=True):
            assert torch.equal(made.cpu(), getattr(expected, name)), name


def test_chances_that_are_none() -> None:
    """Rows are as many as were asked for, whatever was estimated."""
    chances = torch.full((3, WIDTH - 1), 1.0000001)
    chances[1] = float("nan")
    for total in (3, 5, 18):
        counts, begins, source = share_rows(chances.to(DEVICE), total, 3, WIDTH)
        assert counts.sum() == total == len(source.unique())


def test_rows_that_are_the_same_of_all() -> None:
    """Certain drafts are as likely as those before them, of which the earlier count."""
    ragged = Ragged.share(torch.ones(4, WIDTH - 1), 4 + 7)
    assert ragged.counts.tolist() == [6, 3, 1, 1]


def test_rows_of_whole_blocks_and_back() -> None:
    counts = torch.tensor([3, 1, 6, 2])
    ragged = Ragged.of(counts, 12, WIDTH)
    whole = [[10 * request + i for i in range(WIDTH)] for request in range(4)]
    tokens = torch.tensor([t for row, n in zip(whole, counts, strict=True) for t in row[:n]])
    assert torch.equal(torch.tensor(whole).flatten()[ragged.source], tokens)
    blocks = ragged.spread(tokens)
    nearest = tokens[ragged.nearest].view(4, WIDTH)
    for row, near, own, n in zip(blocks.tolist(), nearest.tolist(), whole, counts, strict=True):
        assert row == own[:n] + [0] * (WIDTH - n)
        assert near == own[:n] + [own[n - 1]] * (WIDTH - n)


def test_a_draft_without_a_row_is_not_accepted() -> None:
    """However right it is; the last row of a request gives its bonus token."""
    target = torch.arange(24).view(4, WIDTH)
    drafts = target[:, :-1].clone()
    drafts[2, 1] = 99
    ragged = Ragged.of(torch.tensor([3, 1, 6, 6]), 16, WIDTH)
    accepted = accept(ragged.spread(target.flatten()[ragged.source]), ragged.hide(drafts))
    assert accepted.lengths.tolist() == [3, 1, 2, 6]
    assert accepted.bonus_tokens.tolist() == [2, 6, 13, 23]


def survive(rates: torch.Tensor, requests: int) -> torch.Tensor:
    """Accept lengths [requests] of drafts that survive at some rates ([drafts])."""
    alive = torch.rand(requests, len(rates)) < rates
    return alive.long().cumprod(dim=1).sum(dim=1) + 1


def expected(
    survival: Survival, odds: torch.Tensor, kinds: torch.Tensor, gone: Iterable[int] = ()
) -> Estimate:
    """Of requests side by side, of which some have ended."""
    rows = torch.arange(len(odds))
    ended = torch.tensor([int(row in gone) for row in rows.tolist()], dtype=torch.int32)
    return survival.estimate(odds, kinds, rows, ended)


def test_rates_are_learned_of_what_was_tried() -> None:
    """By position, though only few rows of a block are verified at a time; drawn requests have rates of their own."""
    torch.manual_seed(0)
    survival, true = Survival(WIDTH - 1, "cpu"), torch.tensor([0.95, 0.9, 0.6, 0.3, 0.8])
    odds, kinds = torch.full((64, WIDTH - 1), 3.0), torch.zeros(64, dtype=torch.int64)
    for _ in range(200):
        estimate = expected(survival, odds, kinds)
        rows = torch.randint(1, WIDTH + 1, (64,))
        survival.learn(estimate, rows, torch.minimum(survive(true, 64), rows))
    found = expected(survival, odds, kinds).chances[0]
    torch.testing.assert_close(found, true.cumprod(0), atol=0.05, rtol=0)
    assert torch.equal(
        expected(survival, odds, kinds + 1).chances[0],
        expected(Survival(WIDTH - 1, "cpu"), odds, kinds).chances[0],
    )


def test_a_position_at_which_odds_say_less() -> None:
    """Of odds that were hardly seen there, too."""
    torch.manual_seed(0)
    survival, true = Survival(2, "cpu"), torch.tensor([0.9, 0.45])
    kinds = torch.zeros(32, dtype=torch.int64)
    for _ in range(100):
        odds = torch.rand(32, 2) * torch.tensor([8.0, 3.0]) - 2
        survival.learn(expected(survival, odds, kinds), 3, survive(true, 32))
    first, both = expected(survival, torch.full((1, 2), 4.6), kinds[:1]).chances[0].tolist()
    assert first == pytest.approx(0.9, abs=0.05) and both / first < 0.8


def test_positions_that_are_seldom_reached_are_remembered() -> None:
    """What odds say there is known though a hundred drafts are tried at the first position for one there."""
    torch.manual_seed(0)
    survival, true = Survival(4, "cpu"), torch.tensor([0.2, 0.5, 0.9, 0.3])
    odds, kinds = torch.full((8, 4), 3.0), torch.zeros(8, dtype=torch.int64)
    found = []
    for _ in range(6000):
        estimate = expected(survival, odds, kinds)
        survival.learn(estimate, 5, survive(true, 8))
        found.append(survival.rates[0, 3, estimate.cells[0, 3] % BINS])
    assert torch.stack(found[3000:]).mean() == pytest.approx(0.3, abs=0.03)


def test_what_changes_is_learned_anew() -> None:
    torch.manual_seed(0)
    survival, odds = Survival(4, "cpu"), torch.full((32, 4), 2.0)
    kinds = torch.zeros(32, dtype=torch.int64)
    for rate in (0.9, 0.2):
        for _ in range(150):
            estimate = expected(survival, odds, kinds)
            survival.learn(estimate, 5, survive(torch.full((4,), rate), 32))
        assert expected(survival, odds, kinds).chances[0, 0] == pytest.approx(rate, abs=0.1)


def test_surer_drafts_survive_sooner_at_first() -> None:
    infinite = float("inf")
    odds = torch.tensor([[-9.0, 0.2, 1.0, 5.0, 1e9], [infinite, float("nan"), -infinite, 1, 1]])
    estimate = expected(Survival(5, "cpu"), odds, torch.tensor([0, 1]))
    alone = estimate.chances[0] / torch.cat([torch.ones(1), estimate.chances[0, :-1]])
    assert (alone.diff() >= -1e-6).all() and alone[0] < 0.1 and alone[-1] > 0.99
    assert estimate.cells.min() >= 0 and estimate.cells.max() < 2 * 5 * BINS  # the kinds 0 and 1
    assert torch.isfinite(estimate.chances).all()


def test_a_drafter_that_is_never_right() -> None:
    """Nothing is expected of odds either that were hardly ever seen."""
    torch.manual_seed(0)
    survival, kinds = Survival(5, "cpu"), torch.zeros(4, dtype=torch.int64)
    for _ in range(60):
        odds = torch.rand(4, 5) - 2
        survival.learn(expected(survival, odds, kinds), 2, torch.ones(4).long())
    sure = expected(survival, torch.full((4, 5), 9.0), kinds)
    assert sure.chances.max() < 0.2 and expected(survival, odds, kinds).chances.max() < 0.1


def test_requests_that_have_ended() -> None:
    """They get the bonus token's row alone, and what becomes of their drafts is not counted."""
    survival, odds = Survival(5, "cpu"), torch.full((3, 5), 2.0)
    kinds = torch.zeros(3, dtype=torch.int64)
    estimate = expected(survival, odds, kinds, gone=[1])
    assert Ragged.share(estimate.chances, 9).counts.tolist() == [4, 1, 4]
    survival.learn(estimate, 6, torch.tensor([1, 6, 1]))
    alike = Survival(5, "cpu")
    estimate = expected(alike, odds[:2], kinds[:2])
    alike.learn(estimate, 6, torch.tensor([1, 1]))
    assert torch.equal(survival.rates, alike.rates)


def test_kinds_of_requests() -> None:
    """What is told changes with the requests, and what pads the next batch is none of theirs."""
    kinds = Kinds(6, "cpu")
    for requests, drawing, adapters, expected in (
        (4, [1, 3], None, [0, 1, 0, 1, 0, 0]),
        (5, [1], [None, "a", "b", None, "a"], [0, 3, 2, 0, 2, 0]),
        (2, [], ["b", None], [2, 0, 0, 0, 0, 0]),
        (6, [], [None] * 6, [0] * 6),
    ):
        kinds.tell(requests, drawing, adapters)
        assert kinds.values.tolist() == expected


def test_all_orders_give_the_same() -> None:
    """Ranks must agree: what is counted does not depend on the order in which it is added up."""
    torch.manual_seed(0)
    odds, lengths = 9 * torch.rand(50, 15) - 3, torch.randint(1, 17, (50,))
    kinds, order = torch.randint(0, KINDS, (50,)), torch.randperm(50)
    rates = []
    for at in (torch.arange(50), order):
        survival = Survival(15, "cpu")
        for _ in range(5):
            estimate = expected(survival, odds[at], kinds[at])
            survival.learn(estimate, 16, lengths[at])
        rates.append(survival.rates)
    assert torch.equal(*rates)


@pytest.mark.parametrize(("widest", "width"), [(15, 16), (15, 8), (4, 5)])
def test_kernels(widest: int, width: int) -> None:
    """The steps as a GPU takes them, with all that is learned from round to round."""
    torch.manual_seed(0)
    theirs = Survival(widest, "cpu")
    rates, guess = theirs.rates.to(DEVICE).clone(), theirs._guess.to(DEVICE)
    fresh, counts = torch.zeros(2, 2, KINDS, widest, BINS, device=DEVICE)
    for number in range(6):
        odds = 10 * torch.rand(9, width - 1) - 3
        odds[3, 0], odds[4, 1], odds[5, 0] = float("-inf"), float("inf"), float("nan")
        kinds, lengths = torch.randint(0, KINDS, (9,)), torch.randint(1, width + 1, (9,))
        rows = torch.randint(1, width + 1, (9,)) if number % 2 else width
        at, ended = torch.randperm(12)[:9], torch.randint(0, 2, (12,)).to(torch.int32)
        estimate = theirs.estimate(odds, kinds, at, ended)
        given = (x.to(DEVICE) for x in (odds, kinds, at, ended))
        cells, chances = expect(*given, rates, -2.5, 2.0)
        assert torch.equal(cells.cpu(), estimate.cells)
        torch.testing.assert_close(chances.cpu(), estimate.chances)
        told = theirs.learn(estimate, rows, lengths)
        found = count_and_update(
            *(cells, chances, rows.to(DEVICE) if number % 2 else rows, lengths.to(DEVICE)),
            *(fresh, counts, rates, guess),
            window=512,
            least=0.5,
            weights=(8.0, 16.0),
        )
        assert not fresh.any()
        torch.testing.assert_close(found.cpu(), told)
        assert told.shape == (9, width)
        torch.testing.assert_close(rates.cpu(), theirs.rates)


def test_counting_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of other widths, and rows that pay, come with the traffic, in which nobody waits for a compiler."""
    launches = []

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]):
            return lambda *values, **constants: launches.append((len(values), constants))

    monkeypatch.setattr(survival_kernels, "_count", Launched())
    monkeypatch.setattr(survival_kernels, "_update", Launched())
    values = Survival(WIDTH - 1, "cpu")
    for width in (WIDTH, 3, 2):
        cells, chances = torch.zeros(4, width - 1, dtype=torch.int64), torch.rand(4, width - 1)
        lengths = torch.ones(4, dtype=torch.int64)
        for rows in (width, lengths):
            count_and_update(
                *(cells, chances, rows, lengths),
                *(values._fresh, values._counts, values.rates, values._guess),
                window=512,
                least=0.5,
                weights=(8.0, 16.0),
            )
    counting = launches[::2]
    assert len(counting) == 6 and all(each == counting[0] for each in counting)
