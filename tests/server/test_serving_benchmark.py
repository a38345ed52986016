"""The serving benchmark on real servers: what it counts is what they count, and a dead one costs its own cells."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from benchmark import serving
from tests.server.harness import DEVICE, ROOT, Server, environment, mostly_on, running

REQUESTS = 6
SECONDS = 120

exact = pytest.mark.skipif(DEVICE != "cpu", reason="batches of a GPU round in other ways each time")


def rows(output: Path) -> list[dict]:
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def measure(output: Path, servers: dict[str, str], *more: str, requests: int = REQUESTS) -> int:
    """Exit status of a run on servers that run already."""
    given = [part for name, url in servers.items() for part in ("--url", f"{name}={url}")]
    given += ["--requests", str(requests), "--least-per-client", "1", "--seconds", "30"]
    return serving.main([*given, "--output-file", str(output), *more])


@mostly_on(-1)
@exact
def test_counts_what_the_servers_count(
    tmp_path: Path, plain: Server, dflash: Server, prompts: list[str]
) -> None:
    """Tokens, verify steps and answers, beside those of the native API."""
    output = tmp_path / "found.jsonl"
    places = ("--cells", "chat/greedy/3", "chat/mixed/20/s")
    assert measure(output, {"plain": plain.url, "dflash": dflash.url}, *places) == 0
    expected = plain.references(prompts[:REQUESTS])
    tokens = sum(each["meta_info"]["completion_tokens"] for each in expected)
    greedy = rows(output)[:2]
    assert [row["system"] for row in greedy] == ["plain", "dflash"]
    for row in greedy:
        assert (row["requests"], row["completion_tokens"], row["cut"]) == (REQUESTS, tokens, 0)
        assert row["output_tok_s"] * row["seconds"] == pytest.approx(tokens)
        assert 0 < row["ttft_ms"]["p50"] <= row["latency_ms"]["p50"] <= row["seconds"] * 1e3
        assert row["flushed"] and len(row["answers"]) == 4 * REQUESTS
    assert greedy[0]["answers"] == greedy[1]["answers"]
    assert greedy[0]["verify_steps"] is None and greedy[0]["accept_length"] is None

    drafted = [each["meta_info"] for each in dflash.references(prompts[:REQUESTS])]
    steps = sum(meta["spec_verify_ct"] for meta in drafted)
    assert greedy[1]["verify_steps"] == steps
    assert greedy[1]["accept_length"] == pytest.approx((tokens - REQUESTS) / steps)
    assert 0 < greedy[1]["launched_rounds"] <= steps <= greedy[1]["verified_rows"]
    for row in rows(output):
        assert row["server_tokens"] in (None, row["completion_tokens"])
    assert greedy[1]["server_tokens"] == tokens

    mixed = rows(output)[2:]
    assert [row["system"] for row in mixed] == ["dflash", "plain"]
    assert len({row["answers"] for row in mixed}) == 1  # the greedy half
    assert (
        mixed[0]["answers"][4:8] == "----" and mixed[0]["answers"][:4] == greedy[0]["answers"][:4]
    )
    assert all(row["rate"] == 20 and row["requests"] == REQUESTS for row in mixed)
    assert "| dflash |" in output.with_suffix(".md").read_text()


@exact
def test_answers_with_a_schema_are_those_without(tmp_path: Path, dflash: Server) -> None:
    """So that what the grammar costs is seen at the same answers and accept length."""
    output = tmp_path / "found.jsonl"
    places = ("--cells", "json/greedy/2", "json/schema/2")
    assert measure(output, {"dflash": dflash.url}, *places, requests=8) == 0
    greedy, schema = rows(output)
    assert schema["answers"] == greedy["answers"] and schema["accept_length"] > 1.5


@exact
def test_a_server_that_dies_costs_its_cells(tmp_path: Path, plain: Server) -> None:
    output = tmp_path / "found.jsonl"
    places = ("--cells", "chat/greedy/1,2,3")
    with running(tmp_path / "doomed.log") as doomed:
        servers = {"plain": plain.url, "doomed": doomed.url, "nowhere": "http://127.0.0.1:9"}

        def kill() -> None:
            deadline = time.monotonic() + SECONDS
            while len(rows(output)) < 2 and time.monotonic() < deadline:
                time.sleep(0.02)
            os.killpg(doomed.process.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        assert measure(output, servers, *places, requests=2) == 1
        killer.join()
    found = rows(output)
    errors = {(row["system"], row["clients"]): row["error"] for row in found}
    assert len(found) == 9
    assert [errors["plain", clients] for clients in (1, 2, 3)] == [None, None, None]
    assert errors["doomed", 1] is None and all(errors["doomed", clients] for clients in (2, 3))
    assert errors["doomed", 3].startswith("the server died")
    nowhere = [errors["nowhere", clients] for clients in (1, 2, 3)]
    assert all(error.startswith("the server did not start") for error in nowhere)

    servers |= dict.fromkeys(("doomed", "nowhere"), plain.url)
    assert measure(output, servers, *places, "--resume", requests=2) == 0
    again = rows(output)[9:]
    assert not any(row["error"] for row in again)
    failed = {cell for cell, error in errors.items() if error}
    assert {(row["system"], row["clients"]) for row in again} == failed


@exact
def test_a_kind_that_a_server_refuses_costs_its_cells(tmp_path: Path, plain: Server) -> None:
    """Also where it is asked first: the server is warmed up by the other kinds, and measured."""
    output = tmp_path / "found.jsonl"
    places = ("--cells", "chat/grammar/1,2", "chat/greedy/1")
    with running(tmp_path / "refusing.log", "--grammar-backend", "none") as refusing:
        servers = {"plain": plain.url, "refusing": refusing.url}
        assert measure(output, servers, *places, requests=2) == 1
        refusing.check_idle()
    found = rows(output)
    assert len(found) == 6
    for row in found:
        if (row["system"], row["kind"]) == ("refusing", "grammar"):
            assert row["error"].startswith("the server answered with status 400: Grammar-based")
        else:
            assert row["error"] is None and row["output_tok_s"] > 0
    assert "refusing: the server answered with status 400" in output.with_suffix(".md").read_text()


@mostly_on(-1)
def test_traffic_that_changes(tmp_path: Path, dflash: Server) -> None:
    """Clients come, ask something else, and go; requests under way at a change end as they began."""
    output = tmp_path / "changing.jsonl"
    # Those of whom three leave have short answers, which are soon whole on a busy machine, too.
    phases = "gsm8k/1,chat/sampled/4,gsm8k/1"
    given = ["changing", "--url", f"dflash={dflash.url}", "--phases", phases]
    given += ["--seconds", "3", "--settle", "1", "--output-file", str(output)]
    running, over = [], threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            running.append((time.monotonic(), dflash.load()["num_reqs"]))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        assert serving.main(given) == 0
    finally:
        over.set()
        watching.join()
    [row] = rows(output)
    assert row["phases"] == ["gsm8k c=1", "chat sampled c=4", "gsm8k c=1"]
    assert all(rate > 0 for rate in row["at_first_tok_s"] + row["later_tok_s"])
    # One that has its answer may still be among them when the next one comes.
    most = [at for at, requests in running if requests >= 4]
    assert most
    alone = [requests for at, requests in running if at < most[0] and requests]
    assert alone and alone.count(1) > len(alone) / 2
    # Three of the four ask no more, however long their last answers take on a busy machine.
    after = [requests for at, requests in running if at > most[-1] and requests]
    assert after and 1 in after


@exact
def test_it_stops_when_the_time_is_up(
    tmp_path: Path, plain: Server, capsys: pytest.CaptureFixture
) -> None:
    output = tmp_path / "found.jsonl"
    places = ("--cells", "chat/greedy/1,2", "--stop-after")
    assert measure(output, {"plain": plain.url}, *places, "0.01", requests=2) == 2
    assert rows(output) == [] and "2 cells are left" in capsys.readouterr().out
    assert measure(output, {"plain": plain.url}, *places, "600", "--resume", requests=2) == 0
    assert len(rows(output)) == 2


def servers_of(logs: Path) -> list[psutil.Process]:
    """Living processes that were started in the folder of the logs, as servers are."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(logs) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.long  # two starts of servers as commands
@pytest.mark.command
def test_a_signal_ends_all_servers(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    command = [sys.executable, "benchmark/serving.py", "--systems", "plain,v2", "--logs", str(logs)]
    command += ["--output-file", str(tmp_path / "found.jsonl")]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + SECONDS
    while len(servers_of(logs)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert "0 of 8 cells are in" in said and "Traceback" not in said
    assert servers_of(logs) == []
