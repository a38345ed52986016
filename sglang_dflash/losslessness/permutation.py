"""Permutation test: do two sets of runs come from one distribution?

Pure numpy. A run is one sampled answer, an array of token ids that `END` fills up to the last
position. Within a cell (one prompt under one sampling setting) the runs of an arm are independent
draws, so if both arms decode alike, every assignment of the *whole* runs to the arms is equally
likely. Only whole runs are permuted, so nothing is assumed about how the tokens of a run hang
together; in particular not that two runs agree before the position that is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import false_discovery_control

END = -1  # fills a run after its end, so that lengths are compared too
RARE = 5  # values seen less often in both arms together count as one
ENOUGH = 20  # permutations at least as extreme as what was seen, after which no more are drawn
CHUNK = 256  # permutations drawn at once


@dataclass(frozen=True)
class Hypothesis:
    """That both arms agree in one respect.

    Attributes:
        kind: `token` (its distribution at `position`), `pair` (of the tokens at `position` - 1 and
            `position`), or `run` (all of those together).
        position: 0-based; None for `run`.
        p: of the permutation test, at most 1 and never 0.
    """

    kind: str
    position: int | None
    p: float


def categories(values: np.ndarray) -> np.ndarray:
    """One-hot columns of the values that occur, the rare ones together in the last.

    What is rare depends on both arms together, which no permutation changes.

    Args:
        values: [runs] int64.

    Returns:
        [runs, categories] float32; a single column if the runs do not differ.
    """
    _, codes, counts = np.unique(values, return_inverse=True, return_counts=True)
    common = np.flatnonzero(counts >= RARE)
    columns = codes[:, None] == common[None, :]
    rest = ~columns.any(axis=1, keepdims=True)
    return np.hstack([columns, rest] if rest.any() else [columns]).astype(np.float32)


class Tables:
    """Contingency tables (arm x value) of every token and every pair of adjacent tokens.

    Attributes:
        keys: (kind, position) of each table; positions at which the runs do not differ have none.
        columns: [runs, sum of the tables' categories] float32, one-hot.
    """

    def __init__(self, runs: np.ndarray):
        positions = runs.shape[1]
        named = [(("token", t), runs[:, t]) for t in range(positions)]
        # A pair of ids as one number; ids fit into 32 bits.
        pairs = (runs[:, :-1] + 1 << 32) + runs[:, 1:] + 1
        named += [(("pair", t + 1), pairs[:, t]) for t in range(positions - 1)]
        tables = [(key, categories(values)) for key, values in named]
        tables = [(key, table) for key, table in tables if table.shape[1] > 1]
        self.keys = [key for key, _ in tables]
        self.sizes = np.array([table.shape[1] for _, table in tables], dtype=np.int64)
        empty = np.empty((len(runs), 0), dtype=np.float32)
        self.columns = np.hstack([table for _, table in tables]) if tables else empty
        self.totals = self.columns.sum(axis=0, dtype=np.float64)

    def chi_square(self, labels: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Pearson's statistic of the chosen tables.

        Args:
            labels: [assignments, runs] float32, 1 for the first arm.
            chosen: [tables] bool.

        Returns:
            [assignments, chosen tables] float64.
        """
        runs = labels.shape[1]
        first = labels[0].sum(dtype=np.float64)
        wanted = np.repeat(chosen, self.sizes)
        counts = (labels @ self.columns[:, wanted]).astype(np.float64)
        totals = self.totals[wanted]
        terms = (counts - totals * (first / runs)) ** 2 / totals
        starts = np.cumsum(self.sizes[chosen]) - self.sizes[chosen]
        scale = runs * runs / (first * (runs - first))
        return np.add.reduceat(terms, starts, axis=1) * scale

    def standardised(self, statistics: np.ndarray) -> np.ndarray:
        """[assignments, tables] → [assignments], the sum over tables of about unit variance."""
        freedom = self.sizes - 1
        return ((statistics - freedom) / np.sqrt(2 * freedom)).sum(axis=1)


def compare_runs(
    first: np.ndarray, second: np.ndarray, permutations: int, rng: np.random.Generator
) -> list[Hypothesis]:
    """p-values of every token, every pair, and the runs as a whole.

    Sequential Monte Carlo p-values (Besag and Clifford 1991, Biometrika 78, 301): permutations are
    drawn until `ENOUGH` are at least as extreme as the data, then p is their share; else p is
    (1 + those) / (1 + `permutations`). Exact: P(p <= a) <= a for any a if the arms agree.

    Args:
        first: [runs, positions] int64; second: as many positions, its own number of runs.
        permutations: the most that are drawn.

    Returns:
        Nothing for positions at which no two runs differ: there is nothing to test there.
    """
    tables = Tables(np.vstack([first, second]).astype(np.int64))
    if not tables.keys:
        return []
    labels = np.repeat(np.array([1, 0], dtype=np.float32), [len(first), len(second)])
    p = _sequential(tables, labels, permutations, rng)
    keys = [*tables.keys, ("run", None)]
    return [Hypothesis(*key, float(value)) for key, value in zip(keys, p, strict=True)]


def _sequential(
    tables: Tables, labels: np.ndarray, permutations: int, rng: np.random.Generator
) -> np.ndarray:
    """p-values of all tables, and last of their standardised sum."""
    everything = np.ones(len(tables.keys), dtype=bool)
    seen = _with_sum(tables, tables.chi_square(labels[None], everything))[0]
    slack = 1e-9 * np.maximum(np.abs(seen), 1)  # equal tables may differ in the last bit
    p = np.full(len(seen), np.nan)
    exceeded = np.zeros(len(seen), dtype=np.int64)
    drawn = 0
    for chunk in _assignments(labels, permutations, rng):
        active = np.isnan(p)
        if not active.any():
            break
        # Their sum needs all tables.
        chosen = everything if active[-1] else active[:-1]
        statistics = tables.chi_square(chunk, chosen)
        index = np.flatnonzero(chosen)
        if active[-1]:
            statistics, index = _with_sum(tables, statistics), np.arange(len(seen))
        extreme = statistics >= (seen - slack)[index]
        running = exceeded[index] + np.cumsum(extreme, axis=0)
        stopped = (running[-1] >= ENOUGH) & active[index]
        at = drawn + 1 + (running[:, stopped] >= ENOUGH).argmax(axis=0)
        p[index[stopped]] = ENOUGH / at
        exceeded[index] = running[-1]
        drawn += len(chunk)
    return np.where(np.isnan(p), (exceeded + 1) / (drawn + 1), p)


def _with_sum(tables: Tables, statistics: np.ndarray) -> np.ndarray:
    return np.hstack([statistics, tables.standardised(statistics)[:, None]])


def _assignments(
    labels: np.ndarray, permutations: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Random assignments of the runs to the arms: [up to CHUNK, runs] each."""
    for start in range(0, permutations, CHUNK):
        size = min(CHUNK, permutations - start)
        yield rng.permuted(np.tile(labels, (size, 1)), axis=1)


def enough_permutations(hypotheses: int, q: float) -> int:
    """The fewest with which a single false hypothesis among so many can be discovered."""
    return int(np.ceil(max(hypotheses, 1) / q))


def discoveries(p: Sequence[float], q: float) -> tuple[np.ndarray, np.ndarray]:
    """Benjamini and Hochberg's procedure: (adjusted p-values, which are discovered)."""
    if not len(p):
        return np.empty(0), np.empty(0, dtype=bool)
    adjusted = false_discovery_control(np.asarray(p), method="bh")
    return adjusted, adjusted <= q
