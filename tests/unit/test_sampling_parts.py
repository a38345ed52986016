"""Log-probabilities that are made a few rows at a time belong to their rows."""

from __future__ import annotations

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_dflash.drawing.sampling import _append


def part(first: int, rows: int, top: bool) -> LogitsProcessorOutput:
    ids = torch.arange(first, first + rows)
    return LogitsProcessorOutput(
        next_token_logits=None,
        next_token_logprobs=-ids.float(),
        next_token_top_logprobs_val=[-row.float()[None] for row in ids] if top else None,
        next_token_top_logprobs_idx=[row[None] for row in ids] if top else None,
    )


def test_parts_that_ask_for_different_things() -> None:
    """Neither the first nor the last part wants top tokens; those of the second stay its own."""
    whole = LogitsProcessorOutput(next_token_logits=None)
    for first, rows, top in ((0, 4, False), (4, 2, True), (6, 2, False)):
        _append(whole, part(first, rows, top), rows)
    assert whole.next_token_logprobs.tolist() == [0, -1, -2, -3, -4, -5, -6, -7]
    ids = [list(map(int, row)) for row in whole.next_token_top_logprobs_idx]
    assert ids == [[], [], [], [], [4], [5], [], []]
    assert len(whole.next_token_token_ids_logprobs_val) == 8
