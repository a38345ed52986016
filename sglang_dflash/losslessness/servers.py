"""Starts the two servers that are compared, and ends them with all their processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    with ended_by_signals(), ExitStack() as stack:
        started = [
            stack.enter_context(_started(name, arguments, logs / f"{name}.log", fault_))
            for name, arguments, fault_ in (
                ("speculative", [*common, *dflash, *speculative], fault),
                ("plain", common, None),
            )
        ]
        stack.callback(lambda: [signal_group(server.process, signal.SIGTERM) for server in started])
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
        """Waits for `/health`, up to the monotonic time `until`, and says so now and then."""
        began = said = time.monotonic()
        while (now := time.monotonic()) < until:
            if now - said > 10:
                said = now
                waited = f"waiting for the {self.name} server since {now - began:.0f} s"
                print(
                    f"{waited}, for {until - now:.0f} s more at most", file=sys.stderr, flush=True
                )
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


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal that asks this process to end."""

    def __init__(self, number: int):
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.status = 128 + number


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within it a signal that asks this process to end is an exception, so that what it started ends first.

    Raises:
        Interrupted: there was one.
    """

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted(number)

    with _handled(interrupt):
        yield


@contextmanager
def _handled(handler: Any) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handled in before.items():
            signal.signal(number, handled)


def signal_group(process: subprocess.Popen, number: int) -> bool:
    """Whether there was anybody left in the process's group."""
    process.poll()  # a zombie would count as a member of the group
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def end(process: subprocess.Popen) -> None:
    """Ends a process group; a second Ctrl-C must not leave half of it."""
    with _handled(signal.SIG_IGN):
        for sent in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline:
                if not signal_group(process, sent):
                    process.wait()
                    return
                time.sleep(0.2)
