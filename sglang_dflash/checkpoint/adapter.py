"""What a LoRA adapter says about itself, checked against its target before anything of it is used.

The release compares nothing: an adapter of another size ends its scheduler when a request first asks for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dflash.checkpoint.formats.weights import Shapes
from sglang_dflash.checkpoint.load import resolve
from sglang_dflash.errors import DFlashError

# Modules that the release adapts, in a checkpoint's words.
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "qkv_proj"), ("gate_proj", "up_proj")
MODULES = (*ATTENTION, "o_proj", *MLP, "gate_up_proj", "down_proj", "embed_tokens", "lm_head")
_ALL = ("all", "all-linear")
# Fields that would change what an adapter computes, and that the release does not read.
_UNREAD = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save")
_UNREAD += ("fan_in_fan_out", "layer_replication")
_LAYER, _HALF = re.compile(r"layers\.(\d+)\."), re.compile(r"(\w+)\.lora_(?:embedding_)?([AB])\b")


@dataclass(frozen=True)
class Adapter:
    """
    Attributes:
        label: how it is called in a sentence.
        config: content of its adapter_config.json.
        shapes: of its weights, by name.
    """

    label: str
    config: Mapping[str, Any]
    shapes: Shapes


def read_adapter(name: str, path: str) -> Adapter:
    """Reads the config and the shapes of an adapter in a folder or a Hugging Face repository.

    Raises:
        DFlashError: it is none, or cannot be read.
    """
    folder = resolve(path, flag=f"LoRA adapter {name}", what="LoRA adapter in PEFT's format")
    file, label = folder / "adapter_config.json", f"LoRA adapter {name} ({path})"
    try:
        config = json.loads(file.read_text())
        if not isinstance(config, dict):
            raise ValueError("not an object")
        return Adapter(label, config, _shapes(folder))
    except (OSError, ValueError) as error:
        raise DFlashError(
            f"{label} cannot be read ({error}): give a folder with adapter_config.json and "
            "adapter_model.safetensors, as PEFT writes them."
        ) from error


def _shapes(folder: Path) -> Shapes:
    from safetensors import SafetensorError, safe_open

    found: Shapes = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError("it has no *.safetensors file")
    for each in files:
        try:
            with safe_open(each, framework="pt") as tensors:
                for name in tensors.keys():
                    found[name] = tuple(tensors.get_slice(name).get_shape())
        except SafetensorError as error:
            raise ValueError(f"{each.name}: {error}") from error
    return found


def check_adapter(adapter: Adapter, target: Any, path: str) -> None:
    """Whether an adapter fits a target, and whether the release applies all of it.

    Args:
        target: the target's Hugging Face text config.
        path: of the target, for the sentence.

    Raises:
        DFlashError: names the first thing that does not fit.
    """
    label, config = adapter.label, adapter.config
    rank = _rank(label, config)
    for field in _UNREAD:
        if value := config.get(field):
            raise DFlashError(
                f"{label} has {field} {value!r}, which SGLang's LoRA does not apply: train it without."
            )
    wanted = config.get("target_modules") or "nothing"
    wanted = wanted if isinstance(wanted, list) else [wanted]
    unknown = [] if wanted[0] in _ALL else [m for m in wanted if _last(str(m)) not in MODULES]
    if unknown:
        raise DFlashError(
            f"{label} adapts {unknown[0]}, which SGLang's LoRA does not know: give an adapter of some of "
            f"{', '.join(MODULES)}."
        )
    expected = module_sizes(target)
    places: dict[tuple[str | None, str], set[str]] = {}
    for name, shape in adapter.shapes.items():
        found, at = _HALF.search(name), _LAYER.search(name)
        if found is None or (module := found[1]) not in MODULES:
            raise DFlashError(
                f"{label} has {name}, which SGLang's LoRA does not apply: give an adapter of some of "
                f"{', '.join(MODULES)}, without biases and without modules that are saved whole."
            )
        layer, side = at and at[1], found[2]
        if layer is not None and int(layer) >= target.num_hidden_layers:
            raise DFlashError(
                f"{label} has {name}, but {path} has {target.num_hidden_layers} layers: give an adapter that was "
                "trained for this target."
            )
        places.setdefault((layer, module), set()).add(side)
        if "experts" in name or module not in expected:
            continue
        columns, rows = expected[module]
        right = (rank, columns) if side == "A" else (rows, rank)
        if shape != right:
            raise DFlashError(
                f"{label} has {name} of {_size(shape)}, where {path} and rank {rank} take {_size(right)}: give an "
                "adapter that was trained for this target."
            )
    _check_parts(label, places)


def check_limits(adapter: Adapter, most_rank: int | None, modules: set[str] | None) -> None:
    """Whether a server with these limits takes an adapter.

    Args:
        most_rank: --max-lora-rank; None for no limit.
        modules: what --lora-target-modules names, as the release merges them; None for all.

    Raises:
        DFlashError: names the flag to change.
    """
    from sglang.srt.lora.utils import get_normalized_target_modules

    rank = _rank(adapter.label, adapter.config)
    if most_rank is not None and rank > most_rank:
        raise DFlashError(
            f"{adapter.label} has rank {rank}, and this server takes up to {most_rank}: start it with --max-lora-rank "
            f"{rank} or more."
        )
    given = get_normalized_target_modules(adapter.config["target_modules"])
    if modules is not None and given != {"all"} and (over := sorted(given - modules)):
        raise DFlashError(
            f"{adapter.label} adapts {over[0]}, and this server only {', '.join(sorted(modules))}: start it with all "
            "of them in --lora-target-modules."
        )


def module_sizes(target: Any) -> dict[str, tuple[int, int]]:
    """Columns and rows of the weights that adapters are added to, by module; MLPs not beside experts, which differ.

    Args:
        target: a Hugging Face text config.
    """
    hidden, heads = target.hidden_size, target.num_attention_heads
    kv_heads = getattr(target, "num_key_value_heads", None) or heads
    head = getattr(target, "head_dim", None) or hidden // heads
    q, kv, words = heads * head, kv_heads * head, target.vocab_size
    inner = getattr(target, "intermediate_size", None)
    sizes = {
        "q_proj": (hidden, q),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "qkv_proj": (hidden, q + 2 * kv),
        "o_proj": (q, hidden),
        "embed_tokens": (words, hidden),
        "lm_head": (hidden, words),
    }
    if isinstance(inner, int) and not has_experts(target):
        sizes |= {
            "gate_proj": (hidden, inner),
            "up_proj": (hidden, inner),
            "gate_up_proj": (hidden, 2 * inner),
            "down_proj": (inner, hidden),
        }
    return sizes


def has_experts(target: Any) -> bool:
    """Whether some layers are mixtures of experts, by the target's Hugging Face text config."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any(getattr(target, name, None) for name in names)


def _rank(label: str, config: Mapping[str, Any]) -> int:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    numbers = type(rank) is int and rank > 0 and type(alpha) in (int, float)
    if not numbers or str(config.get("peft_type")).lower() != "lora":
        raise DFlashError(
            f"{label} has peft_type {config.get('peft_type')!r}, r {rank!r} and lora_alpha {alpha!r}: give an adapter "
            "of type LORA with a rank of 1 or more."
        )
    return rank


def _check_parts(label: str, places: dict[tuple[str | None, str], set[str]]) -> None:
    """Both halves of every product, and beside each other what the release adapts as one."""
    there = set(places)
    for (layer, module), sides in places.items():
        where = module if layer is None else f"layers.{layer} {module}"
        if len(sides) < 2:
            raise DFlashError(
                f"{label} has only lora_{min(sides)} of {where}: download or save it again."
            )
        needed = ("q_proj", "v_proj") if module in ATTENTION[:3] else ()
        needed = ("gate_proj",) if module in MLP else needed
        for other in needed:
            if (layer, other) not in there:
                raise DFlashError(
                    f"{label} has {where} without {other}, and SGLang's LoRA adapts them as one: give an adapter "
                    "with both."
                )


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
