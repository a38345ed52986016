"""Attention of blocks with Triton, on every GPU that it compiles for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled

from sglang_dflash.chunks import chunk_of
from sglang_dflash.gpu.block_attention import BlockAttention, window_of
from sglang_dflash.gpu.kernels.block_attention import block_attention
from sglang_dflash.gpu.kernels.block_tiles import WHOLE, Split, Tile

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention


class TritonBlockAttention(BlockAttention):
    """Reads K and V of any dtype beside queries of the model's."""

    name = "triton"
    tile: ClassVar[Tile | None] = None  # the one for so many rows

    def split(self) -> Split | None:
        """How keys are split; None for what occupies the device."""
        # Deterministic inference wants sums over keys in one order, whatever the batch.
        return WHOLE if is_batch_invariant_mode_enabled() else None

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
        return block_attention(
            q,
            keys,
            values,
            table,
            lengths,
            width=self.width,
            split=self.split(),
            tile=self.tile,
            **self.options(keys, layer, causal, sinks),
        )

    def options(
        self,
        keys: torch.Tensor,
        layer: RadixAttention,
        causal: bool,
        sinks: torch.Tensor | None,
    ) -> dict[str, Any]:
        """What kernels want to know of a layer, by the names that they have for it."""
        scaled = layer.k_scale is not None and keys.itemsize == 1
        return dict(
            page_size=self.runner.page_size,
            scale=layer.scaling,
            causal=causal,
            window=window_of(layer),
            chunk=chunk_of(layer, self.runner.attention_chunk_size),
            cap=layer.logit_cap,
            sinks=sinks,
            k_scale=layer.k_scale_float if scaled else 1.0,
            v_scale=layer.v_scale_float if scaled else 1.0,
        )
