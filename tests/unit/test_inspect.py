"""`python -m sglang_dflash.inspect`: what it prints, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sglang_dflash.inspect import MISFIT, REFUSED, RUNS, main
from tests.unit.drafters import reduced_vocabulary, save, speculators_config

PAIR = Path(__file__).parents[2] / "checkpoints" / "tiny"
DRAFTER, TARGET = PAIR / "drafter", PAIR / "target"


def lines(text: str) -> dict[str, str]:
    """What is printed, by the name that begins each line."""
    return {line[:16].strip(): line[17:] for line in text.splitlines()}


def inspect(*arguments: str | Path, capsys: pytest.CaptureFixture) -> tuple[int, dict, str]:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, lines(captured.out), captured.err


@pytest.fixture(scope="module")
def raw() -> dict[str, Any]:
    return json.loads((DRAFTER / "config.json").read_text())


def test_zlab(capsys: pytest.CaptureFixture) -> None:
    status, printed, error = inspect(DRAFTER, "--target", TARGET, capsys=capsys)
    assert (status, error) == (RUNS, "")
    assert printed["format"] == "z-lab"
    assert printed["block"].startswith("16 tokens")
    assert printed["taps"] == "after layers 0, 1, 2 of a target of 4 layers, width 256"
    assert printed["KV a token"].startswith("1024 bytes in bfloat16")
    assert printed["embedding"] == printed["LM head"] == "the target's"
    assert printed["fits the target"].startswith("yes")


def test_speculators(raw: dict, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    mixed = raw | {
        "layer_types": ["sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 64,
    }
    config = speculators_config(mixed, "someone/target", draft_vocab_size=500)
    weights = load_file(DRAFTER / "model.safetensors")
    reduced = reduced_vocabulary(torch.zeros(768, 256), torch.arange(500))
    save(tmp_path, config, model=weights | reduced)
    status, printed, _ = inspect(tmp_path, capsys=capsys)
    assert status == RUNS
    assert (printed["format"], printed["verifier"]) == ("speculators", "someone/target")
    assert printed["vocabulary"] == "500 of the target's 768 tokens"
    assert printed["LM head"] == "its own"
    assert printed["attention"].startswith("layer 0 sees a window of 64 tokens, causal inside")
    assert "layer 1 sees all of the context, both ways" in printed["attention"]
    assert "keep the whole context" in printed["KV a token"]
    assert "fits the target" not in printed


def test_another_target(raw: dict, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    target = json.loads((TARGET / "config.json").read_text()) | {"num_hidden_layers": 6}
    target.pop("layer_types")
    save(tmp_path, target)
    status, printed, error = inspect(DRAFTER, "--target", tmp_path, capsys=capsys)
    assert (status, printed["fits the target"]) == (MISFIT, "no")
    assert error.startswith("error: num_target_layers 4 of")


@pytest.mark.parametrize(
    ("model_type", "architecture", "refused"),
    [
        ("phi", "PhiForCausalLM", "runs as PhiForCausalLM, whose hidden states DFLASH cannot tap"),
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", None),
        ("qwen2_vl", "Qwen2VLForConditionalGeneration", None),
        (
            "mllama",
            "MllamaForConditionalGeneration",
            "runs as MllamaForConditionalGeneration, which wraps",
        ),
        ("gemma3_text", "Gemma3ForCausalLM", None),
        ("qwen3_next", "Qwen3NextForCausalLM", None),
        (
            "deepseek_v3",
            "DeepseekV32ForCausalLM",
            "runs as DeepseekV32ForCausalLM, whose layers choose the keys that they read",
        ),
        (
            "falcon_h1",
            "FalconH1ForCausalLM",
            "runs as FalconH1ForCausalLM, whose recurrent states DFLASH cannot bring back",
        ),
    ],
)
def test_what_the_server_says_of_the_targets_class(
    model_type: str,
    architecture: str,
    refused: str | None,
    raw: dict,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    """Both ask `check_model`."""
    names = ("hidden_size", "vocab_size", "num_attention_heads")
    sizes = {name: raw[name] for name in names} | {"num_hidden_layers": 4}
    target = {"model_type": model_type, "architectures": [architecture]} | sizes
    if model_type == "deepseek_v3":
        target |= {"index_topk": 2048, "index_n_heads": 4, "index_head_dim": 64}
    save(tmp_path, target | ({"text_config": sizes} if "_vl" in model_type else {}))
    status, printed, error = inspect(DRAFTER, "--target", tmp_path, capsys=capsys)
    if refused is None:
        assert (status, error) == (RUNS, "")
    else:
        assert (status, printed["fits the target"]) == (MISFIT, "no")
        assert error.startswith(f"error: --target {tmp_path} {refused}")


def test_refused(raw: dict, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    status, printed, error = inspect(TARGET, capsys=capsys)
    assert (status, printed) == (REFUSED, {})
    assert "is not a DFlash checkpoint" in error and error.endswith(
        "give a DFlash drafter as PATH.\n"
    )
    status, _, error = inspect(tmp_path / "none", capsys=capsys)
    assert status == REFUSED and error.startswith(f"error: PATH {tmp_path}/none is not a folder")
    status, _, error = inspect(save(tmp_path, raw), capsys=capsys)
    assert status == REFUSED and "has no *.safetensors file" in error
    status, _, error = inspect(DRAFTER, "--target", tmp_path / "none", capsys=capsys)
    assert status == REFUSED and "has no config that SGLang can read" in error


def test_as_a_command() -> None:
    command = [sys.executable, "-m", "sglang_dflash.inspect"]
    run = subprocess.run([*command, "/nowhere"], capture_output=True, text=True, timeout=120)
    assert run.returncode == REFUSED
    assert run.stderr.strip().splitlines()[-1].startswith("error: ")
    usage = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert usage.returncode == 2 and "PATH" in usage.stderr
