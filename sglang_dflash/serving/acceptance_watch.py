"""A word in the log if a drafter is never right: the output stays correct, only slower."""

from __future__ import annotations

import logging
from collections.abc import Iterable

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
