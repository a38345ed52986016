"""What takes the place of a model's attention backend while its blocks are captured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

from sglang_dflash.gpu.sliding_keys import sliding_keys
from sglang_dflash.two_pools import is_sliding

if TYPE_CHECKING:
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class BlockAttention(ABC):
    """Attention of the blocks of one batch bucket, which waits for nothing that the host knows.

    The release's backends prepare their metadata on the host before each replay, with lengths that only the result
    of the round before tells. Here lengths and page table are filled in the graph.

    Attributes:
        name: as the flag calls it.
        ends: [bs + 1] int32, where each request's rows begin, and end; None if all have `width` rows.
    """

    name: ClassVar[str]
    ends: torch.Tensor | None = None

    def __init__(
        self,
        runner: ModelRunner,
        cache_lengths: torch.Tensor,
        page_table: torch.Tensor,
        width: int,
        causal: bool,
        short: bool,
    ):
        """
        Args:
            cache_lengths: [bs] int32, keys of each request, its block included; filled each round.
            page_table: [bs, pages] int32; filled each round.
            causal: whether rows of a block see only what is before them.
            short: whether the graph is for short contexts alone (`short_contexts_gain`).
        """
        self.runner, self.width, self.causal = runner, width, causal
        self.cache_lengths, self.page_table = cache_lengths, page_table
        self._sliding = sliding_keys(runner, *page_table.shape, width)
        self._linear: MambaAttnBackendBase | None = None

    @classmethod
    def short_contexts_gain(cls, runner: ModelRunner, requests: int) -> bool:
        """Whether so many requests have a graph of their own while their contexts are short."""
        return False

    def prepare(self) -> None:
        """What all layers share, once a round; `cache_lengths` and `page_table` must be filled."""
        if self._sliding is not None:
            self._sliding.fill(self.cache_lengths, self.page_table)

    def take(self, batch: ForwardBatch) -> None:
        """Takes the place of the backend of a pass over blocks, of which only linear attention stays."""
        self._linear = getattr(batch.attn_backend, "linear_attn_backend", None)
        batch.attn_backend = self
        if self._linear is None:
            return
        self._linear.init_forward_metadata(batch)
        if self.ends is not None:
            metadata = self._linear.forward_metadata
            self._linear.forward_metadata = replace(metadata, query_start_loc=self.ends)

    def keys_of(self, layer: RadixAttention) -> tuple[torch.Tensor, torch.Tensor]:
        """Lengths and page table of the pool in which a layer keeps K/V: [bs] and [bs, pages] int32."""
        if self._sliding is not None and is_sliding(self.runner.token_to_kv_pool, layer.layer_id):
            return self._sliding.lengths, self._sliding.table
        return self.cache_lengths, self.page_table

    def forward(
        self,
        q: torch.Tensor | None = None,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        layer: RadixAttention | RadixLinearAttention | None = None,
        forward_batch: ForwardBatch | None = None,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """What a backend of the release does: [rows, heads * head_dim] → the same; linear attention stays its own."""
        if isinstance(layer, RadixLinearAttention):
            return self._linear.forward_extend(layer=layer, forward_batch=forward_batch, **kwargs)
        pool = forward_batch.token_to_kv_pool
        if save_kv_cache and k is not None:
            slots = forward_batch.out_cache_loc
            if forward_batch.out_cache_loc_swa is not None:
                pool.set_swa_loc(forward_batch.out_cache_loc_swa)
            pool.set_kv_buffer(layer, slots, k, v, layer.k_scale, layer.v_scale)
        keys, values = pool.get_kv_buffer(layer.layer_id)
        heads = q.contiguous().view(-1, layer.tp_q_head_num, layer.head_dim)
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        output = self.attend(heads, keys, values, layer, causal, **kwargs)
        return output.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layer: RadixAttention,
        causal: bool,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Blocks over contexts and themselves.

        Args:
            q: [rows, heads, head_dim], contiguous.
            keys, values: [slots, kv_heads, head_dim], of the pool.
            sinks: [heads], scores of a key without a value.

        Returns:
            [rows, heads, v_head_dim] of the dtype of `q`.
        """


def window_of(layer: RadixAttention) -> int:
    """Keys before itself that a row of a layer sees; -1 for all."""
    return -1 if layer.sliding_window_size is None else layer.sliding_window_size
