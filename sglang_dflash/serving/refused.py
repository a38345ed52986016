"""Refusals of the scheduler, in the process that requests arrive in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_dflash.errors import DFlashError


def accepted(results: Sequence[Any]) -> Sequence[Any]:
    """What schedulers answered, one for each replica.

    Raises:
        DFlashError: one of them refused, in an answer that has no field for it.
    """
    for result in results:
        if refusal := getattr(result, "refusal", None):
            raise DFlashError(refusal)
    return results
