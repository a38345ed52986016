"""Client processes, which ask a server and note when which bytes came.

What came is read after the last answer has ended, so that asking costs little: a wake-up and a list entry
for what arrived at once.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import aiohttp

from benchmark.errors import CellFailed
from benchmark.traffic.answers import Answer, parse, refusal

READ_BUFFER = 1 << 20  # bytes
# Processes have their bodies and look at the clock before the first request is due.
HEAD_START = 0.05


@dataclass(frozen=True)
class Phase:
    """A time in which closed-loop clients ask one kind of requests; what is under way at its end is answered.

    Attributes:
        bodies: as in `Job`.
    """

    bodies: Sequence[bytes]
    clients: int
    seconds: float


@dataclass(frozen=True)
class Job:
    """What is asked of one server, once.

    Attributes:
        bodies: of requests, as JSON, one for each prompt of the pool; request i takes body i modulo
            their number.
        clients: in a closed loop, how many ask at once.
        arrivals: in an open loop, number of each request and when it is due, seconds from the start.
        phases: traffic that changes, one after the other; what `bodies` and `clients` say is not read.
        most: requests in a closed loop, or of all phases.
        least: requests in a closed loop that are sent however late it is.
        seconds: after which no client of a closed loop sends another.
        timeout: seconds after which all must have been answered.
    """

    url: str
    bodies: Sequence[bytes]
    clients: int = 0
    arrivals: Sequence[tuple[int, float]] = ()
    phases: Sequence[Phase] = ()
    most: int = 0
    least: int = 0
    seconds: float = math.inf
    timeout: float = 300.0


@dataclass(frozen=True)
class Heard:
    """What all clients heard.

    Attributes:
        answers: by the time at which they began.
        busiest: processor time of the busiest client process over the time that asking took; near 1
            it could not keep up, and the server may be faster than it was measured.
        processors: the same of all client processes together.
        late: seconds by which a request of an open loop was sent too late, the worst.
    """

    answers: list[Answer]
    busiest: float
    processors: float
    late: float


class Shared:
    """What client processes tell each other, and the process that started them."""

    def __init__(self, context: Any):
        self.sent = context.Value("l", 0)
        self.ended = context.Value("l", 0)
        self.stop = context.Value("b", 0, lock=False)

    def reset(self) -> None:
        self.sent.value = self.ended.value = self.stop.value = 0


class Clients:
    """Client processes that live through a run; one at a time may be used."""

    def __init__(self, processes: int | None = None):
        """
        Args:
            processes: how many; by default one for four processors, at most four.
        """
        count = processes or max(1, min(4, (os.cpu_count() or 1) // 4))
        context = multiprocessing.get_context("spawn")
        self._shared = Shared(context)
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for _ in range(count):
            mine, its = context.Pipe()
            process = context.Process(target=_serve, args=(its, self._shared), daemon=True)
            process.start()
            its.close()
            self._connections.append(mine)
            self._processes.append(process)

    def __len__(self) -> int:
        return len(self._processes)

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.terminate()
            process.join()

    def ask(self, job: Job, tick: Callable[[int], Any] = lambda ended: None) -> Heard:
        """Asks, and waits for the last answer.

        Args:
            tick: told now and then how many were answered.

        Raises:
            CellFailed: the server refused, broke off, or took too long.
        """
        self._shared.reset()
        shares = list(_shares(job, len(self)))
        start = time.perf_counter() + HEAD_START
        connections = self._connections[: len(shares)]
        for connection, share in zip(connections, shares, strict=True):
            connection.send((share, start))
        results = self._results(connections, tick)
        errors = [result for result in results if isinstance(result, str)]
        if errors:
            raise CellFailed(errors[0])
        answers = [answer for heard in results for answer in heard.answers]
        return Heard(
            sorted(answers, key=lambda answer: answer.began),
            max(heard.busiest for heard in results),
            sum(heard.processors for heard in results),
            max(heard.late for heard in results),
        )

    def _results(self, connections: list[Connection], tick: Callable[[int], Any]) -> list[Any]:
        waiting = list(connections)
        results: list[Any] = []
        while waiting:
            for connection in wait(waiting, 0.1):
                waiting.remove(connection)
                try:
                    results.append(connection.recv())
                except (EOFError, OSError):
                    results.append("a client process ended")
                if isinstance(results[-1], str):
                    self._shared.stop.value = 1
            tick(self._shared.ended.value)
        return results


def _shares(job: Job, processes: int) -> Iterator[Job]:
    """What each process does of a job."""
    if job.arrivals:
        parts = [job.arrivals[k::processes] for k in range(processes)]
        yield from (replace(job, arrivals=part) for part in parts if part)
        return
    if job.phases:
        shares = [_counts(phase.clients, processes) for phase in job.phases]
        for counts in zip(*shares, strict=True):
            phases = zip(job.phases, counts, strict=True)
            parts = [replace(phase, clients=count) for phase, count in phases]
            yield replace(job, phases=parts)
        return
    for count in _counts(job.clients, processes):
        if count:
            yield replace(job, clients=count)


def _counts(clients: int, processes: int) -> list[int]:
    each, more = divmod(clients, processes)
    return [each + (k < more) for k in range(processes)]


def _serve(connection: Connection, shared: Shared) -> None:
    """The life of a client process: until its parent is gone."""
    for each in (signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # the parent ends its clients
    while True:
        try:
            job, start = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(_heard(job, start, shared))


def _heard(job: Job, start: float, shared: Shared) -> Heard | str:
    """What one process heard, or why it has nothing to say."""
    before = time.process_time()
    asking = Asking(job, start, shared)
    try:
        asyncio.run(asyncio.wait_for(asking.all(), job.timeout + HEAD_START))
        spent = (time.process_time() - before) / (time.perf_counter() - start)
        return Heard([parse(*each) for each in asking.heard], spent, spent, asking.late)
    except TimeoutError:
        return f"not all requests were answered in {job.timeout:g} s: raise --timeout-s."
    except CellFailed as error:
        return str(error)
    except ExceptionGroup as group:
        error = group.exceptions[0]
        if isinstance(error, aiohttp.ClientError | OSError):
            return f"the server broke off ({type(error).__name__}): see its log."
        return str(error) if isinstance(error, CellFailed) else repr(error)


class Asking:
    """One process's part of a job, under way.

    Attributes:
        heard: prompt, time at which it was sent or due, and what was read when, of each request.
    """

    def __init__(self, job: Job, start: float, shared: Shared):
        self.job, self.start, self.shared = job, start, shared
        self.heard: list[tuple[int, float, list[tuple[float, bytes]]]] = []
        self.late = 0.0

    async def all(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        # A connection that was idle for long may be closed by the server just when it is used again.
        connector = aiohttp.TCPConnector(limit=0, force_close=bool(self.job.arrivals))
        async with (
            aiohttp.ClientSession(
                timeout=timeout, connector=connector, read_bufsize=READ_BUFFER
            ) as session,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(self.job.clients):
                group.create_task(self.client(session))
            for number, due in self.job.arrivals:
                group.create_task(self.arrival(session, number, self.start + due))
            for client in range(max((phase.clients for phase in self.job.phases), default=0)):
                group.create_task(self.changing(session, client))

    async def client(self, session: aiohttp.ClientSession) -> None:
        await asyncio.sleep(self.start - time.perf_counter())
        while (number := self.next()) is not None:
            await self.request(session, number, time.perf_counter())

    def next(self) -> int | None:
        """Number of the next request of all clients of all processes."""
        job, shared = self.job, self.shared
        with shared.sent.get_lock():
            number = shared.sent.value
            late = time.perf_counter() > self.start + job.seconds and number >= job.least
            if shared.stop.value or number >= job.most or late:
                return None
            shared.sent.value += 1
            return number

    async def arrival(self, session: aiohttp.ClientSession, number: int, due: float) -> None:
        await asyncio.sleep(due - time.perf_counter())
        if not self.shared.stop.value:
            self.late = max(self.late, time.perf_counter() - due)
            await self.request(session, number, due)

    async def changing(self, session: aiohttp.ClientSession, client: int) -> None:
        end = self.start
        for phase in self.job.phases:
            begin, end = end, end + phase.seconds
            await asyncio.sleep(begin - time.perf_counter())
            while client < phase.clients and (now := time.perf_counter()) < end:
                if (number := self.next()) is None:
                    return
                await self.request(session, number, now, phase.bodies)

    async def request(
        self,
        session: aiohttp.ClientSession,
        number: int,
        began: float,
        bodies: Sequence[bytes] | None = None,
    ) -> None:
        bodies = bodies or self.job.bodies
        index = number % len(bodies)
        reads: list[tuple[float, bytes]] = []
        url, headers = f"{self.job.url}/v1/completions", {"Content-Type": "application/json"}
        async with session.post(url, data=bodies[index], headers=headers) as response:
            if response.status != 200:
                raise CellFailed(refusal(response.status, await response.text()))
            while data := await response.content.readany():
                reads.append((time.perf_counter(), data))
        self.heard.append((index, began, reads))
        with self.shared.ended.get_lock():
            self.shared.ended.value += 1
