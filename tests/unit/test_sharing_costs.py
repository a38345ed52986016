"""What rounds take whose requests have different numbers of rows: they are run, and their parts are taken off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.round import sharing_costs
from sglang_dflash.round.costs import FAR, Costs, Staircase, Times
from sglang_dflash.round.sharing_costs import SharingTimes

WIDTH, PADDING = 16, 99
SIZES = [1, 4, 8, 20, 40]


class Rounds:
    """A launch of a round over n requests, and n again for the rest, takes so many units.

    Behind contexts it takes twice as many if all rows are verified, and 1 more if requests have different numbers.
    """

    def __init__(self, narrow: list[int], context_len: int = 0) -> None:
        self.sizes, self.widths, self.narrow = SIZES, [1, WIDTH], narrow
        lengths = torch.zeros(PADDING + 1, dtype=torch.int64)
        state = SimpleNamespace(padding_row=PADDING, lengths=lengths)
        self.parts = SimpleNamespace(state=state, context_len=context_len)
        self.run: list[tuple[int, int, int, int | None]] = []
        self.units = 0

    def launch(
        self, rows: torch.Tensor, bounds: torch.Tensor, width: int, *, total: int | None
    ) -> Callable[[], None]:
        n, keys = len(rows), self.parts.state.lengths[PADDING].item()
        assert rows.tolist() == [PADDING] * n and bounds.tolist() == [keys] * n
        assert total is None or n <= total <= n * width
        self.run.append((keys, width, n, total))
        self.units += n + (n * (total is None) + (total is not None) if keys else 0)

        def finish() -> None:
            self.units += n + (n if keys and total is None else 0)

        return finish


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rounds], Costs]:
    """What is added, by a clock that counts a server's units; narrow blocks are drafted in 0.75."""

    def added(rounds: Rounds) -> Costs:
        def milliseconds(runs: Sequence[Callable[[], object]]) -> Times:
            found = []
            for run in runs:
                before = rounds.units
                run()
                found.append(float(rounds.units - before))
            return Times(found, True)

        monkeypatch.setattr(sharing_costs, "milliseconds", milliseconds)
        none = Staircase(SIZES, [0.0] * len(SIZES))
        costs = Costs(
            draft=Staircase([1, 8, 40], [0.5, 1.0, 2.0]),
            whole=none,
            plain=none,
            ragged=Staircase([32, 64], [3.0, 6.0]),
            head=Staircase([32, 64], [0.25, 0.5]),
            context=0.0,
            by_requests={8: Staircase([32], [2.0])},
            narrow={width: Staircase([20, 40], [0.75, 0.75]) for width in rounds.narrow},
        )
        sharing = SharingTimes(rounds, SimpleNamespace(sizes=[32, 64]), rounds.launch)
        found = sharing.added_to(costs)
        assert sharing.quiet and rounds.parts.state.lengths[PADDING] == 0
        return found

    return added


@pytest.mark.parametrize("narrow", [[], [8, 4, 2]])
def test_parts_are_taken_off(narrow: list[int], times: Callable[[Rounds], Costs]) -> None:
    """Of every other number of requests; and of narrow blocks, which may have another kernel, from where these are."""
    rounds = Rounds(narrow)
    found = times(rounds)
    assert found.sharing.keys() == {WIDTH, *narrow[1:2]} and found.behind_contexts == {}
    whole = [run for run in rounds.run if run[1] == WIDTH]
    assert whole == [(0, WIDTH, 1, 16), (0, WIDTH, 8, 32), (0, WIDTH, 40, 64)]
    expected = [2 - 0.5 - 2.0 - 0.25, 16 - 1.0 - 2.0 - 0.25, 80 - 2.0 - 6.0 - 0.5]
    assert [found.shared(WIDTH, n) for n in (1, 8, 40)] == expected
    if narrow:
        assert set(rounds.run) - set(whole) == {(0, 4, 40, 64)}
        assert found.shared(4, 40) == 80 - 0.75 - 6.0 - 0.5


def test_behind_contexts(times: Callable[[Rounds], Costs]) -> None:
    """By how much less contexts add to such rounds than to those of all rows, in proportion up to what was measured."""
    rounds = Rounds([8, 4, 2], context_len=2 * FAR)
    found = times(rounds)
    behind = [run for run in rounds.run if run[1] == WIDTH and (run[0] or run[3] is None)]
    assert behind == [
        *((FAR, WIDTH, 40, 64), (FAR, WIDTH, 40, None)),
        (0, WIDTH, 40, None),
    ]
    assert found.behind_contexts.keys() == {WIDTH, 4}
    near = found.shared(WIDTH, 40)
    for keys, part in ((0, 0.0), (FAR // 4, 0.25), (FAR, 1.0), (3 * FAR, 1.0)):
        assert found.shared(WIDTH, 40, 40 * keys) == near + (1 - 2 * 40) * part
