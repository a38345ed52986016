"""Starts the two servers that are compared, and ends them with all their processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests

from sglang_dflash.losslessness.errors import CannotCompare

PATIENCE = 20  # seconds that a server has to end


def split_arguments(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """(arguments of both servers, those of the speculative one alone: `--speculative-…`).

    Raises:
        CannotCompare: an argument that is set here.
    """
    both: list[str] = []
    speculative: list[str] = []
    target = both
    for argument in given:
        if argument.startswith("--"):
            target = speculative if argument.startswith("--speculative-") else both
            if argument.split("=")[0] in ("--port", "--model-path"):
                raise CannotCompare(
                    f"{argument} cannot be a server argument: both servers share the model that "
                    "--model-path names before the --, and ports are chosen."
                )
        target.append(argument)
    return both, speculative


@contextmanager
def both_running(
    target: str,
    drafter: str,
    given: Sequence[str],
    logs: Path,
    seconds: float,
    fault: str | None = None,
) -> Iterator[tuple[str, str]]:
    """Runs the speculative server and the plain one, both healthy, while the context lasts.

    Args:
        given: server arguments; see `split_arguments`.
        seconds: within which both must be healthy.
        fault: name of a fault for the speculative server, which makes it a negative control.

    Yields:
        The URLs of the speculative and of the plain server.

    Raises:
        CannotCompare: an argument that is set here, or a server that does not start.
    """
    common, speculative = split_arguments(given)
    common = ["--model-path", target, *common]
    dflash = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", drafter]
    until = time.monotonic() + seconds
    with ExitStack() as stack:
        started = [
            stack.enter_context(_started(name, arguments, logs / f"{name}.log", fault_))
            for name, arguments, fault_ in (
                ("speculative", [*common, *dflash, *speculative], fault),
                ("plain", common, None),
            )
        ]
        for server in started:
            server.wait_until_healthy(until)
        yield started[0].url, started[1].url


@dataclass(frozen=True)
class _Server:
    name: str
    url: str
    process: subprocess.Popen
    log: Path

    def wait_until_healthy(self, until: float) -> None:
        """Waits for `/health`, up to the monotonic time `until`."""
        while time.monotonic() < until:
            status = self.process.poll()
            if status is not None:
                raise CannotCompare(
                    f"the {self.name} server ended with status {status}: see {self.log}.\n"
                    f"{tail(self.log)}"
                )
            try:
                if requests.get(f"{self.url}/health", timeout=10).status_code == 200:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.5)
        raise CannotCompare(
            f"the {self.name} server is not up in time: see {self.log}, or raise --start-seconds."
        )


@contextmanager
def _started(
    name: str, arguments: Sequence[str], log: Path, fault: str | None
) -> Iterator[_Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    module = ["sglang.launch_server"]
    if fault is not None:
        module = ["sglang_dflash.losslessness.faulty_server", fault]
    command = [sys.executable, "-m", *module, *arguments]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield _Server(name, f"http://127.0.0.1:{port}", process, log)
    finally:
        end(process)


def tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def end(process: subprocess.Popen) -> None:
    """Ends a process group; a second Ctrl-C must not leave half of it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline:
                process.poll()  # a zombie would count as a member of the group
                try:
                    os.killpg(process.pid, sent)
                except ProcessLookupError:
                    process.wait()
                    return
                time.sleep(0.2)
    finally:
        signal.signal(signal.SIGINT, before)
