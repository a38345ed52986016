"""States of a target's linear-attention layers, recurrent and of convolutions, brought to the accepted token.

K/V of a rejected row is overwritten, but a state has every row in it that went before. So a pass over blocks leaves the
states of its requests as they were, and writes those after each row beside them, by place in the batch: this is how the
release verifies. When it is known how many rows of a request count, those after the last of them become its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from sglang_dflash.round.state import RequestState

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool


class LinearStates:
    """Of all requests, by slots of the release's pool."""

    def __init__(self, pool: HybridReqToTokenPool, state: RequestState, interval: int):
        """
        Args:
            state: lengths of requests.
            interval: after how many tokens of a request the prefix cache wants its states.
        """
        self._pool, self._state, self._interval = pool, state, interval
        self._launched = None
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
        cache = self._pool.mamba_pool.mamba_cache
        return RoundStates(cache, slots, starts, tracked, self._interval)

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
        cache: the pool's states, and those after each row.
        slots: [bs] int32, of the requests' own states.
        starts: [bs] int64, tokens that these have seen.
        tracked: [bs] int64, slots of states for the prefix cache; None if it takes a finished request's own.
        interval: see `LinearStates`.
    """

    cache: MambaPool.SpeculativeState
    slots: torch.Tensor
    starts: torch.Tensor
    tracked: torch.Tensor | None
    interval: int

    def keep(self, rows: torch.Tensor, width: int, tokens: torch.Tensor | None = None) -> None:
        """Makes states those after the first `rows` ([bs] int64, at least one) of each request.

        Args:
            width: rows of the round's blocks.
            tokens: [bs] int64, how many the request took, where it ended before.
        """
        self._write(self.slots, rows - 1, width)
        if self.tracked is None:
            return
        # The scheduler goes by the same: it takes for granted that nothing is written where it sees no crossing.
        ends = self.starts + (rows if tokens is None else tokens)
        crossed = ends // self.interval != (self.starts + 1) // self.interval
        last = ends // self.interval * self.interval - self.starts - 1
        self._write(self.tracked, last.masked_fill(~crossed, -1), width)

    def _write(self, slots: torch.Tensor, steps: torch.Tensor, width: int) -> None:
        """States after each request's row `steps` ([bs] int64) go to `slots`; none where that is negative."""
        cache, recurrent = self.cache, self.cache.intermediate_ssm
        if recurrent.is_cuda:
            recurrent = as_kernels_write(recurrent, width)
        pairs = [(cache.temporal, recurrent)]
        pairs += zip(cache.conv, cache.intermediate_conv_window, strict=True)
        for states, after_rows in pairs:
            if states.is_cuda:
                from sglang.srt.layers.attention.mamba.mamba_state_scatter_triton import (
                    fused_mamba_state_scatter_with_mask,
                )

                fused_mamba_state_scatter_with_mask(states, after_rows, slots, steps)
                continue
            found = (steps >= 0).nonzero().flatten()
            states[:, slots[found].long()] = after_rows[:, found, steps[found]]


def as_kernels_write(after_rows: torch.Tensor, width: int) -> torch.Tensor:
    """Recurrent states after rows of blocks, which the release's kernel writes without a gap between blocks.

    Args:
        after_rows: [layers, requests, rows of the widest block, ...].
        width: rows of the blocks; a divisor of the second and third size multiplied.

    Returns:
        A view of the same, [layers, at least as many requests, width, ...].
    """
    return after_rows.flatten(1, 2).unflatten(1, (-1, width))
