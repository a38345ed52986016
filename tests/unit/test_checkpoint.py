"""What the fields of a config.json mean in both formats, and whether a drafter fits a target."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sglang_dflash.checkpoint.formats.config import DraftConfig, Sight
from sglang_dflash.checkpoint.formats.weights import (
    check_weights,
    draft_token_ids,
    expected_weights,
)
from sglang_dflash.checkpoint.formats.zlab import default_layer_ids
from sglang_dflash.checkpoint.load import check_target, load_config, parse_config
from sglang_dflash.errors import DFlashError
from tests.unit.drafters import (
    random_weights,
    reduced_vocabulary,
    save,
    speculators_config,
    zlab_config,
)

DRAFTER = Path(__file__).parents[2] / "checkpoints" / "tiny" / "drafter"
TARGET = SimpleNamespace(num_hidden_layers=4, hidden_size=256)
VOCABULARY = 768
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.fixture(scope="module")
def good() -> dict[str, Any]:
    return json.loads((DRAFTER / "config.json").read_text())


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return load_file(DRAFTER / "model.safetensors")


def assert_one_sentence(error: DFlashError) -> None:
    """A sentence: what is wrong, then what to do; on one line."""
    text = str(error)
    assert "\n" not in text and text.endswith("."), text
    assert re.search(r"[:;] \w", text), f"says not what to do: {text}"


def test_zlab(good: dict[str, Any]) -> None:
    config = parse_config("x", good)
    assert config == DraftConfig(
        path="x",
        format="z-lab",
        block_size=16,
        default_width=16,
        mask_token_id=3,
        target_layer_ids=(0, 1, 2),
        num_target_layers=4,
        target_hidden_size=256,
        vocab_size=768,
        draft_vocab_size=768,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=768,
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        layers=(Sight(), Sight()),
        rope={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        tied=True,
    )
    check_target(config, TARGET, VOCABULARY)


def test_speculators(good: dict[str, Any]) -> None:
    """The same drafter in the other format; layers are counted from the embedding."""
    raw = speculators_config(good, "someone/target")
    assert raw["aux_hidden_state_layer_ids"] == [1, 2, 3]
    config = parse_config("x", raw)
    expected = replace(
        parse_config("x", good),
        format="speculators",
        num_target_layers=None,
        tied=False,
        verifier="someone/target",
    )
    assert config == expected
    check_target(config, TARGET, VOCABULARY)


def test_a_diff_has_the_defaults_of_its_type(good: dict[str, Any]) -> None:
    raw = speculators_config(good, "t", transformer_layer_config={"model_type": "qwen3"})
    config = parse_config("x", raw | {"draft_vocab_size": 1000})
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (4096, 32, 128)
    assert (config.vocab_size, config.draft_vocab_size) == (151936, 1000)
    raw["transformer_layer_config"] = {}  # Qwen3, if no type is named
    assert parse_config("x", raw | {"draft_vocab_size": 1000}) == config
    raw["transformer_layer_config"] = {"model_type": "llama", "hidden_size": 2048}
    config = parse_config("x", raw)
    assert (config.intermediate_size, config.head_dim, config.qk_norm) == (11008, 64, False)


def test_embedding_as_a_layer(good: dict[str, Any]) -> None:
    raw = speculators_config(good, "t", aux_hidden_state_layer_ids=[3, 0])
    config = parse_config("x", raw)
    assert (config.target_layer_ids, config.taps) == ((2, -1), (-1, 2))
    check_target(config, TARGET, VOCABULARY)


@pytest.mark.parametrize(
    ("drafts", "width"), [(15, 16), (7, 8), (16, 16), (99, 16), (1, 2), (None, 16)]
)
def test_default_width(good: dict[str, Any], drafts: int | None, width: int) -> None:
    """As many drafts as the first proposal method asks for; older files count the bonus token."""
    raw = speculators_config(good, "t")
    raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = drafts
    config = parse_config("x", raw)
    assert (config.block_size, config.default_width) == (16, width)


def test_block_size_inside_dflash_config(good: dict[str, Any]) -> None:
    raw = {key: value for key, value in good.items() if key != "block_size"}
    raw["dflash_config"] = raw["dflash_config"] | {"block_size": 8}
    assert parse_config("x", raw).block_size == 8


def test_defaults(good: dict[str, Any]) -> None:
    names = ("num_target_layers", "num_key_value_heads", "head_dim", "layer_types", "hidden_act")
    raw = {key: value for key, value in good.items() if key not in names}
    config = parse_config("x", raw | {"model_type": "llama"})
    assert (config.num_target_layers, config.num_key_value_heads, config.head_dim) == (None, 8, 32)


@pytest.mark.parametrize(
    ("depth", "layers", "expected"),
    [(36, 1, (18,)), (36, 5, (1, 9, 17, 25, 33)), (28, 3, (1, 13, 25)), (5, 2, (1, 2))],
)
def test_default_layers(depth: int, layers: int, expected: tuple[int, ...]) -> None:
    assert default_layer_ids(depth, layers) == expected


WINDOW = {"use_sliding_window": True, "sliding_window": 64, "layer_types": [SLIDING, FULL]}


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (Sight(), Sight())),
        (WINDOW, (Sight(causal=True, window=64), Sight())),
        (WINDOW | {"is_causal": False}, (Sight(window=64), Sight())),
        (WINDOW | {"is_causal": True}, (Sight(True, 64), Sight(True))),
        (WINDOW | {"use_sliding_window": False}, (Sight(causal=True), Sight())),
        (
            {
                "layer_types": None,
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
            },
            (Sight(), Sight(True, 8)),
        ),
    ],
)
def test_zlab_layers(
    good: dict[str, Any], changes: dict[str, Any], layers: tuple[Sight, ...]
) -> None:
    assert parse_config("x", good | changes).layers == layers


@pytest.mark.parametrize("name", ["causal", "is_causal"])
@pytest.mark.parametrize("value", [True, False])
def test_causal_switch_inside_dflash_config(good: dict[str, Any], name: str, value: bool) -> None:
    raw = good | WINDOW | {"dflash_config": good["dflash_config"] | {name: value}}
    layers = parse_config("x", raw).layers
    assert layers == (Sight(value, 64), Sight(value))
    assert parse_config("x", raw | {"is_causal": value}).layers == layers


@pytest.mark.parametrize(("both_ways", "causal"), [(False, True), (True, False), (None, True)])
def test_speculators_layers(good: dict[str, Any], both_ways: bool | None, causal: bool) -> None:
    """The switch is about sliding layers only."""
    raw = speculators_config(good | WINDOW, "t", sliding_window_non_causal=both_ways)
    assert parse_config("x", raw).layers == (Sight(causal, 64, from_block=True), Sight())


ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_parameters": None}, ROPE),
        ({"rope_parameters": None, "rope_theta": 5e5}, ROPE | {"rope_theta": 5e5}),
        ({"rope_theta": 1.0}, ROPE),  # rope_parameters win
        (
            {"rope_parameters": None, "rope_scaling": {"type": "yarn"} | YARN},
            ROPE | {"rope_type": "yarn"} | YARN,
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6} | YARN},
            ROPE | {"rope_type": "yarn", "rope_theta": 1e6} | YARN,
        ),
        (
            {"rope_parameters": None, "partial_rotary_factor": 0.5},
            ROPE | {"partial_rotary_factor": 0.5},
        ),
    ],
)
def test_rope(good: dict[str, Any], changes: dict[str, Any], rope: dict[str, Any]) -> None:
    assert parse_config("x", good | changes).rope == rope
    assert parse_config("x", speculators_config(good | changes, "t")).rope == rope


MISFITS = {
    "depth": ({"num_target_layers": 5}, "num_target_layers 5 of x does not fit a target of 4"),
    "layer beyond": ({"target_layer_ids": (0, 4)}, "target_layer_ids of x has 4"),
    "last layer": ({"target_layer_ids": (0, 3)}, "layers 0 to 2"),
    "width": ({"hidden_size": 128, "target_hidden_size": 128}, "hidden_size 128 of x"),
    "own width": ({"hidden_size": 128}, "has no embed_tokens.weight and lm_head.weight"),
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
        ("{}", "has neither dflash_config nor speculators_model_type"),
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


def test_prefix_and_shards(good: dict[str, Any], weights: dict, tmp_path: Path) -> None:
    """In two files, one with the prefix that some writers add."""
    names = sorted(weights)
    half = {f"model.{name}": weights[name] for name in names[::2]}
    save(tmp_path, good, a=half, b={name: weights[name] for name in names[1::2]})
    check_weights(load_config(str(tmp_path)))


def owns(folder: Path) -> tuple[bool, bool, bool]:
    """Whether embedding and head are the checkpoint's own, and tied."""
    config = load_config(str(folder))
    check_weights(config)
    return config.own_embedding, config.own_head, config.tied


def test_own_embedding_and_head(good: dict[str, Any], weights: dict, tmp_path: Path) -> None:
    matrix = torch.zeros(VOCABULARY, 256)
    both = {"embed_tokens.weight": matrix, "lm_head.weight": matrix.clone()}
    untied = good | {"tie_word_embeddings": False}
    assert owns(save(tmp_path / "a", good, model=weights)) == (False, False, False)
    assert owns(save(tmp_path / "b", good, model=weights | both)) == (True, True, False)
    del both["lm_head.weight"]
    assert owns(save(tmp_path / "c", good, model=weights | both)) == (True, True, True)
    assert owns(save(tmp_path / "d", untied, model=weights | both)) == (True, False, False)


def test_copies_of_the_verifier(good: dict[str, Any], weights: dict, tmp_path: Path) -> None:
    """Older speculators files hold them; they are neither missed nor used."""
    matrix, norm = torch.zeros(VOCABULARY, 256), torch.zeros(256)
    copies = {
        "embed_tokens.weight": matrix,
        "lm_head.weight": matrix.clone(),
        "verifier_lm_head.weight": matrix.clone(),
        "verifier_norm.weight": norm,
    }
    raw = speculators_config(good, "t")
    assert owns(save(tmp_path, raw, model=weights | copies)) == (False, False, False)
    raw["draft_vocab_size"] = 10
    reduced = reduced_vocabulary(matrix, torch.arange(10))
    assert owns(save(tmp_path, raw, model=weights | copies | reduced)) == (False, True, False)


def test_another_width(tmp_path: Path) -> None:
    """A drafter narrower than its target has embedding and head of its own."""
    raw = zlab_config(target_hidden_size=160)
    config = parse_config("x", raw)
    with pytest.raises(DFlashError, match="has no embed_tokens.weight and lm_head.weight"):
        check_target(config, SimpleNamespace(num_hidden_layers=6, hidden_size=160), 320)
    for form, own in (("z", raw), ("s", speculators_config(raw, "t", target_hidden_size=160))):
        config = replace(parse_config("x", own), own_embedding=True, own_head=True, tied=False)
        folder = save(tmp_path / form, own, model=random_weights(expected_weights(config)))
        assert owns(folder) == (True, True, False)
        config = load_config(str(folder))
        check_target(config, SimpleNamespace(num_hidden_layers=6, hidden_size=160), 320)
        assert expected_weights(config)["fc.weight"] == (96, 3 * 160)


def test_llama_layers(good: dict[str, Any], weights: dict, tmp_path: Path) -> None:
    """With norms of Q and K if the weights are there, without if not."""
    llama = good | {"model_type": "llama"}
    save(tmp_path, llama, model=weights)
    assert load_config(str(tmp_path)).qk_norm
    check_weights(load_config(str(tmp_path)))
    plain = {name: weight for name, weight in weights.items() if "_norm.weight" not in name}
    plain |= {"hidden_norm.weight": weights["hidden_norm.weight"]}
    save(tmp_path, llama, model=plain)
    assert not load_config(str(tmp_path)).qk_norm
    check_weights(load_config(str(tmp_path)))
    save(tmp_path, good, model=plain)
    with pytest.raises(DFlashError, match=r"misses layers\.0\.self_attn\.k_norm\.weight"):
        check_weights(load_config(str(tmp_path)))


def test_reduced_vocabulary(good: dict[str, Any], weights: dict, tmp_path: Path) -> None:
    """d2t holds offsets; t2d alone will do."""
    ids = torch.tensor([2, 3, 11, 500, 767])
    raw = speculators_config(good, "t", draft_vocab_size=5)
    reduced = reduced_vocabulary(torch.zeros(VOCABULARY, 256), ids)
    for name in ("none", "t2d", "d2t"):
        mapping = {key: value for key, value in reduced.items() if key != name}
        config = load_config(str(save(tmp_path / name, raw, model=weights | mapping)))
        check_weights(config)
        assert config.own_head and torch.equal(draft_token_ids(config), ids)


def test_code_of_a_checkpoint_is_not_run(
    good: dict[str, Any], weights: dict, tmp_path: Path
) -> None:
    """`auto_map` is not even read."""
    raw = good | {"auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}}
    save(tmp_path, raw, model=weights)
    (tmp_path / "evil.py").write_text("raise SystemExit('code of the checkpoint ran')")
    assert load_config(str(tmp_path)) == replace(load_config(str(DRAFTER)), path=str(tmp_path))
