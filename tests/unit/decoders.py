"""Tiny random targets of many architectures, written by transformers' own classes, and drafters that repeat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from sglang_dflash.checkpoint.formats.weights import expected_weights
from sglang_dflash.checkpoint.load import load_config
from tests.unit.drafters import save, zlab_config

MASK = 3
SIZES = dict(
    vocab_size=320,
    hidden_size=96,
    intermediate_size=128,
    num_hidden_layers=6,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=320,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
# On a CPU the release computes no soft caps, and of some classes it knows no windows, so they have none that is felt.
WIDE, NARROW = {"sliding_window": 4096}, {"sliding_window": 12}
UNTIED = {"tie_word_embeddings": False}  # what the release takes for granted in some classes
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 4}
GRANITE = dict(
    embedding_multiplier=3.0, residual_multiplier=0.7, attention_multiplier=0.2, logits_scaling=4.0
)
# Two layers of three attend linearly. All experts are taken, so that no rounding decides which.
DELTA_NETS = dict(
    full_attention_interval=3,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
SHARED_EXPERTS = dict(
    num_experts=4,
    num_experts_per_tok=4,
    norm_topk_prob=True,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
)
# With what published configs have and transformers' class has no more; on a CPU the release knows no other RoPE.
DEEPSEEK = UNTIED | dict(
    num_key_value_heads=6,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=24,
    qk_rope_head_dim=16,
    v_head_dim=16,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    n_routed_experts=4,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=4,
    moe_intermediate_size=64,
    routed_scaling_factor=1.5,
    topk_method="noaux_tc",
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=1e4,
        factor=4.0,
        original_max_position_embeddings=256,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
)
# Transformers leaves YaRN's scale out of the softmax there, so it has none.
DEEPSEEK_LITE = DEEPSEEK | {
    "q_lora_rank": None,
    "topk_method": "greedy",
    "rope_parameters": DEEPSEEK["rope_parameters"] | {"mscale_all_dim": 0.0},
}
# With what published configs have and transformers' class has no more.
MINIMAX = (
    UNTIED
    | EXPERTS
    | {"rotary_dim": 16, "scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True}
)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {}),
    "Mistral": ("MistralConfig", WIDE),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen3": ("Qwen3Config", {}),
    "Phi-3": ("Phi3Config", WIDE),
    "Gemma": ("GemmaConfig", {"hidden_act": "gelu"}),  # the release knows no other
    "Gemma 2": (
        "Gemma2Config",
        NARROW
        | {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 16,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "Gemma 3 (text)": ("Gemma3TextConfig", NARROW | {"query_pre_attn_scalar": 16}),
    "GLM4": ("Glm4Config", {"partial_rotary_factor": 0.5}),
    "OLMo": ("OlmoConfig", {"num_key_value_heads": 6}),
    "OLMo 2": ("Olmo2Config", {}),
    "Granite": ("GraniteConfig", GRANITE),
    "Cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "Cohere 2": ("Cohere2Config", WIDE | {"logit_scale": 0.25}),
    "StableLM": ("StableLmConfig", UNTIED | {"partial_rotary_factor": 0.25}),
    "StarCoder2": ("Starcoder2Config", {}),
    "Arcee": ("ArceeConfig", UNTIED),
    "Mixtral": ("MixtralConfig", UNTIED | EXPERTS),
    "OLMoE": (
        "OlmoeConfig",
        UNTIED | {"num_experts": 4, "num_experts_per_tok": 4, "num_key_value_heads": 6},
    ),
    "Granite MoE": ("GraniteMoeConfig", GRANITE | EXPERTS),
    "Qwen3-Next": ("Qwen3NextConfig", UNTIED | DELTA_NETS | SHARED_EXPERTS),
    "DeepSeek-V3": ("DeepseekV3Config", DEEPSEEK),
    "DeepSeek-V2-Lite": ("DeepseekV2Config", DEEPSEEK_LITE),
    "Qwen2-MoE": ("Qwen2MoeConfig", UNTIED | SHARED_EXPERTS),
    "Qwen3-MoE": ("Qwen3MoeConfig", UNTIED | SHARED_EXPERTS),
    "MiniMax-M2": ("MiniMaxM2Config", MINIMAX),
    "GLM4-MoE": (
        "Glm4MoeConfig",
        UNTIED
        | {"n_routed_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
        | {"partial_rotary_factor": 0.5, "use_qk_norm": True, "first_k_dense_replace": 1},
    ),
}


def write_target(folder: Path, name: str, embedding: float = 1.0, **sizes: int) -> PreTrainedModel:
    """Writes a checkpoint with random weights, and gives its model.

    Args:
        embedding: how large what the first layer reads is; the larger, the more often the last token is the likeliest
            again.
        sizes: that differ from those of the others.
    """
    config_class, own = ARCHITECTURES[name]
    config = getattr(transformers, config_class)(**(SIZES | own | sizes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight_name, weight in model.named_parameters():
        fill(weight_name, weight.data)
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    with torch.no_grad():
        scale = config.hidden_size**0.5 if "Gemma" in name else own.get("embedding_multiplier", 1)
        embeddings.mul_(embedding / scale)
        embeddings[MASK] = 0  # of the block, `write_drafter`'s sees the bonus token alone
        head.copy_(embeddings)
    model.save_pretrained(folder)
    return model


def write_drafter(folder: Path, **sizes: int) -> Path:
    """Writes a drafter that drafts the token that its context has most often, told by the taps of the first layer.

    Its only layer attends to all evenly, and hands on what it sees.
    """
    heads = {"num_key_value_heads": SIZES["num_attention_heads"], "head_dim": SIZES["head_dim"]}
    taps = {"mask_token_id": MASK, "target_layer_ids": [0, 2]}
    save(folder, zlab_config(num_hidden_layers=1, dflash_config=taps, **heads | sizes))
    weights = {}
    for name, shape in expected_weights(load_config(str(folder))).items():
        weights[name] = torch.ones(shape) if len(shape) == 1 else torch.zeros(shape)
        if name.endswith(("fc.weight", "v_proj.weight", "o_proj.weight")):
            weights[name] = torch.eye(*shape)
    return save(folder, None, model=weights)


def fill(name: str, weight: torch.Tensor) -> None:
    """Large enough that norms, biases, attention and MLP all matter."""
    if "norm" in name and name.endswith("weight"):
        weight.add_(torch.empty_like(weight).uniform_(-0.5, 0.5))
    elif name.endswith("bias"):
        weight.normal_(std=0.3)
    elif "embed" in name or "lm_head" in name:
        weight.normal_()
    else:
        weight.normal_(std=weight.shape[-1] ** -0.5)
