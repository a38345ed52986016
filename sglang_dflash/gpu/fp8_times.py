"""Which way of a product in FP8 is the fastest on this process's GPU, by rows, as it runs in a round."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence

import torch

from sglang_dflash.gpu.fp8 import Fp8Rows, Fp8Weight, quantize_rows
from sglang_dflash.gpu.fp8_ways import FIRST, STEPS, TILE, WAYS, Way
from sglang_dflash.gpu.tiling_times import microseconds

logger = logging.getLogger(__name__)

_GAIN = 0.97  # of the first way's time, which another must stay below: less is noise


@torch.no_grad()
def find_ways(weights: Iterable[Fp8Weight], dtype: torch.dtype) -> None:
    """Looks for the fastest way of each step of rows; before graphs are captured.

    Args:
        weights: of a model. Those of one shape are timed together, so that none is in the L2 cache when it is read.
        dtype: of the rows before they are quantized.
    """
    begin, alike = time.monotonic(), _alike(weights)
    for some in alike:
        ways: dict[int, Way] = {}
        for most in STEPS:
            # Blocks without their bonus tokens have no round number of rows.
            shape = most - 1, some[0].values.shape[1]
            x = torch.ones(shape, dtype=dtype, device=some[0].values.device)
            ways[most] = fastest(_times(some, quantize_rows(x)))
            torch.cuda.empty_cache()  # what graphs held, which together is gigabytes
        for weight in some:
            weight.ways = ways
        logger.debug("FP8 products of %s: %s", tuple(some[0].values.shape), ways)
    if alike:
        logger.info(
            "DFLASH found how to run %d products in FP8 in %.1f s, %d otherwise than by CUTLASS's kernels as they are",
            len(alike) * len(STEPS),
            time.monotonic() - begin,
            sum(way != FIRST for some in alike for way in some[0].ways.values()),
        )


def _alike(weights: Iterable[Fp8Weight]) -> list[list[Fp8Weight]]:
    """Weights on a GPU, by their shape."""
    found: dict[torch.Size, list[Fp8Weight]] = {}
    for weight in weights:
        if weight.values.is_cuda:
            found.setdefault(weight.values.shape, []).append(weight)
    return list(found.values())


def _times(weights: Sequence[Fp8Weight], rows: Fp8Rows) -> dict[Way, float]:
    """Microseconds of each way that can run."""
    times = {}
    for way in WAYS:
        if way.filled and not len(rows) % TILE:
            continue
        try:
            times[way] = microseconds(
                weights,
                lambda weight: weight.multiply(rows, way),  # noqa: B023
            )
        # PyTorch has both for what a kernel does not take.
        except (RuntimeError, ValueError) as reason:
            logger.debug("FP8 products of %d rows leave out %s: %s", len(rows), way, reason)
    return times


def fastest(times: Mapping[Way, float]) -> Way:
    """`FIRST`, unless another is faster by more than noise."""
    best = min(times, key=times.__getitem__, default=FIRST)
    return best if times.get(best, 0.0) < _GAIN * times.get(FIRST, float("inf")) else FIRST
