"""The sweep: arms one after the other, each cell written as soon as it is measured."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmark import provenance
from benchmark.gsm8k import servers
from benchmark.gsm8k.cells import (
    Arm,
    Cell,
    arms,
    key,
    measured,
    question_count,
    read_rows,
    settings,
)
from benchmark.gsm8k.errors import CannotSweep
from benchmark.gsm8k.measure import measure
from benchmark.gsm8k.questions import Problems, dump, load_problems, questions
from benchmark.servers import System

_BACKENDS = {"cuda": "fa3", "cpu": "torch_native"}


class Sweep:
    """One call of the command.

    Attributes:
        failures: why cells have no measurement.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.problems: Problems = load_problems(args.dataset_path)
        self.settings = settings(args, self.problems.sha256)
        self.settings |= {"data": self.problems.source}
        self.failures: list[str] = []
        self._versions: dict[str, str] = {}
        if args.base_url:
            self.arms = [servers.running_arm(args.base_url)]
        else:
            backends = args.attention_backends or [_BACKENDS[servers.device()]]
            self.arms = arms(args, backends, servers.gpu_count())
        rows = read_rows(args.output_file)
        if rows and not (args.resume or args.dry_run):
            raise CannotSweep(
                f"--output-file {args.output_file} has {len(rows)} rows already: add --resume to go on with it, or "
                "name another file."
            )
        self.done = measured(rows)

    def cells(self, arm: Arm) -> list[Cell]:
        """Those of an arm that are still to be measured."""
        every = [Cell(arm, concurrency) for concurrency in self.args.concurrencies]
        return [cell for cell in every if key(self.settings, cell) not in self.done]

    def describe(self) -> str:
        """What would be measured, and with which servers."""
        lines = [f"data: {self.problems.source}, {len(self.problems.rows)} problems"]
        for arm in self.arms:
            if self.args.base_url:
                lines.append(f"{arm}: the server at {self.args.base_url}")
            else:
                given = servers.server_arguments(self.args, arm, servers.device())
                environment = [f"{name}={value}" for name, value in arm.environment.items()]
                command = shlex.join(["python", "-m", "sglang.launch_server", *given])
                lines.append(" ".join([f"{arm}:", *environment, command]))
            for cell in self.cells(arm):
                count = question_count(self.args, cell.concurrency)
                lines.append(f"  concurrency {cell.concurrency}: {count} questions")
        return "\n".join(lines)

    def run(self) -> None:
        """Measures what is left; a cell or a server that fails leaves its reason in `failures`."""
        tokenizer = AutoTokenizer.from_pretrained(self.args.target_model)
        most = max(question_count(self.args, c) for c in self.args.concurrencies)
        self.asked = questions(self.problems, tokenizer, most)
        if self.args.dump_prompts:
            dump(self.asked, self.args.dump_prompts)
        for arm in self.arms:
            if not (cells := self.cells(arm)):
                continue
            if self.args.base_url:
                self._measure_all(cells, self.args.base_url)
                continue
            try:
                with servers.running(self.args, arm, self.args.logs) as url:
                    self._measure_all(cells, url)
            except CannotSweep as error:
                self._fail(f"{arm}: {error}")

    def _measure_all(self, cells: list[Cell], url: str) -> None:
        for cell in cells:
            count = question_count(self.args, cell.concurrency)
            try:
                result = measure(self.args, cell, url, self.asked[:count])
            except CannotSweep as error:
                self._fail(f"{cell}: {error}")
                result = {"error": str(error)}
            self._write(self._row(cell, url) | result)

    def _fail(self, reason: str) -> None:
        self.failures.append(reason)
        print(f"not measured: {reason}", file=sys.stderr)

    def _row(self, cell: Cell, url: str) -> dict[str, Any]:
        arm = cell.arm
        where = servers.device()
        system = System(arm.name, environment=arm.environment)
        self._versions = self._versions or provenance.versions(system, where)
        self._versions.setdefault("sglang", servers.version(url))
        given = [] if self.args.base_url else servers.server_arguments(self.args, arm, where)
        public = self.settings | {
            "target_model": _public(self.args.target_model),
            "draft_model": _public(self.args.draft_model),
        }
        return {
            "key": key(self.settings, cell),
            "backend": arm.backend,
            "tp": arm.tp,
            "arm": arm.name,
            "concurrency": cell.concurrency,
            "settings": public,
            "provenance": provenance.commit()
            | {
                "date": provenance.now(),
                "versions": self._versions,
                "machine": provenance.machine(arm.tp if where == "cuda" else 0),
                "gpu": provenance.gpu() if where == "cuda" else {},
                "model_revision": revision(self.args.target_model),
                "server_args": [_public(value) for value in given],
                "environment": dict(arm.environment),
            },
        }

    def _write(self, row: dict[str, Any]) -> None:
        """Appends a row so that a kill right after it does not lose it."""
        path: Path = self.args.output_file
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = not path.exists() or path.read_bytes()[-1:] in (b"\n", b"")
        with path.open("a") as out:
            out.write(("" if whole else "\n") + json.dumps(row) + "\n")
            out.flush()
            os.fsync(out.fileno())


def revision(model: str) -> str | None:
    """Commit of a model in the Hugging Face cache; None for a folder of one's own."""
    if os.path.isdir(model):
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")
    return Path(found).parent.name if isinstance(found, str) else None


def _public(value: str) -> str:
    """A model without this machine's folders before it."""
    return "/".join(Path(value).parts[-3:]) if os.path.isabs(value) else value
