"""Passes over blocks through gated delta nets on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_dflash.gpu.kernels.delta_net_rows import convolve, recur

if TYPE_CHECKING:
    import torch
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
        convolved = rows.convolved[at, : len(mixed_qkv)]
        kept, gates = rows.kept[at], rows.gates[at]
        convolve(layer, mixed_qkv, a, b, cache.conv[0], slots, bounds, kept, convolved, gates)
        return recur(cache.temporal, convolved, gates, slots, bounds)

    backend.forward_extend = forward_extend
