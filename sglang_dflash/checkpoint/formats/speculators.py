"""The format of the package `speculators` (0.9.0): a config.json around a transformer's.

`transformer_layer_config` is written as a diff: a key that is absent has the default of its model type.
"""

from __future__ import annotations

from typing import Any

from sglang_dflash.checkpoint.formats.config import DraftConfig, Sight
from sglang_dflash.checkpoint.formats.fields import Fields
from sglang_dflash.checkpoint.formats.transformer import layer_windows, read_transformer
from sglang_dflash.errors import DFlashError


def is_speculators(raw: dict[str, Any]) -> bool:
    """Whether a config.json is one of this format; of which type is another question."""
    return "speculators_model_type" in raw


def parse_speculators(path: str, raw: dict[str, Any]) -> DraftConfig:
    """A `DraftConfig` from the content of a config.json; raises `DFlashError`."""
    fields = Fields(path, raw)
    inner = fields.inner("transformer_layer_config")
    if inner is None:
        raise DFlashError(
            f"config.json of {path} has no transformer_layer_config: it is not a complete speculators checkpoint; "
            "download it again."
        )
    transformer, config = read_transformer(inner)
    block_size = fields.integer("block_size", minimum=2)
    # They count hidden states, of which the first is the embedding.
    layer_ids = fields.integers("aux_hidden_state_layer_ids", minimum=0)
    vocab_size = config.vocab_size
    draft_vocab_size = fields.integer("draft_vocab_size", minimum=1, default=vocab_size)
    if draft_vocab_size > vocab_size:
        raise DFlashError(
            f"draft_vocab_size {draft_vocab_size} of {path} is above its vocab_size {vocab_size}: the checkpoint is "
            "damaged; download it again."
        )
    return DraftConfig(
        path=path,
        format="speculators",
        block_size=block_size,
        default_width=_default_width(fields, block_size),
        mask_token_id=fields.integer("mask_token_id", minimum=0),
        target_layer_ids=tuple(i - 1 for i in layer_ids),
        num_target_layers=None,
        target_hidden_size=fields.integer(
            "target_hidden_size", minimum=1, default=config.hidden_size
        ),
        draft_vocab_size=draft_vocab_size,
        layers=_layers(fields, layer_windows(inner, config)),
        verifier=_verifier(fields),
        **transformer,
    )


def _default_width(fields: Fields, block_size: int) -> int:
    """The bonus token and the drafts that the first proposal method asks for, if they fit in a block."""
    methods = (fields.raw.get("speculators_config") or {}).get("proposal_methods")
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
        return block_size
    method = Fields(fields.path, methods[0], "speculators_config.proposal_methods[0].")
    drafts = method.integer("speculative_tokens", minimum=1, default=block_size - 1)
    return min(drafts + 1, block_size)


def _layers(fields: Fields, windows: list[int | None]) -> tuple[Sight, ...]:
    """The switch is about sliding layers: all others see their block both ways, whatever it says."""
    both_ways = fields.boolean("sliding_window_non_causal", default=False)
    return tuple(
        Sight(causal=not both_ways, window=window, from_block=True)
        if window is not None and window > 0
        else Sight()
        for window in windows
    )


def _verifier(fields: Fields) -> str | None:
    outer = fields.inner("speculators_config")
    verifier = outer and outer.inner("verifier")
    name = verifier.raw.get("name_or_path") if verifier else None
    if name is not None and (not isinstance(name, str) or not name):
        raise verifier.wrong("name_or_path", name, "a folder or Hugging Face repository id")
    return name
