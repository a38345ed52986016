"""Servers as black boxes: which there are, how one is started, and that none is left."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import requests

# Chunks of an answer: rare enough to cost nothing, frequent enough to see the steady state.
STREAM_INTERVAL = 32

_OVERLAPPED = {"SGLANG_ENABLE_SPEC_V2": "1", "SGLANG_ENABLE_DFLASH_SPEC_V2": "1"}
OWN = {
    "v1": {},
    "v2": _OVERLAPPED,
    "v2-plan": _OVERLAPPED | {"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"},
    "plain": {},
}
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SWITCHES = sorted({name for environment in OWN.values() for name in environment})
_DEVICES = {
    "cuda": {
        # flashinfer-cubin and the exact sgl-kernel are not needed for what runs here.
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    },
    "cpu": {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
}


class ServerFailed(Exception):
    """A server did not start, or stopped."""


@dataclass(frozen=True)
class System:
    """One installation of SGLang, or of another server, in one mode.

    Attributes:
        python: its interpreter.
        environment: variables beside those of this process.
        pythonpath: replaces this process's PYTHONPATH; None keeps it.
        arguments: server arguments that only this system gets.
        launch: the module that is run, and what comes before all arguments.
    """

    name: str
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)
    pythonpath: str | None = None
    arguments: tuple[str, ...] = ()
    launch: tuple[str, ...] = ("sglang.launch_server",)

    @property
    def speculative(self) -> bool:
        return self.name != "plain"

    def full_environment(self, device: str) -> dict[str, str]:
        """Environment of its processes; what chooses a worker comes from the system alone."""
        dropped = {*_SWITCHES, "PYTHONPATH"}
        inherited = {name: value for name, value in os.environ.items() if name not in dropped}
        own = _DEVICES[device] | {"HF_HUB_OFFLINE": "1"} | dict(self.environment)
        path = os.environ.get("PYTHONPATH", "") if self.pythonpath is None else self.pythonpath
        if path:  # servers run in another folder
            own["PYTHONPATH"] = ":".join(os.path.abspath(part) for part in path.split(":") if part)
        return inherited | own


def own_system(name: str) -> System:
    """One of this project's systems, from the installation that runs this benchmark."""
    return System(name, environment=OWN[name])


def peer_system(given: str, environment: Mapping[str, str], arguments: Sequence[str]) -> System:
    """Another installation, from NAME=INTERPRETER or NAME=PYTHONPATH.

    Raises:
        ValueError: not of that form, or nothing is there.
    """
    name, _, where = given.partition("=")
    if not name or not where or name in OWN:
        raise ValueError(f"{given} is not NAME=PYTHONPATH or NAME=INTERPRETER with a new name")
    found = shutil.which(where)
    if found:
        return System(name, found, environment, "", tuple(arguments))
    missing = [part for part in where.split(":") if not os.path.isdir(part)]
    if missing:
        raise ValueError(f"{missing[0]} in {given} is neither a folder nor an interpreter")
    return System(name, sys.executable, environment, where, tuple(arguments))


class Server:
    """A running server.

    Attributes:
        arguments: its command line after the module.
        start_seconds: from its start to its first answer.
    """

    def __init__(self, process: subprocess.Popen, port: int, log: Path, arguments: list[str]):
        self.process, self.log, self.arguments = process, log, arguments
        self.url = f"http://127.0.0.1:{port}"
        self.start_seconds = 0.0
        self._began = time.monotonic()

    def version(self) -> str:
        return version(self.url)

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait_until_healthy(self, seconds: float) -> None:
        """Until so many after its start."""
        while True:
            if self.process.poll() is not None:
                raise ServerFailed(f"it ended with status {self.process.returncode}")
            try:
                if requests.get(f"{self.url}/health", timeout=10).status_code == 200:
                    self.start_seconds = time.monotonic() - self._began
                    return
            except requests.RequestException:
                pass
            if time.monotonic() - self._began > seconds:
                raise ServerFailed(f"it was not healthy after {seconds:.0f} s")
            time.sleep(0.5)


def version(url: str) -> str:
    """Of the server at a URL, by its own words."""
    # vLLM's /server_info collects for seconds what is not asked here.
    for path in ("/version", "/server_info", "/get_server_info"):
        answer = requests.get(url + path, timeout=30)
        if answer.status_code == 200 and "version" in (found := answer.json()):
            return str(found["version"])
    return "unknown"


def start(system: System, device: str, arguments: Sequence[str], log: Path) -> Server:
    """Starts a server and does not wait for it. Its caller holds signals back, and ends it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = [*system.launch[1:], *arguments, *system.arguments]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(
            [system.python, "-m", system.launch[0], *given]
            + ["--host", "127.0.0.1", "--port", str(port)],
            env=system.full_environment(device),
            stdout=out,
            stderr=subprocess.STDOUT,
            # `-m` puts the working folder before PYTHONPATH, and a peer must not find this project.
            cwd=log.parent,
            start_new_session=True,
        )
    return Server(process, port, log, given)


def free_log(folder: Path, name: str) -> Path:
    """A log's name that no earlier start has taken."""
    number = 1
    while (path := folder / f"{name}{f'.{number}' * (number > 1)}.log").exists():
        number += 1
    return path


@contextmanager
def running(
    system: System, device: str, arguments: Sequence[str], log: Path, seconds: float
) -> Iterator[Server]:
    """Starts a server, waits for its health, and ends it with all its processes.

    Raises:
        ServerFailed: it did not get healthy in `seconds`.
    """
    with begun(system, device, arguments, log) as server, named(system, server):
        server.wait_until_healthy(seconds)
        yield server


@contextmanager
def begun(system: System, device: str, arguments: Sequence[str], log: Path) -> Iterator[Server]:
    """Starts a server, does not wait for it, and ends it with all its processes."""
    server: Server | None = None
    try:
        with held_back():
            server = start(system, device, arguments, log)
        yield server
    finally:
        if server is not None:
            end(server.process)


@contextmanager
def named(system: System, server: Server) -> Iterator[None]:
    """What fails within names the system, and has the end of the server's log."""
    try:
        yield
    except ServerFailed as failure:
        raise ServerFailed(f"{system.name}: {failure}\n{server.tail()}") from None
    except (requests.RequestException, RuntimeError) as error:
        raise ServerFailed(f"{system.name}: {error}\n{server.tail()}") from error


@contextmanager
def held_back() -> Iterator[None]:
    """Signals that would end this process wait, so that it forgets no process that it started."""
    arrived: list[int] = []
    before = {
        each: signal.signal(each, lambda number, frame: arrived.append(number)) for each in _ENDING
    }
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for number in arrived:
            signal.raise_signal(number)


def end(*processes: subprocess.Popen) -> None:
    """Ends process groups, all at once, and makes sure that nobody of them is left."""
    with held_back():
        left = list(processes)
        for sent, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
            deadline = time.monotonic() + patience
            while left and time.monotonic() < deadline:
                left = [process for process in left if _lives(process, sent)]
                if left:
                    time.sleep(0.2)


def _lives(process: subprocess.Popen, sent: int) -> bool:
    """Whether the signal found anybody in the process's group."""
    process.poll()  # a zombie would count as a member of the group
    try:
        os.killpg(process.pid, sent)
    except ProcessLookupError:
        process.wait()
        return False
    return True


def end_by_signals() -> None:
    """The first signal ends this benchmark as an exception; while it ends its servers, others do nothing."""
    for each in _ENDING:
        signal.signal(each, _end_once)


def _end_once(number: int, frame: object) -> None:
    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)
