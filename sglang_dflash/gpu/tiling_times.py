"""Times of tilings and of algorithms on this process's GPU, as they run in a round: in a graph, with weights from
memory."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import TypeVar

import torch
import triton
from torch.nn.functional import linear

from sglang_dflash.gpu import cublas_lt
from sglang_dflash.gpu.cublas_lt import Algorithm
from sglang_dflash.gpu.kernels.add_norm import add_norm
from sglang_dflash.gpu.kernels.skinny_matmul import MOST_ROWS, Tiling, compile_only
from sglang_dflash.gpu.kernels.swiglu import swiglu
from sglang_dflash.gpu.products import multiply
from sglang_dflash.gpu.tilings import Choice, Key, Kind

logger = logging.getLogger(__name__)

_MOST_WEIGHTS = 16  # enough to be out of the L2 cache when one is read again
_ENOUGH = 160_000_000  # bytes of weights, likewise
_REPLAYS = 5
# Of algorithms, which are many: microseconds that each is looked at, calls at most, how many are varied and how, and
# how many are timed as they run in a round.
_GLANCE, _MOST_CALLS, _VARIED, _KEPT = 200.0, 6, 2, 4
_GLANCES = 0.7  # of the time that there is
_CLUSTERS, _OPTIONS, _PARTS = (2, 3, 4, 5, 7), range(8), (1, 2)
_IN_FLOAT32 = 2  # how parts are added
Weight = TypeVar("Weight")  # a tensor, or what has one


@torch.no_grad()
def time_tilings(
    key: Key, weights: Sequence[torch.Tensor], choices: Sequence[Choice], seconds: float
) -> dict[Choice | None, float]:
    """Microseconds of a product and of what takes it, at the most rows that the key is for.

    What this GPU cannot run, or computes something else, is left out, and so is that for which there was no time. Of
    algorithms more are looked at than are named, and of all the quickest timed.
    """
    end, weights = time.monotonic() + seconds, weights[: _enough(key, weights[0])]
    x = torch.randn(key.rows, key.depth, dtype=torch.bfloat16, device=weights[0].device)
    after = _after(key, x)
    times = {None: microseconds(weights, lambda weight: after(linear(x, weight)))}
    with_swiglu = key.kind is Kind.SWIGLU
    if key.rows > MOST_ROWS:
        choices = _quickest(x, weights, choices, end - (1 - _GLANCES) * seconds)
    else:
        choices = _compile(x, weights[0], choices, with_swiglu, seconds)
    expected = linear(x, weights[0])
    expected = swiglu(expected) if with_swiglu else expected
    for choice in choices:
        if time.monotonic() > end:
            break
        try:
            if _is_right(multiply(x, weights[0], choice, with_swiglu), expected):
                take = (lambda y: y) if with_swiglu else after
                times[choice] = microseconds(
                    weights,
                    lambda weight: take(multiply(x, weight, choice, with_swiglu)),  # noqa: B023
                )
            else:
                logger.warning("DFLASH leaves out what computes something else: %s", choice)
        except (triton.TritonError, RuntimeError) as reason:
            logger.debug("DFLASH leaves out %s: %s", choice, reason)
    return times


def _quickest(
    x: torch.Tensor, weights: Sequence[torch.Tensor], known: Sequence[Algorithm], end: float
) -> list[Algorithm]:
    """The best few of what cuBLASLt offers, of what is known to be good, and of what is next to the best of these."""
    found: dict[Algorithm, float] = {}

    def look(algorithms: Iterable[Algorithm]) -> list[Algorithm]:
        for each in algorithms:
            if each not in found and time.monotonic() < end:
                found[each] = _glance(x, weights, each)
        return sorted(found, key=found.__getitem__)

    best = look([*cublas_lt.offered(len(x), *weights[0].shape), *known])
    tiles = {each.tile: each for each in reversed(best)}  # the best of each tile
    for each in sorted(tiles.values(), key=found.__getitem__)[:_VARIED]:
        best = look(_next_to(each))
    return best[:_KEPT]


def _next_to(algorithm: Algorithm) -> Iterator[Algorithm]:
    """Others with the same tile."""
    for parts, cluster, custom in product(_PARTS, _CLUSTERS, _OPTIONS):
        reduction = _IN_FLOAT32 if parts > 1 else 0
        yield algorithm._replace(splits=parts, reduction=reduction, cluster=cluster, custom=custom)


def _glance(x: torch.Tensor, weights: Sequence[torch.Tensor], algorithm: Algorithm) -> float:
    """Microseconds of one product, about; infinite if it cannot be run."""

    def run(calls: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for i in range(calls):
            cublas_lt.multiply(x, weights[i % len(weights)], algorithm)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1000 / calls

    try:
        run(1)  # loads it
        once = run(1)
        return run(min(_MOST_CALLS, max(2, int(_GLANCE / once))))
    except RuntimeError:
        return math.inf


def _enough(key: Key, weight: torch.Tensor) -> int:
    """Weights among which a product is timed: fewer where it takes longer, and there is more to time."""
    if key.rows <= MOST_ROWS:
        return _MOST_WEIGHTS
    return max(2, min(_MOST_WEIGHTS, -(-_ENOUGH // weight.nbytes)))


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


def microseconds(weights: Sequence[Weight], run: Callable[[Weight], object]) -> float:
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
