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

    def bring(
        self,
        cache: MambaPool.State,
        slots: torch.Tensor,
        begins: torch.Tensor,
        counts: torch.Tensor,
        tracked: torch.Tensor | None = None,
        tracked_counts: torch.Tensor | None = None,
    ) -> None:
        """Makes states those after the rows of each request that count.

        Args:
            cache: of the pool; its convolutions' windows are [layers, slots, channels, 3].
            slots: [bs] int32, of the requests' states.
            begins: [bs] int64, the first row of each.
            counts: [bs] int64, how many rows count.
            tracked: [bs] int64, slots for the states on the way; None if nobody wants them.
            tracked_counts: [bs] int64, after how many rows, at most `counts`; none where that is 0.
        """
        if self.kept.is_cuda:
            from sglang_dflash.gpu.kernels.delta_net_rows import bring
        else:
            from sglang_dflash.cpu.linear_attention import bring
        given = (slots, begins, counts, tracked, tracked_counts)
        bring(cache.temporal, cache.conv[0], self.kept, self.convolved, self.gates, *given)


def bytes_of_row(params: BaseLinearStateParams, itemsize: int) -> int:
    """What a row takes in all layers of one rank.

    Args:
        itemsize: bytes of a number in the model's dtype.
    """
    (channels, _), heads = params.shape.conv[0], params.shape.temporal[0]
    return len(params.layers) * (2 * channels * itemsize + 2 * heads * torch.float32.itemsize)
