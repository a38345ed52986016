"""Numbers of a round that the host reads while the device goes on."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sglang_dflash.device_waits import WAITS


class OnItsWay:
    """Numbers that are copied to the host while the device goes on."""

    def __init__(self, values: torch.Tensor):
        """
        Args:
            values: [n, m].
        """
        self._values, self._done = values.to("cpu", non_blocking=True), None
        if values.is_cuda:
            self._done = torch.cuda.Event()
            self._done.record()

    def tensor(self) -> torch.Tensor:
        """All of them, once they are there."""
        if self._done is not None:
            WAITS.until(self._done)
        return self._values


class DraftsOnHost:
    """Drafts of a round, and how many of them the target verifies."""

    def __init__(self, drafts: torch.Tensor, counts: torch.Tensor | None = None):
        """
        Args:
            drafts: [bs, width - 1] int64.
            counts: [bs] int64, verified rows of each request, the first for its bonus token; None for all of the block.
        """
        self._counted = counts is not None
        told = drafts if counts is None else torch.cat([drafts, counts[:, None]], dim=1)
        self._told = OnItsWay(told)

    def rows(self, wanted: Iterable[int]) -> list[list[int]]:
        """All drafts of some requests."""
        rows = self._rows(wanted)
        return [row[:-1] for row in rows] if self._counted else rows

    def verified(self, wanted: Iterable[int]) -> list[list[int]]:
        """Of some requests the drafts that are verified."""
        rows = self._rows(wanted)
        return [row[: row[-1] - 1] for row in rows] if self._counted else rows

    def _rows(self, wanted: Iterable[int]) -> list[list[int]]:
        values = self._told.tensor()
        return [values[i].tolist() for i in wanted]
