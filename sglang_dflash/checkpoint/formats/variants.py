"""Relatives of DFlash that would load and then draft nonsense, refused by name."""

from __future__ import annotations

from typing import Any

from sglang_dflash.errors import DFlashError

_Z_LAB_OR_SPECULATORS = "use a DFlash checkpoint in z-lab's or speculators' format"
# --speculative-algorithm that SGLang itself has for it.
_INSTEAD = {"eagle3": "EAGLE3", "eagle": "EAGLE", "mtp": "NEXTN"}

# What names a variant: `speculators_model_type` or part of an architecture's or model type's name.
_NAMES = {
    "dflash2": ("dflash2",),
    "dspark": ("dspark",),
    "xpress": ("xpress",),
    "p-eagle": ("peagle", "p_eagle", "p-eagle"),
    "eagle3": ("eagle3",),
    "eagle": ("eagle",),
    "mtp": ("mtp", "nextn"),
}
# Fields that only a variant has, at the top or in dflash_config.
_FIELDS = {
    "dflash2": ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    "xpress": ("xpress_rank", "num_jacobi_passes"),
    "dspark": ("markov_rank", "markov_head_type", "enable_confidence_head"),
    "p-eagle": ("num_depths", "parallel_drafting"),
}
# Fields of layouts in which slot 0 predicts the token after the bonus token, not the bonus token.
_ANCHOR_FIRST = ("num_anchors", "sample_from_anchor", "query_zero_predicts_next")
# Fields of DFlash variants that nothing here computes.
_UNSUPPORTED = {
    "attention_sink_bias": "attention sinks",
}


def refuse_variants(path: str, raw: dict[str, Any]) -> None:
    """Raises `DFlashError` for a config.json of something that is not plain DFlash."""
    dflash = raw.get("dflash_config")
    scopes = [raw, dflash if isinstance(dflash, dict) else {}]
    variant, reason = _variant(raw, scopes)
    if variant:
        instead = _Z_LAB_OR_SPECULATORS
        if variant in _INSTEAD:
            instead = f"serve it with --speculative-algorithm {_INSTEAD[variant]}, or {instead}"
        raise DFlashError(
            f"{path} is a drafter of type {variant} ({reason}), which DFLASH does not run: {instead}."
        )
    for scope in scopes:
        for field in _ANCHOR_FIRST:
            if scope.get(field):
                raise DFlashError(
                    f"{path} has an anchor-first block layout ({field} is {scope[field]!r}), in which every slot "
                    "predicts the next token; DFLASH runs blocks whose slot 0 is the bonus token: "
                    f"{_Z_LAB_OR_SPECULATORS} without it."
                )
        for field, what in _UNSUPPORTED.items():
            if scope.get(field):
                raise DFlashError(
                    f"{field} of {path} is set, and a drafter with {what} is not supported: use one without."
                )


def _variant(raw: dict[str, Any], scopes: list[dict[str, Any]]) -> tuple[str | None, str]:
    """Name of the variant and what tells it, or None."""
    kind = raw.get("speculators_model_type")
    names = [("speculators_model_type", kind)] if kind is not None else []
    names += [("architectures", name) for name in raw.get("architectures") or []]
    names += [("model_type", raw.get("model_type"))]
    for field, name in names:
        folded = str(name).lower()
        for variant, parts in _NAMES.items():
            if any(part in folded for part in parts):
                return variant, f"{field} {name}"
    for variant, fields in _FIELDS.items():
        for scope in scopes:
            for field in fields:
                if scope.get(field) is not None:
                    return variant, f"it has {field}"
    if kind not in (None, "dflash"):
        return str(kind), f"speculators_model_type {kind}"
    return None, ""
