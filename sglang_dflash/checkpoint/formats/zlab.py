"""z-lab's format: the config.json of a transformer with `block_size` and `dflash_config` added.

Values mean what they mean to the PyPI package `dflash`, which reads a field of `dflash_config` at the
top, too, if it is not inside.
"""

from __future__ import annotations

from typing import Any

from sglang_dflash.checkpoint.formats.config import DraftConfig, Sight
from sglang_dflash.checkpoint.formats.fields import Fields
from sglang_dflash.checkpoint.formats.transformer import layer_windows, read_transformer
from sglang_dflash.errors import DFlashError

ARCHITECTURE = "DFlashDraftModel"
# Always written; without them a file is cut short, whatever transformers would put.
_WRITTEN = (
    *("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"),
    "vocab_size",
)


def is_zlab(raw: dict[str, Any]) -> bool:
    """Whether a config.json looks like one of this format."""
    return isinstance(raw.get("dflash_config"), dict) or ARCHITECTURE in (
        raw.get("architectures") or []
    )


def parse_zlab(path: str, raw: dict[str, Any]) -> DraftConfig:
    """A `DraftConfig` from the content of a config.json; raises `DFlashError`."""
    fields = Fields(path, raw)
    dflash = fields.inner("dflash_config") or Fields(path, {}, "dflash_config.")
    for name in _WRITTEN:
        fields.integer(name, minimum=1)
    if raw.get("model_type") is None:
        raise DFlashError(
            f"model_type of {path} is None: it is not a complete DFlash checkpoint; download it again."
        )
    transformer, config = read_transformer(fields)
    block_size = _either(dflash, fields, "block_size").integer("block_size", minimum=2)
    target_layers = fields.integer("num_target_layers", minimum=1, default=None)
    multiplier = _either(dflash, fields, "output_multiplier")
    multiplier.number("output_multiplier", above=0, below=float("inf"), default=None)
    return DraftConfig(
        path=path,
        format="z-lab",
        block_size=block_size,
        default_width=block_size,
        mask_token_id=_either(dflash, fields, "mask_token_id").integer("mask_token_id", minimum=0),
        target_layer_ids=_target_layer_ids(dflash, fields, target_layers),
        num_target_layers=target_layers,
        target_hidden_size=fields.integer(
            "target_hidden_size", minimum=1, default=config.hidden_size
        ),
        draft_vocab_size=config.vocab_size,
        layers=_layers(dflash, fields, layer_windows(fields, config)),
        embedding_scale=_either(dflash, fields, "input_embedding_scale").number(
            "input_embedding_scale", above=0, below=float("inf"), default=1.0
        ),
        tied=bool(config.tie_word_embeddings),
        **transformer,
    )


def default_layer_ids(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """Layers that are tapped where a config names none: the middle, or evenly from 1 to depth - 3."""
    if draft_layers == 1:
        return (target_layers // 2,)
    span = target_layers - 4
    return tuple(round(1 + i * span / (draft_layers - 1)) for i in range(draft_layers))


def _either(dflash: Fields, top: Fields, name: str) -> Fields:
    """Where a field stands: inside `dflash_config`, as in later checkpoints, or at the top."""
    if dflash.raw.get(name) is None and top.raw.get(name) is not None:
        return top
    # A block size that stands nowhere is missed at the top, where the first checkpoints had it.
    return top if name == "block_size" and dflash.raw.get(name) is None else dflash


def _target_layer_ids(dflash: Fields, top: Fields, target_layers: int | None) -> tuple[int, ...]:
    place = _either(dflash, top, "target_layer_ids")
    if place.raw.get("target_layer_ids") is not None:
        return place.integers("target_layer_ids", minimum=0)
    if target_layers is None:
        raise DFlashError(
            f"config.json of {top.path} has neither dflash_config.target_layer_ids nor num_target_layers: it is not a "
            "complete DFlash checkpoint; download it again."
        )
    return default_layer_ids(target_layers, top.raw["num_hidden_layers"])


def _layers(dflash: Fields, top: Fields, windows: list[int | None]) -> tuple[Sight, ...]:
    """A switch holds for all layers; without one, sliding layers are causal and the others are not."""
    switches = {
        "dflash_config.causal": dflash.boolean("causal", default=None),
        "dflash_config.is_causal": dflash.boolean("is_causal", default=None),
        "is_causal": top.boolean("is_causal", default=None),
    }
    given = {name: value for name, value in switches.items() if value is not None}
    if len(set(given.values())) > 1:
        both = " and ".join(f"{name} {str(value).lower()}" for name, value in given.items())
        raise DFlashError(
            f"{both} of {top.path} contradict each other: set both to how the drafter was trained."
        )
    switch = next(iter(given.values()), None)
    return tuple(
        Sight(
            causal=window is not None if switch is None else switch,
            window=window if window is None or window > 0 else None,
        )
        for window in windows
    )
