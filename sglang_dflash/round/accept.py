"""Stage 3: the target's choices against the drafted tokens. `accept` is pure: it touches nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_dflash.gpu.kernels.accept import accept_and_advance
from sglang_dflash.round.ragged import Ragged
from sglang_dflash.round.state import RequestState


@dataclass(frozen=True)
class Accepted:
    """What a round commits.

    Attributes:
        tokens: [bs, width] int64, the target's own choice after each row. The first `lengths` of a
            request are its new tokens; the last of those is the next bonus token.
        lengths: [bs] int64, tokens that the round commits, the bonus token included: 1..width.
        bonus_tokens: [bs] int64, the next round's.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    bonus_tokens: torch.Tensor

    def first(self, requests: int) -> Accepted:
        """What the first requests commit, where the others only pad the batch."""
        return Accepted(
            self.tokens[:requests], self.lengths[:requests], self.bonus_tokens[:requests]
        )


def accept(target_tokens: torch.Tensor, draft_tokens: torch.Tensor) -> Accepted:
    """Accepts drafted tokens up to the first that is not what the target chose.

    The token at the first mismatch is the target's choice given an accepted prefix, so it is valid
    whatever was drafted there: a round always commits one token more than it accepts.

    Args:
        target_tokens: [bs, width] int64, the target's choice after each row of the block.
        draft_tokens: [bs, width - 1] int64.
    """
    matches = (draft_tokens == target_tokens[:, :-1]).to(torch.int64)
    lengths = matches.cumprod(dim=1).sum(dim=1) + 1
    bonus_tokens = target_tokens.gather(1, (lengths - 1)[:, None]).squeeze(1)
    return Accepted(target_tokens, lengths, bonus_tokens)


def accept_round(
    target_tokens: torch.Tensor,
    draft_tokens: torch.Tensor,
    rows: torch.Tensor,
    state: RequestState,
    ragged: Ragged | None = None,
) -> Accepted:
    """`accept`, and the state of the requests at `rows` ([bs] int64) moved on; on a GPU in one launch.

    Args:
        ragged: which rows were verified; None for all.
    """
    if rows.is_cuda:
        counts = None if ragged is None else ragged.counts
        lengths, bonus_tokens = accept_and_advance(
            target_tokens, draft_tokens, rows, *state.moved_by_rounds, counts
        )
        return Accepted(target_tokens, lengths, bonus_tokens)
    if ragged is not None:
        draft_tokens = ragged.hide(draft_tokens)
    accepted = accept(target_tokens, draft_tokens)
    state.advance(rows, target_tokens, accepted.lengths, accepted.bonus_tokens)
    return accepted
