"""What rounds came to, summed up in this process until it is written to Prometheus.

A number in Prometheus' shared memory costs microseconds, and a round has some ninety: more than its tokens cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

# Of drafts, by position: verified after all before them were accepted, accepted of those, expected to be.
_OF_DRAFTS = ("tried", "survived", "expected")


class RoundCounts:
    """Sums since they were last taken out.

    Attributes:
        sums: amounts by the name of a counter and the value of its own label, if it has one.
        lengths: by number of tokens, how many requests took so many from a round.
    """

    def __init__(self, block_size: int):
        self._size = block_size
        self._positions = np.arange(block_size - 1)
        self._clear()

    def _clear(self) -> None:
        self.sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
        self.lengths = [0] * (self._size + 1)
        self._widths = [0] * (self._size + 1)  # requests of rounds in which they had blocks so wide
        # Of rounds by their drafts, as `expected` was told; many are summed up in hardly more time than one.
        self._told: defaultdict[int, list[tuple[np.ndarray, ...]]] = defaultdict(list)

    def committed(self, width: int, taken: Sequence[int]) -> None:
        """See `RoundMetrics.committed`."""
        self._widths[width] += len(taken)
        for length in taken:
            self.lengths[length] += 1

    def expected(self, chances: np.ndarray, verified: np.ndarray, lengths: np.ndarray) -> None:
        """See `RoundMetrics.expected`."""
        self._told[chances.shape[1]].append((chances, verified, lengths))

    def _of_drafts(self) -> np.ndarray:
        """Amounts of `_OF_DRAFTS` by position, [3, block size - 1]."""
        amounts = np.zeros((len(_OF_DRAFTS), self._size - 1))
        for drafts, told in self._told.items():
            chances, verified, lengths = map(np.concatenate, zip(*told, strict=True))
            position, accepted = self._positions[:drafts], lengths[:, None] - 1
            tried = (position <= accepted) & (position < verified - 1)
            before = np.concatenate([np.ones_like(verified), chances[:, :-1]], axis=1)
            alone = chances / np.maximum(before, 1e-30)
            amounts[0, :drafts] += tried.sum(axis=0)
            amounts[1, :drafts] += (tried & (position < accepted)).sum(axis=0)
            amounts[2, :drafts] += np.where(tried, alone, 0.0).sum(axis=0)
        return amounts

    def take_out(self) -> tuple[dict[tuple[str, ...], float], list[int]]:
        """All amounts of counters, as in `sums`, and `lengths`; from then on both begin anew."""
        sums, lengths = self.sums, self.lengths
        for key, amount in self._of_blocks():
            sums[key] += amount
        self._clear()
        return {key: amount for key, amount in sums.items() if amount}, lengths

    def _of_blocks(self) -> Iterator[tuple[tuple[str, ...], float]]:
        lengths, widths = np.array(self.lengths), np.array(self._widths)
        numbers, drafts = np.arange(self._size + 1), self._of_drafts()
        yield ("rounds",), float(lengths.sum())
        yield ("drafted_tokens",), float(widths @ (numbers - 1).clip(min=0))
        yield ("accepted_tokens",), float(lengths @ (numbers - 1).clip(min=0))
        for at in range(1, self._size):
            yield ("drafted_at_position", str(at)), float(widths[at + 1 :].sum())
            yield ("accepted_at_position", str(at)), float(lengths[at + 1 :].sum())
            for name, amounts in zip(_OF_DRAFTS, drafts, strict=True):
                yield (f"{name}_at_position", str(at)), float(amounts[at - 1])
