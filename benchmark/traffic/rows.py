"""Results of this benchmark: JSON lines, one a cell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmark import jsonl
from benchmark.jsonl import Row, good
from benchmark.traffic.arrivals import Closed, Load, Open

NAME = "serving"
_FIELDS = ("benchmark", "key", "system", "workload", "kind", "clients", "rate", "settings")


def read(paths: Sequence[Path]) -> list[Row]:
    """All rows of files; see `benchmark.jsonl.read`."""
    return [row for path in paths for row in jsonl.read(path, _FIELDS, "this benchmark")]


def resume(path: Path) -> dict[str, Row]:
    """Rows by key of the cells that are finished; a line that was torn is cut off."""
    jsonl.cut_off(path)
    return {row["key"]: row for row in read([path]) if good(row)} if path.exists() else {}


def latest(found: Sequence[Row]) -> list[Row]:
    """One row a key: the last one that succeeded, or else the last."""
    chosen: dict[str, Row] = {}
    for row in found:
        if row["key"] not in chosen or good(row) or not good(chosen[row["key"]]):
            chosen[row["key"]] = row
    return list(chosen.values())


def load_of(row: Row) -> Load:
    return Closed(row["clients"]) if row["clients"] else Open(row["rate"])


def said(row: Row) -> str:
    """A row in a line."""
    if not good(row):
        return f"FAILED: {row['error'].splitlines()[0]}"
    text = f"{row['output_tok_s']:,.0f} tok/s, {row['requests_s']:,.1f} requests/s"
    if row["accept_length"]:
        text += f", accept length {row['accept_length']:.2f}"
    text += f", TTFT {row['ttft_ms']['p50']:,.0f} ms, latency {row['latency_ms']['p50']:,.0f} ms"
    if row["client_busiest"] > 0.8:
        text += f"; CLIENT BUSY {row['client_busiest']:.0%}"
    return text
