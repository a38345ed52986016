"""What keeps a benchmark, or a cell of it, from being made."""

from __future__ import annotations


class CannotMeasure(Exception):
    """One sentence for the user: what is wrong, which value, what to do."""


class CellFailed(Exception):
    """A cell gave no figures, and why; the benchmark goes on with the next."""
