"""The DFlash drafter: one non-causal pass proposes a whole block (arXiv 2602.06036)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .modules import Layer, Shape, rope_at
from .target import Target
from .tokenizer import MASK_ID


@dataclass(frozen=True)
class DraftShape:
    """The drafter's layers, its block and the target layers that it reads."""

    layers: Shape = Shape(num_layers=2)
    block_size: int = 16
    # Never the last layer: what HF reports there is already normed.
    target_layer_ids: tuple[int, ...] = (0, 1, 2)


class Drafter(nn.Module):
    """Reads the target's hidden states as context; owns neither embedding nor LM head."""

    def __init__(self, shape: DraftShape):
        super().__init__()
        self.shape = shape
        width = shape.layers.hidden_size
        self.fc = nn.Linear(len(shape.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, shape.layers.norm_eps)
        self.layers = nn.ModuleList(Layer(shape.layers) for _ in range(shape.layers.num_layers))
        self.norm = nn.RMSNorm(width, shape.layers.norm_eps)

    def tap(self, layer_outputs: list[Tensor]) -> Tensor:
        """[B, S, taps * hidden]: what the drafter keeps of a target pass."""
        return torch.cat([layer_outputs[i] for i in self.shape.target_layer_ids], dim=-1)

    def forward(self, target: Target, tokens: Tensor, anchors: Tensor, taps: Tensor) -> Tensor:
        """Logits [B, A, block - 1, vocab] of the slots after each anchor.

        tokens: int64 [B, A], the token at each anchor (the bonus token); anchors: int64 [B, A],
        their positions; taps: [B, S, taps * hidden] at positions 0..S-1, of which a block sees
        those strictly before its anchor. The A blocks of a row do not see each other.
        """
        block, (rows, count) = self.shape.block_size, anchors.shape
        ids = torch.full((rows, count, block), MASK_ID, device=tokens.device)
        ids[..., 0] = tokens
        x = target.embed_tokens(ids).flatten(1, 2)  # [B, A * block, hidden]
        positions = anchors[..., None] + torch.arange(block, device=anchors.device)
        context = self.hidden_norm(self.fc(taps))  # [B, S, hidden]
        rope = rope_at(positions.flatten(1), self.shape.layers)
        context_rope = rope_at(_positions_of(context), self.shape.layers)
        mask = _block_mask(anchors, block, context.shape[1])
        for layer in self.layers:
            seen = layer.self_attn.keys_values(context, context_rope)
            x = layer(x, rope, mask, lambda k, v, seen=seen: _after(seen, (k, v)))
        x = self.norm(x).unflatten(1, (count, block))
        return target.head(x[:, :, 1:])


def _positions_of(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])


def _after(context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Context keys and values followed by the blocks' own."""
    keys, values = (torch.cat(pair, dim=2) for pair in zip(context, own, strict=True))
    return keys, values


def _block_mask(anchors: Tensor, block: int, context: int) -> Tensor:
    """Bool [B, 1, A * block, S + A * block]: the context before the anchor and the own block."""
    rows, count = anchors.shape
    before = torch.arange(context, device=anchors.device) < anchors[..., None]  # [B, A, S]
    owner = torch.arange(count, device=anchors.device).repeat_interleave(block)
    own = (owner[:, None] == owner).expand(rows, -1, -1)
    return torch.cat((before.repeat_interleave(block, dim=1), own), dim=-1)[:, None]
