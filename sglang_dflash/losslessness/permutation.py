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
from scipy.stats import combine_pvalues, false_discovery_control

END = -1  # fills a run after its end, so that lengths are compared too
KINDS = ("token", "pair", "likelihood")
RARE = 0.02  # values that both arms together have less often than this, by run, count as one
ENOUGH = 20  # permutations at least as extreme as what was seen, after which no more are drawn
CHUNK = 256  # permutations drawn at once


@dataclass(frozen=True)
class Hypothesis:
    """That both arms have the same distribution of one thing.

    Attributes:
        kind: `token`, `pair` of adjacent tokens, or `likelihood` of whole runs.
        position: 0-based, of the token or the second of the pair; None: counted over all positions.
        p: of the permutation test, never 0.
    """

    kind: str
    position: int | None
    p: float


def count(values: np.ndarray) -> np.ndarray:
    """How often a run has each value, the rare values together in the last column.

    What is rare depends on both arms together, which no permutation changes.

    Args:
        values: [runs, places] int64.

    Returns:
        [runs, categories] float32, without columns in which all runs are equal.
    """
    runs, places = values.shape
    _, codes, totals = np.unique(values, return_inverse=True, return_counts=True)
    common = totals >= RARE * runs
    # Codes of the common values from 0, and one beyond them for the rest.
    codes = np.where(common, common.cumsum() - 1, common.sum())[codes.reshape(-1)]
    categories = int(common.sum()) + 1
    flat = np.repeat(np.arange(runs), places) * categories + codes
    table = np.bincount(flat, minlength=runs * categories).reshape(runs, categories)
    return table[:, (table != table[0]).any(axis=0)].astype(np.float32)


def likelihood(runs: np.ndarray) -> np.ndarray:
    """How ordinary each run is, by the frequencies of pairs in the runs of both arms.

    A single number, so it shows what is spread thinly over many values: too high or too low a
    temperature, a filter that is ignored.

    Args:
        runs: [runs, positions] int64.

    Returns:
        [runs, 1] float32: log-likelihood of the run under the first-order Markov chain that has
        the frequencies of all runs, in whole steps: their sums are exact, and ties remain ties. No
        column if all runs are equal.
    """
    after = np.hstack([np.full((len(runs), 1), END - 1), runs[:, :-1]])  # a start mark
    pairs = ((after + 2) << 32) + runs + 2
    logs = np.log(_frequencies(pairs)) - np.log(_frequencies(after))
    score = np.where(after == END, 0, logs).sum(axis=1, keepdims=True)
    spread = float(np.ptp(score))
    if spread < 1e-9:
        return np.empty((len(runs), 0), dtype=np.float32)
    steps = 2**23 // len(runs)  # float32 holds whole numbers up to 2**24
    return np.round((score - score.min()) / spread * steps).astype(np.float32)


def _frequencies(values: np.ndarray) -> np.ndarray:
    """How often each value occurs among all of them: the same shape."""
    _, codes, totals = np.unique(values, return_inverse=True, return_counts=True)
    return totals[codes.reshape(values.shape)]


class Tables:
    """What is counted in each run: every token and pair, at each position and over all of them.

    Attributes:
        keys: (kind, position) of each table; one in which all runs are equal is left out.
        sizes: columns of each table.
        columns: [runs, sum of sizes] float32.
    """

    def __init__(self, runs: np.ndarray):
        # A pair of ids as one number; ids fit into 32 bits.
        kinds = {"token": runs, "pair": ((runs[:, :-1] + 1) << 32) + runs[:, 1:] + 1}
        tables: dict[tuple[str, int | None], np.ndarray] = {}
        for first, (kind, values) in enumerate(kinds.items()):
            for place in range(values.shape[1]):
                tables[kind, place + first] = count(values[:, place : place + 1])
            tables[kind, None] = count(values)
        tables["likelihood", None] = likelihood(runs)
        tables = {key: table for key, table in tables.items() if table.shape[1]}
        self.keys = list(tables)
        self.sizes = np.array([table.shape[1] for table in tables.values()], dtype=np.int64)
        empty = np.empty((len(runs), 0), dtype=np.float32)
        self.columns = np.hstack([empty, *tables.values()])
        self.means = self.columns.mean(axis=0, dtype=np.float64)
        self.variances = self.columns.var(axis=0, dtype=np.float64)

    def statistics(self, labels: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Weighted distance of the first arm's counts from those expected of it.

        The squared distance in a column is divided by its standard deviation under permutation,
        which lies between dividing by the variance, where the many rare values drown a fault in the
        few likely ones, and not dividing, where the likely ones drown the others.

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
        variances = self.variances[wanted] * first * (runs - first) / (runs - 1)
        distances = (counts - first * self.means[wanted]) ** 2 / np.sqrt(variances)
        starts = np.cumsum(self.sizes[chosen]) - self.sizes[chosen]
        return np.add.reduceat(distances, starts, axis=1)


def compare_runs(
    first: np.ndarray, second: np.ndarray, permutations: int, rng: np.random.Generator
) -> list[Hypothesis]:
    """p-values of all tables of a cell.

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
    labels = np.repeat(np.array([1, 0], dtype=np.float32), [len(first), len(second)])
    p = _sequential(tables, labels, permutations, rng) if tables.keys else []
    return [Hypothesis(*key, float(value)) for key, value in zip(tables.keys, p, strict=True)]


def _sequential(
    tables: Tables, labels: np.ndarray, permutations: int, rng: np.random.Generator
) -> np.ndarray:
    """[tables] p-values."""
    seen = tables.statistics(labels[None], np.ones(len(tables.keys), dtype=bool))[0]
    seen -= 1e-9 * np.maximum(np.abs(seen), 1)  # equal tables may differ in the last bit
    p = np.full(len(seen), np.nan)
    extreme = np.zeros(len(seen), dtype=np.int64)
    drawn = 0
    for chunk in _assignments(labels, permutations, rng):
        active = np.isnan(p)
        if not active.any():
            break
        more = np.cumsum(tables.statistics(chunk, active) >= seen[active], axis=0)
        reached = extreme[active] + more >= ENOUGH  # [chunk, active]
        at = drawn + 1 + reached.argmax(axis=0)
        p[active] = np.where(reached[-1], ENOUGH / at, np.nan)
        extreme[active] += more[-1]
        drawn += len(chunk)
    return np.where(np.isnan(p), (extreme + 1) / (drawn + 1), p)


def _assignments(
    labels: np.ndarray, permutations: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Random assignments of the runs to the arms: [up to CHUNK, runs] each."""
    for start in range(0, permutations, CHUNK):
        size = min(CHUNK, permutations - start)
        yield rng.permuted(np.tile(labels, (size, 1)), axis=1)


def combine(p: Sequence[float]) -> float:
    """One p-value of independent ones (Fisher): small if many of them are a little too small."""
    return float(combine_pvalues(p, method="fisher").pvalue)


def enough_permutations(hypotheses: int, q: float) -> int:
    """The fewest with which a single false hypothesis among so many can be discovered."""
    return int(np.ceil(max(hypotheses, 1) / q))


def discoveries(p: Sequence[float], q: float) -> tuple[np.ndarray, np.ndarray]:
    """Benjamini and Hochberg's procedure: (adjusted p-values, which are discovered)."""
    if not len(p):
        return np.empty(0), np.empty(0, dtype=bool)
    adjusted = false_discovery_control(np.asarray(p), method="bh")
    return adjusted, adjusted <= q
