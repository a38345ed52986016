"""A real server process, and a client that asks it.

Everything that depends on the machine is in this file: `DFLASH_TEST_DEVICE` (cpu or cuda), on a GPU
`DFLASH_TEST_DTYPE` (bfloat16 or float16) and `DFLASH_TEST_MEMORY` (the fraction of it that may be taken when a server
starts, higher where more servers share one), and `DFLASH_TEST_WORKERS` (names in WORKERS, separated by commas) choose
what the tests run on.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.server.ports import free_port
from tests.server.processes import Launcher, Process, start

ROOT = Path(__file__).parents[2]
PAIR = ROOT / "checkpoints" / "tiny"
TARGET, DRAFTER = PAIR / "target", PAIR / "drafter"

DEVICE = os.environ.get("DFLASH_TEST_DEVICE", "cpu")
DTYPE = os.environ.get("DFLASH_TEST_DTYPE", "float32" if DEVICE == "cpu" else "bfloat16")
_MEMORY = os.environ.get("DFLASH_TEST_MEMORY", "0.3")
_MACHINE = {
    # float32 on one thread: every result is exact whatever the batch, so equality means equality.
    "cpu": ("--device cpu --attention-backend torch_native --dtype float32".split(), 20000),
    "cuda": (
        f"--attention-backend fa3 --dtype {DTYPE} --mem-fraction-static {_MEMORY} "
        # Else drafts are tried as far as they pay there, and accept lengths differ from a CPU's.
        "--disable-piecewise-cuda-graph --speculative-dflash-verify all".split(),
        20000,
    ),
}
_ENVIRONMENT = {
    # A scheduler that overlaps launches ahead of results also where that gains nothing: on a CPU, with small models.
    "cpu": {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "SGLANG_DFLASH_ORDER": "ahead",
    },
    "cuda": {"FLASHINFER_DISABLE_VERSION_CHECK": "1", "SGLANG_DFLASH_ORDER": "ahead"},
}
WORKERS = {
    "v1": {},
    "v2": {"SGLANG_ENABLE_SPEC_V2": "1", "SGLANG_ENABLE_DFLASH_SPEC_V2": "1"},
}
EACH_WAY = [  # how a server is started: see `starter`
    pytest.param(False, id="forked"),
    pytest.param(True, id="command", marks=[pytest.mark.long, pytest.mark.command]),
]
# How many prompts a test asks that would learn more from more of them.
_PROMPTS = int(os.environ.get("DFLASH_TEST_PROMPTS", "0"))


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skips tests on a GPU machine with fewer; on a CPU ranks and replicas share what there is."""
    there = count
    if DEVICE == "cuda":
        import torch

        there = torch.cuda.device_count()
    return pytest.mark.skipif(there < count, reason=f"needs {count} GPUs, and {there} are visible")


def in_long(*values: Any) -> list[Any]:
    """Parameters that only `make test-long` takes."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


# Of two ranks on a CPU: the release wants a NUMA node for each, and NCCL, which came with torch, to find GPUs.
RANKS = (
    {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_NCCL_SO_PATH": "none"} if DEVICE == "cpu" else {}
)
CHOSEN_WORKERS = os.environ.get("DFLASH_TEST_WORKERS", "v1,v2").split(",")


def mostly_on(index: int) -> pytest.MarkDecorator:
    """A test on the shared server of one of the chosen workers; of the other in `make test-long`.

    Where both do the same: what they share is tested on either of them.
    """
    worker = CHOSEN_WORKERS[index]
    others = in_long(*(other for other in CHOSEN_WORKERS if other != worker))
    return pytest.mark.parametrize("dflash", [worker, *others], indirect=True)


# As it was when the tests began: what they import adds to it.
_OUTSIDE = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
_shared: Path | None = None

LAUNCHER = ("sglang.launch_server",)
DFLASH = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(DRAFTER))
START_SECONDS = 300  # a first start on a busy GPU machine, which compiles kernels; else about 20
REQUEST_SECONDS = 120
END_SECONDS = 30  # the release looks every 5 s whether it may end


def prompts_of(usual: int, most: int = 100) -> int:
    """How many prompts to ask: the usual number, or as many as DFLASH_TEST_PROMPTS says, up to the most."""
    return max(usual, min(most, _PROMPTS))


def command(*arguments: str, port: int, target: Path = TARGET) -> list[str]:
    """Arguments of a server; later ones win over the machine's."""
    machine, tokens = _MACHINE[DEVICE]
    common = ["--model-path", str(target), "--port", str(port), "--max-total-tokens", str(tokens)]
    # A scheduler that polls all the time would take a core from the server that is asked.
    common += ["--sleep-on-idle", "--max-running-requests", "16"]
    # Where ranks meet, which the release chooses among clients' ports; replicas take those that follow.
    replicas = int(arguments[arguments.index("--dp-size") + 1]) if "--dp-size" in arguments else 1
    common += ["--nccl-port", str(free_port(replicas))]
    return [*machine, *common, *arguments]


def environment(**extra: str) -> dict[str, str]:
    common = {
        "HF_HUB_OFFLINE": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    }
    return _OUTSIDE | _ENVIRONMENT[DEVICE] | common | extra


def share(folder: Path) -> None:
    """Tells where processes of one run of the tests find each other."""
    global _shared
    _shared = folder


@cache
def _launcher() -> Launcher:
    return Launcher(_shared, environment())


def starter(by_itself: bool) -> Callable[..., Process]:
    """How a server is started: as a command, or on a CPU by a process that has its modules already."""
    return start if by_itself or DEVICE != "cpu" else _launcher().fork


class Answers:
    """Answers by what was asked; in a folder, also for the other processes of a run of the tests."""

    def __init__(self, folder: Path | None):
        self._known: dict[str, Any] = {}
        self._folder = folder

    def get(self, key: str, ask: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = self._shared(key, ask) if self._folder else ask()
        return self._known[key]

    def _shared(self, key: str, ask: Callable[[], Any]) -> Any:
        path = self._folder / hashlib.sha256(key.encode()).hexdigest()
        if not path.exists():
            mine = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
            mine.write_text(json.dumps(ask()))
            mine.replace(path)
        return json.loads(path.read_text())


class Server:
    """A running server, of the given worker or of none. Answers are the JSON of SGLang's native API."""

    def __init__(
        self,
        process: Process,
        port: int,
        log: Path,
        answers: Path | None = None,
        worker: str | None = None,
    ):
        self.process, self.log, self.worker = process, log, worker
        self.url = f"http://127.0.0.1:{port}"
        self.answers = Answers(answers)

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=REQUEST_SECONDS)

    def post(self, path: str, body: dict | None = None, **keywords: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=REQUEST_SECONDS, **keywords)

    def generate(self, prompt: str | list[int], **sampling: Any) -> Any:
        """The greedy answer to one prompt; an `n` above 1 gives a list of answers."""
        response = self.post("/generate", generate_body(prompt, **sampling))
        assert response.status_code == 200, response.text
        return response.json()

    def reference(self, prompt: str | list[int], **sampling: Any) -> Any:
        """`generate`, remembered: greedy answers do not change."""
        key = json.dumps([prompt, sampling], sort_keys=True)
        return self.answers.get(key, lambda: self.generate(prompt, **sampling))

    def references(self, prompts: Sequence[Any], **sampling: Any) -> list[Any]:
        """`reference` of each prompt; eight are asked at once, which takes a third of the time."""
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda prompt: self.reference(prompt, **sampling), prompts))

    def generate_all(self, prompts: Sequence[Any], concurrency: int, **sampling: Any) -> list[dict]:
        """Answers in the order of the prompts, at most `concurrency` asked at once."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **sampling), prompts))

    def stream(self, prompt: str | list[int], **sampling: Any) -> Iterator[dict]:
        """Chunks of a streamed answer; `text` and `output_ids` are all that came so far."""
        body = generate_body(prompt, **sampling) | {"stream": True}
        with self.post("/generate", body, stream=True) as response:
            assert response.status_code == 200, response.text
            yield from events(response)

    def info(self) -> dict:
        """State of the scheduler."""
        return self.get("/server_info").json()["internal_states"][0]

    def metric(self, name: str) -> float:
        """A gauge of `/metrics`."""
        lines = self.get("/metrics").text.splitlines()
        return next(
            float(line.split()[-1]) for line in lines if line.startswith(f"sglang:{name}{{")
        )

    def load(self) -> dict:
        """Requests and slots in use; what only the radix cache holds counts as free."""
        return self.get("/get_load").json()[0]

    def check_idle(self) -> None:
        """Every KV slot is free or evictable, then all are free; the server lives."""
        self.wait_until_idle()
        flush = self.post("/flush_cache?timeout=20")
        assert flush.status_code == 200, flush.text
        self.wait_until_idle()
        assert self.process.poll() is None, tail(self.log)

    def wait_for_requests(self, least: int, seconds: float = 20) -> None:
        """Until the scheduler has so many, running or waiting."""
        deadline = time.monotonic() + seconds
        while (asked := self.load()["num_reqs"]) < least and time.monotonic() < deadline:
            time.sleep(0.02)
        assert asked >= least

    def wait_until_idle(self, seconds: float = 20) -> None:
        """Until nobody is there and every KV slot is free or evictable.

        While a prompt is run in chunks the release's load counts its slots, but not its request. A health check, as a
        router asks each second, is a request too.
        """
        deadline = time.monotonic() + seconds
        while (load := self.load())["num_reqs"] or load["num_tokens"]:
            assert time.monotonic() < deadline, f"requests stay, or KV slots leaked: {load}"
            time.sleep(0.05)


def generate_body(prompt: str | list[int], **sampling: Any) -> dict:
    field = "text" if isinstance(prompt, str) else "input_ids"
    return {field: prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 256} | sampling}


def events(response: requests.Response) -> Iterator[dict]:
    """JSON of server-sent events up to [DONE]."""
    for line in response.iter_lines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))


def decodes(stream: Iterator[dict]) -> None:
    """Waits until a request has decoded. Between its prompt and its first round SGLang's load counts nobody."""
    next(event for event in stream if event["meta_info"]["completion_tokens"] > 1)


def tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


@contextmanager
def running(
    log: Path,
    *arguments: str,
    worker: str | None = None,
    launcher: Sequence[str] = LAUNCHER,
    port: int | None = None,
    output: Path | None = None,
    by_itself: bool = False,
    answers: Path | None = None,
    **variables: str,
) -> Iterator[Server]:
    """Starts a server, waits for its health, ends it with all its processes.

    Args:
        worker: name in WORKERS for a server with DFLASH, None for plain decoding.
        launcher: module that is run, and arguments that must come first.
        port: to listen on; by default one that is free.
        output: where the server writes instead of to `log`.
        by_itself: started as `python -m`, not forked by a process that has imported its modules.
        answers: folder in which the server's remembered answers are kept.
        variables: environment variables of the server.
    """
    port = port or free_port()
    speculation = () if worker is None else DFLASH
    # Plain decoding would compile its penalties; with DFLASH nothing is compiled on a CPU anyway.
    eager = {"TORCH_COMPILE_DISABLE": "1"} if DEVICE == "cpu" and worker is None else {}
    env = environment(**WORKERS.get(worker, {}), **eager, **variables)
    log.touch()
    module, *first = launcher
    given = [*first, *command(*speculation, *arguments, port=port)]
    await_ends(all_of_them=False)
    process = starter(by_itself)(module, given, env, ROOT, output or log)
    try:
        server = Server(process, port, log, answers, worker)
        wait_until_healthy(server)
        yield server
    finally:
        if by_itself or DEVICE != "cpu":
            end(process, log)
        else:
            _ending.append(_ends.submit(end, process, log))


def wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert server.process.poll() is None, f"the server ended:\n{tail(server.log)}"
        try:
            if server.get("/health").status_code == 200:
                return
        except requests.ConnectionError:
            pass
        time.sleep(0.2)
    raise TimeoutError(f"no /health after {START_SECONDS} s:\n{tail(server.log)}")


# Servers end seconds after they are told to, and nobody waits for one after the other.
_ends = ThreadPoolExecutor(8)
_ending: list[Future[None]] = []


def await_ends(all_of_them: bool = True) -> None:
    """An error if a server did not end as it should, of those that were told to."""
    for ending in [each for each in _ending if all_of_them or each.done()]:
        _ending.remove(ending)
        ending.result()


def end(process: Process, log: Path) -> None:
    """Asks the server to end, as an operator would; it must, and must leave nobody behind.

    A server that still waits for a request, or a child that outlives it, is an error.
    """
    try:
        process.send_signal(signal.SIGTERM)
        process.wait(END_SECONDS)
        deadline = time.monotonic() + END_SECONDS
        while group_lives(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not group_lives(process.pid), f"a child outlives its server: {tail(log)}"
    finally:
        if process.poll() is None or group_lives(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def fails_to_start(
    log: Path, *arguments: str, target: Path = TARGET, by_itself: bool = False
) -> tuple[int, str]:
    """Exit status and output of a server that is expected to refuse its arguments."""
    (module,) = LAUNCHER
    given = command(*arguments, port=free_port(), target=target)
    process = starter(by_itself)(module, given, environment(), ROOT, log)
    return process.wait(START_SECONDS), log.read_text(errors="replace")
