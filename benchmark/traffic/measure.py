"""The measurement itself: servers of all systems, asked in turns."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from tqdm import tqdm

from benchmark import jsonl, provenance
from benchmark.errors import CellFailed
from benchmark.jsonl import Row, good
from benchmark.machine import Machine
from benchmark.prompts import load_tokenizer
from benchmark.traffic import cells, origin, rows, workloads
from benchmark.traffic.arrivals import Closed, poisson
from benchmark.traffic.cells import Cell, Place
from benchmark.traffic.clients import Clients, Heard, Job
from benchmark.traffic.counters import Counters, mean_accept_length
from benchmark.traffic.figures import digests, figures
from benchmark.traffic.fleet import Served, fleet
from benchmark.traffic.systems import Choice, Needs, server_arguments
from benchmark.traffic.workloads import Workload

WARM_UP_TOKENS = 64
# A cell is warmed up by no more clients than these: once each server was, by all.
WARM_UP_CLIENTS = 32
WARM_UP_SECONDS = 0.5
# A cell takes longer than its requests are sent: warm-up, and answers that are under way.
MORE_THAN_SECONDS = 4.0
LEAST_CONTEXT = 4096
# After the last answer, until every counter of a server has it.
COUNTERS_SECONDS = 0.1


@dataclass
class Run:
    """One call of the benchmark.

    Attributes:
        deadline: as `time.monotonic` tells it; no cell begins that would end after it.
        done: rows by key, of earlier calls and of this one.
        took: seconds of cells of this call, by what was asked.
    """

    options: argparse.Namespace
    machine: Machine
    cells: list[Cell]
    pools: dict[str, Workload]
    deadline: float | None = None
    done: dict[str, Row] = field(default_factory=dict)
    took: dict[Place, float] = field(default_factory=dict)
    begun: str = field(default_factory=provenance.now)

    def choice(self, cell: Cell) -> Choice:
        return next(choice for choice in self.options.choices if choice.name == cell.system)

    def key(self, cell: Cell) -> str:
        return cells.key(cell, self.settings(cell))

    def settings(self, cell: Cell) -> dict[str, Any]:
        return origin.settings(
            self.options,
            self.choice(cell),
            self.options.pair,
            self.machine,
            self.pools[cell.place.workload],
        )

    def left(self) -> float:
        """Seconds until the deadline."""
        return math.inf if self.deadline is None else self.deadline - time.monotonic()

    def timeout(self) -> float:
        """Seconds that a cell may take in all."""
        return min(self.options.timeout_s, max(self.left(), 1.0))

    def waiting(self) -> list[Cell]:
        return [cell for cell in self.cells if not self.measured(cell)]

    def measured(self, cell: Cell) -> bool:
        row = self.done.get(self.key(cell))
        return row is not None and good(row)

    def rows(self) -> list[Row]:
        """Of this run's cells, as far as they are there."""
        return [self.done[key] for key in map(self.key, self.cells) if key in self.done]

    def needs(self) -> Needs:
        """What every server must hold, whatever is left to measure."""
        given = self.options
        most = given.max_running or max(
            [load.clients for load in self._loads() if isinstance(load, Closed)] or [64]
        )
        longest = max(pool.longest for pool in self.pools.values()) + workloads.RESERVE
        context = min(max(longest, LEAST_CONTEXT), workloads.context_of(Path(given.target_model)))
        # SGLang admits a request only if what it might become has room, vLLM wants one that is full.
        tokens = given.kv_tokens or _rounded_up(max(most * longest, context) + 1024, 1024)
        return Needs(most, tokens, context)

    def _loads(self) -> list[cells.Load]:
        return [cell.place.load for cell in self.cells]

    def server_arguments(self, choice: Choice) -> list[str]:
        given = self.options
        return server_arguments(
            choice,
            given.pair,
            self.needs(),
            self.machine.device,
            given.tp_size,
            given.attention_backend,
        )

    def keep(self, cell: Cell, result: dict[str, Any]) -> None:
        head = {"benchmark": rows.NAME, "key": self.key(cell), **cell.fields()}
        found = {"run": self.begun, "date": provenance.now()} | result.pop("provenance")
        row = head | {"settings": self.settings(cell)} | result | {"provenance": found}
        jsonl.append(self.options.output_file, row)
        self.done[row["key"]] = row
        number = len(self.cells) - len(self.waiting())
        print(f"[{number}/{len(self.cells)}] {cell}: {rows.said(row)}", flush=True)


def _rounded_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def prepare(options: argparse.Namespace, machine: Machine) -> Run:
    """Loads the prompts, and what an earlier call has measured."""
    tokenizer = load_tokenizer(options.target_model)
    context = workloads.context_of(Path(options.target_model))
    names = dict.fromkeys(place.workload for place in options.places)
    pools = {name: workloads.load(name, options.data, tokenizer, context) for name in names}
    for pool in pools.values():
        print(pool.describe(), flush=True)
    for place in options.places:
        pools[place.workload].check_kind(place.kind)
    systems = [choice.name for choice in options.choices]
    order = cells.in_turns(options.places, systems, options.repeats)
    run = Run(options, machine, order, pools)
    if options.stop_after:
        run.deadline = options.began + options.stop_after
    if options.resume:
        run.done = rows.resume(options.output_file)
        there = len(order) - len(run.waiting())
        print(f"resumed: {there} of {len(order)} cells are there already", flush=True)
    return run


def say(run: Run) -> None:
    """What would be measured by which commands."""
    for choice in run.options.choices:
        if choice.system is None:
            print(f"{choice.name}: {choice.url}")
            continue
        whole = choice.system.full_environment(run.machine.device)
        changed = [f"{n}={value}" for n, value in whole.items() if os.environ.get(n) != value]
        command = [choice.system.python, "-m", *choice.system.launch]
        command += [*run.server_arguments(choice), *choice.system.arguments]
        print(f"{choice.name}: {shlex.join([*changed, *command])}")
    for cell in run.waiting():
        print(f"  {cell}")
    print(f"{len(run.waiting())} cells")


def measure(run: Run) -> None:
    """Measures the cells that are not there yet, until none is left or the time is up."""
    waiting = run.waiting()
    if not waiting:
        return
    options = run.options
    logs = (options.logs or options.output_file.with_suffix(".logs")).absolute()
    seconds = min(options.start_timeout, max(run.left(), 1.0))
    needed = [
        choice for choice in run.options.choices if choice.name in {c.system for c in waiting}
    ]
    print(f"starting {', '.join(choice.name for choice in needed)}", flush=True)
    with (
        Clients(options.client_processes) as clients,
        fleet(
            _groups(needed, options.start),
            run.server_arguments,
            run.machine.device,
            logs,
            _warmer(run, waiting, run.needs().requests, seconds),
            seconds,
        ) as served,
    ):
        _measure_all(run, waiting, served, _origins(run, served), clients)


def _groups(choices: Sequence[Choice], start: str) -> list[list[Choice]]:
    """Which servers start side by side; this project's measure what rounds take when they start."""
    own = [choice for choice in choices if choice.kind == "own"]
    others = [choice for choice in choices if choice.kind != "own"]
    groups = {"together": [[*choices]], "own-first": [own, others]}
    return list(filter(None, groups.get(start, [[choice] for choice in choices])))


def _origins(run: Run, served: Sequence[Served]) -> dict[str, dict[str, Any]]:
    """Where figures of each system come from, as far as its server answers."""
    found = {}
    for each in served:
        if not each.dead:
            try:
                found[each.name] = origin.of(run, each)
            except (requests.RequestException, ValueError) as error:
                each.dead = f"the server died before it was asked ({type(error).__name__})"
    return found


def _warmer(
    run: Run, waiting: Sequence[Cell], most: int, seconds: float
) -> Callable[[Served], None]:
    """What warms a server up, before anything is measured: requests of each kind that will come.

    One that the server refuses costs the cells that would ask it.
    """
    kinds = dict.fromkeys((cell.place.workload, cell.place.kind) for cell in waiting)

    def warm(served: Served) -> None:
        warmed: set[str] = set()
        for workload, kind in kinds:
            if kind in warmed:
                continue
            pool, sampling = run.pools[workload], run.options.sampling
            bodies = pool.bodies(kind, sampling, served.model, WARM_UP_TOKENS, stream=False)
            try:
                served.warm_up(bodies[-most:], seconds)
                warmed.add(kind)
            except CellFailed as failure:
                served.refused[workload, kind] = str(failure)
                print(f"{served.name}: {workload} {kind} is refused: {failure}", flush=True)

    return warm


def _measure_all(
    run: Run,
    waiting: Sequence[Cell],
    systems: Sequence[Served],
    origins: dict[str, dict[str, Any]],
    clients: Clients,
) -> None:
    for cell in waiting:
        served = next(each for each in systems if each.name == cell.system)
        # First, because a server that was not up when the time was is no failure.
        if run.left() < _expected(run, cell.place):
            print(f"{len(run.waiting())} cells are left, because the time is up", flush=True)
            return
        if served.dead:
            run.keep(cell, {"error": served.dead, "provenance": {}})
            continue
        if refused := served.refused.get((cell.place.workload, cell.place.kind)):
            run.keep(cell, {"error": refused, "provenance": origins[served.name]})
            continue
        began = time.monotonic()
        try:
            result = _measure_cell(run, cell, served, clients)
            result["provenance"] = origins[served.name] | result["provenance"]
        except (CellFailed, requests.RequestException) as failure:
            result = {"error": str(failure), "provenance": origins[served.name]}
            served.check()
        run.took[cell.place] = max(run.took.get(cell.place, 0), time.monotonic() - began)
        run.keep(cell, result)


def _expected(run: Run, place: Place) -> float:
    """Seconds that a cell will take, about: as long as others did there, or in the same workload."""
    alike = [seconds for other, seconds in run.took.items() if other.workload == place.workload]
    return run.took.get(place) or max([*alike, run.options.seconds + MORE_THAN_SECONDS])


def _measure_cell(run: Run, cell: Cell, served: Served, clients: Clients) -> dict[str, Any]:
    """One cell, as a part of its row.

    Raises:
        CellFailed: no figures, and why.
    """
    place, pool = cell.place, run.pools[cell.place.workload]
    gpu = _warm_up(run, cell, served, clients)
    flushed = None if run.options.keep_cache else served.flush()
    before = served.counters()
    heard = _ask(run, cell, served, clients)
    time.sleep(COUNTERS_SECONDS)
    counted = served.counters().since(before)
    closed = place.load.clients if isinstance(place.load, Closed) else None
    found = figures(heard, run.options.goal, counted, closed)
    if found["accept_length"] is None and counted == Counters() and flushed:
        found["accept_length"] = mean_accept_length(served.url)
    greedy = [pool.is_greedy(place.kind, i) for i in range(len(pool.prompts))]
    return {
        "error": None,
        **found,
        "flushed": flushed,
        "answers": digests(heard.answers, len(pool.prompts), greedy),
        "provenance": {"gpu": gpu, "client_processes": len(clients)},
    }


def _warm_up(run: Run, cell: Cell, served: Served, clients: Clients) -> dict[str, str]:
    """Brings the server to work at this load; returns the state of the GPU meanwhile."""
    place, options = cell.place, run.options
    bodies = run.pools[place.workload].bodies(
        place.kind, options.sampling, served.model, WARM_UP_TOKENS
    )
    many = min(place.load.clients if isinstance(place.load, Closed) else 8, WARM_UP_CLIENTS)
    job = Job(
        served.url,
        bodies[::-1],
        clients=many,
        most=len(bodies),
        least=many,
        seconds=WARM_UP_SECONDS,
        timeout=run.timeout(),
    )
    with ThreadPoolExecutor(1) as pool:
        state = pool.submit(provenance.gpu)
        clients.ask(job)
        return state.result()


def _ask(run: Run, cell: Cell, served: Served, clients: Clients) -> Heard:
    place, options = cell.place, run.options
    pool = run.pools[place.workload]
    bodies = pool.bodies(place.kind, options.sampling, served.model)
    most = options.requests or len(bodies)
    if isinstance(place.load, Closed):
        many = place.load.clients
        job = Job(
            served.url,
            bodies,
            clients=many,
            most=max(most, many * options.least_per_client),
            least=many * options.least_per_client,
            seconds=options.seconds,
            timeout=run.timeout(),
        )
        total = None  # the time ends it
    else:
        due = list(enumerate(poisson(place.load.rate, options.seconds, most)))
        job = Job(served.url, bodies, arrivals=due, timeout=run.timeout())
        total = len(due)
    off = True if options.disable_tqdm else None  # None: only on a terminal
    with tqdm(total=total, desc=str(cell), disable=off, leave=False, unit=" answers") as bar:
        return clients.ask(job, lambda ended: bar.update(ended - bar.n))
