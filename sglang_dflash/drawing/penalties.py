"""Penalties of each row of a block, as if the tokens drafted before it were committed.

SGLang's penalizers take one token a request and step, which is not how a block is committed, so the
sums are formed here from a request's output. They cover the output alone, as SGLang's do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def is_penalized(req: Req) -> bool:
    """Whether a request has a penalty, or a minimum of new tokens that it has not reached."""
    params = req.sampling_params
    return (
        params.frequency_penalty != 0
        or params.presence_penalty != 0
        or params.repetition_penalty != 1
        or params.min_new_tokens > len(req.output_ids)
    )


def row_penalties(
    reqs: list[Req], drafts: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is added to the logits of each row, and what then scales them.

    Args:
        reqs: bs requests, whose `output_ids` are all that was committed.
        drafts: [bs, width - 1] int64.

    Returns:
        Additive and scaling penalties, [bs * width, vocab_size] float32 each.
    """
    bs, width, device = len(reqs), drafts.shape[1] + 1, drafts.device
    frequency, presence, repetition = (
        torch.tensor([[getattr(r.sampling_params, name)] for r in reqs], device=device)
        .float()
        .expand(bs, width)
        for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")
    )
    # One column more than the vocabulary takes what only pads outputs to the same length.
    outputs = _padded([req.output_ids for req in reqs], vocab_size).to(device)
    n = outputs.shape[1]
    counted = torch.zeros(bs, vocab_size + 1, device=device)
    present, scale = counted.clone(), torch.ones_like(counted)
    counted.scatter_add_(1, outputs, frequency[:, :1].expand(bs, n))
    present.scatter_(1, outputs, presence[:, :1].expand(bs, n))
    scale.scatter_(1, outputs, repetition[:, :1].expand(bs, n))
    ends, open_rows = _withheld_ends(reqs, width, vocab_size, device)

    additive = torch.empty(bs, width, vocab_size, device=device)
    scaling = torch.empty_like(additive)
    for i in range(width):
        if i:
            token, column = drafts[:, i - 1 : i], slice(i, i + 1)
            counted.scatter_add_(1, token, frequency[:, column])
            present.scatter_(1, token, presence[:, column])
            scale.scatter_(1, token, repetition[:, column])
        additive[:, i] = -counted[:, :vocab_size] - present[:, :vocab_size]
        additive[:, i].masked_fill_(ends & open_rows[:, i : i + 1], float("-inf"))
        scaling[:, i] = scale[:, :vocab_size]
    return additive.flatten(0, 1), scaling.flatten(0, 1)


def _withheld_ends(
    reqs: list[Req], width: int, vocab_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that end each request [bs, vocab_size], and rows that may not end it [bs, width]."""
    ends = _padded([_stop_ids(req) for req in reqs], vocab_size)
    is_end = torch.zeros(len(reqs), vocab_size + 1, dtype=torch.bool).scatter_(1, ends, True)
    missing = [req.sampling_params.min_new_tokens - len(req.output_ids) for req in reqs]
    rows = torch.arange(width) < torch.tensor(missing)[:, None]
    return is_end[:, :vocab_size].to(device), rows.to(device)


def _stop_ids(req: Req) -> list[int]:
    ids = set(req.sampling_params.stop_token_ids or ())
    if req.tokenizer is not None:
        ids |= set(req.tokenizer.additional_stop_token_ids or ())
        ids.add(req.tokenizer.eos_token_id)
    return sorted(ids)


def _padded(rows: list[list[int]], filler: int) -> torch.Tensor:
    """[len(rows), longest] int64, shorter rows filled up."""
    return torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row, dtype=torch.int64) for row in rows],
        batch_first=True,
        padding_value=filler,
    )
