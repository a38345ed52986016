"""Random LoRA adapters for a target, in PEFT's format, to be measured and tested with.

    python benchmark/adapters.py TARGET FOLDER [--count 8] [--rank 16]

writes FOLDER/adapter0 and on, and prints the server arguments that load them. What they change grows with --scale;
with 0 answers are the target's own, so that accept lengths are, too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ENDS = ("embed_tokens", "lm_head")


def write_adapter(
    folder: Path,
    seed: int,
    target: Path,
    rank: int = 8,
    scale: float = 0.05,
    modules: Collection[str] = (*ATTENTION, *MLP),
    **changes: Any,
) -> Path:
    """An adapter whose products have about `scale` as their size beside inputs of size 1.

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


def target_shapes(target: Path) -> dict[str, tuple[int, int]]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", type=Path, help="folder of the target, with its weights")
    parser.add_argument("folder", type=Path, help="where the adapters go")
    parser.add_argument("--count", type=int, default=8, help="%(default)s")
    parser.add_argument("--rank", type=int, default=16, help="%(default)s")
    parser.add_argument("--scale", type=float, default=0.0, help="%(default)s")
    options = parser.parse_args()
    made = [
        write_adapter(
            options.folder.resolve() / f"adapter{i}", i, options.target, options.rank, options.scale
        )
        for i in range(options.count)
    ]
    print("--lora-paths", *(f"{path.name}={path}" for path in made))


if __name__ == "__main__":
    main()
