"""A process that has imported what a server needs, and forks one for every line on its input.

A server that starts by itself imports for seconds, in each of its three processes, and keeps what it imported for
itself alone. One that is forked here begins where `python -m MODULE` begins to run: it has its own session,
environment, streams and arguments, imports nothing a second time, and shares the memory of what is imported.

A line of input is JSON: module, arguments, environment, folder, output. A line of output is JSON, too: `started`
with the process id, and later `ended` with the process id and the status as `subprocess` gives it. At the end of
the input the servers that are left are killed.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import pkgutil
import runpy
import select
import signal
import sys
from typing import Any, NoReturn


def preload() -> None:
    """Imports what the three processes of a server import, without computing anything."""
    import sglang.srt.entrypoints.http_server
    import sglang.srt.models.registry  # noqa: F401  all models
    from setproctitle import getproctitle

    import sglang_dflash

    for module in pkgutil.walk_packages(sglang_dflash.__path__, "sglang_dflash."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    getproctitle()  # finds the place of the title, beside an environment that is still the first
    gc.collect()
    gc.freeze()  # collections of the servers leave these objects alone, and so the memory is shared


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def listen(wake_up: int) -> dict[str, Any]:
    """Answers lines of input until one forks; returns what was asked for in the new process."""
    alive: set[int] = set()
    rest = b""
    while True:
        readable, _, _ = select.select([0, wake_up], [], [])
        if wake_up in readable:
            os.read(wake_up, 1024)
            for pid, status in ended_children():
                alive.remove(pid)
                tell(ended=pid, status=os.waitstatus_to_exitcode(status))
        if 0 not in readable:
            continue
        if not (data := os.read(0, 1 << 20)):
            leave(alive)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            assert threads() == 1, "a thread would be missing in the server"
            if not (pid := os.fork()):
                return json.loads(line)
            alive.add(pid)
            tell(started=pid)


def tell(**answer: int) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def ended_children() -> list[tuple[int, int]]:
    """Process ids and statuses of those that ended since the last call."""
    found = []
    try:
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(child)
    except ChildProcessError:
        pass
    return found


def leave(alive: set[int]) -> NoReturn:
    for pid in alive:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    os._exit(0)


def become(asked: dict[str, Any]) -> None:
    """What the system does for a new process, and what a module reads from its environment."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for source, descriptors in ((nothing, (0,)), (output, (1, 2))):
        for descriptor in descriptors:
            os.dup2(source, descriptor)
    os.closerange(3, 256)
    sys.argv = [asked["module"], *asked["arguments"]]

    import numpy
    import torch._dynamo.config
    from setproctitle import setproctitle

    setproctitle(" ".join(["python -m", asked["module"], *asked["arguments"]]))
    numpy.random.seed()  # Python's own generator does this by itself
    # Read when it is imported.
    torch._dynamo.config.disable = os.environ.get("TORCH_COMPILE_DISABLE", "0") == "1"


def fork_instead_of_spawn() -> None:
    """Scheduler and detokenizer, too, find everything imported, whatever SGLang asks for."""
    set_start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: set_start_method("fork", force)


def main() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    preload()
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    asked = listen(reader)
    become(asked)
    fork_instead_of_spawn()
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
