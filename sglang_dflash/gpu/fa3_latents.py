"""Attention of blocks over latents of MLA with FlashAttention 3, for heads that were absorbed into queries.

A token has one vector in the pool: a latent, which is its value and the first part of its key, and behind it what RoPE
rotates, the rest of its key. All heads read the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled

from sglang_dflash.gpu.block_attention import BlockAttention
from sglang_dflash.gpu.fa3_attention import Fa3BlockAttention
from sglang_dflash.gpu.fa3_side_by_side import Fa3SideBySide

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

LATENT, ROTATED = 512, 64  # elements of both parts of a key for which FA3 has a kernel


class Fa3LatentAttention(Fa3BlockAttention):
    """Reads latents of the dtype of the model."""

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        # All heads share a key, so a request occupies few multiprocessors however short it is.
        self.num_splits = 1 if is_batch_invariant_mode_enabled() else 0

    @classmethod
    def short_contexts_gain(cls, runner: ModelRunner, requests: int) -> bool:
        return False

    def prepare(self) -> None:
        """Each layer has FA3 make its schedule: what makes one for several knows no latents."""
        BlockAttention.prepare(self)

    def forward(
        self,
        q: torch.Tensor | None = None,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        layer: RadixAttention | None = None,
        forward_batch: ForwardBatch | None = None,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """What a backend of the release does, whether it is given both parts of queries and keys or the whole.

        Args:
            q: [rows, heads * latent]; with `q_rope` None, [rows, heads * (latent + rope)].
            k: [rows, 1, latent]; with `k_rope` None, [rows, 1, latent + rope].
            q_rope, k_rope: [rows, heads * rope] and [rows, 1, rope].

        Returns:
            [rows, heads * latent].
        """
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        heads, sizes = layer.tp_q_head_num, [LATENT, ROTATED]
        if q_rope is None:
            q, q_rope = q.view(-1, heads, layer.head_dim).split(sizes, dim=-1)
        if save_kv_cache and k is not None:
            if k_rope is None:
                k, k_rope = k.view(-1, 1, layer.head_dim).split(sizes, dim=-1)
            slots = forward_batch.out_cache_loc
            forward_batch.token_to_kv_pool.set_mla_kv_buffer(layer, slots, k, k_rope)
        keys = forward_batch.token_to_kv_pool.get_key_buffer(layer.layer_id)
        latents, rotated = keys.view(-1, self.runner.page_size, 1, layer.head_dim).split(sizes, -1)
        made = flash_attn_with_kvcache(
            q=q_rope.reshape(-1, heads, ROTATED),
            qv=q.reshape(-1, heads, LATENT),
            k_cache=rotated,
            v_cache=latents,
            page_table=self.page_table,
            cache_seqlens=self.cache_lengths,
            cu_seqlens_q=self.cu_seqlens_q,
            max_seqlen_q=self.width,
            softmax_scale=layer.scaling,
            causal=True,
            softcap=layer.logit_cap,
            num_splits=self.num_splits,
        )
        return made.view(-1, heads * LATENT)


class Fa3LatentSideBySide(Fa3SideBySide, Fa3LatentAttention):
    """Over rows of requests that have different numbers of them."""
