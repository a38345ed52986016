"""Reads the small pair: a dense Qwen3 or Llama target, and drafters in z-lab's format."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from checkpoints.inflate.sizes import Size
from sglang_dflash.checkpoint.formats.config import DraftConfig
from sglang_dflash.checkpoint.formats.fields import Fields
from sglang_dflash.checkpoint.formats.transformer import layer_windows, read_transformer
from sglang_dflash.checkpoint.formats.weights import (
    EMBEDDING,
    HEAD,
    canonical_name,
    compare_weights,
    expected_weights,
    read_shapes,
    weight_files,
)
from sglang_dflash.checkpoint.load import check_target, load_config
from sglang_dflash.errors import DFlashError

ARCHITECTURES = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}


@dataclass(frozen=True)
class Small:
    """A model of the small pair.

    Attributes:
        raw: its config.json.
        weights: by canonical name, bfloat16; a target has its LM head among them, tied or not.
        eps: of its norms.
        rope_theta: of its RoPE.
    """

    folder: Path
    raw: dict[str, Any]
    size: Size
    weights: dict[str, torch.Tensor]
    eps: float
    rope_theta: float


@dataclass(frozen=True)
class SmallDrafter(Small):
    """A drafter; `config` has its block, mask token and taps, and `noise` is that of its weights."""

    config: DraftConfig
    noise: float = 0.0

    @property
    def name(self) -> str:
        """Of its folder, and with noise of that, too."""
        name = self.folder.resolve().name
        return f"{name}-noise-{self.noise:g}" if self.noise else name

    def with_noise(self, noise: float, seed: int) -> SmallDrafter:
        """One that is right less often: each weight is multiplied by 1 + noise × a normal number; norms stay."""
        generator = torch.Generator().manual_seed(seed)
        weights = dict(self.weights)
        for name, weight in sorted(weights.items()) if noise else ():
            if weight.dim() > 1:
                factor = 1 + noise * torch.randn(weight.shape, generator=generator)
                weights[name] = (weight.float() * factor).to(weight.dtype)
        return replace(self, weights=weights, noise=noise)


def read_target(folder: Path) -> Small:
    """Raises `DFlashError` if the target is not there, or is none that can be inflated."""
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DFlashError(
            f"--target {folder} has no config.json that can be read ({type(error).__name__}): give the folder of a "
            "trained target, such as checkpoints/tiny/target."
        ) from error
    architecture = (raw.get("architectures") or [None])[0]
    if raw.get("model_type") != ARCHITECTURES.get(architecture, ""):
        raise DFlashError(
            f"--target {folder} is {architecture} with model_type {raw.get('model_type')}, and only "
            f"{' and '.join(ARCHITECTURES)} can be inflated: give a target of one of these."
        )
    fields = Fields(str(folder), raw)
    keywords, config = read_transformer(fields)
    # The weights of a target are those of a drafter with an embedding and a head that reads nothing.
    as_drafter = DraftConfig(
        path=str(folder),
        format="target",
        block_size=2,
        default_width=2,
        mask_token_id=0,
        target_layer_ids=(),
        num_target_layers=None,
        target_hidden_size=config.hidden_size,
        draft_vocab_size=config.vocab_size,
        layers=(),
        own_embedding=True,
        own_head=True,
        tied=bool(config.tie_word_embeddings),
        **keywords,
    )
    if any(window is not None for window in layer_windows(fields, config)):
        raise _cannot(folder, "has layers with a sliding window")
    expected = {
        name: shape
        for name, shape in expected_weights(as_drafter).items()
        if name not in ("fc.weight", "hidden_norm.weight")
    }
    _check_plain(as_drafter)
    weights = _weights(folder)
    if as_drafter.tied:
        weights.pop(HEAD, None)
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    if found != expected:
        wrong = sorted(name for name, _ in found.items() ^ expected.items())
        raise DFlashError(
            f"The weights of --target {folder} are not those of its config.json, for example {wrong[0]}: train it "
            "again, or copy all of its files."
        )
    weights.setdefault(HEAD, weights[EMBEDDING])
    return _small(folder, raw, as_drafter, weights)


def read_drafter(folder: Path, target: Small) -> SmallDrafter:
    """Raises `DFlashError` if the drafter is not there, cannot be inflated, or was trained for another target."""
    if not folder.is_dir():
        raise DFlashError(
            f"--drafter {folder} is not a folder: give that of a trained drafter, such as checkpoints/tiny/drafter."
        )
    config = load_config(str(folder), flag="--drafter")
    if config.format != "z-lab":
        raise _cannot(folder, f"is in {config.format} format", "give it in z-lab's")
    if config.own_embedding or config.own_head:
        raise _cannot(folder, "has an embedding or LM head of its own")
    if any(sight.window is not None for sight in config.layers):
        raise _cannot(folder, "has layers with a sliding window")
    compare_weights(config, read_shapes(folder))
    _check_plain(config)
    check_target(config, SimpleNamespace(**target.raw), target.size.vocab)
    raw = json.loads((folder / "config.json").read_text())
    small = _small(folder, raw, config, _weights(folder))
    return SmallDrafter(**vars(small), config=config)


def _check_plain(config: DraftConfig) -> None:
    """Raises `DFlashError` for what the mathematics of inflation does not cover."""
    folder = Path(config.path)
    if config.rope["rope_type"] != "default" or config.rope["partial_rotary_factor"] != 1:
        raise _cannot(
            folder, f"has RoPE of type {config.rope['rope_type']!r} or of a part of a head"
        )
    if config.attention_bias or config.mlp_bias:
        raise _cannot(folder, "has biases")


def _cannot(folder: Path, why: str, instead: str = "train one without") -> DFlashError:
    return DFlashError(f"{folder} {why}, which cannot be inflated: {instead}.")


def _small(folder: Path, raw: dict[str, Any], config: DraftConfig, weights: dict) -> Small:
    size = Size(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        experts=0,
        qk_norm=config.qk_norm,
    )
    return Small(folder, raw, size, weights, config.rms_norm_eps, config.rope["rope_theta"])


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        canonical_name(name): weight.bfloat16()
        for file in weight_files(folder)
        for name, weight in load_file(file).items()
    }
