"""benchmark/: what it computes from answers, traces and results, without a server."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.server_args import ServerArgs
from transformers import AutoProcessor

from benchmark import load, provenance, report, servers, shapes, tables, traces
from benchmark.families import QWEN35_TOKENS
from sglang_dflash.checkpoint.load import check_target, load_config
from sglang_dflash.checkpoint.target_class import check_model

CURVE = [0.756, 0.584, 0.440, 0.320, 0.227, 0.153, 0.102, 0.066]


@pytest.mark.parametrize("name", [name for name in shapes.SHAPES if name != "tiny"])
def test_shapes_are_pairs_that_fit(name: str, tmp_path: Path):
    target, drafter = shapes.write_pair(shapes.SHAPES[name], tmp_path)
    config = load_config(str(drafter))
    raw = shapes.read_config(target)
    check_target(config, SimpleNamespace(**raw), raw["vocab_size"])
    assert config.block_size == (10 if name == "llama-3.1-8b" else 16)
    assert config.num_attention_heads * config.head_dim >= config.hidden_size
    assert not {"num_experts", "quantization_config"} & shapes.read_config(drafter).keys()


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_shapes_are_served(name: str, tmp_path: Path):
    """The release reads their configs, as classes that a drafter can tap."""
    target, drafter = shapes.write_pair(shapes.SHAPES[name], tmp_path)
    args = ServerArgs(model_path=str(target), device="cpu", attention_backend="triton")
    check_model(load_config(str(drafter)), args.get_model_config(), "it", "--model-path")


@pytest.mark.parametrize("name", ["qwen3.5-27b", "qwen3.5-35b-a3b"])
def test_shapes_with_pictures(name: str, tmp_path: Path):
    """Their servers find a processor, and its tokens where the config has them."""
    shape = shapes.SHAPES[name]
    target, _ = shapes.write_pair(shape, tmp_path)
    processor = AutoProcessor.from_pretrained(target)
    found = [processor.tokenizer.convert_tokens_to_ids(token) for token in QWEN35_TOKENS.values()]
    assert found == list(QWEN35_TOKENS) and processor.image_token_id == 248056
    config = json.loads((target / "config.json").read_text())
    assert config["video_token_id"] == processor.video_token_id
    assert config["vision_config"]["out_hidden_size"] == config["text_config"]["hidden_size"]


def test_tiny_shape_is_the_bundled_pair(tmp_path: Path):
    target, drafter = shapes.write_pair(shapes.SHAPES["tiny"], tmp_path)
    assert load_config(str(drafter)).block_size == 16
    assert (target / "model.safetensors").is_file()
    assert not list(tmp_path.iterdir())


def test_tokens_per_round_is_bonus_plus_survivors():
    assert tables.tokens_per_round([], 16) == 1
    assert tables.tokens_per_round([1.0] * 15, 16) == 16
    assert tables.tokens_per_round(CURVE, 16) == pytest.approx(3.648)
    assert tables.tokens_per_round(CURVE, 4) == pytest.approx(1 + 0.756 + 0.584 + 0.440)


@pytest.mark.parametrize("curve", [[0.5, 0.6], [1.2], [-0.1]])
def test_curves_that_cannot_be_are_refused(curve: list[float]):
    with pytest.raises(ValueError):
        tables.tokens_per_round(curve, 16)


def _answer(begin: float, end: float, tokens: int, verify_steps: int) -> load.Progress:
    middle = (begin + end) / 2
    return load.Progress([begin, middle, end], [1, 1 + tokens // 2, 1 + tokens], verify_steps)


def test_steady_state_is_where_all_answers_grow():
    # Two requests, 2 tokens a round, 50 rounds/s each; the second begins half a second later.
    sample = load.steady_state([_answer(0.0, 2.0, 200, 100), _answer(0.5, 2.5, 200, 100)])
    assert sample.steady_s == pytest.approx(1.5)
    assert sample.rounds_per_s == pytest.approx(100)
    assert sample.tok_per_s == pytest.approx(200)
    assert sample.round_ms == pytest.approx(20)
    assert sample.accept_length == pytest.approx(2)
    assert sample.total_s == pytest.approx(2.5)


def test_without_speculation_a_round_is_a_token():
    sample = load.steady_state([_answer(0.0, 2.0, 200, 0)])
    assert sample.rounds_per_s == pytest.approx(sample.tok_per_s)
    assert sample.round_ms == pytest.approx(10)


def test_answers_that_do_not_overlap_have_no_steady_state():
    with pytest.raises(load.NoSteadyState):
        load.steady_state([_answer(0.0, 1.0, 10, 10), _answer(1.5, 2.0, 10, 10)])


def test_prompts_are_the_same_for_all_systems_and_new_for_each_sample():
    first = load.random_prompts(2, 8, 768, "0.0")
    assert first == load.random_prompts(2, 8, 768, "0.0")
    assert first != load.random_prompts(2, 8, 768, "0.1")
    assert all(16 <= token < 768 for prompt in first for token in prompt)


ROUND_US = 100.0


def _trace(rounds: int) -> list[dict]:
    """Rounds of 100 µs: 50 µs, 20 µs on another stream meanwhile, a pause, then 30 µs."""
    events = [{"ph": "M", "name": "process_name"}]
    for number in range(rounds):
        start = 1000 + number * ROUND_US
        for name, cat, offset, duration, stream in (
            ("void nvjet_tst_128x8<float>(int)", "kernel", 0, 50, 7),
            ("small", "kernel", 10, 20, 8),
            ("argmax", "kernel", 60, 29, 7),
            ("small", "kernel", 89, 1, 7),
        ):
            event = {"ph": "X", "name": name, "cat": cat, "dur": duration}
            events.append(event | {"ts": start + offset, "args": {"stream": stream}})
        events.append({"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": start, "dur": 100})
    return events


def test_trace_gives_the_idle_share_of_a_round(tmp_path: Path):
    file = tmp_path / "1-TP-0.trace.json.gz"
    with gzip.open(file, "wt") as out:
        json.dump({"traceEvents": _trace(12)}, out)
    assert traces.wait_for_trace(tmp_path, 1) == file
    profile = traces.analyse(traces.read_trace(file), steps=12, skip=2)
    assert profile.rounds == 9
    assert profile.round_us == pytest.approx(ROUND_US)
    assert profile.busy_us == pytest.approx(80)
    assert profile.idle_share == pytest.approx(0.2)
    assert profile.long_gap_share == pytest.approx(0.2)
    assert profile.launches == pytest.approx(4)
    assert traces.by_kind(profile.kernels) == pytest.approx({"matrix products": 50, "other": 50})
    kernels = {kernel["name"]: kernel for kernel in profile.kernels}
    assert kernels["small"]["calls"] == pytest.approx(2)
    assert kernels["small"]["us"] == pytest.approx(21)
    assert sum(gap["us"] for gap in profile.gaps) == pytest.approx(20)


def test_kinds_of_kernels():
    names = {
        "cutlass::device_kernel<flash::FlashAttnFwdSm90<…>>": "attention",
        "cutlass::Kernel2<gemm>": "matrix products",
        "flashinfer::norm::FusedAddRMSNormKernel": "other",
        "Memset (Unknown)": "copies",
    }
    for name, kind in names.items():
        assert traces.by_kind([{"name": name, "us": 2.0}]) == {kind: 2.0}


def test_rounds_are_counted_by_a_kernel_that_comes_once_in_each():
    activities = [traces.Activity("twice", float(t), t + 1.0) for t in range(0, 240, 5)]
    with pytest.raises(traces.BadTrace):
        traces.round_starts(activities, steps=8)
    assert len(traces.round_starts(activities, steps=24)) == 24


@pytest.mark.parametrize("rounds", [0, 4])
def test_traces_without_rounds_are_refused(rounds: int):
    activities = [traces.Activity("argmax", float(t), t + 1.0) for t in range(rounds)]
    with pytest.raises(traces.BadTrace):
        traces.analyse(activities, steps=6)


def _line(system: str, concurrency: int, rates: list[float], **fields) -> dict:
    origin = {
        "commit": "0123456789abcdef",
        "changed_files": 0,
        "versions": {"torch": "2.11.0", "sglang": "0.5.10.post1"},
        "machine": {"platform": "Linux", "cpus": 16, "gpus_used": 1},
        "command": ["python", "benchmark/rounds.py"],
        "gpu": dict.fromkeys(provenance._GPU_FIELDS, "1") | {"name": "NVIDIA H200"},
    }
    samples = [
        {"rounds_per_s": r, "tok_per_s": r, "round_ms": 1e3 * concurrency / r, "accept_length": 1.0}
        for r in rates
    ]
    whole = {"kind": "rounds", "run": "2030-01-02T03:04:05+00:00", "time": "t", "system": system}
    whole |= {"shape": "qwen3-8b", "block_size": 16, "new_tokens": 384, "prompt_tokens": 128}
    whole |= {"concurrency": concurrency, "samples": samples, "provenance": origin}
    whole |= {"simulated_acceptance": CURVE, "server_arguments": ["--tp", "1"], "environment": {}}
    return whole | fields


def _results() -> list[dict]:
    profile = traces.analyse(
        [
            traces.Activity("argmax", start, start + 95.0)
            for start in (number * ROUND_US for number in range(12))
        ],
        steps=12,
    ).to_json()
    lines = [_line("v1", 1, [100, 101, 99]), _line("v2", 1, [150, 120, 130])]
    lines += [_line("peer-1", 1, [120]), _line("plain", 1, [190])]
    return [*lines, _line("v2", 1, [], kind="profile", profile=profile)]


def test_tables_hold_medians_ratios_and_targets():
    found = tables.cells(_results())
    assert tables.systems(found) == ["v1", "v2", "peer-1", "plain"]
    assert tables.rates_table(found)[2] == ["v2 (rounds/s)", "130 · 7.69 ms"]
    assert tables.ratios_table(found, with_targets=True)[1:] == [
        ["v2 / v1, rounds/s", "1.300 (≥ 1.200: met)"],
        ["v2 / peer-1, rounds/s", "1.083 (≥ 1.150: missed)"],
    ]
    assert tables.ratios_table(found, with_targets=False)[1][1] == "1.300"
    assert tables.idle_table(found, with_targets=True)[1][1] == "5.0% (≤ 5.0%: met)"
    simulated = tables.simulated_table(found, CURVE, 16)
    assert simulated[2] == ["v2 (simulated)", "474"]
    assert simulated[4] == ["plain (measured)", "190"]


def test_report_says_what_on_what_and_what_is_simulated(tmp_path: Path):
    rejected = tmp_path / "rejected.md"
    rejected.write_text("# Tried and rejected\n\n- two streams: 3% slower\n")
    text = report.markdown(_results(), rejected, None)
    for expected in (
        "NVIDIA H200, qwen3-8b, block 16",
        "commit `0123456789ab`",
        "torch 2.11.0",
        "1.300 (≥ 1.200: met)",
        "(simulated)",
        "## Tried and rejected\n\n- two streams: 3% slower",
    ):
        assert expected in text


def test_results_name_no_folder_of_the_machine():
    given = ["--peer", "x=/opt/a:/opt/b", "--model-path", "/tmp/p", "--tp", "1", "--out=~/x"]
    given += ["v2=--lora-paths a=/tmp/a b=/tmp/b --max-loras-per-batch 9", "/tmp/with spaces/x"]
    cleaned = provenance.without_paths(given, {"/tmp/p": "TARGET"})
    assert cleaned == [
        *("--peer", "x=(a path)", "--model-path", "TARGET", "--tp", "1"),
        "--out=(a path)",
        "v2=--lora-paths a=(a path) b=(a path) --max-loras-per-batch 9",
        "(a path)",
    ]


def test_peers_see_their_own_python_path_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("SGLANG_ENABLE_SPEC_V2", "1")
    peer = servers.peer_system(f"p={tmp_path}", {"A": "b"}, ["--x"])
    environment = peer.full_environment("cuda")
    assert environment["PYTHONPATH"] == str(tmp_path)
    assert environment["A"] == "b"
    assert "SGLANG_ENABLE_SPEC_V2" not in environment
    assert servers.own_system("v1").full_environment("cuda")["PYTHONPATH"] == "/ours"
    assert servers.own_system("v2").full_environment("cuda")["SGLANG_ENABLE_SPEC_V2"] == "1"


@pytest.mark.parametrize("given", ["x", "x=", "=y", "v2=/", "x=/no/such/folder"])
def test_peers_that_cannot_be_are_refused(given: str):
    with pytest.raises(ValueError):
        servers.peer_system(given, {}, [])


def test_runs_on_several_gpus_say_so() -> None:
    machine = {"gpu": {"name": "NVIDIA H200"}, "machine": {"gpus_used": 2}}
    assert tables.gpus([{"provenance": machine}]) == "2 × NVIDIA H200"
    assert not tables.has_targets("qwen3-8b", 16, "2 × NVIDIA H200")
    assert tables.has_targets("qwen3-8b", 16, "NVIDIA H200")
