"""Waits for output, which one clock ends."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import suppress
from types import SimpleNamespace

import pytest

from sglang_dflash.serving.output_clock import OutputClock


class State(SimpleNamespace):
    """Of a request; unlike its base it can be referred to weakly."""


def request() -> State:
    return State(event=asyncio.Event(), out_list=[], finished=False)


def answer(state: State, part: str) -> None:
    state.out_list.append(part)
    state.event.set()


def test_output_ends_the_wait() -> None:
    """That was there before, and that comes; the clock has nothing to strike for."""

    async def run() -> None:
        clock, state = OutputClock(0.05), request()
        answer(state, "first")
        await clock.output_of(state)
        assert state.out_list == ["first"]
        state.out_list.clear()
        waiting = asyncio.create_task(clock.output_of(state))
        await asyncio.sleep(0)
        answer(state, "second")
        await waiting
        await asyncio.sleep(0.1)
        assert state.out_list == ["second"] and clock._due is None

    asyncio.run(run())


def test_the_clock_strikes_for_whom_nothing_has_come() -> None:
    """Again and again, while others get their output."""

    async def run() -> None:
        clock, quiet, lively, over = OutputClock(0.1), request(), request(), asyncio.Event()

        async def parts() -> int:
            got = 0
            while not over.is_set():
                asyncio.get_running_loop().call_later(0.01, answer, lively, "part")
                with suppress(TimeoutError):
                    await clock.output_of(lively)
                    lively.event.clear()
                got += len(lively.out_list)
                lively.out_list.clear()
            return got

        asked = asyncio.create_task(parts())
        for _ in range(4):
            with pytest.raises(TimeoutError):
                await clock.output_of(quiet)
        answer(quiet, "late")
        await clock.output_of(quiet)
        over.set()
        assert await asked > 0

    asyncio.run(asyncio.wait_for(run(), 60))  # a clock that never strikes would be waited for


def test_output_with_the_stroke_is_not_lost() -> None:
    async def run() -> None:
        clock, state = OutputClock(60), request()
        waiting = asyncio.create_task(clock.output_of(state))
        await asyncio.sleep(0)
        clock._strike()
        answer(state, "part")
        await waiting
        assert state.out_list == ["part"]

    asyncio.run(run())


def test_who_gives_up_is_forgotten() -> None:
    async def run() -> None:
        clock, state = OutputClock(60), request()
        waiting = asyncio.create_task(clock.output_of(state))
        await asyncio.sleep(0)
        assert clock._waiting
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not clock._waiting

    asyncio.run(run())


def test_nothing_waits_for_a_garbage_collection() -> None:
    """What a request was goes with it, whether it was answered or its client has gone."""

    async def run(gone: bool) -> weakref.ref[State]:
        clock, state = OutputClock(60), request()
        waiting = asyncio.create_task(clock.output_of(state))
        await asyncio.sleep(0)
        if gone:
            waiting.cancel()
        else:
            answer(state, "last")
        with suppress(asyncio.CancelledError):
            await waiting
        return weakref.ref(state)

    gc.disable()
    try:
        assert asyncio.run(run(gone=False))() is None
        assert asyncio.run(run(gone=True))() is None
    finally:
        gc.enable()
