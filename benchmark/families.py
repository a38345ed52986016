"""Shapes of targets beyond Llama and Qwen3: linear attention, latents, two pools, other norms, and quantized weights.

Sizes are those of the published models that the names say. Qwen3.5 has its tower of pictures; others are in classes
without one.
"""

from __future__ import annotations

from typing import Any

# Of the drafter beside each: heads and layers as z-lab's have them, no fewer than its hidden states fill.
_HEADS, _DRAFT_HEADS = 32, {"num_key_value_heads": 8, "head_dim": 128}


def drafter_of(target: dict[str, Any], inner: int) -> dict[str, Any]:
    """Fields of a drafter's config.json for a target that is no plain transformer.

    Args:
        inner: of its MLPs.
    """
    layers, depth = 5, target["num_hidden_layers"]
    taps = [1 + (depth - 4) * n // (layers - 1) for n in range(layers)]
    same = ("hidden_size", "vocab_size", "max_position_embeddings")
    own = {name: target[name] for name in same if name in target}
    rope = {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    heads = {"num_attention_heads": max(_HEADS, target["hidden_size"] // 128)} | _DRAFT_HEADS
    shape = {"num_hidden_layers": layers, "intermediate_size": inner, "block_size": 16}
    dflash = {"mask_token_id": target["vocab_size"] - 1, "target_layer_ids": taps}
    return own | rope | shape | heads | {"dflash_config": dflash}


QWEN3_NEXT = dict(
    architectures=["Qwen3NextForCausalLM"],
    model_type="qwen3_next",
    hidden_size=2048,
    num_hidden_layers=40,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    partial_rotary_factor=0.25,
    rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    full_attention_interval=4,
    layer_types=[("full" if n % 4 == 3 else "linear") + "_attention" for n in range(40)],
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    intermediate_size=5632,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    num_experts=256,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    vocab_size=151936,
    tie_word_embeddings=False,
)
DEEPSEEK_V2_LITE = dict(
    architectures=["DeepseekV2ForCausalLM"],
    model_type="deepseek_v2",
    hidden_size=2048,
    num_hidden_layers=27,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=64,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=10944,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    moe_intermediate_size=1408,
    n_routed_experts=64,
    n_shared_experts=2,
    num_experts_per_tok=6,
    n_group=1,
    topk_group=1,
    topk_method="greedy",
    scoring_func="softmax",
    norm_topk_prob=False,
    routed_scaling_factor=1.0,
    rope_theta=10000.0,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    vocab_size=102400,
    tie_word_embeddings=False,
)
GPT_OSS_20B = dict(
    architectures=["GptOssForCausalLM"],
    model_type="gpt_oss",
    hidden_size=2880,
    num_hidden_layers=24,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    intermediate_size=2880,
    num_local_experts=32,
    num_experts_per_tok=4,
    sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 12,
    attention_bias=True,
    swiglu_limit=7.0,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    rope_theta=150000.0,
    max_position_embeddings=131072,
    vocab_size=201088,
    tie_word_embeddings=False,
)
GEMMA_3_12B = dict(
    architectures=["Gemma3ForCausalLM"],
    model_type="gemma3_text",
    hidden_size=3840,
    num_hidden_layers=48,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=256,
    intermediate_size=15360,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=256,
    sliding_window=1024,
    layer_types=[("full" if n % 6 == 5 else "sliding") + "_attention" for n in range(48)],
    rope_local_base_freq=10000.0,
    rope_theta=1000000.0,
    rope_parameters={
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    max_position_embeddings=131072,
    vocab_size=262208,
    tie_word_embeddings=True,
)
_DELTA_NETS = dict(
    partial_rotary_factor=0.25,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    full_attention_interval=4,
    attn_output_gate=True,
    head_dim=256,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    max_position_embeddings=262144,
    vocab_size=248320,
    tie_word_embeddings=False,
)
QWEN35_27B = _DELTA_NETS | dict(
    model_type="qwen3_5_text",
    hidden_size=5120,
    num_hidden_layers=64,
    num_attention_heads=24,
    num_key_value_heads=4,
    layer_types=[("full" if n % 4 == 3 else "linear") + "_attention" for n in range(64)],
    linear_num_value_heads=48,
    intermediate_size=17408,
)
QWEN35_35B_A3B = _DELTA_NETS | dict(
    model_type="qwen3_5_moe_text",
    hidden_size=2048,
    num_hidden_layers=40,
    num_attention_heads=16,
    num_key_value_heads=2,
    layer_types=[("full" if n % 4 == 3 else "linear") + "_attention" for n in range(40)],
    linear_num_value_heads=32,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    num_experts=256,
    num_experts_per_tok=8,
)


# Of pictures, by their places in the published vocabulary.
QWEN35_TOKENS = {
    248053: "<|vision_start|>",
    248054: "<|vision_end|>",
    248056: "<|image_pad|>",
    248057: "<|video_pad|>",
}


def qwen35(architecture: str, model_type: str, hidden_size: int) -> dict[str, Any]:
    """What a config.json of Qwen3.5 has around its text model's."""
    tower = dict(
        model_type=model_type,
        depth=27,
        hidden_size=1152,
        intermediate_size=4304,
        num_heads=16,
        patch_size=16,
        spatial_merge_size=2,
        temporal_patch_size=2,
        in_channels=3,
        out_hidden_size=hidden_size,
        num_position_embeddings=2304,
        hidden_act="gelu_pytorch_tanh",
        deepstack_visual_indexes=[],
    )
    places = ("vision_start", "vision_end", "image", "video")
    ids = {f"{name}_token_id": place for name, place in zip(places, QWEN35_TOKENS, strict=True)}
    own = {"architectures": [architecture], "model_type": model_type, "vision_config": tower}
    return own | ids | {"tie_word_embeddings": False}


FP8_BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}

# Name → target, the intermediate size of its drafter, and what its config.json has around the text model's.
FAMILIES: dict[str, tuple[dict[str, Any], int, dict[str, Any] | None]] = {
    "qwen3-next-35b-a3b": (QWEN3_NEXT, 6144, None),
    "qwen3.5-27b": (
        QWEN35_27B,
        17408,
        qwen35("Qwen3_5ForConditionalGeneration", "qwen3_5", 5120),
    ),
    "qwen3.5-35b-a3b": (
        QWEN35_35B_A3B,
        6144,
        qwen35("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", 2048),
    ),
    "deepseek-v2-lite": (DEEPSEEK_V2_LITE, 6144, None),
    "gpt-oss-20b": (GPT_OSS_20B, 7680, None),
    "gemma-3-12b": (GEMMA_3_12B, 10240, None),
}
