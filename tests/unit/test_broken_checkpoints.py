"""Broken checkpoints, each one change away from a good one: the server's arguments refuse them all.

A refusal is one sentence that names what is wrong and says what to do.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.server_args import ServerArgs

from sglang_dflash.errors import DFlashError
from tests.unit.drafters import reduced_vocabulary, save, speculators_config

PAIR = Path(__file__).parents[2] / "checkpoints" / "tiny"
DRAFTER, TARGET = PAIR / "drafter", PAIR / "target"
NORM = "norm.weight"
Mutation = Callable[[dict[str, Any]], Any]


def serve(folder: Path) -> ServerArgs:
    """What a server with this drafter does first."""
    return ServerArgs(
        model_path=str(TARGET),
        device="cpu",
        attention_backend="torch_native",
        speculative_algorithm="DFLASH",
        speculative_draft_model_path=str(folder),
    )


def assert_refused(folder: Path, sentence: str) -> None:
    with pytest.raises(DFlashError) as caught:
        serve(folder)
    text = str(caught.value)
    assert sentence in text
    assert "\n" not in text and text.endswith("."), text
    assert re.search(r"[:;] \w", text), f"says not what to do: {text}"


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return load_file(DRAFTER / "model.safetensors")


@pytest.fixture(scope="module")
def zlab() -> dict[str, Any]:
    return json.loads((DRAFTER / "config.json").read_text())


@pytest.fixture(scope="module")
def speculators(zlab: dict[str, Any]) -> dict[str, Any]:
    """With a reduced vocabulary."""
    return speculators_config(zlab, str(TARGET), draft_vocab_size=700)


@pytest.fixture(scope="module")
def speculators_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    head = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"]
    return weights | reduced_vocabulary(head, torch.arange(700))


def put(*path: Any) -> Mutation:
    """Sets the field at the path of names before the last argument."""
    *names, last, value = path

    def mutate(raw: dict[str, Any]) -> None:
        for name in names:
            raw = raw[name]
        raw[last] = value

    return mutate


def drop(*names: str) -> Mutation:
    """Removes the field at a path of names."""

    def mutate(raw: dict[str, Any]) -> None:
        for name in names[:-1]:
            raw = raw[name]
        del raw[names[-1]]

    return mutate


def without(*names: str, then: Mutation) -> Mutation:
    def mutate(raw: dict[str, Any]) -> None:
        drop(*names)(raw)
        then(raw)

    return mutate


DFLASH = "dflash_config"
ZLAB_CONFIGS: dict[str, tuple[Mutation, str]] = {
    "no dflash_config": (drop(DFLASH), "has no dflash_config.mask_token_id"),
    "neither format": (
        lambda raw: (raw.pop(DFLASH), raw.update(architectures=["Qwen3ForCausalLM"])),
        "has neither dflash_config nor speculators_model_type",
    ),
    "dflash_config a list": (put(DFLASH, [1]), "dflash_config of"),
    "no block size": (drop("block_size"), "has no block_size"),
    "block size 1": (put("block_size", 1), "is 1, not a whole number from 2"),
    "block size text": (put("block_size", "16"), "is '16', not a whole number"),
    "block size true": (put("block_size", True), "is True, not a whole number"),
    "inner block size 1": (
        without("block_size", then=put(DFLASH, "block_size", 1)),
        "dflash_config.block_size of",
    ),
    "no mask token": (drop(DFLASH, "mask_token_id"), "has no dflash_config.mask_token_id"),
    "negative mask token": (put(DFLASH, "mask_token_id", -1), "dflash_config.mask_token_id of"),
    "mask token beyond": (put(DFLASH, "mask_token_id", 768), "mask_token_id 768 of"),
    "no layers": (put(DFLASH, "target_layer_ids", []), "dflash_config.target_layer_ids of"),
    "neither layers nor depth": (
        without("num_target_layers", then=drop(DFLASH, "target_layer_ids")),
        "has neither dflash_config.target_layer_ids nor num_target_layers",
    ),
    "default layers": (drop(DFLASH, "target_layer_ids"), "fc.weight of"),
    "layer negative": (put(DFLASH, "target_layer_ids", [-1, 1]), "is [-1, 1], not a list"),
    "layer text": (put(DFLASH, "target_layer_ids", ["1"]), "is ['1'], not a list"),
    "layer beyond": (put(DFLASH, "target_layer_ids", [0, 1, 4]), "target_layer_ids of"),
    "last layer": (put(DFLASH, "target_layer_ids", [0, 1, 3]), "layers 0 to 2"),
    "a layer less": (put(DFLASH, "target_layer_ids", [0, 1]), "fc.weight of"),
    "causal text": (put(DFLASH, "causal", "no"), "dflash_config.causal of"),
    "causal and not": (
        lambda raw: (raw.update(is_causal=False), raw[DFLASH].update(causal=True)),
        "dflash_config.causal true and is_causal false of",
    ),
    "another depth": (put("num_target_layers", 5), "num_target_layers 5 of"),
    "no hidden size": (drop("hidden_size"), "has no hidden_size"),
    "hidden size 0": (put("hidden_size", 0), "hidden_size of"),
    "another width": (put("hidden_size", 128), "hidden_size 128 of"),
    "another target's width": (put("target_hidden_size", 128), "target_hidden_size 128 of"),
    "no heads": (drop("num_attention_heads"), "has no num_attention_heads"),
    "KV heads do not divide": (put("num_key_value_heads", 3), "num_attention_heads 8 of"),
    "other KV heads": (put("num_key_value_heads", 4), "layers.0.self_attn.k_proj.weight of"),
    "odd head size": (put("head_dim", 63), "head_dim 63 of"),
    "no depth": (drop("num_hidden_layers"), "has no num_hidden_layers"),
    "depth 2.0": (put("num_hidden_layers", 2.0), "num_hidden_layers of"),
    "a layer more": (
        lambda raw: (raw.update(num_hidden_layers=3), raw.pop("layer_types")),
        "misses layers.2.input_layernorm.weight",
    ),
    "no intermediate size": (drop("intermediate_size"), "has no intermediate_size"),
    "no vocabulary": (drop("vocab_size"), "has no vocab_size"),
    "another vocabulary": (put("vocab_size", 1000), "vocab_size 1000 of"),
    "layer types short": (put("layer_types", ["full_attention"]), "layer_types of"),
    "layer types a number": (put("layer_types", 2), "layer_types of"),
    "strange layer type": (put("layer_types", ["full_attention", "mamba"]), "has 'mamba'"),
    "window 0": (
        lambda raw: raw.update(
            layer_types=["sliding_attention"] * 2, use_sliding_window=True, sliding_window=0
        ),
        "sliding_window of",
    ),
    "a bias": (put("attention_bias", True), "misses layers.0.self_attn.k_proj.bias"),
    "a bias of text": (put("attention_bias", "yes"), "attention_bias of"),
    "quantized": (put("quantization_config", {"quant_method": "awq"}), "quantization_config of"),
    "other model type": (put("model_type", "llama4"), "model_type of"),
    "no model type": (drop("model_type"), "model_type of"),
    "other activation": (put("hidden_act", "gelu"), "hidden_act of"),
    "context a text": (put("max_position_embeddings", "2k"), "max_position_embeddings of"),
    "epsilon 0": (put("rms_norm_eps", 0), "rms_norm_eps of"),
    "epsilon a text": (put("rms_norm_eps", "1e-6"), "rms_norm_eps of"),
    "strange RoPE": (put("rope_parameters", "rope_type", "dynamic"), "rope_type of"),
    "RoPE without base": (
        put("rope_parameters", "rope_theta", -1),
        "rope_parameters.rope_theta of",
    ),
    "YaRN without factor": (
        put("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        "does not describe a qwen3 transformer",
    ),
    "rotary part of nothing": (
        put("rope_parameters", "partial_rotary_factor", 0.01),
        "partial_rotary_factor of",
    ),
    "embeddings times 0": (put(DFLASH, "input_embedding_scale", 0), "input_embedding_scale of"),
    "attention sinks": (put(DFLASH, "attention_sink_bias", True), "attention_sink_bias of"),
}

INNER = "transformer_layer_config"
SPECULATORS_CONFIGS: dict[str, tuple[Mutation, str]] = {
    "no transformer": (drop(INNER), "has no transformer_layer_config"),
    "transformer a list": (put(INNER, []), "transformer_layer_config of"),
    "width of the type": (drop(INNER, "hidden_size"), "hidden_size 4096 of"),
    "heads of the type": (drop(INNER, "head_dim"), "layers.0.self_attn.k_norm.weight of"),
    "strange model type": (put(INNER, "model_type", "gpt2"), f"{INNER}.model_type of"),
    "no block size": (drop("block_size"), "has no block_size"),
    "no mask token": (put("mask_token_id", None), "has no mask_token_id"),
    "no layers": (put("aux_hidden_state_layer_ids", None), "has no aux_hidden_state_layer_ids"),
    "last layer": (
        put("aux_hidden_state_layer_ids", [1, 2, 4]),
        "aux_hidden_state_layer_ids of",
    ),
    "negative layer": (put("aux_hidden_state_layer_ids", [-1, 2, 3]), "not a list of whole"),
    "vocabulary too large": (put("draft_vocab_size", 800), "draft_vocab_size 800 of"),
    "vocabulary of others": (put("draft_vocab_size", 600), "lm_head.weight of"),
    "vocabulary whole": (put(INNER, "vocab_size", 700), "vocab_size 700 of"),
    "switch of text": (put("sliding_window_non_causal", "no"), "sliding_window_non_causal of"),
    "no drafts": (
        put("speculators_config", "proposal_methods", 0, "speculative_tokens", 0),
        "proposal_methods[0].speculative_tokens of",
    ),
    "verifier a number": (
        put("speculators_config", "verifier", "name_or_path", 7),
        "speculators_config.verifier.name_or_path of",
    ),
    "another target's width": (put("target_hidden_size", 128), "target_hidden_size 128 of"),
}

VARIANTS: dict[str, tuple[str, Mutation, str]] = {
    "anchor first": ("zlab", put(DFLASH, "num_anchors", 512), "anchor-first block layout"),
    "anchor first at the top": ("zlab", put("num_anchors", 4), "num_anchors is 4"),
    "anchor first as declared": (
        "zlab",
        put(DFLASH, "query_zero_predicts_next", True),
        "query_zero_predicts_next is True",
    ),
    "anchor first in speculators": (
        "speculators",
        put("sample_from_anchor", True),
        "anchor-first block layout (sample_from_anchor is True)",
    ),
    "dflash2": (
        "zlab",
        put("architectures", ["DFlash2DraftModel"]),
        "of type dflash2 (architectures DFlash2DraftModel)",
    ),
    "dflash2 by its fields": (
        "zlab",
        put(DFLASH, "selector_rank", 256),
        "of type dflash2 (it has selector_rank)",
    ),
    "dflash2 in speculators": (
        "speculators",
        put("speculators_model_type", "dflash2"),
        "of type dflash2",
    ),
    "dspark": ("speculators", put("speculators_model_type", "dspark"), "of type dspark"),
    "xpress": ("speculators", put("speculators_model_type", "xpress"), "of type xpress"),
    "eagle3": (
        "speculators",
        put("speculators_model_type", "eagle3"),
        "serve it with --speculative-algorithm EAGLE3",
    ),
    "eagle3 of others": (
        "zlab",
        put("architectures", ["LlamaForCausalLMEagle3"]),
        "of type eagle3",
    ),
    "p-eagle": ("speculators", put("speculators_model_type", "peagle"), "of type p-eagle"),
    "mtp": (
        "speculators",
        put("speculators_model_type", "mtp"),
        "serve it with --speculative-algorithm NEXTN",
    ),
    "mtp of others": ("zlab", put("architectures", ["Qwen3NextForCausalLMMTP"]), "of type mtp"),
    "of tomorrow": ("speculators", put("speculators_model_type", "zflash"), "of type zflash"),
}

ZLAB_WEIGHTS: dict[str, tuple[Mutation, str]] = {
    "missing": (drop(NORM), f"misses {NORM}"),
    "left over": (put("lm_tail.weight", torch.zeros(2, 2)), "has left over lm_tail.weight"),
    "renamed": (
        lambda w: w.update({"last.weight": w.pop(NORM)}),
        f"misses {NORM} and has left over last.weight",
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
    "own head of another shape": (put("lm_head.weight", torch.zeros(2, 2)), "lm_head.weight of"),
    "convolutions": (put("layers.0.attention_conv.base_kernel", torch.zeros(2)), "has left over"),
}

SPECULATORS_WEIGHTS: dict[str, tuple[Mutation, str]] = {
    "no mapping": (lambda w: (w.pop("d2t"), w.pop("t2d")), "misses d2t"),
    "mapping short": (put("d2t", torch.zeros(699, dtype=torch.int64)), "has 699 tokens"),
    "mapping beyond": (
        lambda w: w["d2t"].__setitem__(-1, 100),
        "maps draft token 699 to 799, beyond the vocabulary of 768",
    ),
    "absolute mapping": (put("d2t", torch.arange(700)), "beyond the vocabulary"),
    "two to one": (lambda w: w["d2t"].__setitem__(5, 1), "maps two draft tokens to one"),
    "other tokens listed": (
        lambda w: w.update(t2d=w["t2d"].roll(3)),
        "maps two draft tokens to one, or to others than t2d names",
    ),
}


def broken(good: dict[str, Any], mutate: Mutation) -> dict[str, Any]:
    raw = copy.deepcopy(good)
    mutate(raw)
    return raw


@pytest.mark.parametrize("name", ZLAB_CONFIGS)
def test_zlab_config(zlab: dict, weights: dict, tmp_path: Path, name: str) -> None:
    mutate, sentence = ZLAB_CONFIGS[name]
    assert_refused(save(tmp_path, broken(zlab, mutate), model=weights), sentence)


@pytest.mark.parametrize("name", ZLAB_WEIGHTS)
def test_zlab_weights(zlab: dict, weights: dict, tmp_path: Path, name: str) -> None:
    mutate, sentence = ZLAB_WEIGHTS[name]
    assert_refused(save(tmp_path, zlab, model=broken(weights, mutate)), sentence)


@pytest.mark.parametrize("name", SPECULATORS_CONFIGS)
def test_speculators_config(
    speculators: dict, speculators_weights: dict, tmp_path: Path, name: str
) -> None:
    mutate, sentence = SPECULATORS_CONFIGS[name]
    folder = save(tmp_path, broken(speculators, mutate), model=speculators_weights)
    assert_refused(folder, sentence)


@pytest.mark.parametrize("name", SPECULATORS_WEIGHTS)
def test_speculators_weights(
    speculators: dict, speculators_weights: dict, tmp_path: Path, name: str
) -> None:
    mutate, sentence = SPECULATORS_WEIGHTS[name]
    folder = save(tmp_path, speculators, model=broken(speculators_weights, mutate))
    assert_refused(folder, sentence)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(request: pytest.FixtureRequest, weights: dict, tmp_path: Path, name: str) -> None:
    form, mutate, sentence = VARIANTS[name]
    raw = broken(request.getfixturevalue(form), mutate)
    assert_refused(save(tmp_path, raw, model=weights), sentence)


def test_the_good_ones(
    zlab: dict, weights: dict, speculators: dict, speculators_weights: dict, tmp_path: Path
) -> None:
    """Without their mutation they are served."""
    assert serve(save(tmp_path / "z", zlab, model=weights)).speculative_num_draft_tokens == 16
    folder = save(tmp_path / "s", speculators, model=speculators_weights)
    assert serve(folder).speculative_num_draft_tokens == 16


def test_shards(zlab: dict, weights: dict, tmp_path: Path) -> None:
    """Files of an index; one that is missing is named, one that is not in it is left alone."""
    names = sorted(weights)
    halves = {"a": names[::2], "b": names[1::2]}
    for file, part in halves.items():
        save(tmp_path, None, **{file: {name: weights[name] for name in part}})
    save(tmp_path, zlab, consolidated=weights)
    weight_map = {name: f"{file}.safetensors" for file, part in halves.items() for name in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    serve(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    assert_refused(tmp_path, "misses b.safetensors")
    index.write_text("{}")
    assert_refused(tmp_path, "is not an index of safetensors files")


def test_no_weights(zlab: dict, tmp_path: Path) -> None:
    assert_refused(save(tmp_path, zlab), "has no *.safetensors file")


def test_weights_cut_short(zlab: dict, tmp_path: Path) -> None:
    save(tmp_path, zlab)
    whole = (DRAFTER / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:5000])
    assert_refused(tmp_path, "cannot be read")
