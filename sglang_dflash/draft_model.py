"""The draft model: a small transformer without embedding and LM head, which it borrows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from sglang.srt.distributed import get_tensor_model_parallel_world_size
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models.utils import apply_qk_norm
from sglang.srt.utils.hf_transformers_utils import get_rope_config
from torch import nn

from sglang_dflash.checkpoint import canonical_name
from sglang_dflash.errors import DFlashError
from sglang_dflash.fa3_attention import Fa3BlockAttention
from sglang_dflash.fused_attention import can_fuse, fused_attention
from sglang_dflash.fused_layers import can_fuse_layers, run_layers
from sglang_dflash.vocabulary import BorrowedVocabulary

# Weights of a checkpoint that share one parameter here: name → parameter, shard.
_STACKED = {
    ".q_proj.": (".qkv_proj.", "q"),
    ".k_proj.": (".qkv_proj.", "k"),
    ".v_proj.": (".qkv_proj.", "v"),
    ".gate_proj.": (".gate_up_proj.", 0),
    ".up_proj.": (".gate_up_proj.", 1),
}


class DFlashAttention(nn.Module):
    """Queries of a block over context and block; not causal, so ENCODER_ONLY."""

    def __init__(self, config, layer_id: int):
        super().__init__()
        heads, kv_heads, head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        tp_size = get_tensor_model_parallel_world_size()
        self.head_dim = head_dim
        self.num_kv_heads = max(1, kv_heads // tp_size)
        self.q_size, self.kv_size = heads // tp_size * head_dim, self.num_kv_heads * head_dim
        self.qkv_proj = QKVParallelLinear(config.hidden_size, head_dim, heads, kv_heads, bias=False)
        self.o_proj = RowParallelLinear(heads * head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, eps=config.rms_norm_eps)
        theta, scaling = get_rope_config(config)
        self.rotary_emb = get_rope(
            head_dim,
            rotary_dim=head_dim,
            max_position=max(config.max_position_embeddings, config.dflash_context_len),
            base=theta,
            rope_scaling=scaling,
        )
        self.attn = RadixAttention(
            heads // tp_size,
            head_dim,
            head_dim**-0.5,
            num_kv_heads=self.num_kv_heads,
            layer_id=layer_id,
            attn_type=AttentionType.ENCODER_ONLY,
        )

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """[rows, hidden] → [rows, hidden]."""
        if isinstance(forward_batch.attn_backend, Fa3BlockAttention) and can_fuse(self):
            return fused_attention(self, positions, x, forward_batch)
        qkv, _ = self.qkv_proj(x)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = apply_qk_norm(
            q=q, k=k, q_norm=self.q_norm, k_norm=self.k_norm, head_dim=self.head_dim
        )
        q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn(q, k, v, forward_batch))
        return output


class DFlashMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config):
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, [config.intermediate_size] * 2, bias=False
        )
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, hidden]."""
        gate_up, _ = self.gate_up_proj(x)
        output, _ = self.down_proj(self.activation(gate_up))
        return output


class DFlashLayer(nn.Module):
    """Pre-norm transformer layer; carries the residual beside the stream, as SGLang does."""

    def __init__(self, config, layer_id: int):
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_id)
        self.mlp = DFlashMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @property
    def attn(self) -> RadixAttention:
        return self.self_attn.attn

    def forward(
        self,
        positions: torch.Tensor,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        forward_batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stream and residual, [rows, hidden] each."""
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(positions, x, forward_batch)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class DFlashDraftModel(nn.Module):
    """The draft model as an SGLang model; weights carry z-lab's names.

    `finish_loading` must be called once between loading and the first forward pass.
    """

    def __init__(self, config, quant_config=None, prefix: str = ""):
        super().__init__()
        self.config = config
        taps = len(config.dflash_config["target_layer_ids"])
        target_hidden_size = getattr(config, "target_hidden_size", None) or config.hidden_size
        self.mask_token_id: int = config.dflash_config["mask_token_id"]
        self.fc = ReplicatedLinear(taps * target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads a z-lab checkpoint; raises `DFlashError` on a weight that is missing or left over."""
        parameters = dict(self.named_parameters())
        missing = {original for name in parameters for original in _checkpoint_names(name)}
        for name, tensor in weights:
            name = canonical_name(name)
            if name not in missing:
                raise DFlashError(
                    f"The draft checkpoint has a weight {name} that its config.json has no place for."
                )
            missing.remove(name)
            parameter, shard = _parameter_of(name)
            loader = getattr(parameters[parameter], "weight_loader", default_weight_loader)
            loader(parameters[parameter], tensor, *([] if shard is None else [shard]))
        if missing:
            raise DFlashError(
                f"The draft checkpoint misses {len(missing)} weights, among them {min(missing)}."
            )

    def finish_loading(self, target: nn.Module) -> None:
        """Borrows the target's embedding and LM head, and stacks what context K/V needs."""
        # In a tuple, so that the target's modules do not become part of this one.
        self._borrowed = (BorrowedVocabulary(target),)
        attention = [layer.self_attn for layer in self.layers]
        with torch.no_grad():
            self._kv_weight = torch.cat([a.qkv_proj.weight[a.q_size :] for a in attention])
            self.k_norm_weight = torch.stack([a.k_norm.weight for a in attention])

    def context_kv(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """K (neither normed nor rotated) and V of all layers for `n` context tokens.

        Args:
            hidden_states: [n, taps * target_hidden].

        Returns:
            [n, layers * 2 * kv_heads * head_dim], K then V of each layer.
        """
        projected, _ = self.fc(hidden_states.to(self.fc.weight.dtype))
        return torch.nn.functional.linear(self.hidden_norm(projected), self._kv_weight)

    @torch.no_grad()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch, **_
    ) -> torch.Tensor:
        """Draft tokens of each block: [bs * width] int64 → [bs, width - 1] int64.

        Slot i predicts its own position, so slot 0, the bonus token, predicts nothing.
        """
        (vocabulary,) = self._borrowed
        x, residual = vocabulary.embed(input_ids), None
        captured = isinstance(forward_batch.attn_backend, Fa3BlockAttention)
        if captured and can_fuse_layers(self.layers):
            x, _ = run_layers(self.layers, self.norm, x, positions, forward_batch)
        else:
            for layer in self.layers:
                x, residual = layer(positions, x, residual, forward_batch)
            x, _ = self.norm(x, residual)
        width = forward_batch.spec_info.draft_token_num
        drafted = x.view(-1, width, x.shape[-1])[:, 1:].flatten(0, 1)
        return vocabulary.argmax(drafted).view(-1, width - 1)


def _parameter_of(name: str) -> tuple[str, str | int | None]:
    """Parameter and shard into which a checkpoint's weight goes."""
    for part, (stacked, shard) in _STACKED.items():
        if part in name:
            return name.replace(part, stacked), shard
    return name, None


def _checkpoint_names(parameter: str) -> list[str]:
    """Names of the checkpoint's weights that make up a parameter."""
    parts = [part for part, (stacked, _) in _STACKED.items() if stacked in parameter]
    return [parameter.replace(_STACKED[part][0], part) for part in parts] or [parameter]


EntryClass = DFlashDraftModel
