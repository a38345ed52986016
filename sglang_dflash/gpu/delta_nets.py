"""Passes over blocks through gated delta nets on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.fla.fused_sigmoid_gating_recurrent import (
    fused_sigmoid_gating_delta_rule_update,
)

from sglang_dflash.gpu.kernels.delta_net_rows import convolve

if TYPE_CHECKING:
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_dflash.block_rows import BlockRows


def leave_rows(backend: GDNAttnBackend, rows: BlockRows) -> None:
    """Has a backend leave what its rows read in `rows`, and states as they are; other passes stay its own."""
    extend, pool = backend.forward_extend, backend.req_to_token_pool

    def forward_extend(
        layer: RadixLinearAttention,
        forward_batch: ForwardBatch,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        **more: Any,
    ) -> torch.Tensor:
        """[rows, q + k + v] and gates [rows, v_heads] each → [1, rows, v_heads, v_dim]."""
        if not forward_batch.forward_mode.is_target_verify():
            return extend(
                layer=layer, forward_batch=forward_batch, mixed_qkv=mixed_qkv, a=a, b=b, **more
            )
        cache, at = pool.mamba2_layer_cache(layer.layer_id), pool.mamba_map[layer.layer_id]
        slots = backend.forward_metadata.mamba_cache_indices
        bounds = backend.forward_metadata.query_start_loc
        count = len(mixed_qkv)
        convolved = rows.convolved[at, :count]
        kept, gates = rows.kept[at], rows.gates[at]
        convolve(layer, mixed_qkv, a, b, cache.conv[0], slots, bounds, kept, convolved, gates)
        q, k, v = convolved.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
        return fused_sigmoid_gating_delta_rule_update(
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            q=q.view(1, count, layer.num_q_heads, layer.head_q_dim),
            k=k.view(1, count, layer.num_k_heads, layer.head_k_dim),
            v=v.view(1, count, layer.num_v_heads, layer.head_v_dim),
            a=a,
            b=b,
            initial_state_source=cache.temporal,
            initial_state_indices=slots,
            cu_seqlens=bounds,
            use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            disable_state_update=True,
        )

    backend.forward_extend = forward_extend
