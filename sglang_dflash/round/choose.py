"""What the target says after each row of a block: its likeliest token, or a draw."""

from __future__ import annotations

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler

from sglang_dflash.drafter.vocabulary import BorrowedVocabulary
from sglang_dflash.drawing.not_finite import mark
from sglang_dflash.drawing.ranks import agreed
from sglang_dflash.drawing.sampling import ROWS_AT_ONCE, Sampling, rows_of
from sglang_dflash.gpu.kernels.argmax import row_max
from sglang_dflash.round.ragged import Ragged
from sglang_dflash.round.target import TargetRows

_ALL = slice(None)


def likeliest(vocabulary: BorrowedVocabulary, hidden_states: torch.Tensor) -> torch.Tensor:
    """The likeliest token after each row ([rows, hidden] → [rows] int64), `NOT_FINITE` where NaN is.

    Its logits, the largest tensor of a round, are neither converted to float32 nor, under tensor
    parallelism, gathered.
    """
    logits, tokens = vocabulary.likeliest(hidden_states)
    return mark(tokens, logits)


def likeliest_of(
    vocabulary: BorrowedVocabulary, rows: TargetRows, at: slice | torch.Tensor = _ALL
) -> torch.Tensor:
    """`likeliest` after some of a pass's rows, whose requests may have adapters on the head."""
    if rows.adapted is None:
        return likeliest(vocabulary, rows.hidden_states[at])
    wanted = torch.arange(len(rows.hidden_states), device=rows.hidden_states.device)[at]
    found = []
    for part in wanted.split(ROWS_AT_ONCE):
        logits, tokens = row_max(rows.logits(part).next_token_logits)
        found.append(mark(tokens, logits))
    return torch.cat(found)


def choose(
    vocabulary: BorrowedVocabulary,
    sampler: Sampler,
    rows: TargetRows,
    positions: torch.Tensor,
    draft_tokens: torch.Tensor,
    sampling: Sampling | None,
    ragged: Ragged | None = None,
) -> tuple[torch.Tensor, LogitsProcessorOutput | None]:
    """A token after every row of the blocks; after one that was not verified, any.

    Args:
        positions: [bs * width] int64.
        draft_tokens: [bs, width - 1] int64.
        sampling: how to draw; None for the likeliest tokens.
        ragged: which rows `rows` are; None for all.

    Returns:
        [bs, width] int64, and log-probabilities [bs, width] and final hidden states [bs * width, hidden]
        of the rows, if a request asks for any.
    """
    bs, width = draft_tokens.shape[0], draft_tokens.shape[1] + 1
    if sampling is None:
        tokens = likeliest_of(vocabulary, rows)
        return tokens.view(bs, width) if ragged is None else ragged.spread(tokens), None
    if ragged is not None and sampling.alike:
        source, counts = ragged.source, ragged.counts
        drawn = sampling.draw_rows(sampler, rows.logits, positions, source, counts, draft_tokens)
        drawn = agreed(drawn)
        return ragged.spread(drawn), LogitsProcessorOutput(next_token_logits=None)
    if ragged is not None:
        rows = rows.at(ragged.nearest)
    drawn, output = sampling.draw(sampler, rows.logits, positions, width, draft_tokens)
    if sampling.return_hidden_states:
        output.hidden_states = rows.hidden_states
    drawn = agreed(drawn)
    if len(sampling.drawing) == bs:
        return drawn, output
    # Who takes the likeliest token does not pay for what the others ask.
    others = sorted(set(range(bs)).difference(sampling.drawing))
    tokens = draft_tokens.new_empty(bs * width)
    tokens[rows_of(sampling.drawing, width, tokens.device)] = drawn.flatten()
    at = rows_of(others, width, tokens.device)
    tokens[at] = likeliest_of(vocabulary, rows, at)
    return tokens.view(bs, width), output
