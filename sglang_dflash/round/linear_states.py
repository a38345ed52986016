"""States of a target's linear-attention layers, recurrent and of convolutions, brought to the accepted token.

K/V of a rejected row is overwritten, but a state has every row in it that went before. So a pass over blocks leaves the
states of its requests as they were, and what its rows read beside them (`BlockRows`). When it is known how many rows of
a request count, its states are made of those. The release writes the states after each row instead, of which a block of
sixteen has sixteen times as much as a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.fla.chunk_delta_h import CHUNK_SIZE
from torch.nn.functional import pad

from sglang_dflash.block_rows import BlockRows
from sglang_dflash.cpu import linear_attention
from sglang_dflash.round.state import RequestState

if TYPE_CHECKING:
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class LinearStates:
    """Of all requests, by slots of the release's pool.

    Attributes:
        waits: whether a round was launched and what counts of it is not known, so its rows must not be overwritten.
    """

    def __init__(self, runner: ModelRunner, state: RequestState, interval: int, most_rows: int):
        """
        Args:
            runner: the target's.
            state: lengths of requests.
            interval: after how many tokens of a request the prefix cache wants its states.
            most_rows: of a pass over blocks.
        """
        self._pool = pool = runner.req_to_token_pool
        self._state, self._interval, self._launched = state, interval, None
        self.waits = False
        self._rows = BlockRows.reserve(pool.mamba_pool.mamba_cache, most_rows, runner.dtype)
        leave_rows(runner.attn_backend.linear_attn_backend, self._rows)
        slots = pool.req_index_to_mamba_index_mapping
        if (missing := state.padding_row + 1 - len(slots)) > 0:
            # Graphs look up what pads a batch, too: slot 0, which the release keeps for that.
            pool.req_index_to_mamba_index_mapping = pad(slots, (0, missing))

    def of(self, rows: torch.Tensor, reqs: list[Req]) -> RoundStates:
        """What a round over the requests at `rows` ([bs] int64) will leave; asked before it is launched."""
        tracked = None
        if self._pool.enable_mamba_extra_buffer:
            tracked = torch.stack(
                [req.mamba_ping_pong_track_buffer[req.mamba_next_track_idx] for req in reqs]
            )
        slots, starts = self._pool.get_mamba_indices(rows), self._state.lengths[rows]
        self.waits = True
        return RoundStates(self, slots, starts, tracked, self._interval)

    def bring(
        self,
        slots: torch.Tensor,
        begins: torch.Tensor,
        counts: torch.Tensor,
        tracked: torch.Tensor | None = None,
        on_the_way: torch.Tensor | None = None,
    ) -> None:
        """Makes states those after the rows of each request that count, of what the last pass left.

        Args:
            slots: [bs] int32, of the requests' states.
            begins: [bs] int64, the first row of each.
            counts: [bs] int64, how many rows count.
            tracked: [bs] int64, slots for states on the way; None if nobody wants them.
            on_the_way: [bs] int64, after how many rows, at most `counts`; none where that is 0.
        """
        rows, cache = self._rows, self._pool.mamba_pool.mamba_cache
        made = linear_attention if rows.kept.device.type == "cpu" else _kernels()
        left = rows.kept, rows.convolved, rows.gates
        given = (slots, begins, counts, tracked, on_the_way)
        made.bring(cache.temporal, cache.conv[0], *left, *given)

    def bring_prompts(self, batch: ForwardBatch, first: int) -> None:
        """All rows of prompts count, of which the first was row `first` of the last pass."""
        slots = self._pool.get_mamba_indices(batch.req_pool_indices)
        given = (slots, batch.extend_start_loc + first, batch.extend_seq_lens)
        if batch.mamba_track_mask is None:
            self.bring(*given)
            return
        # The release tells an end that is one token behind the chunk where it does not want the last one.
        behind = batch.mamba_track_seqlens - batch.extend_prefix_lens
        on_the_way = (behind // CHUNK_SIZE * CHUNK_SIZE).masked_fill(~batch.mamba_track_mask, 0)
        self.bring(*given, batch.mamba_track_indices, on_the_way)

    def hand_on_in_order(self) -> None:
        """Makes a slot's next owner wait, on the device, for what was launched last.

        An overlapped scheduler frees slots of a request that has finished while a round in vain still writes to them,
        and clears them on another stream for the next owner. That stream also writes the row of `req_to_token` then.
        """
        if self._pool.req_to_token.device.type != "cuda":
            return
        pool, self._launched = self._pool.mamba_pool, torch.cuda.Event()
        allocate = pool.alloc

        def wait_and_allocate(need_size: int) -> torch.Tensor | None:
            torch.cuda.current_stream().wait_event(self._launched)
            return allocate(need_size)

        pool.alloc = wait_and_allocate

    def launched(self) -> None:
        """A prefill or a round was launched, all of it."""
        if self._launched is not None:
            self._launched.record()


@dataclass(frozen=True)
class RoundStates:
    """What a round leaves behind, until it is known how much of it counts.

    Attributes:
        owner: has what the round's rows read.
        slots: [bs] int32, of the requests' own states.
        starts: [bs] int64, tokens that these have seen.
        tracked: [bs] int64, slots of states for the prefix cache; None if it takes a finished request's own.
        interval: see `LinearStates`.
    """

    owner: LinearStates
    slots: torch.Tensor
    starts: torch.Tensor
    tracked: torch.Tensor | None
    interval: int

    def keep(
        self,
        rows: torch.Tensor,
        width: int,
        tokens: torch.Tensor | None = None,
        begins: torch.Tensor | None = None,
    ) -> None:
        """Makes states those after the first `rows` ([bs] int64, at least one) of each request.

        Args:
            width: rows of the round's blocks.
            tokens: [bs] int64, how many the request took, where it ended before.
            begins: [bs] int64, where its rows begin; None if all rows of all blocks were verified.
        """
        self.owner.waits = False
        if begins is None:
            begins = torch.arange(0, len(rows) * width, width, device=rows.device)
        if self.tracked is None:
            self.owner.bring(self.slots, begins, rows)
            return
        # The scheduler goes by the same: it takes for granted that nothing is written where it sees no crossing.
        ends = self.starts + (rows if tokens is None else tokens)
        crossed = ends // self.interval != (self.starts + 1) // self.interval
        on_the_way = (ends // self.interval * self.interval - self.starts).masked_fill(~crossed, 0)
        self.owner.bring(self.slots, begins, rows, self.tracked, on_the_way)


def leave_rows(backend: MambaAttnBackendBase, rows: BlockRows) -> None:
    """Has linear attention of passes over blocks leave what it reads in `rows`, and states as they are."""
    if rows.kept.is_cuda:
        from sglang_dflash.gpu import delta_nets

        delta_nets.leave_rows(backend, rows)
    else:
        backend.block_rows = rows


def _kernels() -> ModuleType:
    """Triton's, which a CPU does not import."""
    from sglang_dflash.gpu.kernels import delta_net_states

    return delta_net_states
