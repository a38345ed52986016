"""Writes and reads the pair: a standard Qwen3 checkpoint and a z-lab DFlash one, both bf16."""

import copy
import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from . import tokenizer as tokens
from .drafter import Drafter, DraftShape
from .modules import Shape
from .target import Target

Model = TypeVar("Model", bound=nn.Module)


def rounded(model: Model) -> Model:
    """A float32 copy, for inference, whose weights are those that bf16 files will hold."""
    return copy.deepcopy(model).bfloat16().float().requires_grad_(False).eval()


def qwen3_config(shape: Shape) -> dict[str, Any]:
    """The config.json fields that target and drafter share."""
    return {
        "model_type": "qwen3",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "hidden_act": "silu",
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        # transformers 5 reads rope_parameters alone, older loaders rope_theta alone.
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "layer_types": ["full_attention"] * shape.num_layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.num_layers,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": tokens.END_ID,
        "pad_token_id": tokens.PAD_ID,
        "dtype": "bfloat16",
    }


def save_target(target: Target, folder: Path) -> None:
    """Write the target's weights, config.json and generation_config.json."""
    config = {"architectures": ["Qwen3ForCausalLM"]} | qwen3_config(target.shape)
    generation = {"eos_token_id": tokens.END_ID, "pad_token_id": tokens.PAD_ID, "do_sample": False}
    _write(folder, target, config, prefix="model.")
    _write_json(folder / "generation_config.json", generation)


def save_drafter(drafter: Drafter, num_target_layers: int, folder: Path) -> None:
    """Write the drafter's weights and config.json."""
    shape = drafter.shape
    config = {"architectures": ["DFlashDraftModel"]} | qwen3_config(shape.layers)
    config["block_size"] = shape.block_size
    config["num_target_layers"] = num_target_layers
    config["dflash_config"] = {
        "mask_token_id": tokens.MASK_ID,
        "target_layer_ids": list(shape.target_layer_ids),
    }
    _write(folder, drafter, config, prefix="")


def load_target(folder: Path) -> tuple[Target, Tokenizer]:
    """A saved target on the CPU in float32, and its tokenizer."""
    target = Target(_shape(json.loads((folder / "config.json").read_text())))
    weights = load_file(folder / "model.safetensors")
    target.load_state_dict({name.removeprefix("model."): w for name, w in weights.items()})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return target.requires_grad_(False).eval(), tokenizer


def load_drafter(folder: Path) -> Drafter:
    """A saved drafter on the CPU in float32."""
    config = json.loads((folder / "config.json").read_text())
    layer_ids = tuple(config["dflash_config"]["target_layer_ids"])
    drafter = Drafter(DraftShape(_shape(config), config["block_size"], layer_ids))
    drafter.load_state_dict(load_file(folder / "model.safetensors"))
    return drafter.requires_grad_(False).eval()


def _shape(config: dict[str, Any]) -> Shape:
    return Shape(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
    )


def _write(folder: Path, model: nn.Module, config: dict[str, Any], prefix: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = model.state_dict().items()
    weights = {prefix + name: w.to("cpu", torch.bfloat16).contiguous() for name, w in state}
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    # save_file makes a file that only its owner can read; a server may run as someone else.
    path.chmod(0o644)
    _write_json(folder / "config.json", config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
