"""Attention of blocks with FlashAttention 3, prepared inside a graph.

The release's backend prepares its metadata on the host before each replay, with lengths that only
the result of the round before tells, and lets every layer compute the same schedule again. Here
lengths, page table and schedule are computed once a round, in the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.radix_attention import AttentionType

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

# Up to this many keys a block's attention is faster on one multiprocessor a KV head than split over
# several with their results combined by another launch.
SHORT_CONTEXT = 2048

HOPPER = 9  # compute capability that FA3 is written for


class Fa3BlockAttention:
    """Takes the place of a model's attention backend while its blocks are captured.

    Attributes:
        num_splits: parts into which the keys of a request are split; 0 lets FA3 choose.
        causal: whether rows of a block see only what is before them.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache_lengths: torch.Tensor,
        page_table: torch.Tensor,
        width: int,
        num_splits: int,
        causal: bool,
    ):
        """
        Args:
            cache_lengths: [bs] int32, keys of each request, its block included; filled each round.
            page_table: [bs, pages] int32; filled each round.
        """
        self.runner, self.width = runner, width
        self.cache_lengths, self.page_table = cache_lengths, page_table
        self.num_splits, self.causal = num_splits, causal
        batch_size = len(cache_lengths)
        self.cu_seqlens_q = torch.arange(
            0, batch_size * width + 1, width, dtype=torch.int32, device=cache_lengths.device
        )
        self.schedule: torch.Tensor | None = None

    def prepare(self) -> None:
        """Computes the schedule that all layers share; `cache_lengths` must be filled."""
        from sgl_kernel.flash_attn import get_scheduler_metadata

        config, tp_size = self.runner.model_config, self.runner.tp_size
        self.schedule = get_scheduler_metadata(
            batch_size=len(self.cache_lengths),
            max_seqlen_q=self.width,
            max_seqlen_k=self.page_table.shape[1] * self.runner.page_size,
            num_heads=config.num_attention_heads // tp_size,
            num_heads_k=config.get_num_kv_heads(tp_size),
            headdim=config.head_dim,
            cache_seqlens=self.cache_lengths,
            qkv_dtype=config.dtype,
            cu_seqlens_q=self.cu_seqlens_q,
            page_size=self.runner.page_size,
            causal=self.causal,
            num_splits=self.num_splits,
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """What a backend of the release does: [rows, heads * head_dim] → the same."""
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        pool = forward_batch.token_to_kv_pool
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        keys, values = pool.get_kv_buffer(layer.layer_id)
        window = layer.sliding_window_size
        has_window = window is not None and window > -1
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        # The schedule is that of full attention, and of the model's other layers.
        scheduled = not has_window and not layer.logit_cap and causal == self.causal
        output = flash_attn_with_kvcache(
            q=q.contiguous().view(-1, layer.tp_q_head_num, layer.head_dim),
            k_cache=keys.view(-1, self.runner.page_size, layer.tp_k_head_num, layer.head_dim),
            v_cache=values.view(-1, self.runner.page_size, layer.tp_v_head_num, layer.v_head_dim),
            page_table=self.page_table,
            cache_seqlens=self.cache_lengths,
            cu_seqlens_q=self.cu_seqlens_q,
            max_seqlen_q=self.width,
            softmax_scale=layer.scaling,
            causal=causal,
            window_size=(window, 0) if has_window else (-1, -1),
            softcap=layer.logit_cap,
            scheduler_metadata=self.schedule if scheduled else None,
            num_splits=self.num_splits,
            **kwargs,
        )
        return output.view(-1, layer.tp_q_head_num * layer.v_head_dim)


def can_capture(runner: ModelRunner) -> bool:
    """Whether the blocks of a model can use this attention instead of the backend's own.

    K and V lie in the pool alike whatever backend reads them, so what is chosen for prompts does not matter.
    """
    chosen = set(runner.server_args.get_attention_backends())
    return (
        (chosen == {"fa3"} or torch.cuda.get_device_capability()[0] == HOPPER)
        and not runner.use_mla_backend
        and not runner.is_hybrid_swa
        and runner.kv_cache_dtype == runner.model_config.dtype
    )
