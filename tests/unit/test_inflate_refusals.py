"""checkpoints/inflate: pairs that cannot be inflated, and disks without room, are refused by a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmark.shapes import TINY, read_config
from checkpoints.inflate.__main__ import main
from checkpoints.inflate.pair import inflate
from sglang_dflash.errors import DFlashError
from tests.unit.test_inflate import DENSE, shape

pytestmark = pytest.mark.usefixtures("one_rank")


def change(folder: Path, **fields: Any) -> Path:
    """The bundled target with other fields in its config.json."""
    folder.mkdir()
    raw = read_config(TINY / "target") | fields
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "model.safetensors").symlink_to(TINY / "target" / "model.safetensors")
    return folder


REFUSALS: list[tuple[dict[str, Any], list[str], str]] = [
    ({}, ["--target", "nowhere"], "--target nowhere has no config.json that can be read"),
    ({}, ["--drafter", "no/where"], "--drafter no/where is not a folder"),
    ({}, ["--drafter", str(TINY / "target")], "is not a DFlash checkpoint"),
    ({}, ["--shape", "llama-3.1-8b"], "--shape llama-3.1-8b is LlamaForCausalLM"),
    ({}, ["--drafter", str(TINY / "drafter")] * 2, "would have the name drafter"),
    ({"architectures": ["GPT2LMHeadModel"]}, [], "is GPT2LMHeadModel with model_type qwen3"),
    ({"intermediate_size": 700}, [], "are not those of its config.json, for example layers.0.mlp"),
    ({"attention_bias": True}, [], "has biases, which cannot be inflated"),
    ({"num_hidden_layers": 5, "layer_types": None}, [], "for example layers.4.input_layernorm"),
    (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        [],
        "has RoPE of type 'yarn'",
    ),
]


@pytest.mark.parametrize(("fields", "given", "sentence"), REFUSALS, ids=[r[2] for r in REFUSALS])
def test_refusals(
    fields: dict, given: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    target = ["--target", str(change(tmp_path / "small", **fields))]
    arguments = ["--shape", "qwen3-8b", "--out", str(tmp_path / "out"), *target, *given]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and sentence in error
    assert not (tmp_path / "out").exists()


def test_no_room(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    usage = SimpleNamespace(free=17 * 10**9)
    monkeypatch.setattr("checkpoints.inflate.pair.shutil.disk_usage", lambda _: usage)
    assert main(["--shape", "qwen3-8b", "--out", str(tmp_path / "out")]) == 1
    assert "has 17.0 GB free, and the pair takes 18." in capsys.readouterr().err
    monkeypatch.undo()
    (tmp_path / "out" / "target").mkdir(parents=True)  # which the refusal did not make
    assert main(["--shape", "qwen3-8b", "--out", str(tmp_path / "out")]) == 1
    assert "target is there already: remove it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_size": 256}, "hidden_size is 256 and can be at most 255"),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 2 and can be at most 1"),
        ({"num_attention_heads": 6}, "query heads of a KV head is 4 and can be at most 2"),
        ({"intermediate_size": 767}, "neurons of an MLP is 768 and can be at most 767"),
        ({"vocab_size": 767}, "vocab_size is 768 and can be at most 767"),
        ({"head_dim": 96}, "head_dim 96 is not a multiple of 64"),
        ({"num_hidden_layers": 5}, "The small target's 4 layers do not fit into the 5 of x"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 4 and can be at most 3"),
    ],
)
def test_sizes_that_do_not_fit(changes: dict, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(DFlashError, match=sentence):
        inflate(shape(DENSE | changes), "x", TINY / "target", [TINY / "drafter"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
