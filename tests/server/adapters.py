"""Random LoRA adapters for the bundled target, in PEFT's format."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.server.harness import TARGET

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ENDS = ("embed_tokens", "lm_head")


def write_adapter(
    folder: Path,
    seed: int,
    rank: int = 8,
    scale: float = 0.05,
    modules: Collection[str] = (*ATTENTION, *MLP),
    target: Path = TARGET,
    **changes: Any,
) -> Path:
    """An adapter whose products have `scale` as their size beside inputs of size 1.

    Args:
        changes: of its adapter_config.json.
    """
    noise, weights = torch.Generator().manual_seed(seed), {}

    def random(rows: int, columns: int, size: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=noise) * size

    for name, (rows, columns) in sorted(target_shapes(target).items()):
        module = name.rpartition(".")[2]
        if module not in modules:
            continue
        names = [f"base_model.model.{name}.lora_{half}.weight" for half in "AB"]
        size = columns**-0.5
        if module == "embed_tokens":
            names = [f"base_model.model.{name}.lora_embedding_{half}" for half in "AB"]
            rows, columns, size = columns, rows, rank**-0.5
        weights |= {names[0]: random(rank, columns, size), names[1]: random(rows, rank, scale)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    config |= {"target_modules": sorted(modules)} | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def target_shapes(target: Path = TARGET) -> dict[str, tuple[int, int]]:
    """Rows and columns of every matrix of a target, its head also where it is the embedding."""
    shapes = {}
    for file in target.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                shape = tuple(tensors.get_slice(name).get_shape())
                if len(shape) == 2:
                    shapes[name.removesuffix(".weight")] = shape
    shapes.setdefault("lm_head", shapes["model.embed_tokens"])
    return shapes
