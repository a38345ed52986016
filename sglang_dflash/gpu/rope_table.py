"""Which rotary embeddings a kernel can compute from their table."""

from __future__ import annotations

from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from torch import nn


def is_table(rope: nn.Module | None) -> bool:
    """Whether all that a rotary embedding does is in its `cos_sin_cache`, halves of a head paired.

    Subclasses of the release scale or arrange the angles in ways that are not; one that only fills the
    table differently says so by `angles_in_table`.
    """
    plain = type(rope) is RotaryEmbedding or getattr(rope, "angles_in_table", False)
    return plain and rope.is_neox_style
