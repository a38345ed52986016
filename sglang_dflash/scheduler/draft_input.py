"""What SGLang's batch carries from one round to the next as `spec_info`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

from sglang_dflash.scheduler.reserve import reserve, slots_required

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


@dataclass
class DFlashDraftInput(SpecInput):
    """Only a note that there is a next round, and how many slots it may need.

    Bonus tokens and lengths stay in `RequestState`, by request, so nothing has to follow the batch
    when it is filtered or merged.

    Attributes:
        width: of the widest block that the next round may have.
        in_flight: tokens that rounds or a prefill whose result the host has not seen yet commit at most.
        new_seq_lens: [bs] int64, what the overlapped scheduler takes as the batch's lengths.
        choose_rounds: says of a batch how many rounds its next step has, and how many tokens those behind the first may
            run; None if it has one.
        rounds, further: as it said.
    """

    width: int
    in_flight: int = 0
    new_seq_lens: torch.Tensor | None = None
    choose_rounds: Callable[[ScheduleBatch], tuple[int, int]] | None = None
    rounds: int = 1
    further: int = 0

    # The overlapped scheduler waits on this event if there is one. There is none: the host never
    # needs the result of the round that was just launched.
    verify_done: None = None

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.DFLASH_DRAFT)

    @property
    def lookahead(self) -> int:
        """Tokens beyond those known to be committed that the next step may run."""
        return self.in_flight + self.width + self.further

    def get_spec_adjust_token_coefficient(self) -> tuple[int, int]:
        return 1, 1

    def filter_batch(self, new_indices: torch.Tensor, has_been_filtered: bool = False) -> None:
        """Nothing is kept by position."""

    def merge_batch(self, other: DFlashDraftInput) -> None:
        """Nothing is kept by position, and what is in flight of either is taken for all."""
        self.in_flight = max(self.in_flight, other.in_flight)

    def slots_required(self, reqs: Sequence[Req], page_size: int) -> int:
        """New slots that the next decode step takes from the allocator, in tokens."""
        return slots_required(reqs, page_size, self.lookahead)

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        """Called by the overlapped scheduler before it launches the next step."""
        if self.choose_rounds is not None:
            self.rounds, self.further = self.choose_rounds(batch)
        reserve(batch, self.lookahead)
