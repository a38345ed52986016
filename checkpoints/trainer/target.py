"""The target: a Qwen3 decoder whose per-layer hidden states the drafter reads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .modules import Layer, Shape, rope_at


class KVCache:
    """Keys and values [B, kv_heads, capacity, D] for each layer, addressed by position.

    What lies beyond a row's committed length is scratch: it is written again before any query can
    see it, so rejecting drafted tokens costs nothing.
    """

    def __init__(self, shape: Shape, rows: int, capacity: int, like: Tensor):
        size = (shape.num_layers, rows, shape.num_kv_heads, capacity, shape.head_dim)
        self.keys, self.values = like.new_zeros(size), like.new_zeros(size)
        self.slots = torch.arange(capacity, device=like.device)

    def write(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new entries at positions [B, T]; return the layer's whole keys and values."""
        index = positions[:, None, :, None].expand_as(k)
        keys, values = self.keys[layer], self.values[layer]
        keys.scatter_(2, index, k.to(keys.dtype))
        values.scatter_(2, index, v.to(values.dtype))
        return keys, values

    def visible(self, positions: Tensor) -> Tensor:
        """Causal mask, bool [B, 1, T, capacity], for queries at positions [B, T]."""
        return self.slots <= positions[:, None, :, None]


class Target(nn.Module):
    """Qwen3 with tied embeddings."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(
        self, ids: Tensor, positions: Tensor | None = None, cache: KVCache | None = None
    ) -> list[Tensor]:
        """Each layer's output [B, T, hidden] for int64 ids [B, T].

        Without positions, a full causal pass from position 0, which fills a cache if there is one;
        with them, a pass that sees what the cache holds.
        """
        full = positions is None
        if full:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        x, outputs = self.embed_tokens(ids), []
        rope = rope_at(positions, self.shape)
        mask = None if full or cache is None else cache.visible(positions)
        for index, layer in enumerate(self.layers):

            def extend(k: Tensor, v: Tensor, at: int = index) -> tuple[Tensor, Tensor]:
                if cache is None:
                    return k, v
                stored = cache.write(at, positions, k, v)
                return (k, v) if full else stored

            x = layer(x, rope, mask, extend)
            outputs.append(x)
        return outputs

    def logits(self, last_output: Tensor) -> Tensor:
        """[..., vocab] from the last layer's output."""
        return self.head(self.norm(last_output))

    def head(self, normed: Tensor) -> Tensor:
        """The LM head alone, which the drafter borrows."""
        return F.linear(normed, self.embed_tokens.weight)
