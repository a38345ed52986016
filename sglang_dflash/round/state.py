"""What target and draft model know of a request between two rounds, kept where they run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from sglang_dflash.gpu import at_once
from sglang_dflash.gpu.kernels.start_requests import start_requests

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

ENDS = 4  # tokens of which each ends a request; of more only the host knows
_NO_TOKEN, _NO_LIMIT = -100, 1 << 62


class RequestState:
    """Bonus token and committed length of every request, by its row in `req_to_token`.

    The host never has to know either to launch the next round. A request's row is written by its
    prefill and by each of its rounds, all on one stream, so a round that was launched for a request
    that has finished meanwhile cannot disturb the next owner of the row.

    Attributes:
        bonus_tokens: [rows + 1] int64; 0 where NaN chose (`not_finite.py`), for a round in vain.
        lengths: [rows + 1] int64.
        ends: [rows + 1, ENDS] int64, tokens that end a request.
        limits: [rows + 1] int64, lengths at which it ends.
        ended: [rows + 1] int32, 1 where it has, as far as these tell. The host hears of it a round late, and decides;
            here it only says that more rows would be in vain.
        rope_deltas: [rows + 1] int64, by how much a target with M-RoPE rotates text behind a request's pictures
            otherwise than by its positions; None for other targets.
        padding_row: row of the requests that only pad a batch; its length stays 0, and it has ended.
    """

    def __init__(self, rows: int, device: torch.device | str, mrope: bool = False):
        self.bonus_tokens = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.ends = torch.full((rows + 1, ENDS), _NO_TOKEN, dtype=torch.int64, device=device)
        self.limits = torch.full((rows + 1,), _NO_LIMIT, dtype=torch.int64, device=device)
        self.ended = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self.rope_deltas = torch.zeros_like(self.lengths) if mrope else None
        self.padding_row = rows
        self.ended[rows] = 1  # what pads a batch has no drafts that count

    @property
    def moved_by_rounds(self) -> tuple[torch.Tensor | int, ...]:
        """What `accept_and_advance` reads and writes, in its order."""
        state = (self.lengths, self.bonus_tokens, self.ends, self.limits, self.ended)
        return (*state, self.padding_row)

    def start(
        self,
        rows: torch.Tensor,
        bonus_tokens: torch.Tensor,
        lengths: torch.Tensor,
        ends: torch.Tensor | None = None,
        rope_deltas: torch.Tensor | None = None,
    ) -> None:
        """After a prefill: [bs] int64 each; `lengths` are those of the prompts.

        Args:
            ends: [bs, ENDS + 1], as `ends_of` gives them; None if nothing is known.
            rope_deltas: [bs] int64; None for a target without M-RoPE.
        """
        if rope_deltas is not None:
            self.rope_deltas[rows] = rope_deltas.to(rows.device, non_blocking=True)
        if ends is not None:
            ends = ends.to(rows.device, non_blocking=True)
            if at_once.used():
                start_requests(rows, bonus_tokens, lengths, ends, self.moved_by_rounds[:-1])
                return
        self.bonus_tokens[rows] = bonus_tokens.to(torch.int64).clamp(min=0)
        self.lengths[rows] = lengths
        self.ended.index_fill_(0, rows, 0)  # `[rows] = 0` would wait for the device
        if ends is not None:
            tokens, limits = ends.split([ENDS, 1], dim=1)
            self.ends[rows], self.limits[rows] = tokens, limits[:, 0]
            self.ended[rows] = (tokens == bonus_tokens[:, None]).any(dim=1).to(torch.int32)

    def rope_deltas_of(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Of the requests at `rows` ([bs] int64), if there are any."""
        return None if self.rope_deltas is None else self.rope_deltas[rows]

    def advance(
        self,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        accept_lengths: torch.Tensor,
        bonus_tokens: torch.Tensor,
    ) -> None:
        """After a round over `rows`: [bs] int64 each, and its tokens, [bs, width] int64."""
        self.bonus_tokens[rows] = bonus_tokens.clamp(min=0)
        lengths = torch.where(rows < self.padding_row, self.lengths[rows] + accept_lengths, 0)
        self.lengths[rows] = lengths
        committed = torch.arange(tokens.shape[1], device=rows.device) < accept_lengths[:, None]
        ends = (tokens[:, :, None] == self.ends[rows][:, None]).any(dim=2)
        over = (ends & committed).any(dim=1) | (lengths >= self.limits[rows])
        self.ended[rows] |= over.to(torch.int32)


def end_tokens(req: Req) -> frozenset[int]:
    """Tokens of which each ends a request; looked up once, since tokenizers take microseconds to say theirs."""
    if (ends := getattr(req, "end_tokens", None)) is None:
        tokenizer = req.tokenizer
        ends = {*(req.sampling_params.stop_token_ids or ()), *(req.eos_token_ids or ())}
        if tokenizer is not None:
            ends |= {tokenizer.eos_token_id, *(tokenizer.additional_stop_token_ids or ())}
        req.end_tokens = ends = frozenset(ends - {None})
    return ends


def ends_of(reqs: Iterable[Req]) -> torch.Tensor:
    """What ends requests, for `RequestState.start`: [requests, ENDS + 1] int64 on the host, the limit last."""
    found = []
    for req in reqs:
        params = req.sampling_params
        tokens = [] if params.ignore_eos else sorted(end_tokens(req))[:ENDS]
        # The prompt's last row gives the first token, and the last token needs no row.
        limit = len(req.origin_input_ids) + params.max_new_tokens - 1
        found.append([*tokens, *[_NO_TOKEN] * (ENDS - len(tokens)), limit])
    ends = torch.tensor(found, dtype=torch.int64)
    return ends.pin_memory() if torch.cuda.is_available() else ends
