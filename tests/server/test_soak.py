"""Random requests, valid and malformed, on each worker; and that a soak sees trouble."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dflash.errors import DFlashError
from sglang_dflash.soak.__main__ import Report, mix_for, parse, read_questions, send, soak
from sglang_dflash.soak.client import Client
from sglang_dflash.soak.traffic import RAW, WRONG_FIELDS, WRONG_SAMPLING, Traffic
from tests.server.harness import PAIR, Server

PROMPTS = PAIR / "data" / "test.jsonl"


@pytest.mark.parametrize(
    "bound",
    [("--requests", "100"), pytest.param(("--seconds", "60"), marks=pytest.mark.long)],
    ids=" ".join,
)
def test_soak(dflash: Server, plain: Server, bound: tuple[str, str]) -> None:
    """No answer wrong, none missing, all slots free after every wave; all kinds of ends seen."""
    options = parse([dflash.url, *bound, "--malformed", "0.25"])
    options.pid = dflash.process.pid
    mix = mix_for(dflash.url, PROMPTS, seed=3)
    report = soak(Client(dflash.url, plain.url), mix, options)
    assert report.wrong == []
    assert set(report.outcomes) == {"whole", "equal", "refused", "left", "aborted"}
    assert dflash.process.poll() is None
    assert len(report.processes) >= 3
    assert "exempt from garbage collection" in dflash.log.read_text(errors="replace")


def test_everything_malformed(dflash: Server, prompts: list[str], tokenizer) -> None:
    """Each thing that can be wrong, once: a 4xx with a sentence, and the server goes on."""
    client, prompt = Client(dflash.url, None), tokenizer.encode(prompts[0])
    bodies: list[dict | bytes] = list(RAW)
    for name, value in WRONG_SAMPLING:
        bodies.append({"input_ids": prompt, "sampling_params": {"max_new_tokens": 8, name: value}})
    for name, value in WRONG_FIELDS:
        bodies.append({"input_ids": prompt, "return_logprob": True} | {name: value})
    outcomes = [send(client, Traffic(body, "refused")) for body in bodies]
    assert outcomes == ["refused"] * len(bodies)


def test_a_wrong_answer_is_seen(dflash: Server, plain: Server) -> None:
    """Parity against a server that was asked something else fails."""
    client = Client(dflash.url, plain.url)
    traffic = mix_for(dflash.url, PROMPTS, seed=4).parity()
    assert send(client, traffic) == "equal"
    (key,) = client._known
    client._known[key] = client._known[key][:-1] + [5]
    assert send(client, traffic).startswith("wrong: ")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        ("", "it is empty"),
        ('"Tom has"\n', "string indices"),
        ('{"prompt": "x"}\n', "'question'"),
        ("{", "Expecting property name"),
    ],
)
def test_no_questions(content: str | None, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DFlashError, match=rf"^--prompts {file} has no questions \(.*{reason}"):
        read_questions(file)


def test_no_server() -> None:
    with pytest.raises(
        DFlashError, match="^http://127.0.0.1:9 does not answer as an SGLang server"
    ):
        mix_for("http://127.0.0.1:9", PROMPTS, 0)


def test_slope() -> None:
    """Of what is resident, and of what is left of it when pages of files do not count."""
    memory = [(t, 900 + t / 60, 500 - t / 120) for t in range(0, 600, 20)]
    report = Report(seconds=600, memory=memory)
    assert report.slopes() == pytest.approx([1, -0.5])
    resident, private = zip(*report.by_minute(), strict=True)
    assert resident == pytest.approx([900, *(900 + m + 2 / 3 for m in range(10))], abs=0.1)
    assert private == pytest.approx([500, *(500 - m / 2 - 1 / 3 for m in range(10))], abs=0.1)
    assert report.as_json()["private_slope_mb_per_minute"] == pytest.approx(-0.5)
    assert Report(seconds=10).slopes() is None and Report().by_minute() == []


# Fills 50 MB when it is told to.
FILLS = """
import os
print(flush=True)
input()
filled = bytearray(os.urandom(1000)) * 50_000
print(len(filled), flush=True)
input()
"""


def test_memory_of_a_process() -> None:
    """Pages of a file are resident; what a process fills is private, too."""
    report = Report()
    with subprocess.Popen(
        [sys.executable, "-c", FILLS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in ("\n", "50000000\n"):
            assert process.stdout.readline() == line
            report.note_memory(process.pid)
            process.stdin.write("\n")
            process.stdin.flush()
    (_, before, own), (_, after, more) = report.memory
    assert after - before == pytest.approx(50, abs=5)
    assert more - own == pytest.approx(50, abs=5)
    assert 0 < own < before
