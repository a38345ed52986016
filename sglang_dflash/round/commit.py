"""Stage 4: accepted rows become context of the draft model; the rest of the round rolls back.

What requests take of a round is the scheduler's to say (`scheduler/results.py`).
"""

from __future__ import annotations

import torch
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.drafter.context_kv import write_context
from sglang_dflash.round.opened import Round


def commit_context(draft: ModelRunner, round: Round, taps: torch.Tensor) -> None:
    """Turns the verified rows into the draft model's context.

    All rows are written, rejected ones too: the shape is then known before the result is, and what
    lies beyond the committed length is scratch that the next round's block overwrites.

    Args:
        taps: [bs * width, taps * hidden], outputs of the tapped layers side by side.
    """
    write_context(draft, taps, round.positions, round.slots)
