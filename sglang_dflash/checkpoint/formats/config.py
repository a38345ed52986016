"""A draft model in the terms that the rest of the package uses, whatever format it came in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sight:
    """Which keys a row of a block sees in one layer.

    Attributes:
        causal: in its own block, only rows up to itself.
        window: how many context tokens; None for all.
        from_block: the window is that of the block's first row for every row, as speculators trains
            it. Otherwise each row has its own, which begins `window - 1` positions before it, as
            z-lab trains it.
    """

    causal: bool = False
    window: int | None = None
    from_block: bool = False

    def __str__(self) -> str:
        inside = "causal inside the block" if self.causal else "both ways inside the block"
        return inside if self.window is None else f"a window of {self.window} tokens, {inside}"


@dataclass(frozen=True)
class DraftConfig:
    """A draft model.

    Attributes:
        path: local folder of the checkpoint.
        format: "z-lab" or "speculators".
        block_size: tokens in a block, the bonus token (slot 0) included.
        default_width: rows of a block unless the user asks for another number.
        mask_token_id: token id that fills slots 1..block_size-1.
        target_layer_ids: 0-based target layers whose outputs are tapped, in the order in which `fc` reads
            them; -1 is the embedding.
        num_target_layers: depth of the target that it was trained for, or None if not said.
        target_hidden_size: width of one tapped hidden state.
        vocab_size: of the target.
        draft_vocab_size: tokens that can be drafted; `vocab_size` unless the vocabulary is reduced.
        hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim,
        intermediate_size, rms_norm_eps, max_position_embeddings: shape of the draft model.
        layers: what each layer sees.
        rope: `rope_type`, `rope_theta` and what else the type needs, in transformers' names.
        attention_bias, mlp_bias: whether the products of attention and MLP have biases.
        qk_norm: whether heads of Q and K are normed, as in Qwen3 and not in Llama.
        embedding_scale: factor on the embeddings of a block.
        own_embedding, own_head: whether the checkpoint's embedding and LM head are used; otherwise they
            are the target's.
        tied: whether an own embedding is the LM head, too.
        verifier: target that the checkpoint names, as a folder or Hugging Face id.
        quantization: how its weights are stored, as config.json says; None for plain.
    """

    path: str
    format: str
    block_size: int
    default_width: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    layers: tuple[Sight, ...]
    rope: dict[str, Any]
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = True
    embedding_scale: float = 1.0
    own_embedding: bool = False
    own_head: bool = False
    tied: bool = False
    verifier: str | None = None
    quantization: dict[str, Any] | None = None

    @property
    def reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size != self.vocab_size

    @property
    def taps(self) -> tuple[int, ...]:
        """The tapped layers, each once and ascending, as the target hands them out."""
        return tuple(sorted(set(self.target_layer_ids)))

    def kv_heads_per_rank(self, tp_size: int) -> int:
        """KV heads on one rank; fewer heads than ranks are replicated."""
        return max(1, self.num_key_value_heads // tp_size)
