"""Triton's attention over rows of requests that have different numbers of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled

from sglang_dflash.gpu.kernels.block_tiles import PROGRAMS, choose_tile
from sglang_dflash.gpu.kernels.launch import device_of
from sglang_dflash.gpu.kernels.side_by_side import side_by_side_attention
from sglang_dflash.gpu.kernels.tile_plan import Plan, make_plan
from sglang_dflash.gpu.triton_attention import TritonBlockAttention

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner


class TritonSideBySide(TritonBlockAttention):
    """Causal; where each request's rows end, the device knows."""

    def __init__(
        self,
        runner: ModelRunner,
        cache_lengths: torch.Tensor,
        page_table: torch.Tensor,
        ends: torch.Tensor,
        rows: int,
    ):
        """
        Args:
            ends: [bs + 1] int32, where each request's rows begin, and end; filled each pass.
            rows: the most that a request can have.
        """
        super().__init__(runner, cache_lengths, page_table, rows, causal=True, short=True)
        self.ends = ends
        self._plans: dict[tuple[int, ...], Plan] = {}

    def prepare(self) -> None:
        super().prepare()
        self._plans.clear()

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layer: RadixAttention,
        causal: bool,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        lengths, table = self.keys_of(layer)
        # The first layer with such heads and keys; mostly all have the same.
        alike = (*q.shape[1:], *keys.shape[1:], values.shape[2], lengths.data_ptr())
        if alike not in self._plans:
            self._plans[alike] = self._plan(q, lengths, *keys.shape[1:], values.shape[2])
        options = self.options(keys, layer, causal, sinks)
        return side_by_side_attention(q, keys, values, table, self._plans[alike], **options)

    def _plan(
        self, q: torch.Tensor, lengths: torch.Tensor, kv_heads: int, dim: int, v_dim: int
    ) -> Plan:
        rows, heads, _ = q.shape
        group, device = heads // kv_heads, device_of(q.device)
        tile = choose_tile(max(dim, v_dim), rows * group, q.itemsize, device.shared_memory)
        # Deterministic inference wants sums over keys in one order, whatever the batch.
        whole = is_batch_invariant_mode_enabled()
        room = 0 if whole else max(1, PROGRAMS * device.multiprocessors // kv_heads)
        return make_plan(self.ends, lengths, rows, group, tile, room)
