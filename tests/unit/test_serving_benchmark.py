"""The serving benchmark: answers, arrivals, figures, cells, resuming, tables, refusals."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmark import provenance, servers, serving
from benchmark.errors import CannotMeasure, CellFailed
from benchmark.machine import Machine
from benchmark.percentiles import percentiles
from benchmark.shapes import TINY
from benchmark.traffic import arguments, arrivals, cells, counters, figures, measure, origin
from benchmark.traffic.answers import Answer, parse
from benchmark.traffic.arrivals import Closed, Open
from benchmark.traffic.cells import Place
from benchmark.traffic.clients import Clients, Heard, Job
from benchmark.traffic.systems import Needs, Pair, choices, server_arguments
from benchmark.traffic.workloads import GREEDY, Sampling, Workload, load


def event(text: str, finish: str | None = None) -> bytes:
    chunk = {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9}}
LAST = b"data: " + json.dumps(USAGE).encode() + b"\n\ndata: [DONE]\n\n"


def test_an_answer_is_read_however_its_bytes_were_cut() -> None:
    """A chunk counts when it is whole, tokens are the server's, and the empty chunk is no first token."""
    whole = event("") + event("é, ") + event("two") + event("", "stop") + LAST
    at_once = parse(3, 10.0, [(10.5, whole)])
    assert (at_once.index, at_once.tokens, at_once.prompt_tokens) == (3, 9, 7)
    assert (at_once.finish, list(at_once.times), list(at_once.characters)) == (
        "stop",
        [10.5, 10.5],
        [3, 6],
    )
    byte_by_byte = parse(3, 10.0, [(10 + i / 1e3, whole[i : i + 1]) for i in range(len(whole))])
    first = whole.index(event("two"))  # the first byte after the first chunk with text
    assert byte_by_byte.ttft_ms() == pytest.approx(first - 2, abs=0.01)
    assert (
        byte_by_byte.digest
        == at_once.digest
        != parse(3, 0, [(1, event("x", "stop") + LAST)]).digest
    )
    carriage = parse(3, 10.0, [(11.0, whole.replace(b"\n", b"\r\n"))])
    assert carriage.digest == at_once.digest


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            b'data: {"error": {"message": "out of memory"}}\n\n',
            "the server answered: out of memory",
        ),
        (event("cut short"), "an answer ended with nothing"),
        (event("", "abort") + LAST, "an answer ended with abort"),
        (b"", "an answer ended with nothing"),
    ],
)
def test_an_answer_that_is_none_fails_the_cell(data: bytes, said: str) -> None:
    with pytest.raises(CellFailed, match=said):
        parse(0, 0.0, [(1.0, data)] if data else [])


def test_poisson_arrivals() -> None:
    found = arrivals.poisson(50, 100, 10**6)
    gaps = np.diff([0, *found])
    assert 4700 < len(found) < 5300 and found == sorted(found) and found[-1] < 100
    # Memoryless: the deviation of a gap is its mean, and gaps do not know of each other.
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.06)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.05
    assert arrivals.poisson(50, 100, 10**6) == found  # everybody gets the same
    assert len(arrivals.poisson(50, 100, 30)) == 30
    assert len(arrivals.poisson(0.001, 1, 30)) == 1


def test_accept_length_leaves_out_what_the_prefill_gave() -> None:
    assert figures.accept_length(810, 10, 100) == 8
    assert figures.accept_length(810, 10, None) is None
    assert figures.accept_length(810, 10, 0) is None


def answer(
    index: int, began: float, ended: float, tokens: int = 11, digest: str = "aaaa"
) -> Answer:
    """The first token after a tenth of a second, then chunks of the same length up to the end."""
    times = [began + 0.1, *np.linspace(began + 0.1, ended, 11)[1:].tolist()]
    return Answer(index, began, ended, times, range(1, 12), tokens, 5, "stop", digest)


def test_times_of_an_answer() -> None:
    one = answer(0, 2.0, 3.1, tokens=21)
    assert one.ttft_ms() == pytest.approx(100) and one.tpot_ms() == pytest.approx(50)
    assert one.gaps_ms() == pytest.approx([100] * 10)
    assert one.tokens_until(np.array([2.0, 2.1, 3.1])) == pytest.approx([0, 21 / 11, 21])
    silent = Answer(0, 2.0, 3.0, [], [], 1, 5, "stop", "aaaa")
    assert silent.ttft_ms() == 1000 and silent.tpot_ms() is None
    assert silent.tokens_until(np.array([2.9, 3.0])).tolist() == [0, 1]


def test_percentiles_are_those_of_the_values() -> None:
    assert percentiles([]) is None
    assert percentiles(range(101)) == {"p50": 50, "p99": 99}
    assert percentiles([3.0, 1.0, 2.0])["p50"] == statistics.median([3, 1, 2])


def test_figures_count_from_the_first_request_to_the_last_end() -> None:
    """As sglang.bench_serving does; the steady state leaves out how it begins and ends."""
    # Two clients, each with ten requests of a second; the second client is half a second late.
    times = [
        (client * 0.5 + number, client * 0.5 + number + 1)
        for client in (0, 1)
        for number in range(10)
    ]
    heard = Heard([answer(i, *pair) for i, pair in enumerate(times)], 0.2, 0.3, 0.0)
    found = figures.figures(heard, figures.Goal(150, 95), counters.Counters(50, 220), clients=2)
    assert found["seconds"] == 10.5 and found["requests"] == 20
    assert found["output_tok_s"] == pytest.approx(220 / 10.5)
    assert found["accept_length"] == pytest.approx((220 - 20) / 50)
    # From 1.5, when both clients have had an answer, to 9.5, when the last was asked.
    assert found["steady_s"] == pytest.approx(8.0)
    assert found["steady_tok_s"] == pytest.approx(22, rel=0.01)
    assert found["ttft_ms"]["p50"] == pytest.approx(100)
    assert found["tpot_ms"]["p99"] == pytest.approx(90) and found["latency_ms"]["p50"] == 1000
    assert found["within_goal"] == 1.0
    slow = figures.figures(heard, figures.Goal(150, 89), counters.Counters(), clients=None)
    assert slow["within_goal"] == 0 and slow["steady_s"] is None and slow["accept_length"] is None


def test_no_steady_state_of_a_wave() -> None:
    wave = [answer(i, 0.0, 1.0) for i in range(8)]
    assert figures.steady_state(wave, 8) is None
    again = [*wave, *(answer(i, 1.0, 2.0) for i in range(8))]
    assert figures.steady_state(again, 8) is None


def test_answers_are_compared_prompt_by_prompt() -> None:
    greedy = [True, False, True, True]
    mine = [
        answer(0, 0, 1),
        answer(1, 0, 1),
        answer(3, 0, 1, digest="bbbb"),
        answer(0, 1, 2, digest="c"),
    ]
    its = [answer(i, 0, 1) for i in range(3)]
    ours, theirs = figures.digests(mine, 4, greedy), figures.digests(its, 4, greedy)
    assert ours == "aaaa--------bbbb" and theirs == "aaaa----aaaa"
    assert figures.differing(ours, theirs) == (0, 1)
    assert figures.differing(ours, "cccc----aaaabbbb") == (1, 2)


def test_places_and_their_order() -> None:
    found = cells.parse_places("chat/greedy/1,8,2.5/s")
    assert found == [Place("chat", "greedy", each) for each in (Closed(1), Closed(8), Open(2.5))]
    order = cells.in_turns(found[:2], ["a", "b", "c"], repeats=2)
    assert [(cell.place.repeat, str(cell.place.load), cell.system) for cell in order] == [
        *((0, "c=1", name) for name in "abc"),
        *((0, "c=8", name) for name in "bca"),
        *((1, "c=1", name) for name in "bca"),
        *((1, "c=8", name) for name in "cab"),
    ]
    for bad in ("chat", "talk/greedy/1", "chat/fast/1", "chat/greedy/0", "chat/greedy/x/s"):
        with pytest.raises(CannotMeasure):
            cells.parse_places(bad)


def parsed(tmp_path: Path, *given: str) -> Any:
    return arguments.parse(["--output-file", str(tmp_path / "out.jsonl"), *given])


def test_systems_by_python_and_path(tmp_path: Path) -> None:
    """Each gets its own command line, and the drafter unless it shall decode plainly."""
    (tmp_path / "site").mkdir()
    options = parsed(
        tmp_path,
        *("--systems", "plain,v2", "--sglang", f"peer={tmp_path / 'site'}"),
        *("--vllm", f"vllm={tmp_path / 'site'}", "--vllm", f"vllm-plain={tmp_path / 'site'}"),
        *("--url", "there=http://localhost:1/", "--without-draft", "vllm-plain"),
        *("--args-of", "peer=--page-size 16", "--env-of", "peer=A=b=c"),
    )
    plain, v2, peer, vllm, vllm_plain, there = options.choices
    assert there.url == "http://localhost:1" and there.system is None
    assert v2.system.environment["SGLANG_ENABLE_OVERLAP_PLAN_STREAM"] == "1"
    assert peer.system.arguments == ("--page-size", "16")
    assert peer.system.environment["A"] == "b=c"
    # Systems load side by side, so no rank may mind that others take memory.
    assert peer.system.environment["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "0"
    assert peer.system.pythonpath == str(tmp_path / "site") and v2.system.pythonpath is None
    needs = Needs(64, 60000, 4096)
    lines = {
        choice.name: server_arguments(choice, options.pair, needs, "cuda", 2, None)
        for choice in (plain, v2, peer, vllm, vllm_plain)
    }
    assert "--speculative-algorithm" not in lines["plain"]
    # While others are asked.
    assert {name for name in lines if "--sleep-on-idle" in lines[name]} == {"plain", "v2", "peer"}
    for name in ("v2", "peer"):
        assert " ".join(lines[name][-6:]).startswith("--speculative-algorithm DFLASH --spec")
        assert " ".join(lines[name]).endswith("--speculative-num-draft-tokens 16")
        assert "--max-total-tokens 60000" in " ".join(lines[name])
    speculation = json.loads(lines["vllm"][lines["vllm"].index("--speculative-config") + 1])
    assert (speculation["method"], speculation["num_speculative_tokens"]) == ("dflash", 15)
    assert "--speculative-config" not in lines["vllm-plain"]
    # 4 + 2 layers, one KV head of 64 on each of two ranks, K and V in bfloat16.
    assert f"--kv-cache-memory-bytes {6 * 64 * 4 * 60000}" in " ".join(lines["vllm"])
    # A block for each of 64 requests, and a prompt.
    assert f"--max-cudagraph-capture-size {64 * 16 + 512}" in " ".join(lines["vllm"])
    assert vllm.system.launch[0].startswith("vllm.") and peer.system.launch == v2.system.launch
    public = provenance.without_paths(["--sglang", f"peer={tmp_path}", "--url", "a=http://b"], {})
    assert public == ["--sglang", "peer=(a path)", "--url", "a=http://b"]


def test_blocks_of_each_system(tmp_path: Path) -> None:
    """Everybody's blocks, but those of a system that has its own; also in what a cell is recognised by."""
    options = parsed(
        tmp_path,
        *("--systems", "v2", "--sglang", f"narrow={tmp_path}", "--vllm", f"vllm={tmp_path}"),
        *("--block-size", "12", "--block-size-of", "narrow=8", "--block-size-of", "vllm=4"),
    )
    needs = Needs(64, 60000, 4096)
    v2, narrow, vllm = (
        " ".join(server_arguments(choice, options.pair, needs, "cuda", 1, None))
        for choice in options.choices
    )
    assert "--speculative-num-draft-tokens 12" in v2
    assert "--speculative-num-draft-tokens 8" in narrow
    assert '"num_speculative_tokens": 3' in vllm
    assert f"--max-cudagraph-capture-size {64 * 4 + 512}" in vllm
    pool = SimpleNamespace(sha256="", max_tokens=1)
    sizes = [
        origin.settings(options, choice, options.pair, Machine.here(), pool)["block_size"]
        for choice in options.choices
    ]
    assert sizes == [12, 8, 4]


def test_who_starts_when(tmp_path: Path) -> None:
    options = parsed(tmp_path, "--systems", "plain,v2", "--sglang", f"a={tmp_path}")
    for start, expected in (
        ("together", [["plain", "v2", "a"]]),
        ("own-first", [["plain", "v2"], ["a"]]),
        ("one-by-one", [["plain"], ["v2"], ["a"]]),
    ):
        groups = measure._groups(options.choices, start)
        assert [[choice.name for choice in group] for group in groups] == expected
    (others,) = measure._groups(options.choices[2:], "own-first")
    assert [choice.name for choice in others] == ["a"]


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "full.jsonl").write_text("{}\n")
    for given, said in (
        (["--systems", "v3"], "v3 is not one of plain, v1, v2"),
        (["--sglang", "peer"], "is not NAME=VALUE"),
        (["--sglang", "peer=/no/such/folder"], "neither a folder nor an interpreter"),
        (["--systems", "v2", "--url", "v2=http://x"], "two systems are named v2"),
        (["--args-of", "v9=--x"], "names v9, which is none of plain, v2"),
        (["--url", "a=http://x", "--args-of", "a=--x"], "runs already"),
        (["--block-size-of", "v2=1"], "--block-size-of v2=1 is not NAME=SLOTS with at least 2"),
        (["--block-size-of", "v2=wide"], "--block-size-of v2=wide is not NAME=SLOTS"),
        (["--target-model", "/no/such"], "is not a folder with a config.json"),
        (["--loads", "0"], "is no load"),
        (["--tp-size", "64"], "--tp-size 64 is more than"),
        (["--output-file", str(tmp_path / "full.jsonl")], "has results already"),
        (["--output-file", "/proc/no/x"], "the folder /proc/no cannot be made"),
        (["--data", str(tmp_path), "--workloads", "gsm8k"], "the workload gsm8k has no prompts"),
        (["report", str(tmp_path / "full.jsonl")], "is not a result of this benchmark"),
    ):
        assert (
            serving.main(
                [
                    *given,
                    *([] if "report" in given else ["--dry-run"] * ("--output-file" not in given)),
                ]
            )
            == 2
        )
        written = capsys.readouterr().err
        assert written.startswith("error: ") and said in written and written.count("\n") == 1


class Letters:
    """A tokenizer: a token a letter."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}


def pool(tmp_path: Path, context: int = 500, **more: object) -> Workload:
    lines = [{"question": f"q{i}", **more} for i in range(3)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load("chat", tmp_path, Letters(), context)


def test_prompts_and_their_requests(tmp_path: Path) -> None:
    found = pool(tmp_path, answer="x" * 99)
    assert found.texts[1] == "Question: q1\nAnswer:" and len(found.prompts) == 3
    assert found.max_tokens == 2 * 100  # the end of text is a token, too
    drawn = Sampling(0.7, 0.9, 0)
    bodies = [json.loads(body) for body in found.bodies("mixed", drawn, "m")]
    assert [body["temperature"] for body in bodies] == [0.0, 0.7, 0.0]
    assert bodies[1]["top_p"] == 0.9 and "top_k" not in bodies[1] and "top_p" not in bodies[0]
    assert bodies[2]["prompt"] == found.prompts[2] and bodies[2]["max_tokens"] == 200
    assert all(body["stream_options"] == {"include_usage": True} for body in bodies)
    adapted = [json.loads(body) for body in found.bodies("adapters", drawn, "m")]
    assert [body["lora_path"] for body in adapted] == ["adapter0", "adapter1", "adapter2"]
    assert all(body["temperature"] == 0 for body in adapted)
    (grammar, *_) = [json.loads(body) for body in found.bodies("grammar", drawn, "m")]
    as_vllm, as_sglang = grammar["structured_outputs"], grammar["regex"]
    assert as_vllm == {"regex": as_sglang}
    short = [json.loads(body) for body in found.bodies("sampled", drawn, "m", 64, stream=False)]
    assert {body["max_tokens"] for body in short} == {64} and "stream" not in short[0]
    assert pool(tmp_path, context=200, answer="x" * 99).max_tokens == 200 - 20 - 32
    assert pool(tmp_path).max_tokens == 500 - 20 - 32  # no answer is known
    (tmp_path / "workloads").mkdir()
    (tmp_path / "workloads" / "chat.jsonl").write_text('{"question": "other"}\n')
    assert len(pool(tmp_path).prompts) == 3  # test.jsonl comes first
    (tmp_path / "test.jsonl").rename(tmp_path / "test.json")
    assert load("chat", tmp_path, Letters(), 500).texts == ["Question: other\nAnswer:"]
    with pytest.raises(CannotMeasure, match="leave no room for the answers"):
        pool(tmp_path, context=150, answer="x" * 99)


def test_requests_with_the_schemas_of_their_prompts(tmp_path: Path) -> None:
    """As SGLang and as vLLM are asked for them; and no other prompts are asked so."""
    schema = {"type": "array", "items": {"type": "integer"}}
    found = pool(tmp_path, answer="[1]", schema=schema)
    for body in map(json.loads, found.bodies("schema", GREEDY, "m")):
        assert body["temperature"] == 0 and json.loads(body["json_schema"]) == schema
        assert body["structured_outputs"] == {"json": schema}
    assert not any(b"json_schema" in body for body in found.bodies("greedy", GREEDY, "m"))
    with pytest.raises(CannotMeasure, match="those of chat have none: ask json/schema"):
        pool(tmp_path).bodies("schema", GREEDY, "m")
    assert serving.main(["--cells", "chat/schema/1", "--dry-run"]) == 2
    assert serving.main(["--cells", "json/schema/1", "--dry-run"]) == 0


def test_nobody_there_fails_the_cell() -> None:
    job = Job("http://127.0.0.1:9", [b"{}"], clients=3, most=9, timeout=20)
    with Clients(2) as clients:
        for _ in range(2):  # clients that failed can be used again
            with pytest.raises(CellFailed, match="the server broke off"):
                clients.ask(job)


def test_bundled_target_and_drafter_are_a_pair() -> None:
    assert Pair(str(TINY / "target"), str(TINY / "drafter")).tiny
    [v2] = choices(["v2"], {}, [], [], [])
    given = server_arguments(v2, Pair(str(TINY / "target"), "d", 8), Needs(4, 5, 6), "cpu", 1, None)
    assert " ".join(given).endswith(
        "--speculative-draft-model-path d --speculative-num-draft-tokens 8"
    )
    assert "--sleep-on-idle" in given and servers.OWN["v1"] == {}
