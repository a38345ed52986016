"""Everything that a round derives from lengths, in one launch.

Stands for `Round.open`, `block_tokens` and the attention metadata: about 25 launches of a few
microseconds each at the head of every round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _open_round(
    rows_ptr,
    lengths_ptr,
    bonus_ptr,
    table_ptr,
    table_stride,
    start_ptr,
    tokens_ptr,
    positions_ptr,
    slots_ptr,
    cache_lengths_ptr,
    page_table_ptr,
    page_table_stride,
    max_pages,
    padding_row,
    mask_token_id,
    last_position,
    last_start,
    WIDTH: tl.constexpr,
    WIDTH_POW2: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    request, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + request)
    padding = row == padding_row
    # A round in vain may begin past the longest context; it must stay in its own row of the table.
    start = tl.minimum(tl.load(lengths_ptr + row), last_start)
    table = table_ptr + tl.where(padding, 0, row) * table_stride

    if tile == 0:
        i = tl.arange(0, WIDTH_POW2)
        inside = i < WIDTH
        at = request * WIDTH + i
        token = tl.where(i == 0, tl.load(bonus_ptr + row), mask_token_id)
        slot = tl.load(table + start + i, mask=inside, other=0).to(tl.int64)
        tl.store(tokens_ptr + at, token, mask=inside)
        tl.store(positions_ptr + at, tl.minimum(start + i, last_position), mask=inside)
        tl.store(slots_ptr + at, tl.where(padding, 0, slot), mask=inside)
        tl.store(start_ptr + request, start)
        tl.store(cache_lengths_ptr + request, (start + WIDTH).to(tl.int32))

    # Pages beyond the lengths are never read, so they are not copied.
    pages = tl.minimum((start + WIDTH + PAGE_SIZE - 1) // PAGE_SIZE, max_pages)
    if tile * TILE < pages:
        page = tile * TILE + tl.arange(0, TILE)
        needed = page < pages
        first_slot = tl.load(table + page * PAGE_SIZE, mask=needed, other=0)
        index = tl.where(padding, 0, first_slot // PAGE_SIZE)
        tl.store(page_table_ptr + request * page_table_stride + page, index, mask=needed)


def open_round(
    rows: torch.Tensor,
    lengths: torch.Tensor,
    bonus_tokens: torch.Tensor,
    req_to_token: torch.Tensor,
    cache_lengths: torch.Tensor,
    page_table: torch.Tensor,
    *,
    width: int,
    page_size: int,
    padding_row: int,
    mask_token_id: int,
    last_position: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Starts, block tokens, positions and slots of a round; fills the attention metadata.

    Args:
        rows: [bs] int64, rows of `req_to_token`; `padding_row` pads.
        lengths, bonus_tokens: [rows + 1] int64, the request state.
        req_to_token: [rows, columns] int32.
        cache_lengths: [>= bs] int32, written: keys that a request's block sees.
        page_table: [>= bs, pages] int32, written up to those lengths.

    Returns:
        start [bs], tokens, positions and slots [bs * width], all int64.
    """
    batch_size, device = len(rows), rows.device
    start = torch.empty(batch_size, dtype=torch.int64, device=device)
    tokens, positions, slots = torch.empty(3, batch_size * width, dtype=torch.int64, device=device)
    tile = 1024
    _open_round[(batch_size, triton.cdiv(page_table.shape[1], tile))](
        rows,
        lengths,
        bonus_tokens,
        req_to_token,
        req_to_token.stride(0),
        start,
        tokens,
        positions,
        slots,
        cache_lengths,
        page_table,
        page_table.stride(0),
        page_table.shape[1],
        padding_row,
        mask_token_id,
        last_position,
        req_to_token.shape[1] - width,
        WIDTH=width,
        WIDTH_POW2=triton.next_power_of_2(width),
        PAGE_SIZE=page_size,
        TILE=tile,
    )
    return start, tokens, positions, slots


def open_round_reference(
    rows: torch.Tensor,
    lengths: torch.Tensor,
    bonus_tokens: torch.Tensor,
    req_to_token: torch.Tensor,
    cache_lengths: torch.Tensor,
    page_table: torch.Tensor,
    *,
    width: int,
    page_size: int,
    padding_row: int,
    mask_token_id: int,
    last_position: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `open_round` does; writes whole rows of the page table."""
    batch_size = len(rows)
    padding = (rows == padding_row)[:, None]
    table_rows = torch.where(padding[:, 0], 0, rows)
    start = lengths[rows].clamp(max=req_to_token.shape[1] - width)
    columns = start[:, None] + torch.arange(width, device=rows.device)
    slots = torch.where(padding, 0, req_to_token[table_rows[:, None], columns].to(torch.int64))
    tokens = torch.full_like(columns, mask_token_id)
    tokens[:, 0] = bonus_tokens[rows]
    cache_lengths[:batch_size] = start + width
    pages = req_to_token[table_rows, ::page_size][:, : page_table.shape[1]] // page_size
    page_table[:batch_size] = torch.where(padding, 0, pages)
    positions = columns.clamp(max=last_position)
    return start, tokens.flatten(), positions.flatten(), slots.flatten()
