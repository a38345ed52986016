"""Percentiles of measured times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Median and 99th percentile; None of nothing, as when every answer came in one chunk."""
    if not len(values):
        return None
    return {f"p{p}": round(float(np.percentile(values, p)), 4) for p in (50, 99)}
