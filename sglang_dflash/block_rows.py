"""What a pass over blocks leaves of its rows in layers of linear attention, of which states are made later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.configs.mamba_utils import BaseLinearStateParams
    from sglang.srt.mem_cache.memory_pool import MambaPool

# Rows that a convolution reads, as kernels know it; all published gated delta nets have this many.
KERNEL = 4


@dataclass(frozen=True)
class BlockRows:
    """Of all layers, by place in the pass.

    Attributes:
        kept: [layers, rows, channels], queries, keys and values before the convolution.
        convolved: [layers, rows, channels], the same behind it.
        gates: [layers, rows, 2, v_heads] float32, what is left of a state at each row, and how much of a value goes in.
    """

    kept: torch.Tensor
    convolved: torch.Tensor
    gates: torch.Tensor

    @classmethod
    def reserve(cls, cache: MambaPool.State, rows: int, dtype: torch.dtype) -> BlockRows:
        """Room for so many rows of a model of this dtype, beside its states."""
        conv, states = cache.conv[0], cache.temporal
        shape, device = (len(conv), rows, conv.shape[2]), conv.device
        gates = torch.zeros(*shape[:2], 2, states.shape[2], device=device)
        kept, convolved = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        return cls(kept, convolved, gates)


def bytes_of_row(params: BaseLinearStateParams, itemsize: int) -> int:
    """What a row takes in all layers of one rank.

    Args:
        itemsize: bytes of a number in the model's dtype.
    """
    (channels, _), heads = params.shape.conv[0], params.shape.temporal[0]
    return len(params.layers) * (2 * channels * itemsize + 2 * heads * torch.float32.itemsize)
