"""The four stages of a round: propose → verify → accept → commit.

They come in two halves. What both models do has shapes that are known before a round is launched, whatever its
requests ask; there rejected rows, too, become context of the draft model, so nothing of `commit` waits for `accept`.
How a row's token is chosen is the request's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_dflash.drawing.sampling import Sampling
from sglang_dflash.round.accept import Accepted, accept_round
from sglang_dflash.round.block_model import BlockModel
from sglang_dflash.round.choose import choose
from sglang_dflash.round.commit import commit_context
from sglang_dflash.round.opened import Round
from sglang_dflash.round.parts import Parts
from sglang_dflash.round.propose import propose
from sglang_dflash.round.ragged import Ragged
from sglang_dflash.round.target import TargetRows
from sglang_dflash.round.verify import verify


@dataclass(frozen=True)
class Blocks:
    """What both models made of a round's blocks.

    Attributes:
        rows: [bs] int64, the requests' rows in `req_to_token`.
        positions: [bs * width] int64.
        draft_tokens: [bs, width - 1] int64.
        target: the target's rows; their taps are context already.
        ragged: which rows of the blocks these are; None for all.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    draft_tokens: torch.Tensor
    target: TargetRows
    ragged: Ragged | None = None

    def first(self, requests: int) -> Blocks:
        """Those of the first requests, where the others only pad the batch."""
        rows = requests * (self.draft_tokens.shape[1] + 1)
        adapted = self.target.adapted
        adapted = None if adapted is None else adapted.at(slice(rows))
        return Blocks(
            self.rows[:requests],
            self.positions[:rows],
            self.draft_tokens[:requests],
            replace(self.target, hidden_states=self.target.hidden_states[:rows], adapted=adapted),
        )


def run_models(parts: Parts, round: Round, draft: BlockModel, target: BlockModel) -> Blocks:
    """propose → verify, and the context that the round leaves, without a wait between them.

    Args:
        draft, target: the models of `parts` as this round runs them.
    """
    return verify_blocks(parts, round, propose(draft, round).tokens, target)


def verify_blocks(
    parts: Parts, round: Round, draft_tokens: torch.Tensor, target: BlockModel
) -> Blocks:
    """What follows the drafts ([bs, width - 1] int64) in `run_models`."""
    rows = verify(target, round, draft_tokens)
    commit_context(parts.draft.runner, round, rows.taps)
    return Blocks(round.rows, round.positions, draft_tokens, replace(rows, taps=None))


def accept_blocks(
    parts: Parts, blocks: Blocks, sampling: Sampling | None = None
) -> tuple[Accepted, LogitsProcessorOutput | None]:
    """accept: what the target chooses after each row against what was drafted; requests' state moves on.

    Args:
        sampling: how to draw; None for the likeliest tokens.

    Returns:
        What the round commits; log-probabilities and hidden states, if `sampling` asks for any.
    """
    sampler, drafts, ragged = parts.target.runner.sampler, blocks.draft_tokens, blocks.ragged
    tokens, output = choose(
        parts.vocabulary, sampler, blocks.target, blocks.positions, drafts, sampling, ragged
    )
    accepted = accept_round(tokens, drafts, blocks.rows, parts.state, ragged)
    if sampling is not None:
        sampling.note(accepted.tokens, accepted.lengths)
    return accepted, output
