"""How a process of the tests is started: as a command, or by a process that has its modules already."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

# Variables that the release and this package read when a server runs; what others say may have been read when
# modules were imported, so a server that differs in one of those is a process that imports for itself.
READ_LATE = {
    "PYTEST_CURRENT_TEST",
    "SGLANG_DFLASH_RANDOM_WIDTHS",
    "SGLANG_ENABLE_DFLASH_SPEC_V2",
    "SGLANG_ENABLE_SPEC_V2",
    "SGLANG_REQ_RUNNING_TIMEOUT",
    "SGLANG_REQ_WAITING_TIMEOUT",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_COMPILE_DISABLE",
}


class Process(Protocol):
    """What is used of `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, number: int) -> None: ...


def start(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, out: Path
) -> Process:
    """`python -m module arguments`, in a session of its own, with both outputs in one file."""
    with out.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
        )


def fork(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, out: Path
) -> Process:
    """The same, but forked by a process that has imported already, where that makes no difference.

    That process is started by the first call, with its environment less what is read late.
    """
    early = {name: value for name, value in environment.items() if name not in READ_LATE}
    if not _launchers:
        _launchers.append(Launcher(early))
    (launcher,) = _launchers
    if early != launcher.environment:
        return start(module, arguments, environment, folder, out)
    asked = {
        "module": module,
        "arguments": list(arguments),
        "environment": dict(environment),
        "folder": str(folder),
        "output": str(out),
    }
    return launcher.fork(asked)


class Forked:
    """A process that somebody else forked."""

    def __init__(self, pid: int, launcher: Launcher):
        self.pid, self._launcher = pid, launcher

    def poll(self) -> int | None:
        return self._launcher.status(self.pid, 0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._launcher.status(self.pid, timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Launcher:
    """The process of `preloaded.py`, and what it told."""

    def __init__(self, environment: Mapping[str, str]):
        self.environment = environment
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.preloaded"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            start_new_session=True,
        )
        self._started: list[int] = []
        self._ended: dict[int, int] = {}
        self._gone = False
        self._news = threading.Condition()
        self._asking = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self.close)

    def _listen(self) -> None:
        for line in self._process.stdout:
            told = json.loads(line)
            with self._news:
                if "started" in told:
                    self._started.append(told["started"])
                else:
                    self._ended[told["ended"]] = told["status"]
                self._news.notify_all()
        with self._news:
            self._gone = True
            self._news.notify_all()

    def _wait_for(self, condition: Any, timeout: float | None) -> None:
        with self._news:
            self._news.wait_for(lambda: condition() or self._gone, timeout)
            if self._gone and not condition():
                raise RuntimeError("the process that forks servers ended")

    def fork(self, asked: dict[str, Any]) -> Forked:
        with self._asking:
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
            self._wait_for(lambda: self._started, None)
            pid = self._started.pop()
        # Its group is its own as soon as it runs; until then a signal to the group would find nobody.
        with suppress(ProcessLookupError):
            while os.getpgid(pid) != pid:
                time.sleep(0.001)
        return Forked(pid, self)

    def status(self, pid: int, timeout: float | None) -> int | None:
        """As subprocess gives it; None if the process still runs."""
        if timeout != 0:
            self._wait_for(lambda: pid in self._ended, timeout)
        return self._ended.get(pid)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


_launchers: list[Launcher] = []  # one, once a server was forked
