"""Whether fused layers compute what the release's do: looked at once, before rounds are captured.

A block of random tokens runs through the layers in each way, on slots that nobody owns yet. A way that raises
or gives something else is not used, on any rank.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.gpu.block_attention import BlockAttention
from sglang_dflash.gpu.rank_sums import all_agree
from sglang_dflash.round.opened import Round
from sglang_dflash.two_pools import single_pools

logger = logging.getLogger(__name__)

# How far a row may be from the release's, relative to its length: in the middle, and at the worst, where an
# expert may be another one. bfloat16 rounds by 0.2% at a time; what computes something else is off by 50% and more.
MIDDLE, WORST = 0.08, 0.4
# The same of layers in FP8, where each of twenty products is off by 4%: 18% and 24% with five layers of Qwen3-8B's
# shape on an H200, whose drafts are about as often right.
MIDDLE_FP8, WORST_FP8 = 0.3, 0.6
# Of width rows each: products by tilings, and by cuBLAS in kernels that do not start early.
_REQUESTS = (1, 3)


class Way(NamedTuple):
    """One way to run the layers of a model.

    Attributes:
        name: to stand behind "with".
        use: makes the model run so.
        run: what a trial gives it, as a batch → hidden states and taps, [rows, hidden] each.
        middle, worst: how far rows may be off.
    """

    name: str
    use: Callable[[], object]
    run: Callable[[Any], Sequence[torch.Tensor]]
    middle: float = MIDDLE
    worst: float = WORST


class Trial(Protocol):
    """What ways are compared on."""

    def run(self, way: Way) -> list[torch.Tensor]:
        """What a way makes of it, in float32."""


class TrialBlocks:
    """Blocks of random tokens of some requests, which see themselves alone."""

    def __init__(
        self,
        runner: ModelRunner,
        attention: type[BlockAttention],
        causal: bool,
        requests: int,
        width: int,
        context_len: int,
    ):
        self.runner, self.pool = runner, runner.token_to_kv_pool
        device, page_size = self.pool.device, runner.page_size
        pages = -(-width // page_size)
        table = 1 + torch.arange(requests * pages, device=device).view(requests, pages)
        row = torch.arange(width, device=device)  # the first page is for padding
        slots = (table[:, row // page_size] * page_size + row % page_size).flatten()
        start = torch.arange(requests, device=device) * 100 % max(1, context_len - width)
        generator = torch.Generator().manual_seed(0)  # the same tokens on all ranks
        tokens = torch.randint(runner.model_config.vocab_size, slots.shape, generator=generator)
        self.tokens = tokens.to(device)
        self.round = Round(
            rows=torch.zeros(requests, dtype=torch.int64, device=device),
            width=width,
            start=start,
            start_bounds=start.cpu(),
            bonus_tokens=self.tokens[::width],
            positions=(start[:, None] + row).flatten(),
            slots=slots,
            cut=False,
        )
        lengths = torch.full((requests,), width, dtype=torch.int32, device=device)
        table = table.to(torch.int32)
        self.attention = attention(runner, lengths, table, width, causal, False)

    @torch.no_grad()
    def run(self, way: Way) -> list[torch.Tensor]:
        """Hidden states and taps; leaves the slots as they are when a server starts."""
        self._clear()
        batch = self.round.forward_batch(self.runner, self.tokens, CaptureHiddenMode.FULL)
        self.attention.take(batch)
        self.attention.prepare()
        made = [states.float() for states in way.run(batch)]
        self._clear()  # waits, where the device is a GPU that failed, too
        return made

    def _clear(self) -> None:
        for pool in single_pools(self.pool):
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer[self.round.slots] = 0
        if self.tokens.is_cuda:
            torch.cuda.synchronize()


def trial_blocks(
    runner: ModelRunner, attention: type[BlockAttention], causal: bool, width: int, context_len: int
) -> list[TrialBlocks]:
    """What a model is tried on, as far as its pool has room.

    Args:
        width: rows of a block.
    """
    room = runner.token_to_kv_pool.size // runner.page_size // -(-width // runner.page_size)
    room = min(
        room, runner.req_to_token_pool.size
    )  # states of linear attention are written by place in the batch
    return [
        TrialBlocks(runner, attention, causal, requests, width, context_len)
        for requests in _REQUESTS
        if requests <= room
    ]


def first_right(
    whose: str, ways: Sequence[Way], trials: Sequence[Trial], group: GroupCoordinator
) -> Way:
    """The first way that gives what the last one, the release's, gives; all ranks get the same, and it is in use.

    Args:
        whose: "target" or "drafter".
        group: of the ranks that run the model together.
    """
    *fused, plain = ways
    expected = None
    for way, other in zip(fused, ways[1:], strict=True):
        expected = expected or _expected(plain, trials)
        why = _agreed(_why_not(way, trials, expected), group)
        if not why:
            return way
        logger.warning(
            "DFLASH runs the %s with %s instead of %s, because %s.",
            whose,
            other.name,
            way.name,
            why,
        )
    plain.use()
    return plain


def _expected(plain: Way, trials: Sequence[Trial]) -> list[list[torch.Tensor]] | Exception:
    try:
        plain.use()
        return [trial.run(plain) for trial in trials]
    except Exception as reason:
        return reason


def _why_not(
    way: Way, trials: Sequence[Trial], expected: list[list[torch.Tensor]] | Exception
) -> str:
    """What is wrong with a way, to stand behind "because"; empty if nothing."""
    if isinstance(expected, Exception):
        return f"there is nothing to compare it with: that of the release raised {expected!r}"
    try:
        way.use()
        made = [trial.run(way) for trial in trials]
        each = [difference(*trial) for trial in zip(made, expected, strict=True)]
    except Exception as reason:
        return f"it raised {reason!r}"
    middle = max((middle for middle, _ in each), default=0.0)
    worst = max((worst for _, worst in each), default=0.0)
    off = f"off by {middle:.2g} of their length in the middle and by {worst:.2g} at the worst"
    if middle <= way.middle and worst <= way.worst:
        logger.info("DFLASH compared %s with the release's: rows are %s", way.name, off)
        return ""
    return f"rows were {off}"


def difference(
    made: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """How far rows ([rows, hidden] each) are from what is expected, relative to their length.

    Returns:
        In the middle of a tensor's rows, and at the worst: the largest of all tensors. Infinite for NaN.
    """
    middle = worst = 0.0
    for a, b in zip(made, expected, strict=True):
        off = (a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-30)
        off = off.nan_to_num(nan=math.inf, posinf=math.inf)
        middle, worst = max(middle, float(off.median())), max(worst, float(off.max()))
    return middle, worst


def _agreed(why: str, group: GroupCoordinator) -> str:
    """What is wrong, empty if nothing is on any rank."""
    if group.world_size == 1 or all_agree(not why, group):
        return why
    return why or "another rank found it wrong"
