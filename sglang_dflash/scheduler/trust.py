"""Rounds without masks, for greedy requests whose grammar the target keeps to by itself.

The likeliest token, if the grammar allows it, is also the likeliest of those that it allows, so a greedy round is right
without masks as long as its tokens are allowed. They are looked at when they come, which takes microseconds and for
which nobody waits; a mask takes xgrammar up to 0.2 ms a row with a vocabulary of 152,000, and its round waits for it.

With a token that its grammar does not allow a request *strays*. It takes the tokens before that one, the rounds that
were launched for it meanwhile come to nothing, and it goes on from its last token with masks: for four rounds, and for
twice as many each time it strays again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_dflash.drawing.grammar import allowed, refuses_what_it_masks
from sglang_dflash.drawing.not_finite import NOT_FINITE
from sglang_dflash.drawing.sampling import asks_more

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_dflash.round.state import RequestState

# Rounds with masks after a request has strayed: the first time, and at most.
_MASKED, _MOST_MASKED = 4, 64


@dataclass
class Trust:
    """Of a request of which some rounds ran without masks.

    Attributes:
        masked: how many of its next rounds have masks.
        after_next: how many will have when it strays again.
        to_drop: results in flight that come to nothing.
        strayed: whether the device believes that it has tokens which it did not take.
    """

    masked: int = 0
    after_next: int = _MASKED
    to_drop: int = 0
    strayed: bool = False

    def stray(self, in_flight: int) -> None:
        """After a result of which not all tokens are allowed, with so many behind it."""
        self.strayed, self.to_drop = True, in_flight
        self.masked, self.after_next = self.after_next, min(2 * self.after_next, _MOST_MASKED)


def may_stray(req: Req) -> bool:
    """Whether what is in flight for a request may come to nothing."""
    return getattr(req, "trust", None) is not None


def begin_anew(reqs: Iterable[Req]) -> None:
    """Before a prefill, whose first tokens are drawn with masks, and which tells the device where requests are."""
    for req in reqs:
        req.unmasked = False
        if may_stray(req):
            req.trust.strayed, req.trust.to_drop = False, 0


def choose_masks(reqs: Iterable[Req], all_of_them: bool) -> None:
    """Decides, before a round, which requests with grammars have masks in it: all, or those that are not `unmasked`."""
    for req in reqs:
        trust = getattr(req, "trust", None) or Trust()
        mine = all_of_them or trust.masked or asks_more(req)
        req.unmasked = not mine and refuses_what_it_masks(req.grammar)
        if req.unmasked:
            req.trust = trust
        trust.masked = max(0, trust.masked - 1)


def go_back(reqs: Iterable[Req], state: RequestState) -> None:
    """Tells the device where those that have strayed go on, before their next round."""
    strayed = [req for req in reqs if may_stray(req) and req.trust.strayed]
    if not strayed:
        return
    places = [(req.req_pool_idx, req.output_ids[-1], req.kv_committed_len) for req in strayed]
    told = torch.tensor(places, dtype=torch.int64)
    if state.lengths.is_cuda:
        told = told.pin_memory()
    state.start(*told.to(state.lengths.device, non_blocking=True).unbind(dim=1))
    for req in strayed:
        req.trust.strayed = False


def comes_to_nothing(req: Req) -> bool:
    """Whether the result that has just come was launched for a request that had strayed."""
    dropped = may_stray(req) and req.trust.to_drop > 0
    if dropped:
        req.trust.to_drop -= 1
    return dropped


def what_counts(req: Req, tokens: Sequence[int]) -> Sequence[int]:
    """Of the tokens of a round those before the one with which its request strays; all, if it does not."""
    if not may_stray(req):
        return tokens
    # What NaN chose ends the request, whatever its grammar says.
    end = tokens.index(NOT_FINITE) if NOT_FINITE in tokens else len(tokens)
    kept = allowed(req.grammar, tokens[:end])
    if kept == end:
        return tokens
    req.trust.stray(req.results_in_flight)
    return tokens[:kept]
