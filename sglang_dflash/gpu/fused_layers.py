"""The layers of a captured block in few launches, for targets and for the draft model.

What is between the matrix products is fused, with what splits them. Products of plain weights run as was
found to be the fastest for their shapes; all others, quantized ones and those with a bias among them, are
the layer's own, and so are experts. Under tensor parallelism the sum over the ranks goes with the norm
that follows it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled
from sglang.srt.distributed import get_tensor_model_parallel_world_size
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import nn

from sglang_dflash.gpu.experts import can_run_experts, is_sparse, run_experts
from sglang_dflash.gpu.fp8 import Fp8Rows, reads_fp8
from sglang_dflash.gpu.fused_attention import can_fuse, is_plain_norm, norm_rope_store
from sglang_dflash.gpu.kernels.add_norm import add_norm
from sglang_dflash.gpu.kernels.skinny_matmul import MOST_ROWS, ROOMS, room_for
from sglang_dflash.gpu.kernels.swiglu import swiglu, swiglu_fp8
from sglang_dflash.gpu.products import multiply
from sglang_dflash.gpu.rank_sums import RankSums
from sglang_dflash.gpu.tilings import MOST_SEARCHED, Key, Kind, Tilings

# Which turn of the ranks' shared memory a sum takes (`kernels/sum_add_norm.py`).
ATTENTION, MLP = 0, 1


@dataclass(frozen=True)
class FusedLayers:
    """Decoder layers that are run together.

    Attributes:
        last_norm: after the last of them.
        tilings: how their products run.
        ranks: sums over the ranks; None where there is one rank.
    """

    layers: Sequence[nn.Module]
    last_norm: RMSNorm
    tilings: Tilings
    ranks: RankSums | None

    def run(
        self,
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
        normed = self.layers[0].input_layernorm(x)
        for i, layer in enumerate(self.layers):
            if i > 0:
                reader = layer.self_attn.qkv_proj
                normed, residual = self._add_norm(x, residual, layer.input_layernorm, MLP, reader)
            if i in taps:
                tapped.append(residual)
            x = self._attend(layer.self_attn, positions, normed, forward_batch)
            reader = getattr(layer.mlp, "gate_up_proj", None)
            normed, residual = self._add_norm(
                x, residual, layer.post_attention_layernorm, ATTENTION, reader
            )
            with get_global_expert_distribution_recorder().with_current_layer(i):
                x = self._mlp(layer.mlp, normed, forward_batch)
        normed, _ = self._add_norm(x, residual, self.last_norm, MLP)
        return normed, tapped

    def _attend(
        self,
        attention: nn.Module,
        positions: torch.Tensor,
        x: torch.Tensor | Fp8Rows,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """[rows, hidden] → this rank's part of the same, or its parts."""
        qkv = self._product(attention.qkv_proj, x, Kind.SUMMED)
        q = norm_rope_store(attention, positions, qkv, x.dtype, forward_batch)
        attended = attention.attn(q, None, None, forward_batch, save_kv_cache=False)
        return self._product(attention.o_proj, attended, self._after(len(x)))

    def _mlp(
        self, mlp: nn.Module, x: torch.Tensor | Fp8Rows, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """[rows, hidden] → this rank's part of the same, or its parts."""
        if is_sparse(mlp):
            return run_experts(mlp, x, forward_batch)
        if reads_fp8(mlp.gate_up_proj) and reads_fp8(mlp.down_proj):
            activated = swiglu_fp8(whole_product(mlp.gate_up_proj, x))
        else:
            activated = self._product(mlp.gate_up_proj, x, Kind.SWIGLU)
        return self._product(mlp.down_proj, activated, self._after(len(x)))

    def _after(self, rows: int) -> Kind:
        """What comes after a product that the norm follows: whether it adds parts."""
        return Kind.SUMMED if self.ranks is None or self.ranks.adds_parts(rows) else Kind.WHOLE

    def _product(self, linear: nn.Module, x: torch.Tensor | Fp8Rows, kind: Kind) -> torch.Tensor:
        """[rows, in] → [rows, out], or the parts of it, [parts, rows, out] float32."""
        key = key_of(linear, kind, room_for(len(x)) or len(x))
        plain = key is not None and x.dtype == linear.weight.dtype
        if plain and (choice := self.tilings.get(key)) is not None:
            return multiply(x, linear.weight, choice, kind is Kind.SWIGLU)
        y = whole_product(linear, x)
        return swiglu(y) if kind is Kind.SWIGLU else y

    def _add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: RMSNorm,
        turn: int,
        reader: nn.Module | None = None,
    ) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor]:
        """Norm of the sum, as the layer takes it that reads it, and the sum."""
        if self.ranks is None:
            in_fp8 = reads_fp8(reader)
            return add_norm(x, residual, norm.weight, norm.variance_epsilon, in_fp8)
        return self.ranks.add_norm(x, residual, norm, turn)


def whole_product(linear: nn.Module, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
    """A layer's own product, of which other ranks may have parts: [rows, in] → [rows, out]."""
    if isinstance(linear, RowParallelLinear):
        return linear(x, skip_all_reduce=True)[0]
    return linear(x)[0]


def fuse_layers(
    layers: Sequence[nn.Module],
    last_norm: RMSNorm,
    tilings: Tilings,
    ranks: RankSums | None,
    rows: Iterable[int] = (),
) -> FusedLayers | None:
    """Layers to be run together, tilings found for their products; None where they cannot be.

    Args:
        rows: of passes over more than tilings are for, of which cuBLAS's fastest algorithms are looked for.
    """
    if not can_fuse_layers(layers) or not is_plain_norm(last_norm):
        return None
    fused = FusedLayers(layers, last_norm, tilings, ranks)
    weights: dict[Key, list[torch.Tensor]] = {}
    for room in (*ROOMS, *sorted(n for n in set(rows) if MOST_ROWS < n <= MOST_SEARCHED)):
        for linear, kind in products_of(fused, room):
            if (key := key_of(linear, kind, room)) is not None:
                weights.setdefault(key, []).append(linear.weight)
    tilings.find(weights)
    return fused


def products_of(fused: FusedLayers, rows: int) -> Iterator[tuple[nn.Module, Kind]]:
    """The matrix products that layers run over so many rows, in their order, without those of experts."""
    after = fused._after(rows)
    for layer in fused.layers:
        yield layer.self_attn.qkv_proj, Kind.SUMMED
        yield layer.self_attn.o_proj, after
        if not is_sparse(layer.mlp):
            yield layer.mlp.gate_up_proj, Kind.SWIGLU
            yield layer.mlp.down_proj, after


def key_of(linear: nn.Module, kind: Kind, room: int) -> Key | None:
    """What a choice for a product is found by; None where it must be the layer's own.

    Args:
        room: for its rows, or these if they are more than any room is for.
    """
    plain = isinstance(linear.quant_method, UnquantizedLinearMethod) and linear.bias is None
    if not plain or linear.weight.dtype != torch.bfloat16 or not linear.weight.is_contiguous():
        return None
    size, depth = linear.weight.shape
    if room > MOST_ROWS and kind is Kind.SUMMED:
        kind = Kind.WHOLE  # cuBLAS adds parts itself
    return Key(size // 2 if kind is Kind.SWIGLU else size, depth, kind, room)


def can_fuse_layers(layers: Sequence[nn.Module]) -> bool:
    """Whether layers have what `FusedLayers` runs, split over all ranks.

    Deterministic inference wants products that round alike however many rows they have; these do not.
    """
    return not is_batch_invariant_mode_enabled() and all(map(_can_fuse_layer, layers))


def _can_fuse_layer(layer: nn.Module) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    if not can_fuse(attention) or not all(map(is_plain_norm, norms)):
        return False
    if not _is_column(attention.qkv_proj) or not _is_row(attention.o_proj):
        return False
    if is_sparse(mlp):
        return can_run_experts(mlp)
    both = hasattr(mlp, "gate_up_proj") and hasattr(mlp, "down_proj")
    return both and _is_column(mlp.gate_up_proj) and _is_row(mlp.down_proj)


def _is_column(linear: nn.Module) -> bool:
    return (
        isinstance(linear, ColumnParallelLinear)
        and not linear.gather_output
        and not linear.skip_bias_add
        and linear.tp_size == get_tensor_model_parallel_world_size()
    )


def _is_row(linear: nn.Module) -> bool:
    return (
        type(linear) is RowParallelLinear
        and linear.input_is_parallel
        and not linear.skip_bias_add
        and linear.tp_size == get_tensor_model_parallel_world_size()
    )
