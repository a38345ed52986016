"""Python's garbage collector in the processes of a server.

A full collection walks every object and begins only when a quarter as many are new. Start-up leaves more
than two million (modules, compiled kernels, tables), so for minutes nothing is collected, tensors of flushed
prefixes among it, and then every request waits up to a second. Objects of start-up are there to stay, so they
are exempt; a full collection then takes milliseconds, and comes often enough for memory to stay flat.
"""

from __future__ import annotations

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
