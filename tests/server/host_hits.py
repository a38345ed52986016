"""Prefixes that the device gives up and the host gives back, and what must then be as before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil
import pytest

from tests.server.checks import accept_length, assert_same, assert_speculated
from tests.server.harness import DEVICE, Server

POOL = 1200  # slots; all that is asked takes several times as many
HOST = (
    "--enable-hierarchical-cache",
    *("--max-total-tokens", str(POOL), "--hicache-ratio", "16", "--max-running-requests", "8"),
)
ARGUMENTS = (
    *HOST,
    *("--enable-metrics", "--reasoning-parser", "qwen3"),
)
BETWEEN = 30  # prompts that crowd the others out
LEAST_FREE = 12 << 30  # bytes; the release leaves 10 GiB to others


def skip_without_memory() -> None:
    if psutil.virtual_memory().available < LEAST_FREE:
        pytest.skip("a hierarchical cache is refused where less than 10 GiB would be left")


def host_tokens(answer: dict) -> int:
    """Of the prompt, those whose K/V came from the host."""
    return (answer["meta_info"].get("cached_tokens_details") or {"host": 0})["host"]


def crowd_out(server: Server, prompts: Sequence[str]) -> None:
    """Asks so much else that the device keeps nothing of what was asked before."""
    server.generate_all(prompts[-BETWEEN:], 4, max_new_tokens=60, ignore_eos=True)


def assert_hits(
    server: Server, plain: Server, asked: Sequence[Any], on_device: list[dict], least: int = 16
) -> None:
    """All that was asked is on the host now; asked again, it is answered in as many rounds as from the device.

    Args:
        on_device: answers after a hit on the device.
        least: tokens of each prompt that come from the host.
    """
    on_host = [server.generate(prompt) for prompt in asked]
    for prompt, first, then in zip(asked, on_device, on_host, strict=True):
        assert host_tokens(first) == 0 and host_tokens(then) >= least
        assert then["meta_info"]["cached_tokens"] >= first["meta_info"]["cached_tokens"]
        assert_same(then, plain.reference(prompt), plain, prompt)
        assert_speculated(then)
        if DEVICE == "cpu":
            for of in ("spec_verify_ct", "spec_accept_histogram"):
                assert first["meta_info"][of] == then["meta_info"][of], of
    # Kernels of a GPU round differently from batch to batch; without draft K/V this is less than half.
    assert accept_length(on_host) == pytest.approx(accept_length(on_device), rel=0.1)
    assert accept_length(on_host) > 3
