"""The target's head with LoRA adapters, over any rows of a pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.lora.utils import LoRABatchInfo


@dataclass(frozen=True)
class AdaptedHead:
    """A head with adapters on it, over the rows of one pass.

    Attributes:
        info: of the pass: ranks and scalings of its adapters.
        owners: [rows] int32, which of these each row has.
    """

    head: Any
    info: LoRABatchInfo
    owners: torch.Tensor

    def at(self, rows: slice | torch.Tensor) -> AdaptedHead:
        """Over some of the rows ([n] int64)."""
        return replace(self, owners=self.owners[rows])

    @contextmanager
    def over(self, rows: slice | torch.Tensor) -> Iterator[Any]:
        """The module, made ready for some of the rows, each a segment of its own."""
        backend, owners = self.head.lora_backend, self.owners[rows]
        before = backend.lm_head_batch_info
        backend.lm_head_batch_info = self._segments(owners)
        try:
            yield self.head
        finally:
            backend.lm_head_batch_info = before

    def _segments(self, owners: torch.Tensor) -> LoRABatchInfo:
        n, device = len(owners), owners.device
        ones = torch.ones(n, dtype=torch.int32, device=device)
        ends = torch.arange(n + 1, dtype=torch.int32, device=device)
        changes = {"seg_lens": ones, "seg_indptr": ends, "weight_indices": owners}
        if hasattr(self.info, "seg_lens_cpu"):  # torch_native reads its segments on the host
            changes |= {f"{name}_cpu": value.cpu() for name, value in changes.items()}
        # csgmv reads its rows in an order, and its max_len is that of its chunks.
        chunked = self.info.permutation is not None
        changes |= {"permutation": ends[:n]} if chunked else {"max_len": 1}
        return replace(
            self.info, bs=n, num_segments=n, expected_tokens=n, use_cuda_graph=False, **changes
        )
