"""Requests that decode while others arrive, and how the prompts of those ran."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tests.server.checks import counted
from tests.server.harness import DEVICE, Server

LENGTHS = (1, 15, 16, 17, 100, 333, 1500)  # of prompts; blocks have 16 rows, pages 1 or 16
# What decodes must still do so when all others have arrived.
RIDERS = {"max_new_tokens": {"cpu": 400, "cuda": 1800}[DEVICE], "ignore_eos": True}
SHORT = {"max_new_tokens": 40, "ignore_eos": True}


@contextmanager
def decoding(
    server: Server, pool: ThreadPoolExecutor, prompts: list[str], **sampling: Any
) -> Iterator[list[dict]]:
    """Requests that decode meanwhile; their answers are there when they have ended."""
    answers: list[dict] = []
    streams = [server.stream(prompt, **sampling) for prompt in prompts]
    for stream in streams:
        next(stream)
    asked = [pool.submit(list, stream) for stream in streams]
    yield answers
    answers += [each.result()[-1] for each in asked]


def ran(server: Server) -> Counter[str]:
    """Tokens of prompts, by way, all until now: beside rounds they are told with one of the next rounds."""
    before, deadline = counted(server)["rounds_total", ""], time.monotonic() + 20
    while busy(server) and counted(server)["rounds_total", ""] == before:
        assert time.monotonic() < deadline, "requests without a round"
        time.sleep(0.05)
    counts = counted(server).items()
    return Counter({way: n for (name, way), n in counts if name == "prompt_rows_total"})


def busy(server: Server) -> bool:
    load = server.load()
    return bool(load["num_reqs"] or load["num_tokens"])
