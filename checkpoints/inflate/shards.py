"""A checkpoint in several safetensors files, of which only a few are in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from safetensors.torch import save_file
from tqdm import tqdm

from checkpoints.inflate.weights import Weights

WRITERS = 2  # files that are written while the next is made


def write_shards(folder: Path, shards: Iterable[Weights], count: int) -> None:
    """Writes `count` files and their index, in the layout of transformers."""
    weight_map: dict[str, str] = {}
    written: list[Future[None]] = []
    size = 0
    progress = tqdm(shards, total=count, desc=folder.name, unit="file", mininterval=5)
    with ThreadPoolExecutor(WRITERS) as pool:
        for number, weights in enumerate(progress, start=1):
            name = f"model-{number:05}-of-{count:05}.safetensors"
            weight_map |= dict.fromkeys(weights, name)
            size += sum(weight.nbytes for weight in weights.values())
            if number > WRITERS:
                written[number - 1 - WRITERS].result()
            written.append(pool.submit(_save, weights, folder / name))
        for future in written:
            future.result()
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def _save(weights: Weights, file: Path) -> None:
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)  # the library may write files that only their owner can read
