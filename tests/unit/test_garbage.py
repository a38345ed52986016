"""Garbage in cycles goes soon, however much start-up left behind, and at a flush at once."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from types import SimpleNamespace

import psutil

from sglang_dflash.scheduler.worker import DFlashWorkerBase

SCRIPT = """
import gc, sys
from sglang_dflash.process.garbage import exempt_start_up

start_up = [[] for _ in range(1_000_000)]
gc.collect()
if sys.argv[1] == "exempt":
    assert exempt_start_up() > len(start_up)
full = gc.get_stats()[2]["collections"]
alive = []
for _ in range(100_000):  # fewer than a quarter of what start-up left
    cycle = []
    cycle.append(cycle)
    alive.append([])  # a server's own objects: without any, nothing ever grows old
print(gc.get_stats()[2]["collections"] - full)
"""


def full_collections(how: str) -> int:
    command = [sys.executable, "-c", SCRIPT, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_full_collections_do_not_wait_for_start_up() -> None:
    assert full_collections("as it is") == 0
    assert full_collections("exempt") > 0


def test_each_process_begins_with_it() -> None:
    """Each sets its logger up in SGLang's `configure_logger`."""
    script = """
import gc
from types import SimpleNamespace
from sglang.srt.utils import configure_logger

for algorithm in (None, "DFLASH"):
    configure_logger(SimpleNamespace(speculative_algorithm=algorithm, log_level="info"))
    print(gc.get_freeze_count() > 100_000)
"""
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert found.split() == ["False", "True"]


class Cycle:
    def __init__(self) -> None:
        self.cycle = self


def test_a_flush_gives_memory_back() -> None:
    """Garbage in cycles, and memory that is free below some that is not."""
    process = psutil.Process()
    worker = SimpleNamespace(rounds=SimpleNamespace(disturbed=False))
    gc.collect()
    gc.disable()
    try:
        cycle = weakref.ref(Cycle())
        blocks = [bytes(2000) for _ in range(100_000)]
        above = bytes(2000)
        full = process.memory_info().rss
        del blocks
        kept = process.memory_info().rss
        DFlashWorkerBase.clear_cache_pool(worker)
        left = process.memory_info().rss
    finally:
        gc.enable()
    assert cycle() is None and len(above) == 2000
    assert full - kept < 100e6, "the C library gave it back by itself"
    assert full - left > 150e6
