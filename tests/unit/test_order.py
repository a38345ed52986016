"""Results are looked at before anything is chosen where launching ahead of them gains less than it costs."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_dflash.errors import DFlashError
from sglang_dflash.scheduler.choices import Promise
from sglang_dflash.scheduler.draft_input import DFlashDraftInput
from sglang_dflash.scheduler.order import (
    AHEAD,
    FIRST,
    ORDER,
    RANDOM,
    ROUNDS,
    Order,
    choose_in_order,
)
from sglang_dflash.scheduler.pace import Pace


def order(
    device: str = "cuda", host: float = 5.0, beside_prompts: float = 9.0, further: float = 1.0
) -> Order:
    """With a host that takes so many milliseconds for a step, and for each further round of one."""
    pace = Pace(SimpleNamespace(world_size=1))
    pace.alone, pace.with_prompts = np.array([host]), np.array([beside_prompts])
    pace.further = np.array([further])
    return Order(device, pace)


def promised(order: Order, device: float, tokens: float = 2.0) -> Callable[[int], Promise]:
    """Of rounds that take the device so long, and give so many tokens."""

    def promise(rounds: int) -> Promise:
        times = order._pace.of_steps(np.array([device]), False, rounds)
        return Promise(tokens, device, float(times[0]))

    return promise


def ends(order: Order, rounds: int, tokens: int | None = None) -> None:
    for _ in range(64):
        order.ended(rounds, 2 * rounds if tokens is None else tokens)


@pytest.fixture(autouse=True)
def unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ORDER, raising=False)
    monkeypatch.delenv(ROUNDS, raising=False)


def test_ten_waits_beside_a_step() -> None:
    """Each for what the device takes beyond a quarter of the step; that takes the host 5 ms, or 9 beside prompts."""
    first = order()
    ends(first, 9)
    first.launched(1.25 + 0.49)
    assert first.looks_first()
    first.launched(1.25 + 0.51)
    assert not first.looks_first()
    first.launched(1.25 + 0.51, prompts=True)
    assert first.looks_first()


def test_long_answers() -> None:
    """Whose one step is soon outweighed; what count are the last ones."""
    first = order()
    ends(first, 99)
    first.launched(1.6)
    assert not first.looks_first()
    ends(first, 9)
    assert first.looks_first()


def test_nothing_is_known() -> None:
    """Of prompts in a pass of their own, of the host, or of answers: then it is as everywhere."""
    first = order()
    first.launched(0.1)
    assert not first.looks_first()
    first.ended(9, 20)
    assert first.looks_first()
    first.launched(None)
    assert not first.looks_first()
    first.launched(1.0)
    assert first.looks_first()
    unmeasured = order(host=0.0)
    unmeasured.ended(9, 20)
    unmeasured.launched(0.1)
    assert not unmeasured.looks_first()


def test_a_named_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ORDER, AHEAD)
    assert not order("cpu").looks_first()
    monkeypatch.setenv(ORDER, FIRST)
    assert order().looks_first()
    monkeypatch.setenv(ORDER, RANDOM)
    ranks = order(), order()
    drawn = [[rank.looks_first() for _ in range(50)] for rank in ranks]
    assert drawn[0] == drawn[1] and 10 < sum(drawn[0]) < 40
    monkeypatch.setenv(ORDER, "last")
    with pytest.raises(DFlashError, match="'last': set it to ahead, first or random"):
        order()


def chosen_for(device: float, rounds: int = 20, **host: float) -> int:
    """By answers of so many rounds, which take the device so long."""
    several = order(**host)
    assert several.rounds(promised(several, device)) == 1  # nothing is known
    ends(several, rounds)
    return several.rounds(promised(several, device))


def test_rounds_of_a_step() -> None:
    """As many as the device computes while the host is at work for them, if answers are not too short."""
    assert chosen_for(0.5) == 4
    assert chosen_for(2.9) == 2  # 24.5 times 3 ms instead of 22 times 5
    assert chosen_for(5.0) == 1
    assert chosen_for(0.1, rounds=3, further=4.9) == 1  # it costs the host as much as a step
    assert chosen_for(0.1, rounds=1000, further=4.5) > 1
    assert chosen_for(0.1, rounds=1) < 4


def test_nobody_waits_for_long() -> None:
    assert chosen_for(8.0, rounds=100, host=30.0) == 4
    assert chosen_for(11.0, rounds=100, host=37.0) == 3  # four would take 44 ms
    assert chosen_for(21.0, rounds=100, host=60.0) == 1


def test_a_number_lasts_for_some_steps() -> None:
    several = order()
    ends(several, 20)
    found = [several.rounds(promised(several, device)) for device in [0.5] * 8 + [9.0] * 9]
    assert found == [4] * 8 + [1] * 9
    assert [several.rounds(lambda rounds: None) for _ in range(9)][-1] == 1


def test_looking_at_several_rounds_first() -> None:
    """What is waited for are all of them, and answers have fewer steps."""
    first = order()
    ends(first, 40)
    first.launched(1.4)
    assert not first.looks_first()  # 41 waits of 0.15 ms
    first.launched(1.4, rounds=4)  # 11 waits of 3.6 ms, and a step has 8
    assert not first.looks_first()
    first.launched(0.6, rounds=4)  # 11 waits of 0.4
    assert first.looks_first()


def test_a_named_number_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROUNDS, "3")
    assert order("cpu").rounds(lambda rounds: None) == 3
    monkeypatch.setenv(ROUNDS, RANDOM)
    ranks = order(), order()
    drawn = [[rank.rounds(lambda rounds: None) for _ in range(50)] for rank in ranks]
    assert drawn[0] == drawn[1] and {*drawn[0]} == {1, 2, 3, 4}
    monkeypatch.setenv(ROUNDS, "5")
    with pytest.raises(DFlashError, match="'5': set it to 1, 2, 3, 4 or random"):
        order()


def chosen(
    order: Order, overlap: bool = True, batch: str | None = "batch"
) -> tuple[list[str], SimpleNamespace]:
    """What a scheduler does, in its order, when it is to choose while a result is pending."""
    done: list[str] = []

    def choose() -> str | None:
        done.append("choose" if scheduler.last_batch is not None else "nothing to merge")
        return batch

    scheduler = SimpleNamespace(
        enable_overlap=overlap,
        draft_worker=SimpleNamespace(order=order, pace=SimpleNamespace(in_a_row=None)),
        result_queue=deque([("batch before", "result")]),
        running_batch=SimpleNamespace(spec_info=DFlashDraftInput(8, in_flight=8)),
        last_batch=SimpleNamespace(spec_info=None),
        process_batch_result=lambda batch, result: done.append(result),
        get_next_batch_to_run=choose,
    )
    choose_in_order(scheduler)
    assert scheduler.get_next_batch_to_run() == batch
    return done, scheduler


@pytest.mark.parametrize("batch", ["batch", None])
def test_a_cpu(batch: str | None) -> None:
    """What is in flight is nothing then, and the release's loop finds no batch whose result it is to take."""
    done, scheduler = chosen(order("cpu"), batch=batch)
    assert done == ["result", "choose"] and not scheduler.result_queue
    assert scheduler.last_batch is None and scheduler.running_batch.spec_info.lookahead == 8
    assert scheduler.draft_worker.pace.in_a_row == (batch is not None)


def test_where_something_overlaps() -> None:
    done, scheduler = chosen(order())
    assert done == ["choose"] and scheduler.result_queue and scheduler.last_batch is not None
    assert scheduler.running_batch.spec_info.in_flight == 8
    assert scheduler.draft_worker.pace.in_a_row is False


def test_a_scheduler_that_does_not_overlap() -> None:
    assert chosen(order("cpu"), overlap=False)[0] == ["choose"]


class Ranks:
    """Those of a group, one after the other; what the first one tells, all take."""

    world_size = 2

    def __init__(self) -> None:
        self._told: deque[object] = deque()

    def broadcast_object(self, obj: object, src: int) -> object:
        if self.first:
            self._told.append(copy.deepcopy(obj))
            return obj
        return self._told.popleft()


def test_ranks_have_as_many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though each measures times of its own: what they go by are those of the first."""
    now, ranks = [0.0], Ranks()
    monkeypatch.setattr("sglang_dflash.scheduler.pace.time.perf_counter", lambda: now[0])
    found = []
    for host, further in ((5.0, 0.5), (1.0, 3.0)):
        ranks.first = not found
        pace = Pace(ranks)
        several, chosen = Order("cuda", pace), []
        for step in range(400):
            rounds = several.rounds(promised(several, 1.0))
            chosen.append((rounds, several.looks_first()))
            several.launched(1.0, rounds=rounds)
            pace.in_a_row = True
            pace.launch(False)
            now[0] += host / 1e3
            if rounds > 1:
                now[0] += (rounds - 1) * further / 1e3
                pace.more((rounds - 1) * further / 1e3)
                pace.took_further(further / 1e3)
            pace.landed()
            if step % 10 == 0:
                several.ended(10, 20)
        found.append(chosen)
    assert found[0] == found[1]
    assert {1, 4} <= {rounds for rounds, _ in found[0]}
