"""The transformer parts that target and drafter share; parameter names are those of HF Qwen3.

Shapes: B batch, T queries, S keys, D head width. Attention tensors are [B, heads, T or S, D].
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# cos and sin of the rotation angles, each float32 [B, 1, T, D].
Rope = tuple[Tensor, Tensor]
# Takes the keys and values of the queries' own tokens, returns all that a layer attends to.
Extend = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Shape:
    """The numbers that a Qwen3 config.json states; the defaults are the bundled target's."""

    num_layers: int = 4
    hidden_size: int = 256
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    vocab_size: int = 768
    max_positions: int = 4096
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6


def rope_at(positions: Tensor, shape: Shape) -> Rope:
    """The rotation at int64 positions [B, T]."""
    exponents = torch.arange(0, shape.head_dim, 2, device=positions.device) / shape.head_dim
    angles = positions[:, None, :, None].float() * shape.rope_theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)  # [B, 1, T, D]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Apply the rotation to [B, heads, T, D]; halves are paired, as in GPT-NeoX."""
    cos, sin = (table.to(x.dtype) for table in rope)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.head_dim = shape.head_dim
        self.group = shape.num_heads // shape.num_kv_heads
        width, kv_width = shape.num_heads * self.head_dim, shape.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, shape.norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, shape.norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))  # [B, T, heads, D]

    def queries(self, x: Tensor, rope: Rope) -> Tensor:
        return rotate(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2), rope)

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        keys = rotate(self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2), rope)
        return keys, self._heads(self.v_proj(x)).transpose(1, 2)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend; `mask` is bool [B, 1, T, S], True where visible, and None means causal."""
        k, v = k.to(q.dtype), v.to(q.dtype)
        if mask is None:
            k, v = (x.repeat_interleave(self.group, dim=1) for x in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            # Heads of a group become further queries: long caches need not be copied for each.
            grouped = q.unflatten(1, (-1, self.group)).flatten(2, 3)
            mask = mask.repeat(1, 1, self.group, 1)
            out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask)
            out = out.unflatten(2, (self.group, -1)).flatten(1, 2)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SiLU-gated feed-forward."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A pre-norm block; `extend` adds the keys and values beyond the queries' own tokens."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(
        self, x: Tensor, rope: Rope, mask: Tensor | None, extend: Extend | None = None
    ) -> Tensor:
        normed = self.input_layernorm(x)
        k, v = self.self_attn.keys_values(normed, rope)
        if extend is not None:
            k, v = extend(k, v)
        x = x + self.self_attn(self.self_attn.queries(normed, rope), k, v, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


def initialize(model: nn.Module, generator: torch.Generator) -> None:
    """Draw every matrix from N(0, 0.02²) on the CPU, so that a seed means the same everywhere."""
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02, generator=generator)
