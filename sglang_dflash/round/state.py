"""What target and draft model know of a request between two rounds, kept where they run."""

from __future__ import annotations

import torch


class RequestState:
    """Bonus token and committed length of every request, by its row in `req_to_token`.

    The host never has to know either to launch the next round. A request's row is written by its
    prefill and by each of its rounds, all on one stream, so a round that was launched for a request
    that has finished meanwhile cannot disturb the next owner of the row.

    Attributes:
        bonus_tokens: [rows + 1] int64; 0 where NaN chose (`not_finite.py`), for a round in vain.
        lengths: [rows + 1] int64.
        padding_row: row of the requests that only pad a batch; its length stays 0.
    """

    def __init__(self, rows: int, device: torch.device | str):
        self.bonus_tokens = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.padding_row = rows

    def start(self, rows: torch.Tensor, bonus_tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        """After a prefill: [bs] int64 each; `lengths` are those of the prompts."""
        self.bonus_tokens[rows] = bonus_tokens.to(torch.int64).clamp(min=0)
        self.lengths[rows] = lengths

    def advance(
        self, rows: torch.Tensor, accept_lengths: torch.Tensor, bonus_tokens: torch.Tensor
    ) -> None:
        """After a round over `rows`: [bs] int64 each."""
        self.bonus_tokens[rows] = bonus_tokens.clamp(min=0)
        self.lengths[rows] = torch.where(
            rows < self.padding_row, self.lengths[rows] + accept_lengths, 0
        )
