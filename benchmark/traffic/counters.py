"""What servers count themselves: verify steps, tokens, versions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import requests

# Verify steps, one for each request in a round: this project, newer SGLang, vLLM.
STEPS = (
    "sglang:dflash_rounds_total",
    "sglang:spec_verify_calls_total",
    "vllm:spec_decode_num_drafts_total",
)
TOKENS = ("sglang:generation_tokens_total", "vllm:generation_tokens_total")
# This project's alone: see docs/metrics.md.
LAUNCHED, ROWS = "sglang:dflash_planned_rounds_total", "sglang:dflash_verified_rows_total"
HOST_STEP = "sglang:dflash_host_step_seconds"
_COUNTED = {*STEPS, *TOKENS, LAUNCHED, ROWS}
_WAY = re.compile(r'\bway="(\w+)"')


@dataclass(frozen=True)
class Counters:
    """As they stand at a moment; None for what a server does not count.

    Attributes:
        steps: verify steps, one for each request in a round.
        tokens: of answers.
        launched: rounds, each of all requests that run.
        rows: of blocks that the target ran in them.
        host_step_ms: what the host takes for a step, lately; with prompts and without.
    """

    steps: float | None = None
    tokens: float | None = None
    launched: float | None = None
    rows: float | None = None
    host_step_ms: Mapping[str, float] = field(default_factory=dict)

    def since(self, before: Counters) -> Counters:
        return Counters(
            _difference(self.steps, before.steps),
            _difference(self.tokens, before.tokens),
            _difference(self.launched, before.launched),
            _difference(self.rows, before.rows),
            self.host_step_ms,
        )


def _difference(now: float | None, before: float | None) -> float | None:
    return None if now is None else now - (before or 0.0)


def parse(text: str) -> Counters:
    """Counters of a Prometheus page, summed over their labels."""
    found: dict[str, float] = {}
    host: dict[str, float] = {}
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        name = series.split("{")[0]
        if name in _COUNTED:
            found[name] = found.get(name, 0.0) + float(value)
        elif name == HOST_STEP and (way := _WAY.search(series)):
            host[way[1]] = 1e3 * float(value)
    return Counters(
        next((found[name] for name in STEPS if name in found), None),
        next((found[name] for name in TOKENS if name in found), None),
        found.get(LAUNCHED),
        found.get(ROWS),
        host,
    )


def read(url: str) -> Counters:
    """Counters of a server; one that shows none has none."""
    answer = requests.get(f"{url}/metrics", timeout=60)
    return parse(answer.text) if answer.status_code == 200 else Counters()


def mean_accept_length(url: str) -> float | None:
    """Of a server of SGLang without `--enable-metrics`: since its cache was flushed, to 40 rounds."""
    answer = requests.get(f"{url}/server_info", timeout=60)
    if answer.status_code != 200:
        return None
    return internal_state(answer.json()).get("avg_spec_accept_length")


def internal_state(info: dict) -> dict:
    """Of a server's first scheduler; empty where its `/server_info` has none."""
    return (info.get("internal_states") or [{}])[0]


_VLLM_CACHE = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)


def kv_tokens(info: dict, page: str) -> int | None:
    """Slots of the KV pool of a server, as it says itself; None if it does not.

    Args:
        info: its `/server_info`, if it is one of SGLang.
        page: its `/metrics`.
    """
    if "max_total_num_tokens" in info:
        return info["max_total_num_tokens"]
    found = _VLLM_CACHE.search(page)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', found[1])) if found else {}
    sizes = [labels.get(name, "") for name in ("num_gpu_blocks", "block_size")]
    return int(sizes[0]) * int(sizes[1]) if all(size.isdigit() for size in sizes) else None
