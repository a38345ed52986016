"""Blocks and prompts side by side, in one launch; stands for `SideBySide.fill`'s steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_TILE = 256


class BlockRows(NamedTuple):
    """Blocks of a round.

    Attributes:
        tokens: [bs] int64, bonus tokens; may lie among others.
        drafts: [bs, width - 1] int64; so may its rows.
        positions, slots: [bs * width] int64.
        rope: likewise; None for a target without M-RoPE.
        owners: [bs] int64, rows of `req_to_token`.
        starts: [bs] int64, committed lengths.
        width: of a block.
        rows: how many rows of all blocks are in the pass.
        shared: source, counts and begins, as in `Ragged`; None for all rows.
    """

    tokens: torch.Tensor
    drafts: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rope: torch.Tensor | None
    owners: torch.Tensor
    starts: torch.Tensor
    width: int
    rows: int
    shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None


class PromptRows(NamedTuple):
    """Prompts, or chunks of them.

    Attributes:
        tokens, positions, slots: [rows] int64.
        owners: [requests] int64, rows of `req_to_token`.
        lengths: [requests] int64, with what was run before.
        begins: [requests] int, where the rows of each begin.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    owners: torch.Tensor
    lengths: torch.Tensor
    begins: torch.Tensor


# Tensors are slices of others, here and there; nothing may be compiled because of where they begin.
@triton.jit(
    do_not_specialize=[
        "rows_stride",
        "bonus_stride",
        "drafts_stride",
        "width",
        "blocks",
        "block_rows",
        "prompts",
        "prompt_rows",
        "size",
        "most",
        "nobody",
    ],
    do_not_specialize_on_alignment=[
        "bonus_ptr",
        "drafts_ptr",
        "positions_ptr",
        "slots_ptr",
        "rope_ptr",
        "owners_ptr",
        "start_ptr",
        "source_ptr",
        "counts_ptr",
        "begins_ptr",
        "prompt_tokens_ptr",
        "prompt_positions_ptr",
        "prompt_slots_ptr",
        "prompt_owners_ptr",
        "prompt_lengths_ptr",
        "prompt_begins_ptr",
    ],
)
def _fill(
    rows_ptr,
    requests_ptr,
    lengths_ptr,
    ends_ptr,
    bonus_ptr,
    drafts_ptr,
    positions_ptr,
    slots_ptr,
    rope_ptr,
    owners_ptr,
    start_ptr,
    source_ptr,
    counts_ptr,
    begins_ptr,
    prompt_tokens_ptr,
    prompt_positions_ptr,
    prompt_slots_ptr,
    prompt_owners_ptr,
    prompt_lengths_ptr,
    prompt_begins_ptr,
    rows_stride,
    bonus_stride,
    drafts_stride,
    width,
    blocks,
    block_rows,
    prompts,
    prompt_rows,
    size,
    most,
    nobody,
    RAGGED: tl.constexpr,
    MROPE: tl.constexpr,
    TILE: tl.constexpr,
):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    of_block, end = i < block_rows, block_rows + prompt_rows
    source = i.to(tl.int64)
    if RAGGED:
        source = tl.load(source_ptr + i, mask=of_block, other=0)
    request = source // width
    draft = source - request * width - 1
    bonus = tl.load(bonus_ptr + request * bonus_stride, mask=of_block & (draft < 0), other=0)
    drafted = of_block & (draft >= 0)
    token = tl.load(drafts_ptr + request * drafts_stride + draft, mask=drafted, other=0)
    j = i - block_rows
    of_prompt = (j >= 0) & (i < end)
    token += bonus + tl.load(prompt_tokens_ptr + j, mask=of_prompt, other=0)
    here = tl.load(prompt_positions_ptr + j, mask=of_prompt, other=0)
    position = here + tl.load(positions_ptr + source, mask=of_block, other=0)
    slot = tl.load(slots_ptr + source, mask=of_block, other=0)
    slot += tl.load(prompt_slots_ptr + j, mask=of_prompt, other=0)
    # What is of neither has 0 in all.
    tl.store(rows_ptr + i, token, mask=i < size)
    tl.store(rows_ptr + rows_stride + i, position, mask=i < size)
    tl.store(rows_ptr + 2 * rows_stride + i, slot, mask=i < size)
    if MROPE:
        # Pictures do not come here, and text of prompts has its positions.
        rope = here + tl.load(rope_ptr + source, mask=of_block, other=0)
        tl.store(rows_ptr + 3 * rows_stride + i, rope, mask=i < size)

    decodes, last = i < blocks, blocks + prompts
    k = i - blocks
    prefills = (k >= 0) & (i < last)
    owner = tl.load(owners_ptr + i, mask=decodes, other=0)
    owner += tl.load(prompt_owners_ptr + k, mask=prefills, other=0)
    tl.store(requests_ptr + i, tl.where(i < last, owner, nobody), mask=i <= most)
    keys = tl.load(start_ptr + i, mask=decodes, other=0)
    begin = i * width
    if RAGGED:
        keys += tl.load(counts_ptr + i, mask=decodes, other=0)
        begin = tl.load(begins_ptr + i, mask=decodes, other=0).to(tl.int32)
    else:
        keys += tl.where(decodes, width, 0)
    keys += tl.load(prompt_lengths_ptr + k, mask=prefills, other=0)
    keys = tl.where(i == last, size - end, keys)
    tl.store(lengths_ptr + i, keys.to(tl.int32), mask=i <= most)
    begin = tl.where(decodes, begin, size)
    ahead = tl.load(prompt_begins_ptr + k, mask=prefills, other=0).to(tl.int32)
    begin = tl.where(prefills, block_rows + ahead, begin)
    begin = tl.where(i == last, end, begin)
    tl.store(ends_ptr + i, begin, mask=i <= most + 1)


def fill_pass(
    buffers: torch.Tensor,
    requests: torch.Tensor,
    cache_lengths: torch.Tensor,
    ends: torch.Tensor,
    size: int,
    nobody: int,
    blocks: BlockRows | None,
    prompts: PromptRows | None,
) -> None:
    """Fills the buffers of a pass, as in `SideBySide`.

    Args:
        buffers: [3 or 4, rows] int64; the fourth for M-RoPE.
        size: rows of the pass; those behind the prompts' are nobody's.
        nobody: what stands in `requests` for none.
    """
    unread, mrope, most = requests, len(buffers) > 3, len(requests) - 1
    of_blocks, shared, widths, counts = [unread] * 7, [unread] * 3, (0, 0, 1), (0, 0)
    ragged = False
    if blocks is not None:
        of_blocks = [unread if each is None else each for each in blocks[:7]]
        widths = blocks.tokens.stride(0), blocks.drafts.stride(0), blocks.width
        counts = len(blocks.owners), blocks.rows
        if ragged := blocks.shared is not None:
            shared = blocks.shared
    of_prompts = [*[unread] * 5, ends] if prompts is None else prompts  # of the same types
    counts += (0, 0) if prompts is None else (len(prompts.owners), len(prompts.tokens))
    _fill[(triton.cdiv(max(size, most + 2), _TILE),)](
        *(buffers, requests, cache_lengths, ends),
        *of_blocks,
        *shared,
        *of_prompts,
        *(buffers.stride(0), *widths, *counts, size, most, nobody),
        RAGGED=ragged,
        MROPE=mrope,
        TILE=_TILE,
    )
