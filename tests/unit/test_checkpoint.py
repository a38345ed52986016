"""Draft checkpoints that are not what they should be: one sentence each, and the right one."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.checkpoint import (
    DraftConfig,
    check_target,
    check_weights,
    load_config,
    parse_config,
)
from sglang_dflash.errors import DFlashError

DRAFTER = Path(__file__).parents[2] / "checkpoints" / "tiny" / "drafter"
TARGET = SimpleNamespace(num_hidden_layers=4, hidden_size=256)
VOCABULARY = 768
Mutation = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def good() -> dict[str, Any]:
    return json.loads((DRAFTER / "config.json").read_text())


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return load_file(DRAFTER / "model.safetensors")


def set_dflash(name: str, value: Any) -> Mutation:
    return lambda raw: raw["dflash_config"].update({name: value})


def put(name: str, value: Any) -> Mutation:
    return lambda raw: raw.update({name: value})


def drop(name: str) -> Mutation:
    return lambda raw: raw.pop(name)


def assert_one_sentence(error: DFlashError) -> None:
    """A sentence: what is wrong, then what to do; on one line."""
    text = str(error)
    assert "\n" not in text and text.endswith("."), text
    assert re.search(r"[:;] \w", text), f"says not what to do: {text}"


BROKEN_CONFIGS = {
    "no dflash_config": (drop("dflash_config"), "has no dflash_config"),
    "dflash_config a list": (put("dflash_config", [1]), "has no dflash_config"),
    "no block size": (drop("block_size"), "no block_size"),
    "block size 1": (put("block_size", 1), "block_size of x is 1"),
    "block size text": (put("block_size", "16"), "block_size of x is '16'"),
    "block size true": (put("block_size", True), "block_size of x is True"),
    "no mask token": (lambda r: r["dflash_config"].pop("mask_token_id"), "mask_token_id"),
    "negative mask token": (
        set_dflash("mask_token_id", -1),
        "dflash_config.mask_token_id of x is -1",
    ),
    "no layers": (set_dflash("target_layer_ids", []), "target_layer_ids of x is []"),
    "layers missing": (set_dflash("target_layer_ids", None), "target_layer_ids of x is None"),
    "layers descending": (set_dflash("target_layer_ids", [2, 1]), "not an ascending list"),
    "layers twice": (set_dflash("target_layer_ids", [1, 1]), "not an ascending list"),
    "layer negative": (set_dflash("target_layer_ids", [-1, 1]), "not an ascending list"),
    "layer text": (set_dflash("target_layer_ids", ["1"]), "not an ascending list"),
    "no hidden size": (drop("hidden_size"), "no hidden_size"),
    "hidden size 0": (put("hidden_size", 0), "hidden_size of x is 0"),
    "no heads": (drop("num_attention_heads"), "no num_attention_heads"),
    "KV heads do not divide": (put("num_key_value_heads", 3), "num_attention_heads 8 of x"),
    "odd head size": (put("head_dim", 63), "head_dim 63 of x is odd"),
    "no depth": (drop("num_hidden_layers"), "no num_hidden_layers"),
    "depth 2.0": (put("num_hidden_layers", 2.0), "num_hidden_layers of x is 2.0"),
    "no intermediate size": (drop("intermediate_size"), "no intermediate_size"),
    "no vocabulary": (drop("vocab_size"), "no vocab_size"),
    "sliding window": (
        put("layer_types", ["full_attention", "sliding_attention"]),
        "sliding_attention",
    ),
    "layer types short": (put("layer_types", ["full_attention"]), "layer_types of x"),
    "layer types a number": (put("layer_types", 2), "layer_types of x"),
    "sliding somewhere": (
        lambda r: (r.pop("layer_types"), r.update(use_sliding_window=True)),
        "use_sliding_window of x is true",
    ),
    "inner block size 1": (
        lambda r: (r.pop("block_size"), r["dflash_config"].update(block_size=1)),
        "dflash_config.block_size of x is 1",
    ),
    "quantized": (put("quantization_config", {"quant_method": "fp8"}), "quantization_config of x"),
    "other model type": (put("model_type", "llama4"), "model_type of x is 'llama4'"),
    "no model type": (drop("model_type"), "model_type of x is None"),
    "other activation": (put("hidden_act", "gelu"), "hidden_act of x is 'gelu'"),
    "context a text": (put("max_position_embeddings", "2k"), "max_position_embeddings of x"),
    "epsilon 0": (put("rms_norm_eps", 0), "rms_norm_eps of x is 0"),
    "epsilon a text": (put("rms_norm_eps", "1e-6"), "rms_norm_eps of x is '1e-6'"),
}


@pytest.mark.parametrize("name", BROKEN_CONFIGS)
def test_broken_config(good: dict[str, Any], name: str) -> None:
    mutate, sentence = BROKEN_CONFIGS[name]
    raw = copy.deepcopy(good)
    mutate(raw)
    with pytest.raises(DFlashError) as caught:
        parse_config("x", raw)
    assert sentence in str(caught.value)
    assert_one_sentence(caught.value)


def test_good_config(good: dict[str, Any]) -> None:
    config = parse_config("x", good)
    assert config == DraftConfig(
        path="x",
        block_size=16,
        mask_token_id=3,
        target_layer_ids=(0, 1, 2),
        num_target_layers=4,
        target_hidden_size=256,
        vocab_size=768,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=768,
    )
    check_target(config, TARGET, VOCABULARY)


def test_block_size_inside_dflash_config(good: dict[str, Any]) -> None:
    raw = {key: value for key, value in good.items() if key != "block_size"}
    raw["dflash_config"] = raw["dflash_config"] | {"block_size": 8}
    assert parse_config("x", raw).block_size == 8


def test_defaults(good: dict[str, Any]) -> None:
    names = ("num_target_layers", "num_key_value_heads", "head_dim", "layer_types", "hidden_act")
    config = parse_config("x", {key: value for key, value in good.items() if key not in names})
    assert (config.num_target_layers, config.num_key_value_heads, config.head_dim) == (None, 8, 32)


MISFITS = {
    "depth": ({"num_target_layers": 5}, "num_target_layers 5 of x does not fit a target of 4"),
    "layer beyond": ({"target_layer_ids": (0, 4)}, "target_layer_ids of x has 4"),
    "last layer": ({"target_layer_ids": (0, 3)}, "layers 0 to 2"),
    "width": ({"hidden_size": 128, "target_hidden_size": 128}, "hidden_size 128 of x"),
    "own width": ({"hidden_size": 128}, "hidden_size 128 of x"),
    "tapped width": ({"target_hidden_size": 128}, "target_hidden_size 128 of x"),
    "vocabulary": ({"vocab_size": 1000}, "vocab_size 1000 of x"),
    "mask token": ({"mask_token_id": 768}, "mask_token_id 768 of x"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_another_targets_drafter(good: dict[str, Any], name: str) -> None:
    changes, sentence = MISFITS[name]
    with pytest.raises(DFlashError) as caught:
        check_target(replace(parse_config("x", good), **changes), TARGET, VOCABULARY)
    assert sentence in str(caught.value)
    assert_one_sentence(caught.value)


def save(
    folder: Path, config: dict[str, Any] | str | None, **files: dict[str, torch.Tensor]
) -> None:
    folder.mkdir(exist_ok=True)
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / "config.json").write_text(text)
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/nowhere", "/nowhere is not a folder"),
        ("./nowhere", "is not a folder"),
        ("nowhere", "is not a folder"),
        ("a/b/c", "is not a folder"),
        (__file__, "is not a folder"),
        ("nobody/nothing-at-all", "neither a folder nor a repository that can be downloaded"),
    ],
)
def test_no_such_path(path: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DFlashError) as caught:
        load_config(path)
    assert sentence in str(caught.value)
    assert path in str(caught.value)
    assert_one_sentence(caught.value)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (None, "has no config.json"),
        ("", "is not valid JSON"),
        ("{'block_size': 16}", "is not valid JSON"),
        ("[1, 2]", "is not a JSON object"),
        ("null", "is not a JSON object"),
        ("{}", "has no dflash_config"),
    ],
)
def test_config_file(tmp_path: Path, config: str | None, sentence: str) -> None:
    save(tmp_path, config)
    with pytest.raises(DFlashError) as caught:
        load_config(str(tmp_path))
    assert sentence in str(caught.value)
    assert_one_sentence(caught.value)


def test_config_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(DFlashError, match="is not valid JSON"):
        load_config(str(tmp_path))


def test_the_target_is_no_drafter() -> None:
    with pytest.raises(DFlashError, match=r"architectures \['Qwen3ForCausalLM'\]"):
        load_config(str(DRAFTER.parent / "target"))


def test_good_weights(good: dict[str, Any], weights: dict, tmp_path: Path) -> None:
    check_weights(load_config(str(DRAFTER)))
    # In two files, with the prefix that some writers add.
    names = sorted(weights)
    half = {f"model.{name}": weights[name] for name in names[::2]}
    save(tmp_path, good, a=half, b={name: weights[name] for name in names[1::2]})
    check_weights(load_config(str(tmp_path)))


NORM = "norm.weight"
BROKEN_WEIGHTS = {
    "missing": (drop(NORM), f"misses {NORM}"),
    "left over": (put("lm_head.weight", torch.zeros(2, 2)), "has left over lm_head.weight"),
    "renamed": (
        lambda w: w.update({"last.weight": w.pop(NORM)}),
        f"misses {NORM} and has left over",
    ),
    "another shape": (put(NORM, torch.zeros(255)), f"{NORM} of"),
    "transposed": (
        lambda w: w.update({"fc.weight": w["fc.weight"].T.contiguous()}),
        "has shape [768, 256]",
    ),
    "a layer too many": (put("layers.2.mlp.up_proj.weight", torch.zeros(2)), "left over layers.2"),
    "a bias": (
        put("layers.0.self_attn.q_proj.bias", torch.zeros(512)),
        "left over layers.0.self_attn",
    ),
    "all missing": (lambda w: w.clear(), "and 21 more"),
    "twice": (put(f"model.{NORM}", torch.zeros(256)), f"has {NORM} twice"),
}


@pytest.mark.parametrize("name", BROKEN_WEIGHTS)
def test_broken_weights(good: dict[str, Any], weights: dict, tmp_path: Path, name: str) -> None:
    mutate, sentence = BROKEN_WEIGHTS[name]
    tensors = dict(weights)
    mutate(tensors)
    save(tmp_path, good, model=tensors)
    with pytest.raises(DFlashError) as caught:
        check_weights(load_config(str(tmp_path)))
    assert sentence in str(caught.value)
    assert_one_sentence(caught.value)


def test_no_weights(good: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, good)
    with pytest.raises(DFlashError, match="has no .*safetensors file"):
        check_weights(load_config(str(tmp_path)))


def test_weights_cut_short(good: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, good)
    whole = (DRAFTER / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:5000])
    with pytest.raises(DFlashError, match="cannot be read") as caught:
        check_weights(load_config(str(tmp_path)))
    assert_one_sentence(caught.value)
