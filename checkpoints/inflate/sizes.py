"""How a small transformer fits into a large one: sizes, copies of hidden dimensions, places of layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from sglang_dflash.errors import DFlashError


@dataclass(frozen=True)
class Size:
    """A transformer's sizes, in the words of its config.json.

    Attributes:
        intermediate: neurons of the MLP, or of each expert.
        experts: 0 for a dense model.
        qk_norm: whether heads of Q and K are normed, as in Qwen3 and not in Llama.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int
    qk_norm: bool

    @classmethod
    def of(cls, config: dict[str, Any], qk_norm: bool) -> Size:
        """Reads a complete config.json."""
        experts = config.get("num_experts", 0)
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            intermediate=config["moe_intermediate_size" if experts else "intermediate_size"],
            vocab=config["vocab_size"],
            experts=experts,
            qk_norm=qk_norm,
        )

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.kv_heads

    def parameters(self, taps: int = 0) -> int:
        """Of a target, whose embedding and LM head count; with taps, of a drafter, which has neither."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        mlp = 3 * self.hidden * self.intermediate * max(1, self.experts)
        outside = taps * self.hidden**2 if taps else 2 * self.vocab * self.hidden
        return self.layers * (attention + mlp + self.experts * self.hidden) + outside


def check_fit(name: str, small: Size, shape: str, large: Size) -> None:
    """Whether `small` can be written into `large`.

    Args:
        name, shape: what the sentence calls them.

    Raises:
        DFlashError: names the first size that does not fit.
    """
    limits = (
        ("hidden_size", small.hidden, large.hidden - 1),  # one is kept for the unused vocabulary
        ("num_key_value_heads", small.kv_heads, large.kv_heads),
        ("query heads of a KV head", small.group, large.group),
        ("neurons of an MLP", small.intermediate, large.intermediate),
        ("vocab_size", small.vocab, large.vocab),
        ("num_hidden_layers", small.layers, large.layers),
    )
    for what, mine, most in limits:
        if mine > most:
            raise DFlashError(
                f"{name} does not fit into {shape}: {what} is {mine} and can be at most {most}; give a smaller pair or "
                "a larger shape."
            )
    if large.head_dim % small.head_dim:
        raise DFlashError(
            f"{name} does not fit into {shape}: head_dim {large.head_dim} is not a multiple of {small.head_dim}, so "
            "RoPE would turn by other angles; give a pair whose head_dim divides it."
        )


def copies(small: int, large: int) -> tuple[float, ...]:
    """Factors of the copies of `small` hidden dimensions that `large` ones hold; the first is 1.

    An RMSNorm over more dimensions sees another mean square, which its weight must make up for. With copies
    of the right factors the mean square is a power of 4 times the small one, so that this is a power of 2,
    which bfloat16 multiplies by exactly. Without room for them there is one copy, and weights are rounded.
    """
    rest = Fraction(large, small)
    while rest >= 4:
        rest /= 4
    factors, factor = [], Fraction(1)
    while rest and factor >= Fraction(1, 16):
        digit = rest // factor**2  # of the ratio, written with base 4
        factors += [float(factor)] * digit
        rest -= digit * factor**2
        factor /= 2
    exact = rest == 0 and len(factors) * small < large
    return tuple(factors) if exact else (1.0,)


@dataclass(frozen=True)
class Places:
    """Where the layers of a small target are in a large one; its other layers change nothing.

    Attributes:
        layers: of each small layer, ascending.
        taps: from a small layer to the large one that a drafter reads instead.
    """

    layers: tuple[int, ...]
    taps: dict[int, int]


def place(small: int, tapped: Iterable[int], large: int, taps: Sequence[int], shape: str) -> Places:
    """Places `small` layers so that what drafters read of them is there at the `taps` of a large target.

    Args:
        tapped: small layers that any drafter reads.

    Raises:
        DFlashError: they cannot be placed so.
    """
    tapped, free, layers, found = set(tapped), 0, [], {}
    for layer in range(small):
        layers.append(free)
        if layer in tapped:
            later = [tap for tap in sorted(taps) if tap >= free]
            if not later:
                raise DFlashError(
                    f"The drafters read the layers {sorted(tapped)} of the small target, for which the taps "
                    f"{list(taps)} of {shape} do not suffice: give drafters that read fewer layers."
                )
            found[layer] = free = later[0]
        free += 1
    if free > large:
        raise DFlashError(
            f"The small target's {small} layers do not fit into the {large} of {shape} when its taps are {list(taps)}: "
            "give a pair with fewer layers, or one that reads later ones."
        )
    return Places(tuple(layers), found)
