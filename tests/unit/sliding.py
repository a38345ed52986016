"""Tiny random targets whose sliding layers have a pool of their own, of a window that is soon full, and what they are
asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM

from tests.unit.decoders import MASK, SIZES, UNTIED, fill

WINDOW, CONTEXT = 24, 1024
TOKENS = {"max_new_tokens": 5 * WINDOW, "ignore_eos": True}
SHARED = [(11 * i) % 300 + 5 for i in range(2 * WINDOW)]
PROMPTS = [
    SHARED[: 17 * (n % 4)] + [(7 * n + 31 * i) % 300 + 5 for i in range(n)]
    for n in (1, 2, 8, 21, 34, 55, 89, 144)
]
# Of MiMo-V2-Flash transformers knows nothing, but the release reads any config that has these fields.
MIMO = (
    SIZES
    | UNTIED
    | dict(
        architectures=["MiMoV2FlashForCausalLM"],
        model_type="llama",
        hidden_act="silu",
        max_position_embeddings=CONTEXT,
        hybrid_layer_pattern=[0, 1, 1, 0, 1, 1],
        moe_layer_freq=[0] * 6,
        n_routed_experts=1,
        layernorm_epsilon=1e-5,
        attention_bias=False,
        v_head_dim=8,
        swa_num_attention_heads=6,
        swa_num_key_value_heads=3,
        swa_head_dim=24,
        swa_v_head_dim=16,
        sliding_window=WINDOW,
        sliding_window_size=WINDOW,
        add_swa_attention_sink_bias=True,
        rope_theta=1e4,
    )
)


def write_mimo(folder: Path, embedding: float = 1.0, **own: Any) -> Path:
    """Sliding layers with sinks, other heads than the full ones, and more of them.

    Args:
        embedding: as of `write_target`.
    """
    torch.manual_seed(0)
    config = MIMO | own
    weights = {name: torch.zeros(shape) for name, shape in _mimo_weights(config).items()}
    for name, weight in weights.items():
        fill(name, weight)
        if "norm" in name:
            weight += 1
    embeddings = weights["model.embed_tokens.weight"].mul_(embedding)
    embeddings[MASK] = 0
    weights["lm_head.weight"].copy_(embeddings)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def _mimo_weights(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    for index, sliding in enumerate(config["hybrid_layer_pattern"]):
        prefix, layer = "swa_" * sliding, f"model.layers.{index}."
        heads, kv_heads = (
            config[f"{prefix}num_{kind}_heads"] for kind in ("attention", "key_value")
        )
        dim, v_dim = config[f"{prefix}head_dim"], config[f"{prefix}v_head_dim"]
        shapes |= {
            f"{layer}self_attn.q_proj.weight": (heads * dim, hidden),
            f"{layer}self_attn.k_proj.weight": (kv_heads * dim, hidden),
            f"{layer}self_attn.v_proj.weight": (kv_heads * v_dim, hidden),
            f"{layer}self_attn.o_proj.weight": (hidden, heads * v_dim),
            f"{layer}mlp.gate_proj.weight": (config["intermediate_size"], hidden),
            f"{layer}mlp.up_proj.weight": (config["intermediate_size"], hidden),
            f"{layer}mlp.down_proj.weight": (hidden, config["intermediate_size"]),
            f"{layer}input_layernorm.weight": (hidden,),
            f"{layer}post_attention_layernorm.weight": (hidden,),
        }
        if sliding and config["add_swa_attention_sink_bias"]:
            shapes[f"{layer}self_attn.attention_sink_bias"] = (heads,)
    return shapes


# Heads that kernels of a GPU know; of a drafter beside them, too.
ON_GPUS = dict(
    hidden_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    swa_num_attention_heads=4,
    swa_num_key_value_heads=4,
    head_dim=192,
    v_head_dim=128,
    swa_head_dim=192,
    swa_v_head_dim=128,
)
DRAFTER_ON_GPUS = dict(hidden_size=128, num_attention_heads=2, num_key_value_heads=2, head_dim=64)


def write_gpt_oss(folder: Path, embedding: float = 1.0) -> Path:
    """Every other layer slides, all have sinks; experts in bfloat16, all of which are taken."""
    torch.manual_seed(0)
    sizes = (
        SIZES
        | UNTIED
        | dict(
            hidden_size=128,
            head_dim=64,
            num_attention_heads=4,
            max_position_embeddings=CONTEXT,
            num_local_experts=4,
            num_experts_per_tok=4,
            sliding_window=WINDOW,
            swiglu_limit=7.0,
        )
    )
    model = GptOssForCausalLM(GptOssConfig(**sizes)).eval()
    for name, weight in model.named_parameters():
        fill(name, weight.data)
    head, embeddings = model.lm_head.weight.data, model.get_input_embeddings().weight.data
    embeddings.mul_(embedding)
    embeddings[MASK] = 0
    head.copy_(embeddings)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
