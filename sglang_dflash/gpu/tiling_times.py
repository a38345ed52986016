"""Times of tilings on this process's GPU, as they run in a round: in a graph, with weights from memory."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
from torch.nn.functional import linear

from sglang_dflash.gpu.kernels.add_norm import add_norm
from sglang_dflash.gpu.kernels.skinny_matmul import Tiling, compile_only, launch
from sglang_dflash.gpu.kernels.swiglu import swiglu
from sglang_dflash.gpu.tilings import Key, Kind

logger = logging.getLogger(__name__)

_MOST_WEIGHTS = 16  # enough to be out of the L2 cache when one is read again
_REPLAYS = 5


@torch.no_grad()
def time_tilings(
    key: Key, weights: Sequence[torch.Tensor], tilings: Sequence[Tiling], seconds: float
) -> dict[Tiling | None, float]:
    """Microseconds of a product and of what takes it, at the most rows that the key is for.

    Tilings that this GPU cannot run, or that compute something else, are left out, and so are those for
    which there was no time.
    """
    end, weights = time.monotonic() + seconds, weights[:_MOST_WEIGHTS]
    x = torch.randn(key.rows, key.depth, dtype=torch.bfloat16, device=weights[0].device)
    after = _after(key, x)
    times = {None: _microseconds(weights, lambda weight: after(linear(x, weight)))}
    with_swiglu = key.kind is Kind.SWIGLU
    tilings = _compile(x, weights[0], tilings, with_swiglu, seconds)
    expected = linear(x, weights[0])
    expected = swiglu(expected) if with_swiglu else expected
    for tiling in tilings:
        if time.monotonic() > end:
            break
        try:
            if _is_right(launch(x, weights[0], tiling, with_swiglu), expected):
                take = (lambda y: y) if with_swiglu else after
                times[tiling] = _microseconds(
                    weights,
                    lambda weight: take(launch(x, weight, tiling, with_swiglu)),  # noqa: B023
                )
            else:
                logger.warning(
                    "DFLASH leaves out a tiling that computes something else: %s", tiling
                )
        except (triton.TritonError, RuntimeError) as reason:
            logger.debug("DFLASH leaves out %s: %s", tiling, reason)
    return times


def _after(key: Key, x: torch.Tensor) -> Callable[[torch.Tensor], object]:
    """What takes a product."""
    if key.kind is Kind.SWIGLU:
        return swiglu
    residual = x.new_zeros(len(x), key.size)
    weight = x.new_ones(key.size)
    return lambda y: add_norm(y, residual, weight, 1e-6)


def _compile(
    x: torch.Tensor,
    weight: torch.Tensor,
    tilings: Sequence[Tiling],
    with_swiglu: bool,
    seconds: float,
) -> Sequence[Tiling]:
    """Compiles several at once, as each takes one core about a second; those for which there is time."""
    threads = max(1, min(len(tilings), (os.cpu_count() or 2) // 2))
    tilings = tilings[: max(1, int(seconds * threads))]
    with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for tiling in tilings:
            compile_only(x, weight, tiling, with_swiglu)
    return tilings


def _is_right(y: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within what the order of additions changes."""
    whole = (y.sum(0) if y.dim() == 3 else y).float()
    return bool((whole - expected.float()).abs().max() <= 0.02 * expected.float().abs().max())


def _microseconds(weights: Sequence[torch.Tensor], run: Callable[[torch.Tensor], object]) -> float:
    """Of one run, in a graph over all weights: the least of several replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(weights[0])
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=stream):
        for weight in weights:
            run(weight)
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(weights))
    return min(times)
