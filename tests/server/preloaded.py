"""A process that has imported what a server needs, and forks one whenever it is asked to.

A server that starts by itself imports for seconds, in each of its three processes, and keeps what it imported for
itself alone. One that is forked here begins where `python -m MODULE` begins to run: it has its own session,
environment, streams and arguments, imports nothing a second time, and shares the memory of what is imported.

It listens on a Unix socket, `launcher` in the folder that is its argument. A line that it reads is JSON: module,
arguments, environment, folder, output. A line that it writes is JSON, too: `started` with the process id, and
later `ended` with the process id and the status as `subprocess` gives it. What a client started is killed when it
hangs up; when the last one does, the process ends.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import sys
from contextlib import suppress
from typing import Any


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


class Client:
    """Who asked for servers: what was read of it so far, and its servers that run."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.rest = b""
        self.running: set[int] = set()

    def tell(self, **answer: int) -> None:
        with suppress(OSError):
            self.connection.sendall(json.dumps(answer).encode() + b"\n")

    def lines(self) -> list[bytes] | None:
        """Those that are complete; None if it hung up."""
        try:
            data = self.connection.recv(1 << 20)
        except OSError:
            data = b""
        *lines, self.rest = (self.rest + data).split(b"\n")
        return lines if data else None


class Forks:
    """Serves clients until a fork: the new process gets what was asked for, the old one goes on."""

    def __init__(self, listener: socket.socket):
        self.selector = selectors.DefaultSelector()
        self.listener = listener
        self.clients: list[Client] = []
        self.wake_up, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(listener, selectors.EVENT_READ, None)
        self.selector.register(self.wake_up, selectors.EVENT_READ, None)

    def serve(self) -> dict[str, Any]:
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    self.accept()
                elif key.fileobj == self.wake_up:
                    os.read(self.wake_up, 1024)
                    self.reap()
                elif (asked := self.hear(key.data)) is not None:
                    return asked

    def accept(self) -> None:
        connection, _ = self.listener.accept()
        self.clients.append(Client(connection))
        self.selector.register(connection, selectors.EVENT_READ, self.clients[-1])

    def hear(self, client: Client) -> dict[str, Any] | None:
        """In a new process what it shall be; else nothing."""
        if (lines := client.lines()) is None:
            self.hang_up(client)
            return None
        for line in lines:
            assert len(os.listdir("/proc/self/task")) == 1, "the server would lack a thread"
            if not (pid := os.fork()):
                return json.loads(line)
            client.running.add(pid)
            client.tell(started=pid)
        return None

    def reap(self) -> None:
        with suppress(ChildProcessError):
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                for client in self.clients:
                    if child[0] in client.running:
                        client.running.remove(child[0])
                        client.tell(ended=child[0], status=os.waitstatus_to_exitcode(child[1]))

    def hang_up(self, client: Client) -> None:
        for pid in client.running:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.selector.unregister(client.connection)
        self.clients.remove(client)
        if not self.clients:
            os._exit(0)


def become(asked: dict[str, Any]) -> None:
    """What the system does for a new process, and what modules read from the environment when imported."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for source, descriptor in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, descriptor)
    os.closerange(3, 1024)
    sys.argv = [asked["module"], *asked["arguments"]]

    import numpy
    import torch._dynamo.config
    from setproctitle import setproctitle
    from sglang.srt.managers import schedule_policy

    setproctitle(" ".join(["python -m", asked["module"], *asked["arguments"]]))
    numpy.random.seed()  # Python's own generator does this by itself
    torch._dynamo.config.disable = os.environ.get("TORCH_COMPILE_DISABLE", "0") == "1"
    clipped = os.environ.get("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "4096")
    schedule_policy.CLIP_MAX_NEW_TOKENS = int(clipped)


def fork_instead_of_spawn() -> None:
    """Scheduler and detokenizer, too, find everything imported, whatever SGLang asks for."""
    set_start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: set_start_method("fork", force)


def main(folder: str) -> None:
    preload()
    os.chdir(folder)  # the path of a socket must be short
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("launcher.new")
    listener.listen()
    os.rename("launcher.new", "launcher")  # there when it can be used
    asked = Forks(listener).serve()
    become(asked)
    fork_instead_of_spawn()
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1])
