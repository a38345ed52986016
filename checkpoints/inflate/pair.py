"""Target and drafters of a large shape, written from a small pair."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmark.shapes import Shape, drafter_config, target_config
from checkpoints.inflate.shards import write_shards
from checkpoints.inflate.sizes import Places, Size, check_fit, place
from checkpoints.inflate.small import Small, SmallDrafter, read_drafter, read_target
from checkpoints.inflate.vocabulary import widen_tokenizer
from checkpoints.inflate.weights import Filler, Inflation, Weights
from sglang_dflash.checkpoint.formats.weights import EMBEDDING, HEAD
from sglang_dflash.errors import DFlashError

# What stands beside a target's weights and config: tokenizer, chat template, generation config.
COMPANIONS = (
    *("tokenizer*", "*.jinja", "generation_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.*", "merges.txt"),
)


def inflate(
    shape: Shape,
    name: str,
    target: Path,
    drafters: Sequence[Path],
    out: Path,
    seed: int = 0,
    noises: Sequence[float] = (0.0,),
) -> list[str]:
    """Writes `out`/target and a folder for each drafter, of the drafter's name.

    Args:
        name: of the shape, for sentences.
        target, drafters: folders of the small pair.
        noises: of weights; each drafter is written with each of them.

    Returns:
        Lines that say what was written.

    Raises:
        DFlashError: the pair cannot be read or does not fit the shape, or there is no room for it.
    """
    small = read_target(target)
    read = [read_drafter(folder, small) for folder in drafters]
    small_drafters = [each.with_noise(noise, seed) for each in read for noise in noises]
    large, large_draft = target_config(shape), drafter_config(shape)
    if small.raw["model_type"] != large["model_type"].removesuffix("_moe"):
        raise DFlashError(
            f"--shape {name} is {large['architectures'][0]}, and --target {target} is {small.raw['architectures'][0]}, "
            "which norms other parts of attention: choose a shape of its kind."
        )
    taps = large_draft["dflash_config"]["target_layer_ids"]
    size = Size.of(large, small.size.qk_norm)
    draft_sizes = [Size.of(large_draft, each.size.qk_norm) for each in small_drafters]
    check_fit(f"--target {target}", small.size, name, size)
    for each, draft_size in zip(small_drafters, draft_sizes, strict=True):
        check_fit(f"--drafter {each.folder}", each.size, name, draft_size)
    tapped = {layer for each in small_drafters for layer in each.config.target_layer_ids}
    places = place(small.size.layers, tapped, size.layers, taps, name)
    _check_room(out, size.parameters() + sum(s.parameters(len(taps)) for s in draft_sizes))
    folders = _folders(out, small_drafters)

    fill = Filler(seed)
    inflation = Inflation(small.size, size, fill)
    lines = [_line(folders[0], inflation)]
    shards = _target_shards(small, inflation, places)
    _write(folders[0], large | _own_fields(small, inflation), shards, size.layers + 2)
    for file in sorted({file for pattern in COMPANIONS for file in target.glob(pattern)}):
        shutil.copyfile(file, folders[0] / file.name)
    if (tokenizer := folders[0] / "tokenizer.json").exists():
        widen_tokenizer(tokenizer, small.size.vocab, size.vocab, seed)
    for each, draft_size, folder in zip(small_drafters, draft_sizes, folders[1:], strict=True):
        inflation = Inflation(each.size, draft_size, fill)
        config = large_draft | _own_fields(each, inflation) | _draft_fields(each, taps)
        shards = _drafter_shards(each, inflation, places, taps)
        _write(folder, config, shards, draft_size.layers + 1)
        lines.append(_line(folder, inflation))
    return lines


def _target_shards(small: Small, inflation: Inflation, places: Places) -> Iterator[Weights]:
    """One file for a layer, one for the embedding, one for the LM head."""
    yield {f"model.{EMBEDDING}": inflation.embedding(small.weights[EMBEDDING])}
    numbers = {at: number for number, at in enumerate(places.layers)}
    for at in range(inflation.large.layers):
        layer = inflation.layer(_layer(small, numbers.get(at)))
        yield {f"model.layers.{at}.{name}": weight for name, weight in layer.items()}
    yield {
        "model.norm.weight": inflation.final_norm(small.weights["norm.weight"]),
        HEAD: inflation.head(small.weights[HEAD]),
    }


def _drafter_shards(
    small: SmallDrafter, inflation: Inflation, places: Places, taps: Sequence[int]
) -> Iterator[Weights]:
    """One file for a layer, one for the rest."""
    weights = small.weights
    read = [places.taps[layer] for layer in small.config.target_layer_ids]
    yield {
        "fc.weight": inflation.taps(weights["fc.weight"], read, taps),
        "hidden_norm.weight": inflation.inner_norm(weights["hidden_norm.weight"]),
        "norm.weight": inflation.final_norm(weights["norm.weight"]),
    }
    for at in range(inflation.large.layers):
        layer = inflation.layer(_layer(small, at if at < small.size.layers else None))
        yield {f"layers.{at}.{name}": weight for name, weight in layer.items()}


def _layer(small: Small, number: int | None) -> Weights | None:
    if number is None:
        return None
    prefix = f"layers.{number}."
    return {
        name.removeprefix(prefix): weight
        for name, weight in small.weights.items()
        if name.startswith(prefix)
    }


def _own_fields(small: Small, inflation: Inflation) -> dict[str, Any]:
    """Fields of config.json that are the small model's."""
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {
        "rms_norm_eps": small.eps * inflation.norm**2,
        "rope_theta": small.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": small.rope_theta},
        "max_position_embeddings": small.raw["max_position_embeddings"],
        "tie_word_embeddings": False,
        **{name: small.raw.get(name) for name in tokens},
    }


def _draft_fields(small: SmallDrafter, taps: Sequence[int]) -> dict[str, Any]:
    """Fields that say how the small drafter was trained, and what the large one reads."""
    own = {name: small.raw[name] for name in ("model_type", "is_causal") if name in small.raw}
    dflash = {
        **small.raw.get("dflash_config", {}),
        "mask_token_id": small.config.mask_token_id,
        "target_layer_ids": list(taps),
    }
    dflash.pop("block_size", None)
    return own | {"block_size": small.config.block_size, "dflash_config": dflash}


def _folders(out: Path, drafters: Sequence[SmallDrafter]) -> list[Path]:
    """Folders of target and drafters, made."""
    names = ["target", *(each.name for each in drafters)]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise DFlashError(
            f"Two folders in --out would have the name {twice[0]}: rename one of the small drafters' folders."
        )
    folders = [out / name for name in names]
    there = [folder for folder in folders if folder.exists()]
    if there:
        raise DFlashError(
            f"{there[0]} is there already: remove it, or choose another folder as --out."
        )
    try:
        for folder in folders:
            folder.mkdir(parents=True)
    except OSError as error:
        raise DFlashError(
            f"--out {out} cannot be made ({error.strerror}): choose another folder."
        ) from error
    return folders


def _check_room(out: Path, parameters: int) -> None:
    there = next(folder for folder in (out, *out.resolve().parents) if folder.exists())
    needed, free = 2 * parameters, shutil.disk_usage(there).free
    if needed > free:
        raise DFlashError(
            f"--out {out} has {free / 1e9:.1f} GB free, and the pair takes {needed / 1e9:.1f} GB: choose another disk "
            "or a smaller shape."
        )


def _write(folder: Path, config: dict[str, Any], shards: Iterator[Weights], count: int) -> None:
    """The config comes last: a folder without one is not finished."""
    write_shards(folder, shards, count)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _line(folder: Path, inflation: Inflation) -> str:
    how = "no weight rounded" if inflation.exact else "some weights rounded to bfloat16"
    size = inflation.large
    return f"{folder}: {size.layers} layers of width {size.hidden}, {how}"
