"""Python's garbage collector in the processes of a server, and what the C library keeps.

A full collection walks every object and begins only when a quarter as many are new. Start-up leaves more
than two million (modules, compiled kernels, tables), so for minutes nothing is collected, tensors of flushed
prefixes among it, and then every request waits up to a second. Objects of start-up are there to stay, so they
are exempt; a full collection then takes milliseconds, and comes often enough for memory to stay flat.
"""

from __future__ import annotations

import ctypes
import gc


def exempt_start_up() -> int:
    """Takes what exists now out of future collections; each call adds what is new.

    Returns:
        How many objects are exempt.
    """
    gc.collect()
    gc.freeze()
    # The threshold of a full collection is a share of what the last one left; let that be nothing.
    gc.collect()
    return gc.get_freeze_count()


def give_memory_back() -> None:
    """Collects garbage now, and gives the system what the C library holds for later.

    glibc keeps freed memory below anything that lives: tens of MB, more or less of it each minute.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)
