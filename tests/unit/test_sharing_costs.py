"""What rounds take whose requests have different numbers of rows: they are run, and their parts are taken off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.round import sharing_costs
from sglang_dflash.round.costs import Costs, Staircase, Times

WIDTH, PADDING = 16, 99
SIZES = [1, 4, 8, 20, 40]


class Rounds:
    """A launch of a round over n requests, and n again for the rest, takes so many units."""

    def __init__(self, narrow: list[int]) -> None:
        self.sizes, self.widths, self.narrow = SIZES, [1, WIDTH], narrow
        state = SimpleNamespace(padding_row=PADDING, lengths=torch.zeros(1, dtype=torch.int64))
        self.parts = SimpleNamespace(state=state)
        self.run: list[tuple[int, int, int]] = []
        self.units = 0

    def launch(
        self, rows: torch.Tensor, bounds: torch.Tensor, width: int, *, total: int
    ) -> Callable[[], None]:
        assert rows.tolist() == [PADDING] * len(rows) and len(bounds) == len(rows)
        assert len(rows) <= total <= len(rows) * width
        self.run.append((width, len(rows), total))
        self.units += len(rows)

        def finish() -> None:
            self.units += len(rows)

        return finish


@pytest.mark.parametrize("narrow", [[], [8, 4, 2]])
def test_parts_are_taken_off(narrow: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every other number of requests; and of narrow blocks, which may have another kernel, from where these are."""
    rounds, none = Rounds(narrow), Staircase(SIZES, [0.0] * len(SIZES))

    def milliseconds(runs: Sequence[Callable[[], object]]) -> Times:
        times = []
        for run in runs:
            before = rounds.units
            run()
            times.append(float(rounds.units - before))
        return Times(times, True)

    monkeypatch.setattr(sharing_costs, "milliseconds", milliseconds)
    costs = Costs(
        draft=Staircase([1, 8, 40], [0.5, 1.0, 2.0]),
        whole=none,
        plain=none,
        ragged=Staircase([32, 64], [3.0, 6.0]),
        head=Staircase([32, 64], [0.25, 0.5]),
        context=0.0,
        by_requests={8: Staircase([32], [2.0])},
        narrow={width: Staircase([20, 40], [0.75, 0.75]) for width in narrow},
    )
    passes = SimpleNamespace(sizes=[32, 64])
    sharing, quiet = sharing_costs.costs_of_sharing(rounds, passes, rounds.launch, costs)
    assert quiet and sharing.keys() == {WIDTH, *narrow[1:2]}
    whole = [run for run in rounds.run if run[0] == WIDTH]
    assert whole == [(WIDTH, 1, 16), (WIDTH, 8, 32), (WIDTH, 40, 64)]
    expected = [2 - 0.5 - 2.0 - 0.25, 16 - 1.0 - 2.0 - 0.25, 80 - 2.0 - 6.0 - 0.5]
    assert [sharing[WIDTH].at(n) for n in (1, 8, 40)] == expected
    if narrow:
        assert set(rounds.run) - set(whole) == {(4, 40, 64)}
        assert sharing[4].at(40) == 80 - 0.75 - 6.0 - 0.5
