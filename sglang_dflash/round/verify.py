"""Stage 2: [bonus, drafts] → the target's choice and its hidden states for every row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from sglang_dflash.drafter.vocabulary import BorrowedVocabulary
from sglang_dflash.drawing.not_finite import mark
from sglang_dflash.drawing.ranks import agreed
from sglang_dflash.drawing.sampling import Sampling
from sglang_dflash.round.block_model import BlockModel
from sglang_dflash.round.opened import Round
from sglang_dflash.round.target import TargetRows


@dataclass(frozen=True)
class Verified:
    """What the target says about a block.

    Attributes:
        tokens: [bs, width] int64, the target's choice after each row.
        taps: [bs * width, taps * hidden], outputs of the tapped layers side by side.
        output: log-probabilities [bs, width] and final hidden states [bs * width, hidden] of the rows, if
            a request asks for more than the likeliest token.
    """

    tokens: torch.Tensor
    taps: torch.Tensor
    output: LogitsProcessorOutput | None = None


def verify(
    target: BlockModel,
    vocabulary: BorrowedVocabulary,
    round: Round,
    draft_tokens: torch.Tensor,
    sampling: Sampling | None = None,
) -> Verified:
    """Runs the target over the blocks, causally, and chooses a token after every row.

    Args:
        draft_tokens: [bs, width - 1] int64.
        sampling: how to draw; None for the likeliest tokens.

    Writes the target's K/V of every row to the round's slots.
    """
    tokens = torch.cat([round.bonus_tokens[:, None], draft_tokens], dim=1).flatten()
    rows = target.run(round, tokens, CaptureHiddenMode.FULL)
    if sampling is None:
        return Verified(likeliest(vocabulary, rows).view(-1, round.width), rows.taps)
    drawn, output = sampling.draw(
        target.runner.sampler, rows.logits, round.positions, round.width, draft_tokens
    )
    if sampling.return_hidden_states:
        output.hidden_states = rows.hidden_states
    return Verified(agreed(drawn), rows.taps, output)


def likeliest(vocabulary: BorrowedVocabulary, rows: TargetRows) -> torch.Tensor:
    """The likeliest token after each row, [rows] int64, `NOT_FINITE` where NaN is.

    Its logits, the largest tensor of a round, are neither converted to float32 nor, under tensor
    parallelism, gathered.
    """
    logits, tokens = vocabulary.likeliest(rows.hidden_states)
    return mark(tokens, logits)
