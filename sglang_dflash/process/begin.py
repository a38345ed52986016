"""What each process of a server does first: HTTP, schedulers, detokenizer."""

from __future__ import annotations

from sglang_dflash.process.full_disk import outlive_full_disk
from sglang_dflash.process.garbage import exempt_start_up


def begin_process() -> None:
    """Called when all modules are there, before the loggers take the streams."""
    outlive_full_disk()
    exempt_start_up()
