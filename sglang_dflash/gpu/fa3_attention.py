"""Attention of blocks with FlashAttention 3.

The release's backend lets every layer compute the same schedule again; here it is computed once a round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled

from sglang_dflash.gpu.block_attention import BlockAttention, window_of

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner

# Up to this many keys a block's attention is faster on one multiprocessor a KV head than split over
# several with their results combined by another launch.
SHORT_CONTEXT = 2048


class Fa3BlockAttention(BlockAttention):
    """Reads the dtype of the model, and FP8 as the release does: queries are rounded to it, too.

    Attributes:
        num_splits: parts into which the keys of a request are split; 0 lets FA3 choose.
        longest: rows of the request that has most, as FA3 is told. It takes its tile for them; where each request's
            rows end it reads on the device.
    """

    name = "fa3"

    def __init__(
        self,
        runner: ModelRunner,
        cache_lengths: torch.Tensor,
        page_table: torch.Tensor,
        width: int,
        causal: bool,
        short: bool,
    ):
        super().__init__(runner, cache_lengths, page_table, width, causal, short)
        self.longest = width
        batch_size = len(cache_lengths)
        # Deterministic inference wants sums over keys in one order, whatever the batch.
        single = short or _fills_device(runner, batch_size) or is_batch_invariant_mode_enabled()
        self.num_splits = 1 if single else 0
        self.cu_seqlens_q = torch.arange(
            0, batch_size * width + 1, width, dtype=torch.int32, device=cache_lengths.device
        )
        self.schedule: torch.Tensor | None = None

    @classmethod
    def short_contexts_gain(cls, runner: ModelRunner, requests: int) -> bool:
        return not _fills_device(runner, requests)

    def prepare(self) -> None:
        from sgl_kernel.flash_attn import get_scheduler_metadata

        super().prepare()
        config, tp_size = self.runner.model_config, self.runner.tp_size
        self.schedule = get_scheduler_metadata(
            batch_size=len(self.cache_lengths),
            max_seqlen_q=self.longest,
            max_seqlen_k=self.page_table.shape[1] * self.runner.page_size,
            num_heads=config.num_attention_heads // tp_size,
            num_heads_k=config.get_num_kv_heads(tp_size),
            headdim=config.head_dim,
            headdim_v=config.v_head_dim,
            cache_seqlens=self.cache_lengths,
            qkv_dtype=self.runner.kv_cache_dtype,
            cu_seqlens_q=self.cu_seqlens_q,
            page_size=self.runner.page_size,
            causal=self.causal,
            num_splits=self.num_splits,
        )

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layer: RadixAttention,
        causal: bool,
        **kwargs: Any,
    ) -> torch.Tensor:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        window, (lengths, table) = window_of(layer), self.keys_of(layer)
        # The schedule is that of full attention, and of the model's other layers.
        scheduled = window < 0 and not layer.logit_cap and causal == self.causal
        if keys.dtype != q.dtype and layer.k_scale is not None:
            shape = (len(self.cache_lengths), layer.tp_k_head_num)
            kwargs |= {
                "k_descale": layer.k_scale.expand(shape),
                "v_descale": layer.v_scale.expand(shape),
            }
        return flash_attn_with_kvcache(
            q=q.to(keys.dtype),
            k_cache=keys.view(-1, self.runner.page_size, layer.tp_k_head_num, layer.head_dim),
            v_cache=values.view(-1, self.runner.page_size, layer.tp_v_head_num, layer.v_head_dim),
            page_table=table,
            cache_seqlens=lengths,
            cu_seqlens_q=self.cu_seqlens_q,
            max_seqlen_q=self.longest if scheduled else self.width,
            softmax_scale=layer.scaling,
            causal=causal,
            window_size=(window, 0) if window >= 0 else (-1, -1),
            softcap=layer.logit_cap,
            scheduler_metadata=self.schedule if scheduled else None,
            num_splits=self.num_splits,
            **kwargs,
        ).to(q.dtype)


def _fills_device(runner: ModelRunner, requests: int) -> bool:
    """Whether KV heads alone occupy every multiprocessor, so that splitting keys gains nothing."""
    kv_heads = runner.model_config.get_num_kv_heads(runner.tp_size)
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return requests * kv_heads >= device.multi_processor_count
