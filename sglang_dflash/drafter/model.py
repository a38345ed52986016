"""The draft model: a small transformer that borrows embedding and LM head, or has its own."""

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
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models.utils import apply_qk_norm
from torch import nn

from sglang_dflash.checkpoint.dequantize import plain_weights
from sglang_dflash.checkpoint.formats.config import DraftConfig
from sglang_dflash.checkpoint.formats.weights import (
    canonical_name,
    draft_token_ids,
    ignored_weights,
)
from sglang_dflash.checkpoint.load import load_config
from sglang_dflash.drafter.draft_vocabulary import DraftVocabulary
from sglang_dflash.drafter.fp8 import Fp8Products
from sglang_dflash.drafter.rope import draft_rope
from sglang_dflash.drafter.window_attention import window_attention
from sglang_dflash.errors import DFlashError
from sglang_dflash.gpu.block_attention import BlockAttention
from sglang_dflash.gpu.fused_attention import can_fuse, fused_attention
from sglang_dflash.gpu.fused_layers import FusedLayers, fuse_layers
from sglang_dflash.gpu.rank_sums import RankSums
from sglang_dflash.gpu.tilings import Tilings

# Weights of a checkpoint that share one parameter here: name → parameter, shard.
_STACKED = {
    ".q_proj.": (".qkv_proj.", "q"),
    ".k_proj.": (".qkv_proj.", "k"),
    ".v_proj.": (".qkv_proj.", "v"),
    ".gate_proj.": (".gate_up_proj.", 0),
    ".up_proj.": (".gate_up_proj.", 1),
}


class DFlashAttention(nn.Module):
    """Queries of a block over context and block.

    Attributes:
        sight: which keys a row sees. Without a window the attention backend computes it; a layer that
            is not causal is ENCODER_ONLY to it.
        q_norm, k_norm: None where heads are not normed.
        fuses: whether small kernels are fused in captured blocks, where they can be.
    """

    def __init__(self, config: DraftConfig, layer_id: int, rotary_emb: RotaryEmbedding):
        super().__init__()
        heads, kv_heads, head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        tp_size, bias = get_tensor_model_parallel_world_size(), config.attention_bias
        self.sight, self.fuses = config.layers[layer_id], True
        self.head_dim = head_dim
        self.num_kv_heads = config.kv_heads_per_rank(tp_size)
        self.q_size, self.kv_size = heads // tp_size * head_dim, self.num_kv_heads * head_dim
        self.qkv_proj = QKVParallelLinear(config.hidden_size, head_dim, heads, kv_heads, bias=bias)
        self.o_proj = RowParallelLinear(heads * head_dim, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(head_dim, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps=config.rms_norm_eps) if config.qk_norm else None
        self.rotary_emb = rotary_emb
        self.attn = RadixAttention(
            heads // tp_size,
            head_dim,
            head_dim**-0.5,
            num_kv_heads=self.num_kv_heads,
            layer_id=layer_id,
            attn_type=AttentionType.DECODER if self.sight.causal else AttentionType.ENCODER_ONLY,
        )

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """[rows, hidden] → [rows, hidden]."""
        captured = isinstance(forward_batch.attn_backend, BlockAttention)
        if captured and self.fuses and can_fuse(self):
            return fused_attention(self, positions, x, forward_batch)
        qkv, _ = self.qkv_proj(x)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        if self.q_norm is not None:
            q, k = apply_qk_norm(
                q=q, k=k, q_norm=self.q_norm, k_norm=self.k_norm, head_dim=self.head_dim
            )
        q, k = self.rotary_emb(positions, q, k)
        if self.sight.window is None:
            attended = self.attn(q, k, v, forward_batch)
        else:
            attended = window_attention(q, k, v, self.attn, self.sight, forward_batch)
        output, _ = self.o_proj(attended)
        return output


class DFlashMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [inner] * 2, bias=bias)
        self.down_proj = RowParallelLinear(inner, hidden, bias=bias)
        self.activation = SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, hidden]."""
        gate_up, _ = self.gate_up_proj(x)
        output, _ = self.down_proj(self.activation(gate_up))
        return output


class DFlashLayer(nn.Module):
    """Pre-norm transformer layer; carries the residual beside the stream, as SGLang does."""

    def __init__(self, config: DraftConfig, layer_id: int, rotary_emb: RotaryEmbedding):
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_id, rotary_emb)
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

    Attributes:
        draft: its config, in the package's own terms.
        fused: its layers as captured rounds run them; None until then, and where they cannot be fused.
        fp8: its products in FP8; None where they are not to be.
        tells_odds: whether it says how sure it is of its drafts.
    """

    def __init__(self, config, quant_config=None, prefix: str = ""):
        """
        Args:
            config: Hugging Face config with `dflash_checkpoint`, folder of the checkpoint, and
                `dflash_context_len`, how many positions a sequence can have.
        """
        super().__init__()
        self.config = config
        self.draft = draft = load_config(config.dflash_checkpoint)
        self.mask_token_id: int = draft.mask_token_id
        self.fc = ReplicatedLinear(
            len(draft.taps) * draft.target_hidden_size, draft.hidden_size, bias=False
        )
        self.hidden_norm = RMSNorm(draft.hidden_size, eps=draft.rms_norm_eps)
        positions = max(draft.max_position_embeddings, config.dflash_context_len)
        rotary_emb = draft_rope(draft, positions)
        self.layers = nn.ModuleList(
            DFlashLayer(draft, i, rotary_emb) for i in range(draft.num_hidden_layers)
        )
        self.norm = RMSNorm(draft.hidden_size, eps=draft.rms_norm_eps)
        self.fused: FusedLayers | None = None
        self.fp8: Fp8Products | None = None
        self.tells_odds = False
        self.embed_tokens = self.lm_head = None
        if draft.own_embedding:
            self.embed_tokens = VocabParallelEmbedding(draft.vocab_size, draft.hidden_size)
        if draft.own_head and not draft.tied:
            self.lm_head = ParallelLMHead(draft.draft_vocab_size, draft.hidden_size)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads a checkpoint; raises `DFlashError` on weights that are missing or left over."""
        parameters = dict(self.named_parameters())
        missing = {original for name in parameters for original in _checkpoint_names(name)}
        left_over, ignored = set(), ignored_weights(self.draft)
        if stored := self.draft.quantization:
            weights = plain_weights(weights, stored, self.draft.path)
        for name, tensor in weights:
            name = canonical_name(name)
            if name not in missing:
                left_over |= {name} - set(ignored)
                continue
            missing.remove(name)
            if name == "fc.weight":
                tensor = fold_taps(tensor, self.draft.target_layer_ids)
            parameter, shard = _parameter_of(name)
            loader = getattr(parameters[parameter], "weight_loader", default_weight_loader)
            loader(parameters[parameter], tensor, *([] if shard is None else [shard]))
        if missing or left_over:
            raise DFlashError(
                f"The draft checkpoint {self.draft.path} misses {sorted(missing)} and has left over "
                f"{sorted(left_over)}: download it again."
            )

    def finish_loading(self, target: nn.Module) -> None:
        """Borrows the target's embedding and LM head, and stacks what context K/V needs."""
        head = self.embed_tokens if self.draft.tied else self.lm_head
        token_ids = draft_token_ids(self.draft)
        # In a tuple, so that the target's modules do not become part of this one.
        self._borrowed = (DraftVocabulary(target, self.draft, self.embed_tokens, head, token_ids),)
        attention = [layer.self_attn for layer in self.layers]
        self.k_norm_weight = self._kv_bias = None
        with torch.no_grad():
            self._kv_weight = torch.cat([a.qkv_proj.weight[a.q_size :] for a in attention])
            if self.draft.attention_bias:
                self._kv_bias = torch.cat([a.qkv_proj.bias[a.q_size :] for a in attention])
            if self.draft.qk_norm:
                self.k_norm_weight = torch.stack([a.k_norm.weight for a in attention])

    def run_in_fp8(self, least: int) -> None:
        """Products of weights with so many elements from now on; `fp8` can still change that."""
        products = Fp8Products(self, least)
        if products.any:
            self.fp8 = products
            products.use(True)

    def take_head_again(self) -> None:
        """After new weights of the target, of whose head there may be a copy in FP8."""
        vocabulary = self.vocabulary
        if vocabulary.fp8_head is not None:
            vocabulary.fp8_head.fill(vocabulary.plain_head)

    def fuse(self, tilings: Tilings, ranks: RankSums | None, rows: Iterable[int] = ()) -> None:
        """Fuses the layers for captured rounds; all ranks call it alike; see `fuse_layers`."""
        # What runs in FP8 has other products.
        rows = rows if self.fp8 is None else ()
        layers = fuse_layers(self.layers, self.norm, tilings, ranks, rows)
        self.use(layers, attention=True)

    def use(self, layers: FusedLayers | None, attention: bool) -> None:
        """How captured rounds run the layers: fused, or with their attention alone fused, where it can be, or not."""
        self.fused = layers
        for layer in self.layers:
            layer.self_attn.fuses = attention

    def settle(self) -> None:
        """Once it is known how it runs: frees what it does not need for that."""
        if self.fp8 is not None:
            self.fp8.keep()

    @property
    def vocabulary(self) -> DraftVocabulary:
        return self._borrowed[0]

    def context_kv(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """K (neither normed nor rotated) and V of all layers for `n` context tokens.

        Args:
            hidden_states: [n, taps * target_hidden], each tapped layer once, ascending.

        Returns:
            [n, layers * 2 * kv_heads * head_dim], K then V of each layer.
        """
        projected, _ = self.fc(hidden_states.to(self.fc.weight.dtype))
        return torch.nn.functional.linear(
            self.hidden_norm(projected), self._kv_weight, self._kv_bias
        )

    @torch.no_grad()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch, **_
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Draft tokens of each block: [bs * width] int64 → [bs, width - 1] int64.

        If `tells_odds`, those and the log-odds that each is the token, [bs, width - 1] float32.
        """
        drafted = self.draft_states(input_ids, positions, forward_batch)
        drafts = forward_batch.spec_info.draft_token_num - 1
        if not self.tells_odds:
            return self.vocabulary.argmax(drafted).view(-1, drafts)
        tokens, log_odds = self.vocabulary.likeliest_with_odds(drafted)
        return tokens.view(-1, drafts), log_odds.view(-1, drafts)

    @torch.no_grad()
    def draft_states(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """What the LM head turns into draft tokens: [bs * width] int64 → [bs * (width - 1), hidden].

        Slot i predicts its own position, so slot 0, the bonus token, predicts nothing.
        """
        x, residual = self.vocabulary.embed(input_ids), None
        captured = isinstance(forward_batch.attn_backend, BlockAttention)
        if captured and self.fused is not None:
            x, _ = self.fused.run(x, positions, forward_batch)
        else:
            for layer in self.layers:
                x, residual = layer(positions, x, residual, forward_batch)
            x, _ = self.norm(x, residual)
        width = forward_batch.spec_info.draft_token_num
        return x.view(-1, width, x.shape[-1])[:, 1:].flatten(0, 1)


def fold_taps(weight: torch.Tensor, layer_ids: tuple[int, ...]) -> torch.Tensor:
    """`fc` for hidden states that come once a layer and ascending, whatever a checkpoint lists.

    Args:
        weight: [hidden, len(layer_ids) * target_hidden].

    Returns:
        [hidden, taps * target_hidden]; the columns of a layer that is listed twice are added up.
    """
    parts = weight.chunk(len(layer_ids), dim=1)
    by_layer = {
        layer: sum(part for part, id in zip(parts, layer_ids, strict=True) if id == layer)
        for layer in sorted(set(layer_ids))
    }
    return torch.cat(list(by_layer.values()), dim=1)


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
