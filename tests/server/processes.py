"""How a process of the tests is started: as a command, or by a process that has its modules already."""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir, suppress
from pathlib import Path
from typing import Protocol

# Variables that are read when a server runs, or that `preloaded.py` looks at again. Others may have been read when
# modules were imported, so a server that differs in one of those imports for itself.
READ_LATE = {
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION",
    "SGLANG_CPU_OMP_THREADS_BIND",
    "SGLANG_DFLASH_ORDER",
    "SGLANG_DFLASH_RANDOM_ROWS",
    "SGLANG_DFLASH_RANDOM_WIDTHS",
    "SGLANG_ENABLE_DFLASH_SPEC_V2",
    "SGLANG_ENABLE_SPEC_V2",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY",
    "SGLANG_MAMBA_CONV_DTYPE",
    "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR",
    "SGLANG_NCCL_SO_PATH",
    "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS",
    "SGLANG_REQ_RUNNING_TIMEOUT",
    "SGLANG_REQ_WAITING_TIMEOUT",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_COMPILE_DISABLE",
}
PRELOAD_SECONDS = 300


class Process(Protocol):
    """What is used of `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...


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


class Launcher:
    """The process of `preloaded.py`, which is started by whoever first needs it.

    Attributes:
        environment: of the modules that it has imported.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]):
        """All that give the same folder share one."""
        self.environment = {k: v for k, v in environment.items() if k not in READ_LATE}
        self._connection = self._connect(folder)
        self._started: list[int] = []
        self._ended: dict[int, int] = {}
        self._gone = False
        self._news = threading.Condition()
        self._asking = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self._connection.close)

    def _connect(self, folder: Path) -> socket.socket:
        path, log = folder / "launcher", folder / "launcher.log"
        connection = socket.socket(socket.AF_UNIX)
        with (folder / "launcher.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                arguments = ("tests.server.preloaded", [str(folder)])
                process = start(*arguments, self.environment, Path(__file__).parents[2], log)
                deadline = time.monotonic() + PRELOAD_SECONDS
                while not path.exists():
                    assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                    time.sleep(0.05)
        with chdir(folder):  # the path of a socket must be short
            connection.connect(path.name)
        return connection

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        out: Path,
    ) -> Process:
        """As `start`, but forked by the process that has imported already, if that is the same."""
        if {k: v for k, v in environment.items() if k not in READ_LATE} != self.environment:
            return start(module, arguments, environment, folder, out)
        asked = {"module": module, "arguments": list(arguments), "environment": dict(environment)}
        asked |= {"folder": str(folder), "output": str(out)}
        with self._asking:
            self._connection.sendall(json.dumps(asked).encode() + b"\n")
            self._wait_for(lambda: self._started, None)
            pid = self._started.pop()
        # Its group is its own as soon as it runs; until then a signal to the group would find nobody.
        with suppress(ProcessLookupError):
            while os.getpgid(pid) != pid:
                time.sleep(0.001)
        return Forked(pid, self)

    def status(self, pid: int, timeout: float | None) -> int | None:
        """As `subprocess` gives it; None if the process still runs."""
        if timeout != 0:
            self._wait_for(lambda: pid in self._ended, timeout)
        return self._ended.get(pid)

    def _listen(self) -> None:
        with suppress(OSError), self._connection.makefile() as lines:
            for line in lines:
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

    def _wait_for(self, condition: Callable[[], object], timeout: float | None) -> None:
        with self._news:
            self._news.wait_for(lambda: condition() or self._gone, timeout)
            if self._gone and not condition():
                raise RuntimeError("the process that forks servers ended")


class Forked:
    """A process that the launcher forked."""

    def __init__(self, pid: int, launcher: Launcher):
        self.pid, self._launcher = pid, launcher

    def poll(self) -> int | None:
        return self._launcher.status(self.pid, 0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._launcher.status(self.pid, timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return status

    def send_signal(self, sig: int = signal.SIGTERM) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)
