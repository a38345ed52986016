"""Random LoRA adapters for the bundled target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmark import adapters
from benchmark.adapters import ATTENTION, ENDS, MLP
from tests.server.harness import TARGET

__all__ = ["ATTENTION", "ENDS", "MLP", "write_adapter"]


def write_adapter(folder: Path, seed: int, target: Path = TARGET, **made: Any) -> Path:
    """See `adapters.write_adapter`."""
    return adapters.write_adapter(folder, seed, target, **made)
