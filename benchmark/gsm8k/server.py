"""The server of some cells: started with all that they share, or one that runs already."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from benchmark import servers
from benchmark.errors import CannotMeasure, CellFailed
from benchmark.gsm8k import arguments
from benchmark.gsm8k.cells import BASELINE, DFLASH, Cell, split_arguments
from benchmark.machine import Machine, label, location

_SYSTEMS = {BASELINE: "plain", "v1": "v1", "v2": "v2-plan"}
BUNDLED_TARGET = "checkpoints/tiny/target"
PROMPT_TOKENS = 1024  # more than the longest problem has; sizes the KV pool of a CPU
IDLE_SECONDS = 20


@dataclass(frozen=True)
class Served:
    """A server that answers.

    Attributes:
        arguments: its command line after the module; empty if it was not started here.
    """

    url: str
    arguments: Sequence[str] = ()
    start_seconds: float | None = None

    def info(self) -> dict[str, Any]:
        answer = requests.get(f"{self.url}/server_info", timeout=60)
        answer.raise_for_status()
        return answer.json()

    def flush(self) -> None:
        """Empties the radix cache, as soon as nobody is served.

        Raises:
            CellFailed: it stays busy, or does not answer.
        """
        until = time.monotonic() + IDLE_SECONDS
        while True:
            try:
                answer = requests.post(f"{self.url}/flush_cache", timeout=60)
            except requests.RequestException as error:
                raise CellFailed(f"the server is gone ({type(error).__name__}).") from None
            if answer.status_code == 200:
                return
            if time.monotonic() > until:
                raise CellFailed(f"the server is still busy after {IDLE_SECONDS} s.")
            time.sleep(0.1)

    def usable(self) -> bool:
        """Whether it can serve the next cell, after one that failed."""
        try:
            requests.post(f"{self.url}/abort_request", json={"abort_all": True}, timeout=60)
            self.flush()
        except (CellFailed, requests.RequestException):
            return False
        return True


def system(options: argparse.Namespace, arm: str) -> servers.System:
    """How servers of an arm are started; the worker is chosen by the environment alone."""
    models = [options.target_model or arguments.TARGET, options.draft_model or arguments.DRAFTER]
    local = all(Path(model).is_dir() for model in models)
    offline = "1" if local else os.environ.get("HF_HUB_OFFLINE", "0")
    return servers.System(arm, environment=servers.OWN[_SYSTEMS[arm]] | {"HF_HUB_OFFLINE": offline})


def command(options: argparse.Namespace, machine: Machine, cell: Cell) -> list[str]:
    """Arguments of the server of all cells that differ from `cell` in concurrency only."""
    most = max(options.concurrencies)
    target = location(options.target_model or arguments.TARGET)
    given = ["--model-path", target, "--device", machine.device, "--tp-size", str(cell.tp)]
    given += ["--attention-backend", cell.backend, "--max-running-requests", str(most)]
    if machine.gpus:
        # No larger batches than these come, so no more graphs are worth their start-up time.
        given += ["--cuda-graph-max-bs", str(most)]
        if label(target) == BUNDLED_TARGET:
            # The release's piecewise graphs fail on so small a model.
            given += ["--disable-piecewise-cuda-graph"]
    else:
        tokens = most * (options.max_new_tokens + PROMPT_TOKENS)
        given += ["--dtype", "float32", "--max-total-tokens", str(tokens), "--sleep-on-idle"]
    if options.page_size is not None:
        given += ["--page-size", str(options.page_size)]
    if options.disable_radix_cache:
        given += ["--disable-radix-cache"]
    both, speculative = split_arguments(options.server_arguments)
    given += both
    if cell.speculative:
        drafter = location(options.draft_model or arguments.DRAFTER)
        given += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", drafter]
        for name in ("speculative_draft_attention_backend", "speculative_dflash_draft_window_size"):
            if getattr(options, name) is not None:
                given += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        given += speculative
    return given


@contextmanager
def served(options: argparse.Namespace, machine: Machine, cell: Cell) -> Iterator[Served]:
    """The server of a cell, while the context lasts; one that runs already goes on running.

    Raises:
        benchmark.servers.ServerFailed: it did not start.
    """
    if options.base_url is not None:
        yield Served(options.base_url.rstrip("/"))
        return
    folder = (options.logs or options.output_file.with_suffix(".logs")).absolute()
    log = servers.free_log(folder, f"{cell.backend}-tp{cell.tp}-{cell.arm}")
    given = command(options, machine, cell)
    with servers.running(
        system(options, cell.arm), machine.device, given, log, options.timeout_s
    ) as server:
        yield Served(server.url, server.arguments, round(server.start_seconds, 1))


def attached(options: argparse.Namespace) -> list[Cell]:
    """The cells of `--base-url`, by what that server says of itself; names its target too.

    Raises:
        CannotMeasure: it does not answer, or is no such server as `--workers` says.
    """
    url = options.base_url.rstrip("/")
    try:
        info = Served(url).info()
    except (requests.RequestException, ValueError) as error:
        raise CannotMeasure(
            f"the server at --base-url {url} does not answer /server_info ({type(error).__name__}): "
            "start it, or give its URL."
        ) from None
    algorithm = info.get("speculative_algorithm")
    if options.workers and algorithm != "DFLASH":
        raise CannotMeasure(
            f"--workers {options.workers[0]} is given, but the server at {url} runs "
            f"{algorithm or 'plain decoding'}: leave --workers out."
        )
    if algorithm not in (None, "DFLASH"):
        raise CannotMeasure(
            f"the server at {url} runs {algorithm}: give one with DFLASH, or plain."
        )
    arm = (options.workers or [DFLASH])[0] if algorithm else BASELINE
    options.target_model = options.target_model or info["tokenizer_path"]
    options.draft_model = info.get("speculative_draft_model_path")
    options.page_size = info.get("page_size")
    options.disable_radix_cache = bool(info.get("disable_radix_cache"))
    backend = info.get("attention_backend") or "default"
    return [Cell(backend, info["tp_size"], arm, c) for c in options.concurrencies]
