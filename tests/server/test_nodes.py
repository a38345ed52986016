"""`--nnodes 2 --tp-size 2`: two launches that serve as one, here on one machine, which meet on a loopback address."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.server.checks import assert_same, assert_speculated
from tests.server.harness import (
    CHOSEN_WORKERS,
    DEVICE,
    DFLASH,
    LAUNCHER,
    RANKS,
    ROOT,
    START_SECONDS,
    WORKERS,
    Server,
    command,
    environment,
    free_port,
    group_lives,
    needs_gpus,
    prompts_of,
    starter,
    wait_until_healthy,
)
from tests.server.processes import Process

pytestmark = needs_gpus(2)

FIRST, SECOND = CHOSEN_WORKERS[0], CHOSEN_WORKERS[-1]
END_SECONDS = 20
MEET_SECONDS = 5


@contextmanager
def node(log: Path, rank: int, meet: int, port: int, worker: str, *more: str) -> Iterator[Process]:
    """One of two; whatever is left of it is killed."""
    arguments = (*DFLASH, "--tp-size", "2", "--nnodes", "2", "--node-rank", str(rank))
    arguments += ("--dist-init-addr", f"127.0.0.1:{meet}", *more)
    # Each node counts its GPUs from 0; here both have the same ones.
    arguments += ("--base-gpu-id", str(rank)) if DEVICE == "cuda" else ()
    env = environment(**WORKERS[worker], **RANKS)
    process = starter(False)(LAUNCHER[0], command(*arguments, port=port), env, ROOT, log)
    try:
        yield process
    finally:
        if group_lives(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ended(process: Process, within: float = END_SECONDS) -> int:
    """Status of a node that must end with all its processes."""
    status = process.wait(within)
    deadline = time.monotonic() + END_SECONDS
    while group_lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not group_lives(process.pid), "a child outlives its server"
    return status


def scheduler_of(process: Process) -> psutil.Process:
    children = psutil.Process(process.pid).children(recursive=True)
    (child,) = [child for child in children if child.name().startswith("sglang::scheduler")]
    return child


@pytest.mark.parametrize(("worker", "end"), [(FIRST, "SIGTERM"), (SECOND, "killed")])
def test_two_nodes(
    logs: Path, tmp_path: Path, plain: Server, prompts: list[str], worker: str, end: str
) -> None:
    """Answers are those of plain decoding; when one node ends, so does the other, and says why."""
    meet, ports = free_port(), (free_port(), free_port())
    files = [tmp_path / f"{rank}.log" for rank in (0, 1)]
    with (
        node(files[0], 0, meet, ports[0], worker) as first,
        node(files[1], 1, meet, ports[1], worker) as second,
    ):
        server = Server(first, ports[0], files[0], worker=worker)
        wait_until_healthy(server)
        wait_until_healthy(Server(second, ports[1], files[1]))  # nothing else is answered there
        asked = prompts[: prompts_of(8)]
        for prompt, answer in zip(asked, server.generate_all(asked, concurrency=4), strict=True):
            assert_same(answer, plain.reference(prompt), plain, prompt)
            assert_speculated(answer, 3)
        if end == "SIGTERM":
            first.send_signal(signal.SIGTERM)
            assert ended(first) == 0
            assert ended(second) != 0
            assert "Node 1 of 2 ends, because another one did" in files[1].read_text()
        else:
            victim = scheduler_of(second)
            victim.kill()
            assert ended(second) == 1
            assert ended(first) != 0
            said = f"Rank 0 of node 1 (process {victim.pid}) ended with exit code -9, so the server ends."
            assert said in files[1].read_text()
            assert "Node 0 of 2 ends, because another one did" in files[0].read_text()


def test_a_node_is_missing(tmp_path: Path) -> None:
    """Whichever it is, the other says so when --dist-timeout is over, and ends: long before torch's own timeout."""
    more = ("--dist-timeout", str(MEET_SECONDS))
    files = [tmp_path / f"{rank}.log" for rank in (0, 1)]
    meet = [free_port(), free_port()]
    with (
        node(files[0], 0, meet[0], free_port(), FIRST, *more) as first,
        node(files[1], 1, meet[1], free_port(), SECOND, *more) as second,
    ):
        for rank, process in enumerate((first, second)):
            assert ended(process, within=START_SECONDS) != 0
            said = f"Node {rank} of 2 ends, because not all nodes met at --dist-init-addr 127.0.0.1:{meet[rank]} in"
            assert said in files[rank].read_text()
