"""Penalties on the logits of blocks, and the tokens that they count, in a launch each."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

PRESENT, END = 1, 2  # marks of a token: it is in the output; it would end the request


class Counted(NamedTuple):
    """What was counted of requests with penalties, each in its place.

    Attributes:
        places: [rows + 1] int64, by row in `req_to_token`; -1 for a request without penalties.
        sums: [places, vocabulary] float32, the frequency penalty added up once for each time that a token came:
            sums, because a product would round otherwise than SGLang's.
        marks: [places, vocabulary] uint8, `PRESENT` and `END`.
        rates: [places, 3] float32, frequency, presence and repetition penalty.
        output: [places, 2] int32, tokens of the output, and the least that it must have.
    """

    places: torch.Tensor
    sums: torch.Tensor
    marks: torch.Tensor
    rates: torch.Tensor
    output: torch.Tensor


@triton.jit
def _penalize(
    logits_ptr,
    rows_ptr,
    drafts_ptr,
    places_ptr,
    sums_ptr,
    marks_ptr,
    rates_ptr,
    output_ptr,
    logits_stride,
    drafts_stride,
    vocabulary,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PRESENT: tl.constexpr,
    END: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    place = tl.load(places_ptr + tl.load(rows_ptr + request))
    if place >= 0:
        token = tl.program_id(1) * TILE + tl.arange(0, TILE)
        at = place * vocabulary + token
        mark = tl.load(marks_ptr + at, mask=token < vocabulary, other=0)
        present, end = (mark & PRESENT) != 0, (mark & END) != 0
        total = tl.load(sums_ptr + at, mask=present, other=0.0)
        frequency = tl.load(rates_ptr + place * 3)
        presence = tl.load(rates_ptr + place * 3 + 1)
        repetition = tl.load(rates_ptr + place * 3 + 2)
        missing = tl.load(output_ptr + place * 2 + 1) - tl.load(output_ptr + place * 2)
        row_ptr = logits_ptr + request * WIDTH * logits_stride + token
        for i in tl.static_range(WIDTH):
            if i > 0:
                drafted = token == tl.load(drafts_ptr + request * drafts_stride + (i - 1))
                total = tl.where(drafted, total + frequency, total)
                present = present | drafted
            withheld = end & (i < missing)
            changed = present | withheld
            x = tl.load(row_ptr + i * logits_stride, mask=changed, other=0.0)
            x += tl.where(withheld, float("-inf"), -total - tl.where(present, presence, 0.0))
            # As the release's compiled kernel divides.
            x = tl.where(present, tl.where(x < 0, x * repetition, x / repetition), x)
            tl.store(row_ptr + i * logits_stride, x, mask=changed)


def penalize(
    logits: torch.Tensor, rows: torch.Tensor, drafts: torch.Tensor, counted: Counted
) -> None:
    """Penalises each row of a block as if the drafts before it were in the output. Changes `logits` alone.

    Args:
        logits: [bs * width, vocabulary] float32 without NaN, elements of a row side by side.
        rows: [bs] int64, the requests' rows in `req_to_token`.
        drafts: [bs, width - 1] int64.
    """
    bs, vocabulary = len(rows), counted.marks.shape[1]
    tile = min(1024, triton.next_power_of_2(vocabulary))
    _penalize[(bs, triton.cdiv(vocabulary, tile))](
        logits,
        rows,
        drafts,
        *counted,
        logits.stride(0),
        drafts.stride(0),
        vocabulary,
        WIDTH=drafts.shape[1] + 1,
        TILE=tile,
        PRESENT=PRESENT,
        END=END,
        num_warps=4,
    )


def penalize_reference(
    logits: torch.Tensor, rows: torch.Tensor, drafts: torch.Tensor, counted: Counted
) -> None:
    """What `penalize` does."""
    width = drafts.shape[1] + 1
    for request, place in enumerate(counted.places[rows].tolist()):
        if place < 0:
            continue
        total, marks = counted.sums[place].clone(), counted.marks[place]
        present, end = (marks & PRESENT) != 0, (marks & END) != 0
        frequency, presence, repetition = counted.rates[place]
        produced, least = counted.output[place].tolist()
        for i in range(width):
            if i:
                total[drafts[request, i - 1]] += frequency
                present[drafts[request, i - 1]] = True
            x = logits[request * width + i]
            x += -total - torch.where(present, presence, 0.0)
            if produced + i < least:
                x[end] = float("-inf")
            scaling = torch.where(present, repetition, 1.0)
            x.copy_(torch.where(x < 0, x * scaling, x / scaling))


@triton.jit
def _count(
    rows_ptr,
    tokens_ptr,
    lengths_ptr,
    places_ptr,
    sums_ptr,
    marks_ptr,
    rates_ptr,
    output_ptr,
    tokens_stride,
    vocabulary,
    TILE: tl.constexpr,
    PRESENT: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    place = tl.load(places_ptr + tl.load(rows_ptr + request))
    if place >= 0:
        length = tl.load(lengths_ptr + request).to(tl.int32)
        frequency = tl.load(rates_ptr + place * 3)
        for first in range(0, length, TILE):
            i = first + tl.arange(0, TILE)
            token = tl.load(tokens_ptr + request * tokens_stride + i, mask=i < length, other=-1)
            at = place * vocabulary + token
            # The same token may come twice; all that is added to it is the same, so the order is nothing.
            tl.atomic_add(
                sums_ptr + at,
                tl.zeros([TILE], tl.float32) + frequency,
                mask=token >= 0,
                sem="relaxed",
            )
            mark = tl.load(marks_ptr + at, mask=token >= 0, other=0)
            tl.store(marks_ptr + at, mark | PRESENT, mask=token >= 0)
        tl.store(output_ptr + place * 2, tl.load(output_ptr + place * 2) + length)


def count(
    rows: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, counted: Counted
) -> None:
    """Adds tokens to the outputs of requests. Changes `counted`.

    Args:
        rows: [bs] int64, the requests' rows in `req_to_token`.
        tokens: [bs, most] int64; what NaN chose, -1, is in no output.
        lengths: [bs] int64, how many of them.
    """
    _count[(len(rows),)](
        rows,
        tokens,
        lengths,
        *counted,
        tokens.stride(0),
        counted.marks.shape[1],
        TILE=32,
        PRESENT=PRESENT,
        num_warps=1,
    )


def count_reference(
    rows: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, counted: Counted
) -> None:
    """What `count` does."""
    places = counted.places[rows].tolist()
    for place, row, length in zip(places, tokens, lengths.tolist(), strict=True):
        if place < 0:
            continue
        new = row[:length][row[:length] >= 0]
        counted.sums[place].scatter_add_(0, new, counted.rates[place, 0].expand(len(new)))
        counted.marks[place, new] |= PRESENT
        counted.output[place, 0] += length
