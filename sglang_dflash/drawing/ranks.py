"""One draw for all ranks of a tensor-parallel group."""

from __future__ import annotations

import torch
from sglang.srt.distributed import get_tp_group


def agreed(tokens: torch.Tensor) -> torch.Tensor:
    """Drawn tokens (int64, any shape) as the first rank drew them.

    Every rank draws from the same logits, but each with random numbers of its own. Plain decoding goes on
    whatever they are; after a round, ranks that drew otherwise would have other lengths and other slots.
    """
    group = get_tp_group()
    return tokens if group.world_size == 1 else group.broadcast(tokens.contiguous(), src=0)
