"""What a sweep measures: arms, cells, and which of them an output has already."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.servers import OWN

BASELINE = "baseline"


@dataclass(frozen=True)
class Arm:
    """One server: what it runs on and how it decodes.

    Attributes:
        name: "baseline", or a worker of DFLASH.
    """

    backend: str
    tp: int
    name: str

    @property
    def speculative(self) -> bool:
        return self.name != BASELINE

    @property
    def environment(self) -> dict[str, str]:
        return OWN["v2-plan"] if self.name == "v2" else OWN["v1"]

    def __str__(self) -> str:
        return f"{self.backend}, tp {self.tp}, {self.name}"


@dataclass(frozen=True)
class Cell:
    """An arm at a concurrency."""

    arm: Arm
    concurrency: int

    def __str__(self) -> str:
        return f"{self.arm}, concurrency {self.concurrency}"


def question_count(args: argparse.Namespace, concurrency: int) -> int:
    return min(args.questions_per_concurrency_base * concurrency, args.max_questions_per_config)


def arms(args: argparse.Namespace, backends: Sequence[str], gpus: int) -> list[Arm]:
    """All that is asked for and fits the machine; what does not is said on stderr.

    Args:
        gpus: of this machine; 0 stands for a CPU, which has one rank.
    """
    found = []
    for backend in backends:
        for tp in args.tp_sizes:
            if tp > max(gpus, 1):
                have = f"{gpus} GPUs" if gpus else "no GPU"
                print(f"skipped: tp {tp} ({backend}), this machine has {have}", file=sys.stderr)
                continue
            names = [] if args.skip_baseline else [BASELINE]
            found += [Arm(backend, tp, name) for name in [*names, *args.workers]]
    return found


def settings(args: argparse.Namespace, problems_sha256: str) -> dict[str, Any]:
    """What must be equal for two rows to be measurements of one thing."""
    names = (
        "target_model",
        "draft_model",
        "questions_per_concurrency_base",
        "max_questions_per_config",
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "batch_requests",
        "repeats",
        "speculative_draft_attention_backend",
        "speculative_dflash_draft_window_size",
        "page_size",
        "disable_radix_cache",
        "base_url",
        "server_args",
    )
    return {name: getattr(args, name) for name in names} | {"data_sha256": problems_sha256}


def key(settings: dict[str, Any], cell: Cell) -> str:
    """Says which cell of which sweep a row is."""
    arm = cell.arm
    text = json.dumps([settings, arm.backend, arm.tp, arm.name, cell.concurrency], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of an output, the last of each cell. A line that a kill cut short is left out."""
    rows: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows.pop(row["key"], None)
        rows[row["key"]] = row
    return list(rows.values())


def measured(rows: Sequence[dict[str, Any]]) -> set[str]:
    """Keys of the cells that need not be measured again."""
    return {row["key"] for row in rows if not row.get("error")}
