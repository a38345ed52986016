"""Whether kernels do what the steps do that they stand for: looked at once, before rounds are captured.

It also has them compiled, for which nobody is to wait later.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import torch

from sglang_dflash.gpu import at_once
from sglang_dflash.round.opened import Round
from sglang_dflash.round.ragged import Ragged
from sglang_dflash.round.side_by_side import Drafted, SideBySide
from sglang_dflash.round.state import ENDS, RequestState

logger = logging.getLogger(__name__)

_LENGTHS = (5, 1, 9)  # of prompts
_FILLED_UP = 7  # rows


def use_kernels(inputs: SideBySide, width: int) -> None:
    """From now on, if they are right.

    Args:
        inputs: what passes read; it is overwritten.
        width: of the widest block.
    """
    same = False
    try:
        examples = []
        for kernels in (False, True):
            at_once.use(kernels)
            examples.append(list(_example(inputs, width)))
        same = all(map(torch.equal, *examples))
    except Exception:
        logger.warning("DFLASH cannot run kernels that stand for many small steps.", exc_info=True)
    at_once.use(same)
    if not same:
        logger.warning(
            "DFLASH launches small steps one by one, so rounds of many requests start later."
        )


def _example(inputs: SideBySide, width: int) -> Iterator[torch.Tensor]:
    """What is made of random blocks and prompts."""
    random, device = torch.Generator().manual_seed(0), inputs.requests.device
    prompt_rows = sum(_LENGTHS)
    room = (inputs.buffers.shape[1] - prompt_rows - _FILLED_UP) // width
    count = max(1, min(5, inputs.most - len(_LENGTHS), room))
    chances = torch.rand(count, width - 1, generator=random).cumprod(dim=1).to(device)
    ragged = Ragged.share(chances, max(count, count * width // 2))
    yield from (ragged.counts, ragged.begins, ragged.source)

    def numbers(*shape: int, below: int = 1000) -> torch.Tensor:
        return torch.randint(1, below, shape, generator=random).to(device)

    tokens = numbers(count, 2 * width)  # of which blocks are a part, as where graphs leave them
    owners = torch.randperm(count, generator=random).to(device)
    round = Round(
        *(owners, width, numbers(count), numbers(count).cpu(), tokens[:, 0]),
        *(numbers(count * width), numbers(count * width)),
        rope_deltas=None if inputs.rope is None else numbers(count),
    )
    whole = Drafted(round, tokens[:, 1:width])
    positions = numbers(prompt_rows)
    prompts = SimpleNamespace(
        batch_size=len(_LENGTHS),
        input_ids=numbers(prompt_rows),
        positions=positions,
        mrope_positions=positions.expand(3, -1),
        out_cache_loc=numbers(prompt_rows),
        req_pool_indices=numbers(len(_LENGTHS), below=inputs.padding_row + 1),
        seq_lens=numbers(len(_LENGTHS)),
        extend_seq_lens_cpu=list(_LENGTHS),
        extend_start_loc=torch.tensor([0, 5, 6], dtype=torch.int32).to(device),
    )
    size = count * width + prompt_rows + _FILLED_UP
    shared = replace(whole, ragged=ragged)
    for blocks, beside in ((None, prompts), (whole, prompts), (shared, prompts), (shared, None)):
        inputs.fill(size, blocks, beside)
        filled = (inputs.buffers[:, :size], inputs.requests, inputs.cache_lengths, inputs.ends)
        yield from (each.clone() for each in filled)

    for dtype in (torch.int32, torch.int64):  # of samplers, which have it from one place or another
        state, ends = RequestState(count, device), numbers(count, ENDS + 1).cpu()
        first = numbers(count).to(dtype)
        first[0] = ends[0, 0]
        state.start(owners, first, numbers(count), ends)
        yield from (state.lengths, state.bonus_tokens, state.ends, state.limits, state.ended)
