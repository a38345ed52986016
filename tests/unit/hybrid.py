"""Tiny random targets with linear attention, written by transformers' own classes."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.unit.decoders import MASK, SIZES, UNTIED, fill

CONTEXT = 1024
# All experts are taken, so that no rounding decides which; of four layers one attends to all.
QWEN3_NEXT = (
    SIZES
    | UNTIED
    | dict(
        num_hidden_layers=6,
        full_attention_interval=3,
        max_position_embeddings=CONTEXT,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=4,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        mlp_only_layers=[],
    )
)


def write_qwen3_next(folder: Path, embedding: float = 1.0) -> PreTrainedModel:
    """Writes a checkpoint with random weights, and gives its model; `embedding` as of `write_target`."""
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(**QWEN3_NEXT)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        fill(name, weight.data)
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    with torch.no_grad():
        embeddings.mul_(embedding)
        embeddings[MASK] = 0
        head.copy_(embeddings)
    model.save_pretrained(folder)
    return model
