"""Negative controls: faults that losslessness must not survive, put into a server on purpose.

Each replaces one function of the process that runs the models. Nothing in the project imports this
module but `faulty_server`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

SHARPER = 1.25  # the biased sampler draws as if the temperature were divided by this


def lenient(target_tokens: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
    """The target's choices, as a rule sees them that forgives the first wrong draft of a block.

    Args:
        target_tokens: [bs, width] int64.
        draft_tokens: [bs, width - 1] int64.

    Returns:
        [bs, width] int64: at the first mismatch the draft instead of the target's choice.
    """
    drafts = torch.cat([draft_tokens, target_tokens[:, -1:]], dim=1)  # the last row has no draft
    wrong = (drafts != target_tokens).to(torch.int64)
    first = (wrong.cumsum(dim=1) == 1) & wrong.bool()
    return torch.where(first, drafts, target_tokens)


def sharpened(probabilities: torch.Tensor) -> torch.Tensor:
    """[bs, vocabulary] → the same shape, from a distribution that is a little too sharp."""
    sharper = probabilities.pow(SHARPER)
    return sharper / sharper.sum(dim=-1, keepdim=True)


def break_accept() -> None:
    """Commits the first wrong draft of each block as if the target had chosen it."""
    from sglang_dflash.round import accept as stage

    right, fused = stage.accept, stage.accept_and_advance

    def accept(target_tokens: torch.Tensor, draft_tokens: torch.Tensor, *rest: Any) -> Any:
        return right(lenient(target_tokens, draft_tokens), draft_tokens, *rest)

    def accept_and_advance(target_tokens: torch.Tensor, draft_tokens: torch.Tensor, *rest) -> Any:
        return fused(lenient(target_tokens, draft_tokens), draft_tokens, *rest)

    stage.accept, stage.accept_and_advance = accept, accept_and_advance


def bias_sampler() -> None:
    """Draws tokens from distributions that are too sharp; greedy decoding stays right."""
    from sglang.srt.layers.sampler import Sampler

    right = Sampler._sample_from_probs

    def _sample_from_probs(self: Sampler, probs: torch.Tensor, *rest: Any, **more: Any) -> Any:
        return right(self, sharpened(probs), *rest, **more)

    Sampler._sample_from_probs = _sample_from_probs


FAULTS: dict[str, Callable[[], None]] = {"accept": break_accept, "sampler": bias_sampler}


def inject(name: str) -> None:
    """Puts the fault into this process, and says so."""
    FAULTS[name]()
    logger.warning(
        "THIS SERVER IS BROKEN ON PURPOSE (fault: %s). It is the negative control of "
        "sglang_dflash.losslessness: do not use its answers.",
        name,
    )
