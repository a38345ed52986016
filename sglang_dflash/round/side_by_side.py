"""Rows of requests side by side, however many each has: what a target's pass over them reads.

Blocks of a round come first, then prompts or chunks of them, then rows that only fill the pass up. Those belong to a
request of their own, whose K/V goes to slot 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.gpu import at_once
from sglang_dflash.gpu.kernels.fill_pass import BlockRows, PromptRows, fill_pass
from sglang_dflash.round.adapter_buffers import Ids
from sglang_dflash.round.clean_pool import CleanPool
from sglang_dflash.round.opened import Round, own_positions
from sglang_dflash.round.ragged import Ragged
from sglang_dflash.round.verify_input import DFlashVerifyInput
from sglang_dflash.two_pools import sliding_slots


@dataclass(frozen=True)
class Drafted:
    """Blocks whose draft model has run.

    Attributes:
        round: start bounds on the host included.
        draft_tokens: [bs, width - 1] int64.
        ragged: which of their rows are to be verified; None for all.
        adapters: of their requests; None if the server has none.
    """

    round: Round
    draft_tokens: torch.Tensor
    ragged: Ragged | None = None
    adapters: Ids | None = None

    @property
    def rows(self) -> int:
        """Of all blocks, that are to be verified."""
        if self.ragged is not None:
            return self.ragged.total
        return self.draft_tokens.numel() + len(self.draft_tokens)

    @property
    def longest(self) -> int:
        """No less than the keys that a request's block sees."""
        return int(self.round.start_bounds.max()) + self.round.width


class SideBySide:
    """Buffers for the largest pass; their addresses are baked into graphs.

    Attributes:
        tokens, positions, slots: [rows] int64.
        rope: [rows] int64, `Round.rope_positions`; None for a target without M-RoPE.
        buffers: [3 or 4, rows] int64, all of these.
        requests: [requests + 1] int64, rows of `req_to_token`; `padding_row` for none.
        cache_lengths: [requests + 1] int32, keys that a request's last row sees.
        ends: [requests + 2] int32, where each request's rows begin, and end.
        page_table: [requests + 1, pages] int32.
    """

    def __init__(
        self,
        req_to_token: torch.Tensor,
        page_size: int,
        rows: int,
        requests: int,
        mrope: bool = False,
    ):
        device = req_to_token.device
        self.padding_row = len(req_to_token)
        self._table, self._page_size = req_to_token, page_size
        self.buffers = torch.zeros(3 + mrope, rows, dtype=torch.int64, device=device)
        self.tokens, self.positions, self.slots = self.buffers[:3]
        self.rope = self.buffers[3] if mrope else None
        self.most = requests
        self.requests = torch.full((requests + 1,), self.padding_row, device=device)
        self.cache_lengths = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        self.ends = torch.zeros(requests + 2, dtype=torch.int32, device=device)
        # Rows that fill a pass up are one request's, and can be more than a context has.
        pages = -(-max(rows, req_to_token.shape[1]) // page_size)
        self.page_table = torch.zeros(requests + 1, pages, dtype=torch.int32, device=device)

    def fill(self, size: int, blocks: Drafted | None, prompts: ForwardBatch | None) -> None:
        """Puts blocks and prompts side by side, and fills up to `size` rows."""
        if at_once.used():
            self._fill_at_once(size, blocks, prompts)
            return
        at = end = last = request = 0
        self.requests.fill_(self.padding_row)
        self.cache_lengths.zero_()
        if blocks is not None:
            at = end = blocks.rows
            request = last = len(blocks.draft_tokens)
            self._put(blocks)
        if prompts is not None:
            end, last = at + len(prompts.input_ids), request + prompts.batch_size
            given = [prompts.input_ids, prompts.positions, prompts.out_cache_loc]
            if self.rope is not None:
                # Pictures do not come here, and text has one number for all three.
                given.append(prompts.mrope_positions[0])
            for row, value in zip(self.buffers, given, strict=True):
                row[at:end].copy_(value)
            self.requests[request:last].copy_(prompts.req_pool_indices)
            self.cache_lengths[request:last].copy_(prompts.seq_lens)
        self.buffers[:, end:size].zero_()
        self.cache_lengths[last].fill_(size - end)
        ends = torch.tensor(list(self._ends(size, blocks, prompts)), dtype=torch.int32)
        if self.ends.is_cuda:
            ends = ends.pin_memory()
        self.ends.copy_(ends, non_blocking=True)
        if blocks is not None and blocks.ragged is not None:  # only the device knows
            self.ends[:request].copy_(blocks.ragged.begins)

    def _fill_at_once(
        self, size: int, blocks: Drafted | None, prompts: ForwardBatch | None
    ) -> None:
        fill_pass(
            *(self.buffers, self.requests, self.cache_lengths, self.ends, size, self.padding_row),
            None if blocks is None else self._rows_of(blocks),
            None if prompts is None else _rows_of_prompts(prompts),
        )

    def _rows_of(self, blocks: Drafted) -> BlockRows:
        round, ragged = blocks.round, blocks.ragged
        return BlockRows(
            *(round.bonus_tokens, blocks.draft_tokens, round.positions, round.slots),
            None if self.rope is None else round.rope_positions,
            *(round.rows, round.start, round.width, blocks.rows),
            None if ragged is None else (ragged.source, ragged.counts, ragged.begins),
        )

    def _put(self, blocks: Drafted) -> None:
        """Blocks at the beginning, all of their rows or those that are to be verified."""
        round, ragged, request = blocks.round, blocks.ragged, len(blocks.draft_tokens)
        drafted = torch.cat([round.bonus_tokens[:, None], blocks.draft_tokens], dim=1).flatten()
        rows, into = [drafted, round.positions, round.slots], self.buffers[:, : blocks.rows]
        if self.rope is not None:
            rows.append(round.rope_positions)
        if ragged is None:
            torch.stack(rows, out=into)
        else:
            into.copy_(torch.stack(rows)[:, ragged.source])
        self.requests[:request].copy_(round.rows)
        counts = round.width if ragged is None else ragged.counts
        self.cache_lengths[:request].copy_(round.start + counts)

    def _ends(
        self, size: int, blocks: Drafted | None, prompts: ForwardBatch | None
    ) -> Iterator[int]:
        at = requests = 0
        if blocks is not None:
            at, requests = blocks.rows, len(blocks.draft_tokens)
            ragged = blocks.ragged is not None
            yield from [0] * requests if ragged else range(0, at, blocks.round.width)
        lengths = () if prompts is None else prompts.extend_seq_lens_cpu
        yield from accumulate(lengths, initial=at)
        yield from [size] * (self.most + 1 - requests - len(lengths))

    def clear(self, size: int) -> None:
        """Nothing but rows that fill a pass up."""
        self.fill(size, None, None)

    def first(self, requests: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`cache_lengths` and `ends` of a pass over no more requests, and the one that fills it up."""
        return self.cache_lengths[: requests + 1], self.ends[: requests + 2]

    def table_of(self, keys: int, requests: int) -> torch.Tensor:
        """The part of the page table that contexts of up to so many keys need, of so many requests; see `first`."""
        return self.page_table[: requests + 1, : -(-keys // self._page_size)]

    def look_up(self, table: torch.Tensor) -> None:
        """Fills a part of the page table."""
        owners = self.requests[: len(table)]
        nobody = (owners == self.padding_row)[:, None]
        rows = owners.clamp(max=self.padding_row - 1)
        slots = self._table[:, :: self._page_size][:, : table.shape[1]].index_select(0, rows)
        pages = (slots // self._page_size).masked_fill_(nobody, 0)
        table[:, : pages.shape[1]].copy_(pages)

    def forward_batch(self, runner: ModelRunner, size: int, requests: int) -> ForwardBatch:
        """The first `size` rows as a batch of the target's, of so many requests (see `first`).

        What attention reads is its own.
        """
        requests += 1
        lengths = self.cache_lengths[:requests].to(torch.int64)
        positions, slots = self.positions[:size], self.slots[:size]
        sliding = sliding_slots(runner.token_to_kv_pool, slots)
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=requests,
            input_ids=self.tokens[:size],
            req_pool_indices=self.requests[:requests],
            seq_lens=lengths,
            seq_lens_cpu=torch.full((requests,), self._table.shape[1]),
            seq_lens_sum=requests * self._table.shape[1],
            orig_seq_lens=lengths,
            out_cache_loc=slots,
            out_cache_loc_swa=sliding,
            positions=own_positions(runner.model, positions),
            mrope_positions=None if self.rope is None else self.rope[:size].repeat(3, 1),
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool=CleanPool(runner.token_to_kv_pool, sliding),
            attn_backend=runner.attn_backend,
            spec_algorithm=runner.spec_algorithm,
            spec_info=DFlashVerifyInput(size, positions, CaptureHiddenMode.FULL),
            capture_hidden_mode=CaptureHiddenMode.FULL,
            num_token_non_padded_cpu=size,
        )


def _rows_of_prompts(prompts: ForwardBatch) -> PromptRows:
    return PromptRows(
        *(prompts.input_ids, prompts.positions, prompts.out_cache_loc),
        *(prompts.req_pool_indices, prompts.seq_lens, prompts.extend_start_loc),
    )
