"""The sweep itself: servers one after the other, each with all of its cells."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import requests
from tqdm import tqdm

from benchmark import provenance
from benchmark.errors import CannotMeasure, CellFailed
from benchmark.gsm8k import arguments, cells, rows, server
from benchmark.gsm8k.cells import Cell
from benchmark.gsm8k.client import Load, ask
from benchmark.gsm8k.figures import over_repeats, sample
from benchmark.gsm8k.questions import Question, load_problems, questions
from benchmark.machine import Machine, label, revision
from benchmark.prompts import dump, load_tokenizer
from benchmark.servers import ServerFailed, System

WARM_UP_TOKENS = 128


@dataclass
class Sweep:
    """One call of the benchmark.

    Attributes:
        asked: every problem of the data set; a cell asks the first ones, and its warm-up the last.
        data: what is said of them in the results.
        done: rows by key, of earlier calls and of this one.
    """

    options: argparse.Namespace
    machine: Machine
    cells: list[Cell]
    asked: list[Question]
    data: dict[str, str]
    done: dict[str, rows.Row] = field(default_factory=dict)
    run: str = field(default_factory=provenance.now)

    def settings(self, cell: Cell) -> dict[str, Any]:
        return cells.settings(self.options, cell, self.machine, self.data)

    def key(self, cell: Cell) -> str:
        return cells.key(cell, self.settings(cell))

    def keep(self, cell: Cell, result: dict[str, Any]) -> None:
        row = {
            "key": self.key(cell),
            **asdict(cell),
            "settings": self.settings(cell),
            **result,
            "provenance": {"run": self.run, "date": provenance.now()} | result["provenance"],
        }
        rows.append(self.options.output_file, row)
        self.done[row["key"]] = row
        print(f"{cell}: {said(row)}", flush=True)

    def results(self) -> list[rows.Row]:
        """The rows of this sweep's cells that there are."""
        keys = [self.key(cell) for cell in self.cells]
        return [self.done[key] for key in keys if key in self.done]


def prepare(options: argparse.Namespace, machine: Machine) -> Sweep | None:
    """Says what will be measured, and loads what it needs; None for a dry run."""
    if options.base_url is not None:
        planned, skipped = server.attached(options), []
    else:
        planned, skipped = cells.plan(options, machine)
    for line in skipped:
        print(line, flush=True)
    if not planned:
        raise CannotMeasure(
            "no cell is left: give a smaller --tp-sizes, or what is to be measured."
        )
    if options.dry_run:
        _say_plan(options, machine, planned)
        return None
    problems = load_problems(options.dataset_path)
    tokenizer = load_tokenizer(options.target_model or arguments.TARGET)
    asked = questions(problems, tokenizer, options.enable_thinking)
    print(f"questions: {len(asked)} of {problems.source}", flush=True)
    if options.dump_prompts is not None:
        most = max(cells.questions(options, cell) for cell in planned)
        texts = [(each.text, f"#### {each.answer}") for each in asked[:most]]
        dump(texts, options.dump_prompts)
    data = {"data": problems.source, "data_sha256": problems.sha256}
    data["instruction"] = problems.instruction
    sweep = Sweep(options, machine, planned, asked, data)
    if options.resume:
        finished = rows.resume(options.output_file)
        sweep.done = {key: finished[key] for key in map(sweep.key, planned) if key in finished}
        print(f"resumed: {len(sweep.done)} of {len(planned)} cells are there already", flush=True)
    return sweep


def _say_plan(options: argparse.Namespace, machine: Machine, planned: Sequence[Cell]) -> None:
    for group in cells.servers(list(planned)):
        if options.base_url is None:
            whole = server.system(options, group[0].arm).full_environment(machine.device)
            changed = {n: value for n, value in whole.items() if os.environ.get(n) != value}
            variables = [f"{name}={value}" for name, value in changed.items()]
            command = server.command(options, machine, group[0])
            launch = ["python", "-m", "sglang.launch_server", *command]
            print(shlex.join([*variables, *launch]))
        for cell in group:
            print(f"  {cell} questions={cells.questions(options, cell)}")
    print(f"{len(planned)} cells, {options.repeats} measurements each")


def measure(sweep: Sweep) -> None:
    """Measures every cell that is not there yet."""
    for group in cells.servers(sweep.cells):
        waiting = [cell for cell in group if sweep.key(cell) not in sweep.done]
        while waiting:
            if sweep.options.base_url is None:
                first = waiting[0]
                print(f"{first.backend} tp={first.tp} {first.arm}: starting", flush=True)
            before = len(waiting)
            try:
                _measure_server(sweep, waiting)
            except ServerFailed as failure:
                print(failure, flush=True)
                if len(waiting) == before:  # it never served
                    for cell in waiting:
                        sweep.keep(cell, _failed(f"the server did not start: {failure}"))
                    waiting = []


def _measure_server(sweep: Sweep, waiting: list[Cell]) -> None:
    """Starts a server and takes cells off `waiting` until none is left or it can serve no more."""
    with server.served(sweep.options, sweep.machine, waiting[0]) as served:
        while waiting:
            cell = waiting[0]
            try:
                result = _measure_cell(sweep, served, cell)
            except (CellFailed, requests.RequestException) as failure:
                result = _failed(str(failure))
            waiting.pop(0)
            sweep.keep(cell, result)
            if result["error"] and waiting and not served.usable():
                if sweep.options.base_url is not None:
                    raise CannotMeasure(
                        f"the server at {sweep.options.base_url} serves no more: start it again, then "
                        "go on with --resume."
                    )
                return


def _measure_cell(sweep: Sweep, served: server.Served, cell: Cell) -> dict[str, Any]:
    """All repeats of a cell, as a part of its row.

    Raises:
        CellFailed: no figures, and why.
    """
    options = sweep.options
    load = Load(
        served.url,
        cells.sampling(options),
        cell.concurrency,
        options.batch_requests,
        options.timeout_s,
    )
    gpu = _warm_up(load, sweep.asked)
    asked = sweep.asked[: cells.questions(options, cell)]
    samples = [_sample(served, load, asked, cell, options, n) for n in range(options.repeats)]
    error = None
    if cell.speculative and not all(each["verify_steps"] for each in samples):
        error = "DFLASH is on, but no verify step happened: see the server's log."
    return {
        "error": error,
        **over_repeats(samples),
        "samples": samples,
        "provenance": _provenance(sweep, served, cell) | {"gpu": gpu},
    }


def _failed(error: str) -> dict[str, Any]:
    return {"error": error, "provenance": {}}


def _warm_up(load: Load, asked: Sequence[Question]) -> dict[str, str]:
    """Brings the server to work at the concurrency; returns the state of the GPU meanwhile."""
    tokens = min(WARM_UP_TOKENS, load.sampling["max_new_tokens"])
    short = Load(
        load.url,
        load.sampling | {"max_new_tokens": tokens},
        load.concurrency,
        load.batch,
        load.seconds,
    )
    with ThreadPoolExecutor(1) as pool:
        state = pool.submit(provenance.gpu)
        ask(short, [question.ids for question in asked[-load.concurrency :]])
        return state.result()


def _sample(
    served: server.Served,
    load: Load,
    asked: Sequence[Question],
    cell: Cell,
    options: argparse.Namespace,
    number: int,
) -> dict[str, Any]:
    """One measurement, from an empty cache."""
    served.flush()
    name = f"{cell} [{number + 1}/{options.repeats}]"
    off = True if options.disable_tqdm else None  # None: only on a terminal
    with tqdm(total=len(asked), desc=name, disable=off, leave=False) as bar:
        answers, seconds = ask(load, [question.ids for question in asked], bar.update)
    return sample(asked, answers, seconds)


def _provenance(sweep: Sweep, served: server.Served, cell: Cell) -> dict[str, Any]:
    options, machine = sweep.options, sweep.machine
    commit = provenance.commit()
    if options.commit:
        commit = {"commit": options.commit, "changed_files": None}
    models = {"target": options.target_model or arguments.TARGET}
    if cell.speculative:
        models["drafter"] = options.draft_model or arguments.DRAFTER
    found = {"sglang": served.info().get("version", "unknown")}
    environment: dict[str, str] = {}
    if options.base_url is None:
        system = server.system(options, cell.arm)
        found = _versions(system.name, machine.device) | found
        environment = provenance.environment(system, machine.device)
    known = {server.location(model): label(model) for model in models.values()}
    return commit | {
        "versions": found,
        "models": {n: {"name": label(m), "revision": _revision(m)} for n, m in models.items()},
        "machine": provenance.machine(cell.tp if machine.gpus else 0),
        "server_arguments": provenance.without_paths(served.arguments, known),
        "environment": environment,
        "start_s": served.start_seconds,
        "command": provenance.command_line(),
    }


@cache
def _versions(name: str, device: str) -> dict[str, str]:
    return provenance.versions(System(name), device)


_revision = cache(revision)


def said(row: rows.Row) -> str:
    """A row in a line."""
    if row["error"]:
        return f"FAILED: {row['error'].splitlines()[0]}"
    text = f"{row['output_tok_s']:,.1f} tok/s, accuracy {row['accuracy']:.3f}"
    return text + (f", accept length {row['accept_length']:.3f}" if row["accept_length"] else "")
