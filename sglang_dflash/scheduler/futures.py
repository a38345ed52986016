"""Tokens that a launched pass will give need no numbers here.

Where the release overlaps, it numbers them, and hands the numbers on as if they were the tokens: a tensor on the device
that is made, negated, filtered and joined in each step. A DFLASH round finds its bonus tokens in `RequestState`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


class NoNumbers:
    """Stands for `FutureIndices`.

    Attributes:
        indices: of which the scheduler takes the negative for a batch's tokens.
    """

    @property
    def indices(self) -> NoNumbers:
        return self

    def __neg__(self) -> None:
        """No tensor, as batches have none that are new."""


def number_nothing(scheduler: Scheduler) -> None:
    """From now on, of a scheduler that overlaps."""
    if scheduler.enable_overlap:
        nothing = NoNumbers()
        scheduler.future_map.alloc_future_indices = lambda requests: nothing
