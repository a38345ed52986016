"""Rotary embedding of the draft model: all angles in one table, whatever their type."""

from __future__ import annotations

import torch
from sglang.srt.layers.rotary_embedding import RotaryEmbedding, get_rope

from sglang_dflash.checkpoint.formats.config import DraftConfig


def draft_rope(config: DraftConfig, positions: int) -> RotaryEmbedding:
    """The rotary embedding of a draft model, for positions below `positions`."""
    if config.rope["rope_type"] != "default":
        return ScaledRotaryEmbedding(config, positions)
    return get_rope(
        config.head_dim,
        rotary_dim=int(config.head_dim * config.rope["partial_rotary_factor"]),
        max_position=positions,
        base=config.rope["rope_theta"],
    )


class ScaledRotaryEmbedding(RotaryEmbedding):
    """Cosines and sines of scaled RoPE, computed by transformers' own functions.

    Only the table differs from the release's class: what reads the table computes every type.
    """

    def __init__(self, config: DraftConfig, positions: int):
        self._frequencies = scaled_frequencies(config)
        inverse, _ = self._frequencies
        super().__init__(
            config.head_dim,
            rotary_dim=2 * len(inverse),
            max_position_embeddings=positions,
            base=config.rope["rope_theta"],
            is_neox_style=True,
            dtype=torch.get_default_dtype(),
        )

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        inverse, factor = self._frequencies
        positions = torch.arange(self.max_position_embeddings, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, inverse)
        table = torch.cat([angles.cos(), angles.sin()], dim=-1) * factor
        return table.to(torch.get_default_device())


def scaled_frequencies(config: DraftConfig) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [rotary_dim / 2] float32 on the CPU, and the factor on cosines and sines."""
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    shape = Qwen3Config(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope),
    )
    with torch.device("cpu"):
        return ROPE_INIT_FUNCTIONS[config.rope["rope_type"]](shape, device="cpu")
