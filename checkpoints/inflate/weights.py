"""Weights of a large transformer that computes what a small one does.

Hidden dimensions of the large one, in this order: the small one's, further copies of them, one that holds a
constant, and the rest, which are always zero. Norms take the copies and the constant out again, so whatever
reads normed states may have random columns for all but the small one's. What would bring something else into
the result is cut off by zeros in `o_proj` and `down_proj`; all that lies behind is random.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from checkpoints.inflate.sizes import Size, copies

Weights = dict[str, torch.Tensor]
STD = 0.02  # of random weights, as models of these families begin
# Logits of tokens that the small vocabulary lacks are - CONSTANT * GAIN * AGAINST over the root mean square of
# the last layer's states: -131,072 at 1 and below -100 up to 1,000.
CONSTANT, GAIN, AGAINST = 2.0**-12, 2.0**12, 2.0**17


class Filler:
    """Random weights: pieces of one table of normal numbers, because copying is faster than drawing."""

    SIZE = 1 << 22

    def __init__(self, seed: int):
        self._generator = torch.Generator().manual_seed(seed)
        numbers = torch.empty(self.SIZE).normal_(0, STD, generator=self._generator)
        self._table = numbers.bfloat16()

    def __call__(self, *shape: int) -> torch.Tensor:
        """bfloat16 of that shape, with standard deviation `STD`."""
        out = torch.empty(shape, dtype=torch.bfloat16)
        flat, half = out.view(-1), self.SIZE // 2
        for start in range(0, len(flat), half):
            piece = flat[start : start + half]
            offset = int(torch.randint(half, (1,), generator=self._generator))
            piece.copy_(self._table[offset : offset + len(piece)])
        return out


class Inflation:
    """Writes weights of a transformer of size `small` into the shapes of one of size `large`.

    Attributes:
        norm: factor on the weights of the norms over hidden states; its square is that on their eps.
        exact: whether all factors are powers of 2, so that no weight is rounded.
    """

    def __init__(self, small: Size, large: Size, fill: Filler):
        self.small, self.large, self._fill = small, large, fill
        self._copies = copies(small.hidden, large.hidden)
        self._constant = len(self._copies) * small.hidden
        self.norm = math.sqrt(sum(c * c for c in self._copies) * small.hidden / large.hidden)
        self._stretch = large.head_dim // small.head_dim
        # Attention divides by the root of the head size. Of Q every other number, say, is zero, and its norm
        # makes up for just as much.
        self._query = 1.0 if small.qk_norm else math.sqrt(self._stretch)
        self.exact = all(math.log2(factor).is_integer() for factor in (self.norm, self._query))

    def embedding(self, small: torch.Tensor) -> torch.Tensor:
        """[vocab, hidden]; rows of unused tokens are random."""
        rows = torch.cat([small, self._fill(self.large.vocab - len(small), self.small.hidden)])
        out = torch.zeros(self.large.vocab, self.large.hidden, dtype=torch.bfloat16)
        self._write(out.T, rows.T)
        out[:, self._constant] = CONSTANT
        return out

    def head(self, small: torch.Tensor) -> torch.Tensor:
        """[vocab, hidden], to read what `final_norm` gives; unused tokens never win."""
        out = self._fill(self.large.vocab, self.large.hidden)
        out[: len(small), : self.small.hidden] = small
        out[: len(small), self._constant] = 0
        out[len(small) :, self._constant] = -AGAINST
        return out

    def final_norm(self, small: torch.Tensor) -> torch.Tensor:
        """[hidden]; lets the constant through."""
        out = self.inner_norm(small)
        out[self._constant] = GAIN
        return out

    def inner_norm(self, small: torch.Tensor | None) -> torch.Tensor:
        """[hidden]; takes copies and constant out. Without a small one, for a layer that is cut off."""
        out = 1 + self._fill(self.large.hidden)
        out[: self.small.hidden] *= self.norm
        if small is not None:
            out[: self.small.hidden] = small.float() * self.norm
        out[self.small.hidden : self._constant + 1] = 0
        return out

    def taps(self, small: torch.Tensor, read: Sequence[int], taps: Sequence[int]) -> torch.Tensor:
        """`fc` of a drafter, [hidden, taps * hidden]; taps that the small one lacks are cut off.

        Args:
            small: [small hidden, len(read) * small hidden].
            read: large layers that stand for those that the small drafter reads, in its order.
            taps: large layers that the large drafter reads, in its order.
        """
        width = self.small.hidden
        out = torch.zeros(width, len(taps), self.large.hidden, dtype=torch.bfloat16)
        for part, layer in zip(small.split(width, dim=1), read, strict=True):
            out[:, taps.index(layer), :width] += part
        return self._written(out.flatten(1))

    def layer(self, small: Mapping[str, torch.Tensor] | None) -> Weights:
        """Weights of a layer by their names inside it; without a small one, of a layer that changes nothing."""
        names = ("input_layernorm.weight", "post_attention_layernorm.weight")
        norms = {name: self.inner_norm(small and small[name]) for name in names}
        return norms | self._attention(small) | self._mlp(small)

    def _attention(self, small: Mapping[str, torch.Tensor] | None) -> Weights:
        mine, its, stretch = self.large, self.small, self._stretch
        heads, group, dim = mine.kv_heads, mine.group, mine.head_dim
        q = self._fill(heads, group, dim, mine.hidden)
        k, v = (self._fill(heads, dim, mine.hidden) for _ in "kv")
        o = torch.zeros(mine.hidden, heads, group, dim, dtype=torch.bfloat16)
        norms = {"q_norm": 1 + self._fill(dim), "k_norm": 1 + self._fill(dim)}
        if small is not None:
            get = lambda name: small[f"self_attn.{name}.weight"]  # noqa: E731
            kv = (its.kv_heads, its.head_dim, its.hidden)
            # Dimension i turns by the angle of the large i * stretch. K has copies in those between, which
            # keep its mean square, and Q zeros, which make them not count.
            used = q[: its.kv_heads, : its.group]
            used[:] = used * (torch.arange(dim) % stretch == 0)[:, None]
            used[:, :, ::stretch, : its.hidden] = (
                get("q_proj").view(its.kv_heads, its.group, *kv[1:]).float() * self._query
            )
            k[: its.kv_heads, :, : its.hidden] = (
                get("k_proj").view(kv).repeat_interleave(stretch, 1)
            )
            v[: its.kv_heads, : its.head_dim, : its.hidden] = get("v_proj").view(kv)
            shape = (its.hidden, its.kv_heads, its.group, its.head_dim)
            self._write(
                o[:, : its.kv_heads, : its.group, : its.head_dim], get("o_proj").view(shape)
            )
            if its.qk_norm:
                norms["q_norm"][::stretch] = get("q_norm")
                norms["k_norm"] = get("k_norm").repeat_interleave(stretch)
        products = {
            "q_proj": q.flatten(0, 2),
            "k_proj": k.flatten(0, 1),
            "v_proj": v.flatten(0, 1),
            "o_proj": o.flatten(1),
        }
        return _named("self_attn", products | norms if mine.qk_norm else products)

    def _mlp(self, small: Mapping[str, torch.Tensor] | None) -> Weights:
        if not self.large.experts:
            return _named("mlp", self._expert(small))
        # Whichever experts a router chooses, their normalized weights sum to one.
        weights = {"mlp.gate.weight": self._fill(self.large.experts, self.large.hidden)}
        for expert in range(self.large.experts):
            weights |= _named(f"mlp.experts.{expert}", self._expert(small))
        return weights

    def _expert(self, small: Mapping[str, torch.Tensor] | None) -> Weights:
        hidden, neurons = self.large.hidden, self.large.intermediate
        gate, up = (self._fill(neurons, hidden) for _ in range(2))
        down = torch.zeros(hidden, neurons, dtype=torch.bfloat16)
        if small is not None:
            for out, name in ((gate, "gate_proj"), (up, "up_proj")):
                out[: self.small.intermediate, : self.small.hidden] = small[f"mlp.{name}.weight"]
            self._write(down[:, : self.small.intermediate], small["mlp.down_proj.weight"])
        return {"gate_proj": gate, "up_proj": up, "down_proj": down}

    def _written(self, small: torch.Tensor) -> torch.Tensor:
        """What writes hidden states: [small hidden, n] → [hidden, n]."""
        out = torch.zeros(self.large.hidden, small.shape[1], dtype=torch.bfloat16)
        self._write(out, small)
        return out

    def _write(self, out: torch.Tensor, small: torch.Tensor) -> None:
        width = self.small.hidden
        for index, factor in enumerate(self._copies):
            out[index * width : (index + 1) * width] = factor * small


def _named(part: str, products: Weights) -> Weights:
    return {f"{part}.{name}.weight": weight for name, weight in products.items()}
