"""Which cells a sweep has, and what makes two cells the same."""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from benchmark.gsm8k import arguments
from benchmark.machine import Machine, label

BASELINE = "baseline"
DFLASH = "dflash"  # a server that runs already, of which only this much can be asked
ARMS = (BASELINE, "v1", "v2", DFLASH)


@dataclass(frozen=True)
class Cell:
    """One figure of a table.

    Attributes:
        arm: plain decoding (`baseline`) or the worker.
    """

    backend: str
    tp: int
    arm: str
    concurrency: int

    @property
    def speculative(self) -> bool:
        return self.arm != BASELINE

    def __str__(self) -> str:
        return f"{self.backend} tp={self.tp} {self.arm} conc={self.concurrency}"


def plan(options: argparse.Namespace, machine: Machine) -> tuple[list[Cell], list[str]]:
    """The cells in the order in which they are measured, and what is skipped and why."""
    skipped, sizes = [], []
    for tp in options.tp_sizes or arguments.TP_SIZES:
        if tp <= max(machine.gpus, 1):
            sizes.append(tp)
        else:
            has = f"{machine.gpus} GPU{'s' * (machine.gpus > 1)}" if machine.gpus else "no GPU"
            skipped.append(f"tp={tp} skipped: this machine has {has}")
    arms = [] if options.skip_baseline else [BASELINE]
    arms += options.workers or arguments.WORKERS
    return [
        Cell(backend, tp, arm, concurrency)
        for backend in options.attention_backends or machine.attention_backends()
        for tp in sizes
        for arm in arms
        for concurrency in options.concurrencies
    ], skipped


def servers(cells: list[Cell]) -> list[list[Cell]]:
    """Cells of one server each, in their order."""
    return [list(group) for _, group in groupby(cells, lambda c: (c.backend, c.tp, c.arm))]


def questions(options: argparse.Namespace, cell: Cell) -> int:
    """How many are asked, if the data set has so many."""
    wanted = options.questions_per_concurrency_base * cell.concurrency
    return min(wanted, options.max_questions_per_config)


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    """SGLang's `sampling_params`."""
    names = ("max_new_tokens", "temperature", "top_p", "top_k")
    return {name: getattr(options, name) for name in names}


def split_arguments(given: list[str]) -> tuple[list[str], list[str]]:
    """(server arguments of all servers, those of servers with DFLASH: `--speculative-…`)."""
    both: list[str] = []
    speculative: list[str] = []
    target = both
    for argument in given:
        if argument.startswith("--"):
            target = speculative if argument.startswith("--speculative-") else both
        target.append(argument)
    return both, speculative


def settings(
    options: argparse.Namespace, cell: Cell, machine: Machine, data: dict[str, str]
) -> dict[str, Any]:
    """What the figures of a cell depend on besides the machine and the versions.

    Args:
        data: what is said of the questions.
    """
    both, speculative = split_arguments(options.server_arguments)
    found = {
        "target_model": label(options.target_model or arguments.TARGET),
        "device": machine.device,
        **data,
        **sampling(options),
        "questions_per_concurrency_base": options.questions_per_concurrency_base,
        "max_questions_per_config": options.max_questions_per_config,
        "enable_thinking": options.enable_thinking,
        "batch_requests": options.batch_requests,
        "disable_radix_cache": options.disable_radix_cache,
        "page_size": options.page_size,
        "repeats": options.repeats,
        "server_args": both,
    }
    if cell.speculative:
        found |= {
            "draft_model": label(options.draft_model or arguments.DRAFTER),
            "speculative_draft_attention_backend": options.speculative_draft_attention_backend,
            "speculative_dflash_draft_window_size": options.speculative_dflash_draft_window_size,
            "speculative_server_args": speculative,
        }
    return found


def key(cell: Cell, settings: dict[str, Any]) -> str:
    """Equal for cells that are the same measurement."""
    text = json.dumps([asdict(cell), settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
