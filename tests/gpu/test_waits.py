"""The host waits for the device where it has asked for something, and nowhere else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.gpu.waits_told import TOLD
from tests.server.harness import running

REQUESTS, CLIENTS = 64, 8


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_requests_that_come_and_go(temperature: float, logs: Path, prompts: list[str]) -> None:
    """Prompts beside rounds, requests that end, prefixes that are known and that are not.

    A step in which the host waits for small kernels of its own, which those of a round hold up, takes it milliseconds
    more; the more rows the round has, the more. With pages of several tokens the release waits where requests end.
    """
    log, arguments = logs / f"waits-{temperature}.log", ("--speculative-dflash-verify", "auto")
    with running(log, *arguments, worker="v2", launcher=("tests.gpu.waits_told",)) as server:
        asked = {"temperature": temperature, "max_new_tokens": 100}
        server.generate_all(prompts[:REQUESTS], concurrency=CLIENTS, **asked)  # compilers wait, too
        server.check_idle()
        begin = len(log.read_text().splitlines())
        answers = server.generate_all(prompts[:REQUESTS], concurrency=CLIENTS, **asked)
        assert sum(answer["meta_info"]["spec_verify_ct"] for answer in answers) > REQUESTS
    told = (line.partition(TOLD) for line in log.read_text().splitlines()[begin:])
    waits = Counter(where.strip() for _, found, where in told if found)
    print(*(f"{times} x {where}" for where, times in waits.most_common()), sep="\n")
    assert not waits
