"""Requests whose output has come, and when they go on."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from sglang_dflash.serving.output_clock import OutputClock
from sglang_dflash.serving.turns import FEW, LONG, Turns


class State(SimpleNamespace):
    """Of a request; unlike its base it can be referred to weakly."""


def request(name: str) -> State:
    return State(name=name, event=asyncio.Event(), out_list=[], finished=False)


def answer(state: State, finished: bool = False) -> None:
    state.out_list.append("part")
    state.finished = finished
    state.event.set()


class Answers:
    """Requests that read their answers to the end, and the order in which they did."""

    def __init__(self, names: str):
        self.now = 0.0
        self.clock = OutputClock(60, Turns(lambda: self.now))
        self.states = {name: request(name) for name in names}
        self.went_on: list[str] = []
        self.parts: dict[str, list[int]] = {name: [] for name in names}
        self.tasks = [asyncio.create_task(self._read(state)) for state in self.states.values()]

    async def _read(self, state: State) -> None:
        while not state.finished or state.out_list:
            await self.clock.output_of(state)
            self.went_on.append(state.name)
            self.parts[state.name].append(len(state.out_list))
            state.out_list.clear()
            state.event.clear()

    async def begin(self) -> None:
        """All wait for their second part."""
        await asyncio.sleep(0)
        for state in self.states.values():
            answer(state)
        while len(self.went_on) < len(self.states):
            await asyncio.sleep(0)
        self.went_on.clear()

    def answer(self, names: str, finished: bool = False) -> None:
        for name in names:
            answer(self.states[name], finished)

    async def turns(self, number: int) -> None:
        """So many turns of the event loop."""
        for _ in range(number):
            await asyncio.sleep(0)

    async def end(self) -> None:
        for state in self.states.values():
            if not state.finished:
                answer(state, finished=True)
        await asyncio.gather(*self.tasks)


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 60))

    return run


@asynccontextmanager
async def begun(names: str) -> AsyncIterator[Answers]:
    """Answers that wait for their second part; all are read to the end."""
    answers = Answers(names)
    await answers.begin()
    yield answers
    await answers.end()


@in_a_loop
async def test_a_few_go_on_in_a_turn_of_the_event_loop() -> None:
    async with begun("abcdefghi") as answers:
        answers.answer("abcdefghi")
        turns = []
        while len(answers.went_on) < 9:
            before = len(answers.went_on)
            await asyncio.sleep(0)
            turns.append(len(answers.went_on) - before)
        assert max(turns) == FEW and answers.went_on == list("abcdefghi")


@in_a_loop
async def test_who_asks_meanwhile_does_not_wait_for_all() -> None:
    """A request takes several turns, and each is a short one."""
    async with begun("abcdefghijklmnop") as answers:
        answers.answer("abcdefghijklmnop")
        await answers.turns(3)
        assert len(answers.went_on) <= 3 * FEW < 16


@in_a_loop
async def test_answers_that_end_or_begin_come_first() -> None:
    async with begun("abcdefgh") as answers:
        new = request("new")
        answers.states["new"], answers.parts["new"] = new, []
        answers.tasks.append(asyncio.create_task(answers._read(new)))
        await asyncio.sleep(0)
        answers.answer("abcdefg")
        answers.answer("h", finished=True)
        answer(new)
        while len(answers.went_on) < 9:
            await asyncio.sleep(0)
        # Those who come first of all find a place at once; the others need none.
        assert answers.went_on[FEW : FEW + 2] == ["h", "new"]


@in_a_loop
async def test_who_waits_for_a_turn_when_its_answer_ends_goes_on_once_with_all_of_it() -> None:
    async with begun("abcdefgh") as answers:
        answers.answer("abcdefgh")
        answers.answer("h", finished=True)
        while "g" not in answers.went_on:
            await answers.turns(1)
        await answers.turns(1)
        assert answers.went_on.index("h") == FEW and answers.went_on.count("h") == 1
        assert answers.parts["h"] == [1, 2]


@in_a_loop
async def test_who_goes_alone_goes_at_once() -> None:
    """As soon as an `asyncio.Event` would let it."""
    async with begun("a") as answers:
        answers.answer("a")
        await asyncio.sleep(0)
        assert answers.went_on == ["a"]


@in_a_loop
async def test_who_leaves_while_waiting_for_a_turn_takes_no_place() -> None:
    async with begun("abcdefgh") as answers:
        answers.answer("abcdefgh")
        for task in answers.tasks[FEW:-1]:
            task.cancel()
        await answers.turns(2)
        assert answers.went_on == [*"abcdefgh"[:FEW], "h"]
        answers.tasks = [task for task in answers.tasks if not task.cancelled()]
        answers.states = {name: answers.states[name] for name in (*"abcdefgh"[:FEW], "h")}


@in_a_loop
async def test_answers_that_end_or_begin_need_no_place() -> None:
    async with begun("abcdefgh") as answers:
        answers.answer("abcdefgh", finished=True)
        await asyncio.sleep(0)
        assert answers.went_on == list("abcdefgh")


@in_a_loop
async def test_who_gets_more_while_waiting_goes_on_once_with_all_of_it() -> None:
    """In its place, and nobody goes on without output, which would raise in the reader."""
    async with begun("abcdefgh") as answers:
        answers.answer("abcdefgh")
        answers.answer("hgfedcba")
        await answers.turns(20)
        assert answers.went_on == list("abcdefgh")
        assert all(answers.parts[name] == [1, 2] for name in "abcdefgh")


@in_a_loop
async def test_who_has_waited_for_long_goes_on_however_many_they_are() -> None:
    """In one turn, after one in which other things took long; not who came since."""
    async with begun("abcdefghijklmn") as answers:
        answers.answer("abcdefghij")
        answers.now += 2 * LONG
        answers.answer("klmn")
        # Who is let go in one turn runs in the next.
        await answers.turns(2)
        assert answers.went_on == list("abcdefghij")


@in_a_loop
async def test_who_has_waited_for_less_waits_for_a_place() -> None:
    async with begun("abcdefghij") as answers:
        answers.answer("abcdefghij")
        answers.now += LONG / 2
        await answers.turns(2)
        assert answers.went_on == list("abcdefghij")[: 2 * FEW]


@in_a_loop
async def test_who_goes_on_when_the_clock_strikes_gives_its_place_up() -> None:
    async with begun("abcdefgh") as answers:
        answers.answer("abcdefgh")
        answers.clock._strike()
        await answers.turns(20)
        assert sorted(answers.went_on) == list("abcdefgh")
