"""What a DFlash draft checkpoint says about itself, checked against its target.

The two formats and their weights are read in `formats/`.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_dflash.checkpoint.formats.config import DraftConfig
from sglang_dflash.checkpoint.formats.speculators import is_speculators, parse_speculators
from sglang_dflash.checkpoint.formats.variants import refuse_variants
from sglang_dflash.checkpoint.formats.weights import read_shapes, with_weights
from sglang_dflash.checkpoint.formats.zlab import is_zlab, parse_zlab
from sglang_dflash.errors import DFlashError

FLAG = "--speculative-draft-model-path"


def resolve(
    path: str, revision: str | None = None, flag: str = FLAG, what: str = "DFlash checkpoint"
) -> Path:
    """The local folder of a checkpoint given as a folder or as a Hugging Face repository id.

    Only JSON and safetensors are downloaded: no code.

    Args:
        flag: what the user gave it with, for the sentence.
        what: it should be.

    Raises:
        DFlashError: the folder does not exist and no hub has such a repository.
    """
    if os.path.isdir(path):
        return Path(path)
    if os.path.exists(path) or path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise DFlashError(
            f"{flag} {path} is not a folder: give the folder of a {what}, or its Hugging Face repository id."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(path, revision=revision, allow_patterns=["*.json", "*.safetensors"])
        )
    except Exception as error:
        raise DFlashError(
            f"{flag} {path} is neither a folder nor a repository that can be downloaded ({type(error).__name__}): "
            "check the name, or download it first."
        ) from error


def load_config(path: str, revision: str | None = None, flag: str = FLAG) -> DraftConfig:
    """Reads `config.json` of a draft checkpoint, and the names of its weights if it has any.

    Args:
        flag: what the user gave `path` with, for the sentence.

    Raises:
        DFlashError: not a DFlash checkpoint, or a field is missing or has a value that cannot be.
    """
    folder = resolve(path, revision, flag)
    config = parse_config(str(folder), read_json(folder, path), flag)
    if any(folder.glob("*.safetensors*")):
        config = with_weights(config, read_shapes(folder))
    return config


def read_json(folder: Path, path: str) -> dict[str, Any]:
    """Content of a checkpoint's config.json; `path` is what the user calls it."""
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
    return raw


def parse_config(path: str, raw: dict[str, Any], flag: str = FLAG) -> DraftConfig:
    """A `DraftConfig` from the content of a config.json in either format; raises `DFlashError`."""
    refuse_variants(path, raw)
    stored = raw.get("quantization_config")
    if stored:
        from sglang_dflash.checkpoint.dequantize import check_drafter

        check_drafter(stored, path)
    if is_speculators(raw):
        return replace(parse_speculators(path, raw), quantization=stored)
    if is_zlab(raw):
        return replace(parse_zlab(path, raw), quantization=stored)
    raise DFlashError(
        f"{path} is not a DFlash checkpoint (architectures {raw.get('architectures')}): its config.json has neither "
        f"dflash_config nor speculators_model_type; give a DFlash drafter as {flag}."
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
    path, depth = config.path, target.num_hidden_layers
    another = "give the drafter that was trained for this target"
    if config.num_target_layers is not None and config.num_target_layers != depth:
        raise DFlashError(
            f"num_target_layers {config.num_target_layers} of {path} does not fit a target of {depth} layers: "
            f"{another}."
        )
    outside = [i for i in config.target_layer_ids if not -1 <= i <= depth - 2]
    if outside:
        # After the last layer the target norms its hidden states; no drafter sees them without.
        raise DFlashError(
            f"{_layer_name(config, outside[0])}, but a target of {depth} layers can "
            f"be tapped after layers 0 to {depth - 2}: {another}."
        )
    if config.hidden_size == config.target_hidden_size != target.hidden_size:
        raise DFlashError(
            f"hidden_size {config.hidden_size} of {path} does not fit the target's hidden_size {target.hidden_size}: "
            f"{another}."
        )
    if config.target_hidden_size != target.hidden_size:
        raise DFlashError(
            f"target_hidden_size {config.target_hidden_size} of {path} does not fit the target's hidden_size "
            f"{target.hidden_size}: {another}."
        )
    if config.hidden_size != target.hidden_size and not (config.own_embedding and config.own_head):
        raise DFlashError(
            f"hidden_size {config.hidden_size} of {path} is not the target's {target.hidden_size}, so it cannot share "
            "the target's embedding and LM head, and it has no embed_tokens.weight and lm_head.weight of its own: "
            f"{another}."
        )
    if config.vocab_size != vocab_size:
        raise DFlashError(
            f"vocab_size {config.vocab_size} of {path} does not fit the target's vocab_size {vocab_size}: {another}."
        )
    if config.mask_token_id >= vocab_size:
        raise DFlashError(
            f"mask_token_id {config.mask_token_id} of {path} is not in the target's vocabulary of {vocab_size}: "
            f"{another}."
        )


def _layer_name(config: DraftConfig, layer: int) -> str:
    """A tapped layer in the words of the checkpoint's format."""
    if config.format == "speculators":
        return f"aux_hidden_state_layer_ids of {config.path} has {layer + 1}, the output of layer {layer}"
    return f"target_layer_ids of {config.path} has {layer}"
