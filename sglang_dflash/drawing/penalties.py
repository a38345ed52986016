"""Penalties, and minimums of new tokens, for each row of a block as if the tokens drafted before it were committed.

SGLang's penalizers take one token a request and step, which is not how a block is committed. What was put out is
counted here, on the device and on the stream of the rounds, so that a round can be launched before the host has seen
the one before it. Penalties cover the output alone, as SGLang's do.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_dflash.device_waits import to_device
from sglang_dflash.gpu.kernels.penalties import (
    END,
    Counted,
    count,
    count_reference,
    penalize,
    penalize_reference,
)

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

_FEWEST = 8


def is_penalized(req: Req) -> bool:
    """Whether a request has a penalty, or a minimum of new tokens that it is not known to have reached."""
    params = req.sampling_params
    return (
        params.frequency_penalty != 0
        or params.presence_penalty != 0
        or params.repetition_penalty != 1
        or params.min_new_tokens > len(req.output_ids)
    )


@dataclass(frozen=True)
class Penalizer:
    """Stands where a `SamplingBatchInfo` has SGLang's penalizers, for the rows of some requests' blocks.

    Attributes:
        rows: [bs] int64, the requests' rows in `req_to_token`.
        drafts: [bs, width - 1] int64.
    """

    counted: Counted
    rows: torch.Tensor
    drafts: torch.Tensor
    is_required = True

    def apply(self, logits: torch.Tensor) -> None:
        """Penalises [bs * width, vocabulary] float32 in place."""
        penalised = penalize if logits.is_cuda else penalize_reference
        penalised(logits, self.rows, self.drafts, self.counted)


class Penalties:
    """The tokens that penalised requests have put out, by row in `req_to_token`.

    A prefill starts a request anew, whatever was counted in its row before; its first token and those that its
    rounds commit are added. A round in vain counts for nobody: a row that was given up has no place.

    A place is five bytes for each token of the vocabulary, 0.76 MB with one of 152,000. There are none before a
    penalised request comes, and then as many as such requests ever ran at once, in powers of two: what has finished
    or was retracted leaves its place to the next.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device | str):
        self.vocabulary, self.device = vocabulary, torch.device(device)
        self.counted = Counted(
            places=torch.full((rows + 1,), -1, dtype=torch.int64, device=device),
            sums=torch.zeros(0, vocabulary, device=device),
            marks=torch.zeros(0, vocabulary, dtype=torch.uint8, device=device),
            rates=torch.zeros(0, 3, device=device),
            output=torch.zeros(0, 2, dtype=torch.int32, device=device),
        )
        self._owners: dict[int, tuple[Req, int]] = {}  # by row, with its place
        self._free: list[int] = []

    def start(self, reqs: Sequence[Req], rows: torch.Tensor) -> Penalizer | None:
        """Before a prefill, or one of its chunks: nothing is counted but what a retracted request has put out.

        Args:
            rows: [bs] int64.

        Returns:
            What penalises its next tokens, None if nobody asks for it.
        """
        penalised = [req for req in reqs if is_penalized(req)]
        if not penalised and not self._owners:
            return None
        given_up = self._give_up({req.req_pool_idx for req in reqs})
        self._grow(len(penalised))
        places = dict.fromkeys(given_up, -1)
        for req in penalised:
            places[req.req_pool_idx] = place = self._free.pop()
            self._owners[req.req_pool_idx] = req, place
        if places:
            at, values = self._to_device([list(places), list(places.values())])
            self.counted.places[at] = values
        if not penalised:
            return None
        self._clear(penalised, [places[req.req_pool_idx] for req in penalised])
        return self.of(rows, torch.empty(len(rows), 0, dtype=torch.int64, device=self.device))

    def count(self, rows: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        """Adds to the output of those requests that are penalised.

        Args:
            rows: [bs] int64.
            tokens: [bs, most] int64.
            lengths: [bs] int64, how many of them.
        """
        counted = count if tokens.is_cuda else count_reference
        counted(rows, tokens, lengths, self.counted)

    def of(self, rows: torch.Tensor, drafts: torch.Tensor) -> Penalizer:
        """What penalises the blocks of the requests at `rows` ([bs] int64, [bs, width - 1] int64)."""
        return Penalizer(self.counted, rows, drafts)

    def _give_up(self, restarted: set[int | None]) -> list[int]:
        """Frees the places of rows that get a new owner, or have none that runs; those rows."""
        rows = [
            row
            for row, (req, _) in self._owners.items()
            if row in restarted or req.finished() or req.req_pool_idx != row
        ]
        self._free += [self._owners.pop(row)[1] for row in rows]
        return rows

    def _grow(self, wanted: int) -> None:
        """Makes at least `wanted` places free."""
        counted, old = self.counted, len(self.counted.marks)
        if wanted <= len(self._free):
            return
        size = max(_FEWEST, old)
        while size - old + len(self._free) < wanted:
            size *= 2
        new = [torch.cat([part, part.new_empty(size - old, part.shape[1])]) for part in counted[1:]]
        self.counted = Counted(counted.places, *new)
        self._free += range(old, size)
        logger.info(
            "DFLASH counts the tokens of up to %d requests with penalties, in %d MiB",
            size,
            sum(part.nbytes for part in new) >> 20,
        )

    def _clear(self, reqs: list[Req], places: list[int]) -> None:
        """Begins to count in places that requests were given."""
        params = [req.sampling_params for req in reqs]
        at = self._to_device(places)
        _, sums, marks, rates, output = self.counted
        sums.index_fill_(0, at, 0)
        marks.index_fill_(0, at, 0)
        rates[at] = self._to_device(
            [[p.frequency_penalty, p.presence_penalty, p.repetition_penalty] for p in params],
            torch.float32,
        )
        output[at] = self._to_device([[0, p.min_new_tokens] for p in params], torch.int32)
        ends = [
            place * self.vocabulary + token
            for place, req in zip(places, reqs, strict=True)
            for token in _stop_ids(req)
            if req.sampling_params.min_new_tokens and 0 <= token < self.vocabulary
        ]
        if ends:
            marks.view(-1).index_fill_(0, self._to_device(ends), END)
        if retracted := [req for req in reqs if req.output_ids]:
            self._recount(retracted)

    def _recount(self, reqs: list[Req]) -> None:
        """Adds what requests had put out before they were retracted."""
        lengths = [len(req.output_ids) for req in reqs]
        most = max(lengths)
        rows, lengths = self._to_device([[req.req_pool_idx for req in reqs], lengths])
        padded = [[*req.output_ids, *[-1] * (most - len(req.output_ids))] for req in reqs]
        self.count(rows, self._to_device(padded), lengths)

    def _to_device(self, values: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Without a wait for what runs there."""
        return to_device(torch.tensor(values, dtype=dtype), self.device)


def _stop_ids(req: Req) -> set[int]:
    """Tokens that end a request, as SGLang's penalizer takes them."""
    ids = set(req.sampling_params.stop_token_ids or ())
    if req.tokenizer is not None:
        ids |= set(req.tokenizer.additional_stop_token_ids or ())
        ids.add(req.tokenizer.eos_token_id)
    return ids - {None}
