"""The layers of a captured block in few launches, for targets and for the draft model.

Only on one GPU: under tensor parallelism products are summed over the ranks, and
`fused_attention.py` fuses what it can.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import nn

from sglang_dflash.gpu.fused_attention import can_fuse, norm_rope_store
from sglang_dflash.gpu.kernels.add_norm import add_norm
from sglang_dflash.gpu.kernels.skinny_matmul import product, product_swiglu


def can_fuse_layers(layers: Sequence[nn.Module]) -> bool:
    """Whether layers are what `run_layers` computes: whole, unquantized, without biases.

    Deterministic inference wants products that round alike however many rows they have; these do not.
    """
    return not is_batch_invariant_mode_enabled() and all(
        can_fuse(layer.self_attn) and _is_plain(layer) for layer in layers
    )


def _is_plain(layer: nn.Module) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    names = ("gate_up_proj", "down_proj")
    if not all(hasattr(mlp, name) for name in names):
        return False  # a mixture of experts
    products = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    return all(
        isinstance(linear.quant_method, UnquantizedLinearMethod)
        and linear.bias is None
        and linear.tp_size == 1
        for linear in products
    ) and all(map(_is_plain_norm, (layer.input_layernorm, layer.post_attention_layernorm)))


def _is_plain_norm(norm: nn.Module) -> bool:
    return (
        type(norm) is RMSNorm
        and norm.variance_size_override is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
    )


def run_layers(
    layers: Sequence[nn.Module],
    last_norm: RMSNorm,
    x: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: ForwardBatch,
    taps: Collection[int] = (),
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """All layers and the norm after them; K/V of the rows are written to their slots on the way.

    Args:
        x: [rows, hidden], embeddings.
        positions: [rows] int64.
        taps: layers whose input is wanted.

    Returns:
        [rows, hidden], and the inputs of the tapped layers, likewise.
    """
    residual, tapped = x, []
    normed = layers[0].input_layernorm(x)
    for i, layer in enumerate(layers):
        if i > 0:
            normed, residual = _add_norm(x, residual, layer.input_layernorm)
        if i in taps:
            tapped.append(residual)
        x = _attend(layer.self_attn, positions, normed, forward_batch)
        normed, residual = _add_norm(x, residual, layer.post_attention_layernorm)
        x = product(
            product_swiglu(normed, layer.mlp.gate_up_proj.weight), layer.mlp.down_proj.weight
        )
    normed, _ = _add_norm(x, residual, last_norm)
    return normed, tapped


def _add_norm(
    x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    return add_norm(x, residual, norm.weight, norm.variance_epsilon)


def _attend(
    attention: nn.Module, positions: torch.Tensor, x: torch.Tensor, forward_batch: ForwardBatch
) -> torch.Tensor:
    """[rows, hidden] → the same, or its parts."""
    qkv_weight, o_weight = attention.qkv_proj.weight, attention.o_proj.weight
    q = norm_rope_store(attention, positions, product(x, qkv_weight), forward_batch)
    attended = attention.attn(q, None, None, forward_batch, save_kv_cache=False)
    return product(attended, o_weight)
