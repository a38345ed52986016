"""Which rotary embeddings a kernel can compute from their table."""

from __future__ import annotations

from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from torch import nn

_FORWARD = ("forward", "forward_native", "forward_cuda")


def is_table(rope: nn.Module | None) -> bool:
    """Whether all that a rotary embedding does is in its `cos_sin_cache`, halves of a head paired.

    Subclasses of the release that only fill the table differently (Llama 3, YaRN, linear scaling) compute
    as the plain class does; others scale or arrange the angles when they read it.
    """
    kind = type(rope)
    return (
        isinstance(rope, RotaryEmbedding)
        and all(getattr(kind, name) is getattr(RotaryEmbedding, name) for name in _FORWARD)
        and rope.is_neox_style
    )
