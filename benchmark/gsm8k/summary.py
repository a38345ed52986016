"""The tables at the end, in the published form: as text, as Markdown, as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.gsm8k.cells import BASELINE

Rows = Sequence[dict[str, Any]]
_HEADER = (
    ("target_model", "target model"),
    ("draft_model", "draft model"),
    ("data", "data"),
    ("data_sha256", "data sha256"),
    ("max_new_tokens", "max new tokens"),
    ("temperature", "temperature"),
    ("top_p", "top p"),
    ("top_k", "top k"),
    ("questions_per_concurrency_base", "questions per concurrency"),
    ("max_questions_per_config", "questions at most"),
    ("repeats", "repeats"),
    ("page_size", "page size"),
    ("disable_radix_cache", "radix cache off"),
    ("batch_requests", "batched requests"),
    ("speculative_draft_attention_backend", "drafter's attention backend"),
    ("speculative_dflash_draft_window_size", "drafter's window"),
)


@dataclass(frozen=True)
class Table:
    """Figures by TP size and concurrency.

    Attributes:
        cells: (tp, concurrency) → what is printed.
    """

    backend: str
    title: str
    cells: dict[tuple[int, int], str]

    def grid(self) -> list[list[str]]:
        """Header and rows, a dash where nothing was measured."""
        tps = sorted({tp for tp, _ in self.cells})
        concurrencies = sorted({concurrency for _, concurrency in self.cells})
        lines = [["tp \\ conc", *map(str, concurrencies)]]
        for tp in tps:
            lines.append([str(tp), *(self.cells.get((tp, c), "-") for c in concurrencies)])
        return lines


def tables(rows: Rows) -> list[Table]:
    """All tables of each backend; failed cells are left out."""
    good = [row for row in rows if not row.get("error")]
    found = []
    for backend in dict.fromkeys(row["backend"] for row in good):
        mine = [row for row in good if row["backend"] == backend]
        found += [table for table in _of_backend(backend, mine) if table.cells]
    return found


def _of_backend(backend: str, rows: Rows) -> list[Table]:
    by_arm: dict[str, dict[tuple[int, int], dict]] = {}
    for row in rows:
        by_arm.setdefault(row["arm"], {})[row["tp"], row["concurrency"]] = row
    baseline = by_arm.get(BASELINE, {})
    workers = [name for name in by_arm if name != BASELINE]

    def table(title: str, arm: dict, show: Callable[[dict], str]) -> Table:
        return Table(backend, title, {at: show(row) for at, row in arm.items()})

    def ratio(title: str, above: dict, below: dict) -> Table:
        both = [at for at in above if at in below]
        return Table(backend, title, {at: _ratio(above[at], below[at]) for at in both})

    found = [table("Baseline output tok/s", baseline, _rate)]
    found.append(table("Baseline accuracy", baseline, _accuracy))
    for name in workers:
        title = "DFLASH" if len(workers) == 1 else f"DFLASH {name}"
        arm = by_arm[name]
        found.append(table(f"{title} output tok/s", arm, _rate))
        found.append(table(f"{title} accuracy", arm, _accuracy))
        found.append(ratio(f"Speedup ({title} / baseline)", arm, baseline))
        found.append(table(f"{title} acceptance length", arm, _accept_length))
    if {"v1", "v2"} <= by_arm.keys():
        found.append(ratio("v2 / v1", by_arm["v2"], by_arm["v1"]))
    return found


def _rate(row: dict) -> str:
    spread = row.get("output_tok_s_spread")
    return f"{row['output_tok_s']:,.1f}" + (f" ±{spread:,.1f}" if spread is not None else "")


def _accuracy(row: dict) -> str:
    return f"{row['accuracy']:.3f}"


def _accept_length(row: dict) -> str:
    return f"{row['accept_length']:.3f}"


def _ratio(above: dict, below: dict) -> str:
    return f"{above['output_tok_s'] / below['output_tok_s']:.3f}"


def header(rows: Rows) -> list[tuple[str, str]]:
    """Settings of a sweep, the machine, and the version."""
    if not rows:
        return []
    settings, origin = rows[0]["settings"], rows[0]["provenance"]
    lines = [
        (title, str(settings[name]))
        for name, title in _HEADER
        if settings.get(name) is not None and settings[name] is not False
    ]
    gpu = origin["gpu"].get("name") or f"no GPU, {origin['machine']['cpus']} CPUs"
    lines.append(("machine", gpu))
    lines.append(("sglang", origin["versions"].get("sglang", "unknown")))
    lines.append(("commit", origin["commit"]))
    return lines


def as_text(rows: Rows) -> str:
    parts = ["\n".join(f"{name}: {value}" for name, value in header(rows))]
    for table in tables(rows):
        grid = table.grid()
        widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
        lines = [
            "  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in grid
        ]
        parts.append("\n".join([f"[{table.backend}] {table.title}", *lines]))
    return "\n\n".join(parts) + "\n"


def as_markdown(rows: Rows) -> str:
    parts = ["\n".join(f"- {name}: {value}" for name, value in header(rows))]
    backend = None
    for table in tables(rows):
        if table.backend != backend:
            backend = table.backend
            parts.append(f"## {backend}")
        first, *rest = [f"| {' | '.join(line)} |" for line in table.grid()]
        rule = "|---" * len(table.grid()[0]) + "|"
        parts.append("\n".join([f"**{table.title}**", "", first, rule, *rest]))
    return "\n\n".join(parts) + "\n"


def as_csv(rows: Rows) -> str:
    """A line a cell."""
    names = (
        *("backend", "tp", "arm", "concurrency", "questions", "output_tok_s"),
        *("output_tok_s_spread", "accuracy", "accept_length", "accept_length_of_tokens"),
        *("verify_steps", "completion_tokens"),
    )
    latencies = [(kind, p) for kind in ("ttft_ms", "inter_token_ms") for p in ("p50", "p99")]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, *(f"{kind}_{p}" for kind, p in latencies), "error"])
    for row in rows:
        times = [(row.get(kind) or {}).get(p) for kind, p in latencies]
        writer.writerow([*(row.get(name) for name in names), *times, row.get("error")])
    return out.getvalue()
