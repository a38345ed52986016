"""The permutation test against enumeration, and on decoders whose faults are known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import binom

from sglang_dflash.losslessness import permutation, simulation
from sglang_dflash.losslessness.permutation import (
    END,
    Tables,
    combine,
    compare_runs,
    count,
    discoveries,
    enough_permutations,
    likelihood,
)
from sglang_dflash.losslessness.sampling import padded


def by_key(hypotheses: list) -> dict:
    return {(h.kind, h.position): h.p for h in hypotheses}


def test_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "RARE", 0.5)
    values = np.array([[7, 7], [7, 8], [7, 8], [8, 8], [8, 9], [8, 5]])
    # 7 and 8 occur three times or more in six runs; 9 and 5, once each, share the last column.
    expected = [[2, 0, 0], [1, 1, 0], [1, 1, 0], [0, 2, 0], [0, 1, 1], [0, 1, 1]]
    assert count(values).tolist() == expected


def test_runs_that_are_equal_leave_nothing_to_test() -> None:
    runs = np.full((20, 3), 5)
    assert count(runs).shape == (20, 0)
    assert compare_runs(runs[:10], runs[10:], 100, np.random.default_rng(0)) == []


def test_end_fills_short_answers() -> None:
    assert padded([[1, 2, 3], [4], []], 2).tolist() == [[1, 2], [4, END], [END, END]]


def test_likelihood() -> None:
    runs = np.array([[1, 1, 1], [1, 1, 1], [1, END, END], [2, 1, 1]])
    # Tokens after 1: five times 1 and once the end; nothing counts after the end.
    logs = [np.log(3 / 4 * 5 / 6 * 5 / 6), np.log(3 / 4 / 6), np.log(1 / 4 * 5 / 6)]
    score = likelihood(runs)[:, 0]
    assert score[0] == score[1] == score.max()
    assert score[2] == 0
    steps = 2**23 // 4
    assert score[3] == pytest.approx(steps * (logs[2] - logs[1]) / (logs[0] - logs[1]), abs=1)
    assert likelihood(np.ones((4, 3), dtype=np.int64)).shape == (4, 0)


def brute_force_statistic(values: np.ndarray, first: tuple[int, ...]) -> float:
    """Squared distances over standard deviations, the moments taken over all assignments."""
    runs = len(values)
    total = 0.0
    for value in np.unique(values):
        has = (values == value).astype(float)
        draws = [has[list(chosen)].sum() for chosen in itertools.combinations(range(runs), 4)]
        total += (has[list(first)].sum() - np.mean(draws)) ** 2 / np.std(draws)
    return total


def test_against_all_assignments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four runs against five: 126 assignments, all enumerated."""
    monkeypatch.setattr(permutation, "RARE", 0)
    monkeypatch.setattr(permutation, "ENOUGH", 10**9)
    values = np.array([1, 1, 1, 2, 2, 2, 1, 3, 2])
    table = Tables(values[:, None])
    labels = np.array([[1, 1, 1, 1, 0, 0, 0, 0, 0]], dtype=np.float32)
    seen = brute_force_statistic(values, (0, 1, 2, 3))
    # A single position has no pairs.
    assert table.keys == [("token", 0), ("token", None), ("likelihood", None)]
    statistics = table.statistics(labels, np.array([True, True, False]))
    assert statistics == pytest.approx(np.array([[seen, seen]]))
    exact = np.mean(
        [
            brute_force_statistic(values, chosen) >= seen - 1e-9
            for chosen in itertools.combinations(range(9), 4)
        ]
    )
    rng = np.random.default_rng(0)
    p = by_key(compare_runs(values[:4, None], values[4:, None], 20_000, rng))
    assert p["token", 0] == pytest.approx(exact, abs=0.02)


def test_stopping_early_changes_p_values_little(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    first, second = rng.integers(0, 4, (60, 6)), rng.integers(0, 4, (90, 6))
    early = by_key(compare_runs(first, second, 20_000, rng))
    monkeypatch.setattr(permutation, "ENOUGH", 10**9)
    late = by_key(compare_runs(first, second, 20_000, rng))
    assert early.keys() == late.keys()
    for key, p in late.items():
        assert early[key] == pytest.approx(p, rel=1.0, abs=0.01)


def test_p_values_of_equal_arms_are_uniform() -> None:
    rng = np.random.default_rng(0)
    p = []
    for _ in range(60):
        runs = rng.integers(0, 5, (96, 2))
        p += [h.p for h in compare_runs(runs[:32], runs[32:], 2_000, rng) if h.position == 1]
    # 120 p-values, two of each sample: at most this many below each level in 999 of 1,000 cases.
    for level in (0.05, 0.2, 0.5):
        assert np.sum(np.array(p[::2]) <= level) <= binom.ppf(0.999, 60, level)
    assert np.mean(p) == pytest.approx(0.5, abs=0.13)


def test_dependence_of_tokens_is_seen() -> None:
    """Both tokens have their right distributions, but come together as they should not."""
    rng = np.random.default_rng(1)
    first = rng.integers(0, 4, (200, 2))
    second = np.repeat(rng.integers(0, 4, (200, 1)), 2, axis=1)
    p = by_key(compare_runs(first, second, 2_000, rng))
    assert p["pair", 1] == pytest.approx(1 / 2_001)
    assert min(p["token", 0], p["token", 1]) > 0.001


def test_lengths_are_compared() -> None:
    rng = np.random.default_rng(1)
    first, second = rng.integers(0, 2, (2, 100, 5))
    second[:40, 3:] = END
    p = by_key(compare_runs(first, second, 2_000, rng))
    assert p["token", 4] < 0.001 < p["token", 1]


def test_false_discovery_control() -> None:
    p = [0.001, 0.013, 0.04, 0.012, 0.5]
    adjusted, found = discoveries(p, 0.05)
    assert adjusted == pytest.approx([0.005, 0.13 / 6, 0.05, 0.13 / 6, 0.5])
    assert found.tolist() == [True, True, True, True, False]
    assert discoveries([], 0.05)[1].tolist() == []


def test_enough_permutations_for_a_single_discovery() -> None:
    n = enough_permutations(1000, 0.05)
    assert discoveries([1 / (n + 1)] + [1.0] * 999, 0.05)[1].sum() == 1


def test_many_small_hints_are_one_large_one() -> None:
    assert combine([0.5] * 30) > 0.3
    assert combine([0.1] * 30) < 1e-4


EXPERIMENTS = 60


def test_false_alarms() -> None:
    """A first look discovers something with probability q = 0.05, and confirmation clears it."""
    rng = np.random.default_rng(0)
    arms = [
        simulation.experiment(simulation.none, 2, 48, 12, 0.05, rng) for _ in range(EXPERIMENTS)
    ]
    first, rejected = simulation.rates(arms)
    assert first * EXPERIMENTS <= binom.ppf(0.999, EXPERIMENTS, 0.05)
    assert rejected * EXPERIMENTS <= binom.ppf(0.999, EXPERIMENTS, 0.05**2)
    assert all(arm.hypotheses > 8 * 2 * 12 / 2 for arm in arms)


@pytest.mark.parametrize("fault", ["temperature / 1.25", "20% of the drafts unchecked"])
def test_power(fault: str) -> None:
    rng = np.random.default_rng(0)
    arms = [simulation.experiment(simulation.FAULTS[fault], 4, 256, 8, 0.05, rng) for _ in range(2)]
    assert simulation.rates(arms) == (1.0, 1.0)


def test_a_fault_in_one_place_is_found_there() -> None:
    """One token of one cell, wrong in one tenth of the runs."""
    rng = np.random.default_rng(0)
    plain = simulation.Decoder.random(2, rng)
    cells = [(0, 0), (1, 1)]

    def fresh(chosen: list) -> tuple[dict, dict]:
        runs = plain.draw(chosen, 256, 8)
        if (1, 1) in runs:
            runs[1, 1][:26, 5] = 39
        return runs, plain.draw(chosen, 512, 8)

    arm = simulation.judge_arm("simulated", *fresh(cells), fresh, 0.05, rng)
    assert not arm.accepted
    worst = next(d for d in arm.confirmed if d.position is not None)
    assert (worst.prompt, worst.setting, worst.position, worst.token) == (1, 1, 5, 39)
    assert worst.first - worst.second == pytest.approx(0.1, abs=0.05)
