"""A word in the log if a drafter is never right, or seldom under an adapter or with new weights of the target.

The output stays correct, only slower.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

logger = logging.getLogger(__name__)

# A drafter that is right once in a hundred rounds is unseen after so many with a chance of 5%.
STEPS = 300

_CAUSES = (
    "DFLASH: none of the first %d verify steps accepted a drafted token, so decoding is slower than without a "
    "drafter. Usual causes: %s was trained for another target, or for another version or chat template of this one; "
    "its config.json has wrong target_layer_ids, mask_token_id or causal switches; its blocks are laid out "
    "anchor-first; its weights are those of another step of its training; or requests sample at a very high "
    "temperature. python -m sglang_dflash.inspect shows how a checkpoint is read."
)


class AcceptanceWatch:
    """Looks at the first verify steps of a server, and says once if nothing was ever accepted."""

    def __init__(self, drafter: str, speaks: bool = True):
        """
        Args:
            drafter: path of its checkpoint.
            speaks: whether this rank is the one that says it.
        """
        self._drafter, self._speaks = drafter, speaks
        self.steps = 0
        self.done = False

    def note(self, lengths: Iterable[int]) -> None:
        """Takes the accept length of each verify step that counts, the bonus token included."""
        if self.done:
            return
        for length in lengths:
            self.steps += 1
            if length > 1 or self.steps == STEPS:
                self.done = True
                if length == 1 and self._speaks:
                    logger.warning(_CAUSES, STEPS, self._drafter)
                return


class AdapterWatch:
    """Compares what is accepted under each LoRA adapter with what is without, and says once where it is far less."""

    def __init__(self, name_of: Callable[[str], str]):
        """
        Args:
            name_of: what users call an adapter, by its id.
        """
        self._name_of = name_of
        self._steps: defaultdict[str | None, int] = defaultdict(int)
        self._drafts: defaultdict[str | None, int] = defaultdict(int)
        self._done: set[str] = set()

    def note(self, adapters: Iterable[str | None], taken: Iterable[Sequence[int]]) -> None:
        """Takes a round: of each request its adapter, and the tokens it took, none if it ran in vain."""
        for adapter, tokens in zip(adapters, taken, strict=True):
            if not tokens or adapter in self._done:
                continue
            self._steps[adapter] += 1
            self._drafts[adapter] += len(tokens) - 1
            if adapter is not None and self._steps[adapter] % STEPS == 0:
                self._compare(adapter)

    def _compare(self, adapter: str) -> None:
        if self._steps[None] < STEPS:
            return
        self._done.add(adapter)
        mine, base = (self._drafts[each] / self._steps[each] for each in (adapter, None))
        if mine < base / 2:
            logger.warning(
                "DFLASH: under LoRA adapter %s %.2f drafts of a verify step are accepted, and %.2f without an adapter: "
                "the drafter was trained for the target alone, so decoding is slower under this adapter.",
                self._name_of(adapter),
                mine,
                base,
            )


class WeightsWatch:
    """Compares what is accepted after each update of the target's weights with the most that was with earlier ones."""

    def __init__(self, speaks: bool = True):
        """
        Args:
            speaks: whether this rank is the one that says it.
        """
        self._speaks = speaks
        self._updates = self._steps = self._drafts = 0
        self._most = 0.0
        self._warned = False

    def new_weights(self) -> None:
        """The target's weights were updated, or a part of them; what is accepted is counted anew."""
        if self._steps >= STEPS:
            self._most = max(self._most, self._drafts / self._steps)
        self._updates += 1
        self._steps = self._drafts = 0

    def note(self, lengths: Iterable[int]) -> None:
        """Takes the accept length of each verify step that counts, the bonus token included."""
        for length in lengths:
            self._steps += 1
            self._drafts += length - 1
        if self._steps < STEPS:
            return
        now = self._drafts / self._steps
        fell = now < self._most / 2
        if fell and not self._warned and self._speaks:
            logger.warning(
                "DFLASH: since update %d of the target's weights %.2f drafts of a verify step are accepted, and up to "
                "%.2f were with earlier ones: the drafter keeps its own, trained for those, so decoding is slower.",
                self._updates,
                now,
                self._most,
            )
        self._warned = fell
