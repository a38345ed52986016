"""A target that answers NaN: the request fails, the others go on, and nothing of it stays behind.

NaN travels with a request: what its tokens become is NaN, too, and so are the K/V under its slots.
Where a token is chosen, NaN gives `NOT_FINITE` instead; what chooses the next one on the device takes
token 0 for it, for a round in vain; and the host ends the request when it sees it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_dflash.serving.metrics import metrics

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

NOT_FINITE = -1

# Rounds before which the padding slots are cleaned once a request has failed: the one that the host
# launches next, and one more in case a round in vain was still to run.
_CLEANINGS = 2


def mark(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """`tokens`, and `NOT_FINITE` where one was chosen by NaN.

    Args:
        tokens: [n] int64.
        logits: [n], the largest of each row, which is NaN if one is.
    """
    return torch.where(logits.isnan(), NOT_FINITE, tokens)


def take_out(logits: torch.Tensor) -> torch.Tensor:
    """Rows with NaN, [n] bool; their NaN become 0, because a sampler cannot draw from them.

    Args:
        logits: [n, vocabulary], changed in place.
    """
    rows = logits.isnan().any(dim=-1)
    logits.nan_to_num_(nan=0.0, posinf=float("inf"), neginf=float("-inf"))
    return rows


def end_of(req: Req) -> int:
    """Makes a request fail at the token that NaN chose; gives the token to append in its place."""
    message = (
        f"The target's logits are NaN after {req.seqlen} tokens of this request, so it has no next token: the "
        "model's weights are damaged, or overflow with this input; try another --dtype."
    )
    if req.to_finish is None:
        req.to_finish = FINISH_ABORT(message, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)
    logger.error("Request %s failed: %s", req.rid, message)
    req.not_finite = True
    padding.soil()
    metrics.rounds.not_finite()
    return min(req.eos_token_ids or {0})


def end_marked(reqs: Sequence[Req], tokens: list[int]) -> list[int]:
    """First tokens of prefilled requests, those that NaN chose replaced; see `end_of`."""
    return [
        end_of(req) if token == NOT_FINITE and req.is_chunked <= 0 else max(token, 0)
        for req, token in zip(reqs, tokens, strict=True)
    ]


class PaddingSlots:
    """The slots that SGLang keeps for padding, into which rows without a slot of their own write."""

    def __init__(self) -> None:
        self._soiled = 0
        self._pools: list[tuple[KVCache, int]] = []

    def watch(self, *runners: ModelRunner) -> None:
        """Takes the pools of target and draft model."""
        self._pools = [(runner.token_to_kv_pool, runner.page_size) for runner in runners]

    def soil(self) -> None:
        """Rows of a request that failed may have written NaN there."""
        self._soiled = _CLEANINGS

    def clean(self) -> None:
        """Before a round: NaN times a weight of zero is NaN, so masked keys must not have it."""
        if not self._soiled:
            return
        self._soiled -= 1
        for pool, page_size in self._pools:
            for layer in range(pool.start_layer, pool.start_layer + pool.layer_num):
                pool.get_key_buffer(layer)[:page_size].zero_()
                pool.get_value_buffer(layer)[:page_size].zero_()


padding = PaddingSlots()
