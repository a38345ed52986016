"""The transformer of a draft model: the part of config.json that both formats share.

`transformers` fills in what a config leaves out and brings its RoPE fields into one shape.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

from sglang_dflash.checkpoint.formats.fields import Fields
from sglang_dflash.errors import DFlashError

MODEL_TYPES = ("qwen3", "llama")
# Others change their angles with the length of a sequence.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

_INTEGERS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "vocab_size", "max_position_embeddings"),
)
# What shapes a transformer; nothing else of a config.json reaches `transformers`, least of all
# `auto_map`, which names code.
_FIELDS = (
    *_INTEGERS,
    *("rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias", "tie_word_embeddings"),
    *("layer_types", "use_sliding_window", "sliding_window", "max_window_layers"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
)


def read_transformer(fields: Fields) -> tuple[dict[str, Any], Any]:
    """Reads the fields of a transformer.

    Returns:
        Keywords of `DraftConfig`, and transformers' own config for what only one format needs.

    Raises:
        DFlashError: a field has a value that cannot be, or that is not supported.
    """
    path, raw = fields.path, fields.raw
    for name in _INTEGERS:
        fields.integer(name, minimum=1, default=None)
    fields.number("rms_norm_eps", above=0, below=1, default=None)
    for name in ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"):
        fields.boolean(name, default=None)
    _check_choices(fields)
    config = _hugging_face_config(fields, raw.get("model_type", "qwen3"))
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = config.head_dim
    if heads % kv_heads:
        raise DFlashError(
            f"{fields.prefix}num_attention_heads {heads} of {path} is not a multiple of num_key_value_heads "
            f"{kv_heads}: the checkpoint is damaged; download it again."
        )
    if head_dim % 2:
        raise DFlashError(
            f"{fields.prefix}head_dim {head_dim} of {path} is odd, and rotary embedding pairs its dimensions: "
            "the checkpoint is damaged; download it again."
        )
    keywords = dict(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        rms_norm_eps=float(config.rms_norm_eps),
        max_position_embeddings=config.max_position_embeddings,
        attention_bias=bool(config.attention_bias),
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        rope=_rope(fields, config, head_dim),
        # Llama's class has none; a writer that puts Qwen3's layers under its name has their weights.
        qk_norm=config.model_type == "qwen3",
    )
    return keywords, config


def layer_windows(fields: Fields, config: Any) -> list[int | None]:
    """For each layer, the window of a sliding one, or None; -1 for a sliding one without a window."""
    depth = config.num_hidden_layers
    types = getattr(config, "layer_types", None) or ["full_attention"] * depth
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in types and window is not None:
        Fields(fields.path, {"sliding_window": window}, fields.prefix).integer(
            "sliding_window", minimum=1
        )
    return [(window or -1) if kind == "sliding_attention" else None for kind in types]


def _check_choices(fields: Fields) -> None:
    """Fields of which only some values are supported."""
    path, raw = fields.path, fields.raw
    model_type = raw.get("model_type", "qwen3")
    if model_type not in MODEL_TYPES:
        raise DFlashError(
            f"{fields.prefix}model_type of {path} is {model_type!r}, and only {' and '.join(map(repr, MODEL_TYPES))} "
            "are supported: use a drafter whose layers are of such a type."
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise DFlashError(
            f"{fields.prefix}hidden_act of {path} is {raw['hidden_act']!r}, and only 'silu' is supported: use a "
            "drafter with SwiGLU layers."
        )
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.inner(name)
        kind = rope and (rope.raw.get("rope_type") or rope.raw.get("type"))
        if kind is not None and kind not in ROPE_TYPES:
            raise DFlashError(
                f"{rope.prefix}rope_type of {path} is {kind!r}, and only {', '.join(ROPE_TYPES)} are supported: use a "
                "drafter with one of them."
            )
    types, depth = raw.get("layer_types"), raw.get("num_hidden_layers")
    if types is not None:
        _check_layer_types(fields, types, depth)


def _check_layer_types(fields: Fields, types: Any, depth: int | None) -> None:
    path = fields.path
    if not isinstance(types, list) or depth is not None and len(types) != depth:
        raise DFlashError(
            f"{fields.prefix}layer_types of {path} is not a list of one type for each of its {depth} layers: "
            "the checkpoint is damaged; download it again."
        )
    strange = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
    if strange:
        raise DFlashError(
            f"{fields.prefix}layer_types of {path} has {strange[0]!r}, and only 'full_attention' and "
            "'sliding_attention' are supported: use a drafter with such layers."
        )


def _hugging_face_config(fields: Fields, model_type: str) -> Any:
    from transformers import AutoConfig

    given = {name: fields.raw[name] for name in _FIELDS if fields.raw.get(name) is not None}
    # It writes to the RoPE fields that it is given, and talks about those of other models.
    logging.getLogger("transformers.modeling_rope_utils").setLevel(logging.ERROR)
    try:
        return AutoConfig.for_model(model_type, **copy.deepcopy(given))
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise DFlashError(
            f"config.json of {fields.path} does not describe a {model_type} transformer ({reason}): the checkpoint "
            "is damaged; download it again."
        ) from error


def _rope(fields: Fields, config: Any, head_dim: int) -> dict[str, Any]:
    """RoPE of the draft model, never of the target."""
    rope = config.rope_parameters
    if isinstance(rope.get("sliding_attention"), dict):
        rope = rope["sliding_attention"]  # one for each type of layer: speculators takes this one
    rope = {name: value for name, value in rope.items() if name != "type"}
    Fields(fields.path, rope, "rope_parameters.").number("rope_theta", above=0, below=float("inf"))
    if rope["rope_type"] != "default":
        Fields(fields.path, rope, "rope_parameters.").number("factor", above=0, below=float("inf"))
    part = rope.setdefault("partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * part) if type(part) in (int, float) and 0 < part <= 1 else 0
    if rotary_dim < 2 or rotary_dim % 2:
        raise DFlashError(
            f"partial_rotary_factor of {fields.path} is {part!r}, which does not leave an even part of the head_dim "
            f"{head_dim}: the checkpoint is damaged; download it again."
        )
    return rope
