"""Layers that attend to chunks of the context, as three of four in Llama 4: a row sees nothing before its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention


def chunk_of(layer: RadixAttention, size: int | None) -> int:
    """Tokens of a layer's chunks; 0 if it sees the whole context.

    Args:
        size: of those of the model; None if it has none.
    """
    return size if size and layer.use_irope else 0
