"""How a kernel starts beside the one before it (programmatic dependent launch, Hopper and later), and on what.

A kernel that is launched so begins while its predecessor still runs, and calls `gdc_wait` before it
touches anything that a kernel wrote; what it reads earlier are weights. With few rows the start of a
kernel is a notable part of it; with many it is none, and early programs only take room.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

_MOST_ROWS = 64  # 128 rows were slower: docs/rejected.md


@functools.cache
def can_overlap() -> bool:
    """Whether this GPU launches kernels beside their predecessors."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def starts_early(rows: int) -> bool:
    """Whether kernels over so many rows are launched beside their predecessors."""
    return rows <= _MOST_ROWS and can_overlap()


class Device(NamedTuple):
    """Compute capability, multiprocessors, and bytes of shared memory that a program may have."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int


@functools.cache
def device_of(device: torch.device) -> Device:
    """What kernels run on; without a GPU, in the interpreter, as an H200."""
    if device.type != "cuda":
        return Device((9, 0), 132, 232_448)
    found = torch.cuda.get_device_properties(device)
    return Device(
        (found.major, found.minor),
        found.multi_processor_count,
        found.shared_memory_per_block_optin,
    )
