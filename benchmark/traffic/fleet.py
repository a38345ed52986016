"""The servers of a run: started side by side, warmed up, asked in turns, ended together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import requests

from benchmark import servers
from benchmark.errors import CellFailed
from benchmark.servers import Server, ServerFailed
from benchmark.traffic import counters
from benchmark.traffic.answers import refusal
from benchmark.traffic.systems import Choice

FLUSHES = ("/flush_cache", "/reset_prefix_cache")  # SGLang's, vLLM's
IDLE_SECONDS = 20


@dataclass
class Served:
    """A system's server.

    Attributes:
        server: None for one that was not started here.
        model: what requests call the model.
        dead: why it serves no more, or never did.
        refused: why it does not answer requests of a (workload, kind).
    """

    choice: Choice
    url: str
    server: Server | None = None
    model: str = ""
    dead: str | None = None
    refused: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.choice.name

    def get_ready(self, seconds: float) -> None:
        """Waits until it answers.

        Raises:
            ServerFailed, requests.RequestException: it did not in time.
        """
        if self.server is not None:
            self.server.wait_until_healthy(seconds)
        answer = requests.get(f"{self.url}/v1/models", timeout=60)
        answer.raise_for_status()
        self.model = answer.json()["data"][0]["id"]

    def warm_up(self, bodies: Sequence[bytes], seconds: float) -> None:
        """Asks the first alone and then all at once: what is compiled or allocated late is, then.

        Raises:
            CellFailed: one was refused.
            requests.RequestException: one was not answered.
        """

        def ask(body: bytes) -> None:
            answer = requests.post(
                f"{self.url}/v1/completions",
                data=body,
                headers={"Content-Type": "application/json"},
                timeout=seconds,
            )
            if answer.status_code != 200:
                raise CellFailed(refusal(answer.status_code, answer.text))

        ask(bodies[0])
        with ThreadPoolExecutor(len(bodies)) as pool:
            list(pool.map(ask, bodies))

    def flush(self) -> bool:
        """Empties its prefix cache, as soon as nobody is served; False if it has no such request.

        Raises:
            CellFailed: it stays busy, or does not answer.
        """
        until = time.monotonic() + IDLE_SECONDS
        while True:
            try:
                answers = [requests.post(self.url + path, timeout=60) for path in FLUSHES]
            except requests.RequestException as error:
                raise CellFailed(f"the server is gone ({type(error).__name__}).") from None
            if any(map(_flushed, answers)):
                return True
            if {answer.status_code for answer in answers} <= {404, 405}:
                return False
            if time.monotonic() > until:
                raise CellFailed(f"the server is still busy after {IDLE_SECONDS} s.")
            time.sleep(0.05)

    def counters(self) -> counters.Counters:
        return counters.read(self.url)

    def tells(self) -> tuple[dict, str]:
        """Its `/server_info`, empty of vLLM, and its `/metrics`."""
        page = requests.get(f"{self.url}/metrics", timeout=60).text
        if "vllm:" in page:  # whose /server_info takes seconds
            return {}, page
        info = requests.get(f"{self.url}/server_info", timeout=60)
        return info.json() if info.status_code == 200 else {}, page

    def check(self) -> None:
        """After a cell that failed: a server that serves no more is `dead`."""
        if self.server is not None and self.server.process.poll() is not None:
            self.dead = f"the server ended with status {self.server.process.returncode}"
            return
        try:
            # Requests of clients that left must be gone.
            requests.post(f"{self.url}/abort_request", json={"abort_all": True}, timeout=60)
            self.flush()
        except (CellFailed, requests.RequestException) as error:
            self.dead = f"the server died: {error}"


def _flushed(answer: requests.Response) -> bool:
    """SGLang says it by the status, vLLM in the body."""
    return answer.status_code == 200 and b'"success":false' not in answer.content.replace(b" ", b"")


@contextmanager
def fleet(
    groups: Sequence[Sequence[Choice]],
    arguments: Callable[[Choice], list[str]],
    device: str,
    logs: Path,
    warm: Callable[[Served], None],
    seconds: float,
) -> Iterator[list[Served]]:
    """Servers of all systems that answer and are warm, while the context lasts.

    Those that did not come up are `dead`, and the others go on.

    Args:
        groups: those of one are started side by side, when all of the group before it are warm.
        arguments: command line of a system's server.
        warm: called with each that answers, in a thread of its own.
        seconds: for the start of one.
    """
    grouped = [[Served(choice, choice.url) for choice in group] for group in groups]
    found = [served for group in grouped for served in group]
    pool = ThreadPoolExecutor(len(found))
    try:
        for group in grouped:
            for served in group:
                _start(served, arguments, device, logs)
            begun = [pool.submit(_bring_up, served, warm, seconds) for served in group]
            for each in begun:
                each.result()
        yield found
    finally:
        # Threads that still wait for a server see its end.
        servers.end(*(each.server.process for each in found if each.server is not None))
        pool.shutdown()


def _start(
    served: Served, arguments: Callable[[Choice], list[str]], device: str, logs: Path
) -> None:
    system = served.choice.system
    if system is None:
        return
    log = servers.free_log(logs, served.name)
    with servers.held_back():
        served.server = servers.start(system, device, arguments(served.choice), log)
    served.url = served.server.url


def _bring_up(served: Served, warm: Callable[[Served], None], seconds: float) -> None:
    began = time.monotonic()
    try:
        served.get_ready(seconds)
        up = time.monotonic() - began
        warm(served)
    except (ServerFailed, requests.RequestException, ValueError, LookupError) as error:
        said = str(error).splitlines()[0]
        served.dead = f"the server did not start: {said}"
        tail = f"\n{served.server.tail()}" if served.server is not None else ""
        print(f"{served.name}: {served.dead}{tail}", flush=True)
    else:
        warmed = time.monotonic() - began - up
        print(f"{served.name}: up after {up:.0f} s, warm after {warmed:.0f} s more", flush=True)
