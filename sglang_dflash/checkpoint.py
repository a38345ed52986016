"""What a DFlash draft checkpoint says about itself, checked against its target.

Reads the format of z-lab's published checkpoints: a Qwen3-like `config.json` with `block_size`
and `dflash_config`, and safetensors that hold no embedding and no LM head.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dflash.errors import DFlashError

ARCHITECTURE = "DFlashDraftModel"


@dataclass(frozen=True)
class DraftConfig:
    """A draft model, in the terms that the rest of the package uses.

    Attributes:
        block_size: tokens in a block, the bonus token (slot 0) included.
        mask_token_id: token id that fills slots 1..block_size-1.
        target_layer_ids: 0-based target layers whose outputs are tapped, ascending.
        num_target_layers: depth of the target that it was trained for, or None if not said.
        target_hidden_size: width of one tapped hidden state.
        hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim,
        intermediate_size: shape of the draft model.
    """

    path: str
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    target_hidden_size: int
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int

    def kv_heads_per_rank(self, tp_size: int) -> int:
        """KV heads on one rank; fewer heads than ranks are replicated."""
        return max(1, self.num_key_value_heads // tp_size)


def resolve(path: str, revision: str | None = None) -> Path:
    """The local folder of a checkpoint given as a folder or as a Hugging Face repository id.

    Raises:
        DFlashError: the folder does not exist and no hub has such a repository.
    """
    if os.path.isdir(path):
        return Path(path)
    if os.path.exists(path) or path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise DFlashError(
            f"--speculative-draft-model-path {path} is not a folder: give the folder of a DFlash "
            "checkpoint, or its Hugging Face repository id."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(path, revision=revision, allow_patterns=["*.json", "*.safetensors"])
        )
    except Exception as error:
        raise DFlashError(
            f"--speculative-draft-model-path {path} is neither a folder nor a repository that can be "
            f"downloaded ({type(error).__name__}): check the name, or download it first."
        ) from error


def load_config(path: str, revision: str | None = None) -> DraftConfig:
    """Reads `config.json` of a draft checkpoint.

    Raises:
        DFlashError: not a DFlash checkpoint, or a field is missing or has a value that cannot be.
    """
    folder = resolve(path, revision)
    file = folder / "config.json"
    if not file.is_file():
        raise DFlashError(
            f"{path} has no config.json, so it is not a DFlash checkpoint: give the folder that holds "
            "the draft model's config.json and model.safetensors."
        )
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise DFlashError(
            f"{file} is not valid JSON ({error}): download the checkpoint again."
        ) from error
    if not isinstance(raw, dict):
        raise DFlashError(f"{file} is not a JSON object: download the checkpoint again.")
    return parse_config(str(folder), raw)


def parse_config(path: str, raw: dict[str, Any]) -> DraftConfig:
    """A `DraftConfig` from the content of a z-lab `config.json`; raises `DFlashError`."""
    dflash = raw.get("dflash_config")
    if not isinstance(dflash, dict):
        raise DFlashError(
            f"{path} is not a DFlash checkpoint (architectures {raw.get('architectures')}): its config.json "
            "has no dflash_config; give a DFlash drafter as --speculative-draft-model-path."
        )
    fields = _Fields(path, raw)
    hidden_size = fields.integer("hidden_size", minimum=1)
    heads = fields.integer("num_attention_heads", minimum=1)
    config = DraftConfig(
        path=path,
        block_size=_block_size(path, raw, dflash),
        mask_token_id=_Fields(path, dflash, "dflash_config.").integer("mask_token_id", minimum=0),
        target_layer_ids=_layer_ids(path, dflash.get("target_layer_ids")),
        num_target_layers=fields.integer("num_target_layers", minimum=1, default=None),
        target_hidden_size=fields.integer("target_hidden_size", minimum=1, default=hidden_size),
        vocab_size=fields.integer("vocab_size", minimum=1),
        hidden_size=hidden_size,
        num_hidden_layers=fields.integer("num_hidden_layers", minimum=1),
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("num_key_value_heads", minimum=1, default=heads),
        head_dim=fields.integer("head_dim", minimum=1, default=hidden_size // heads),
        intermediate_size=fields.integer("intermediate_size", minimum=1),
    )
    if config.num_attention_heads % config.num_key_value_heads:
        raise DFlashError(
            f"num_attention_heads {heads} of {path} is not a multiple of num_key_value_heads "
            f"{config.num_key_value_heads}: the checkpoint is damaged; download it again."
        )
    if config.head_dim % 2:
        raise DFlashError(
            f"head_dim {config.head_dim} of {path} is odd, and rotary embedding pairs its dimensions: "
            "the checkpoint is damaged; download it again."
        )
    fields.integer("max_position_embeddings", minimum=1, default=None)
    _refuse_unsupported(path, raw)
    return config


def _block_size(path: str, raw: dict[str, Any], dflash: dict[str, Any]) -> int:
    """It stands beside `dflash_config` in the first published checkpoints, inside it in later ones."""
    if raw.get("block_size") is None and dflash.get("block_size") is not None:
        return _Fields(path, dflash, "dflash_config.").integer("block_size", minimum=2)
    return _Fields(path, raw).integer("block_size", minimum=2)


def _refuse_unsupported(path: str, raw: dict[str, Any]) -> None:
    """Variants that would fail to load, or load and then draft nonsense."""
    for field, supported in (("model_type", "qwen3"), ("hidden_act", "silu")):
        if raw.get(field, supported if field == "hidden_act" else None) != supported:
            raise DFlashError(
                f"{field} of {path} is {raw.get(field)!r}, and only {supported!r} is supported: use a drafter in the "
                "format of z-lab's published checkpoints."
            )
    eps = raw.get("rms_norm_eps", 1e-6)
    if type(eps) not in (int, float) or not 0 < eps < 1:
        raise DFlashError(
            f"rms_norm_eps of {path} is {eps!r}, not a number between 0 and 1: the checkpoint is damaged; "
            "download it again."
        )
    layer_types = raw.get("layer_types")
    if layer_types is not None and (
        not isinstance(layer_types, list) or len(layer_types) != raw["num_hidden_layers"]
    ):
        raise DFlashError(
            f"layer_types of {path} is not a list of one type for each of its {raw['num_hidden_layers']} layers: "
            "the checkpoint is damaged; download it again."
        )
    if layer_types is None and raw.get("use_sliding_window"):
        raise DFlashError(
            f"use_sliding_window of {path} is true without layer_types that say where: use a drafter without sliding "
            "windows."
        )
    sliding = [kind for kind in layer_types or [] if kind != "full_attention"]
    if sliding:
        raise DFlashError(
            f"layer_types of {path} has {sliding[0]!r}, and only 'full_attention' is supported: "
            "use a drafter without sliding windows."
        )
    if raw.get("quantization_config"):
        raise DFlashError(
            f"quantization_config of {path} is set, and a quantized drafter is not supported: use the "
            "unquantized checkpoint."
        )


def check_target(config: DraftConfig, target: Any, vocab_size: int) -> None:
    """Whether a drafter fits a target.

    Args:
        config: the drafter.
        target: the target's Hugging Face text config.
        vocab_size: rows of the target's embedding.

    Raises:
        DFlashError: names the first field that does not fit.
    """
    depth = target.num_hidden_layers
    if config.num_target_layers is not None and config.num_target_layers != depth:
        raise DFlashError(
            f"num_target_layers {config.num_target_layers} of {config.path} does not fit a target of {depth} "
            "layers: give the drafter that was trained for this target."
        )
    if config.target_layer_ids[-1] > depth - 2:
        raise DFlashError(
            f"dflash_config.target_layer_ids of {config.path} has {config.target_layer_ids[-1]}, but a target of "
            f"{depth} layers can be tapped after layers 0 to {depth - 2}: give the drafter of this target."
        )
    if config.hidden_size != target.hidden_size:
        # It runs on the target's embedding and ends in the target's LM head.
        raise DFlashError(
            f"hidden_size {config.hidden_size} of {config.path} does not fit the target's hidden_size "
            f"{target.hidden_size}: give the drafter that was trained for this target."
        )
    if config.target_hidden_size != target.hidden_size:
        raise DFlashError(
            f"target_hidden_size {config.target_hidden_size} of {config.path} does not fit the target's hidden_size "
            f"{target.hidden_size}: give the drafter that was trained for this target."
        )
    if config.vocab_size != vocab_size:
        raise DFlashError(
            f"vocab_size {config.vocab_size} of {config.path} does not fit the target's vocab_size {vocab_size}: "
            "give the drafter that was trained for this target."
        )
    if config.mask_token_id >= vocab_size:
        raise DFlashError(
            f"dflash_config.mask_token_id {config.mask_token_id} of {config.path} is not in the target's "
            f"vocabulary of {vocab_size}: give the drafter that was trained for this target."
        )


def expected_weights(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a z-lab checkpoint."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_attention_heads * dim, config.num_key_value_heads * dim
    layer = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    taps = len(config.target_layer_ids) * config.target_hidden_size
    shapes = {
        "fc.weight": (hidden, taps),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config.num_hidden_layers):
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def canonical_name(name: str) -> str:
    """A weight's name without the `model.` that some writers put in front."""
    return name.removeprefix("model.")


def check_weights(config: DraftConfig) -> None:
    """Compares the names and shapes in the safetensors headers with what the config needs.

    Raises:
        DFlashError: lists what is missing, left over or of another shape.
    """
    from safetensors import safe_open

    files = sorted(Path(config.path).glob("*.safetensors"))
    if not files:
        raise DFlashError(
            f"{config.path} has no *.safetensors file: download the checkpoint again."
        )
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes = {
                    name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()
                }
        except Exception as error:
            raise DFlashError(
                f"{file} cannot be read ({error}): download the checkpoint again."
            ) from error
        for name, shape in shapes.items():
            if canonical_name(name) in found:
                raise DFlashError(
                    f"{config.path} has {canonical_name(name)} twice, the second time in {file.name}: remove the files "
                    "that do not belong to it, or download it again."
                )
            found[canonical_name(name)] = shape
    compare_weights(config, found)


def compare_weights(config: DraftConfig, found: dict[str, tuple[int, ...]]) -> None:
    """Raises `DFlashError` unless `found` (name to shape) is just what `config` needs."""
    expected = expected_weights(config)
    missing, unexpected = expected.keys() - found.keys(), found.keys() - expected.keys()
    if missing or unexpected:
        parts = [f"misses {_some(missing)}"] if missing else []
        parts += [f"has left over {_some(unexpected)}"] if unexpected else []
        raise DFlashError(
            f"{config.path} {' and '.join(parts)}: its weights are not those of its config.json; download it again."
        )
    for name in sorted(expected):
        if found[name] != expected[name]:
            raise DFlashError(
                f"{name} of {config.path} has shape {list(found[name])} where its config.json says "
                f"{list(expected[name])}: download it again."
            )


def _some(names: Iterable[str], limit: int = 4) -> str:
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _layer_ids(path: str, value: Any) -> tuple[int, ...]:
    good = isinstance(value, list) and value and all(type(i) is int and i >= 0 for i in value)
    if not good or sorted(set(value)) != value:
        raise DFlashError(
            f"dflash_config.target_layer_ids of {path} is {value}, not an ascending list of layer numbers: "
            "the checkpoint is damaged; download it again."
        )
    return tuple(value)


_REQUIRED = object()


class _Fields:
    """Typed reads from one JSON object."""

    def __init__(self, path: str, raw: dict[str, Any], prefix: str = ""):
        self.path, self.raw, self.prefix = path, raw, prefix

    def integer(self, name: str, *, minimum: int, default: Any = _REQUIRED) -> Any:
        value = self.raw.get(name)
        if value is None:
            if default is _REQUIRED:
                raise DFlashError(
                    f"config.json of {self.path} has no {self.prefix}{name}: it is not a complete DFlash checkpoint; "
                    "download it again."
                )
            return default
        if type(value) is not int or value < minimum:
            raise DFlashError(
                f"{self.prefix}{name} of {self.path} is {value!r}, not a whole number from {minimum}: "
                "the checkpoint is damaged; download it again."
            )
        return value
