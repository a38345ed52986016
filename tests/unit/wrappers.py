"""Tiny random multimodal targets with their processors, written by transformers' own classes, and what to ask them."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel

from tests.unit.decoders import DELTA_NETS, MASK, SHARED_EXPERTS, SIZES, WIDE, fill

TOKENIZER = Path(__file__).parents[2] / "checkpoints" / "tiny" / "target"
FIRST_SPECIAL = 768  # behind the tokens of the bundled pair
VOCABULARY = 832
TEXT = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 1024}
MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]}
INTERLEAVED = {"rope_parameters": MROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
TOWER = dict(
    depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=SIZES["hidden_size"]
)
# With these twice as large, attention looks at few tokens, so answers depend on where those are.
SHARP = re.compile("language_model.*[qk]_(proj.weight|norm)")
QWEN_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
GLM_TOKENS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
GEMMA_TOKENS = {
    "boi_token_index": "<start_of_image>",
    "eoi_token_index": "<end_of_image>",
    "image_token_index": "<image_soft_token>",
}
LLAMA_TOKENS = {
    "boi_token_index": "<|image_start|>",
    "eoi_token_index": "<|image_end|>",
    "image_token_index": "<|patch|>",
    "fake_image_token_index": "<|image|>",
    "tile_x_separator_token_index": "<|tile_x_separator|>",
    "tile_y_separator_token_index": "<|tile_y_separator|>",
}


@dataclass(frozen=True)
class Wrapper:
    """
    Attributes:
        config, processor, images, videos: classes of transformers.
        text, tower: what the language model and the vision tower have of their own.
        tokens: of pictures, by the config's names.
        picture, video: what stands for one in a prompt; without the latter, it takes none.
        sizes: of pictures, for their processors.
        more: arguments of the processor.
        arguments: of a server that is to take pictures.
    """

    config: str
    processor: str
    images: str
    tower: dict[str, Any]
    sizes: dict[str, Any]
    videos: str | None = None
    text: dict[str, Any] = field(default_factory=lambda: {"rope_parameters": MROPE})
    tokens: dict[str, str] = field(default_factory=lambda: QWEN_TOKENS)
    picture: str = "<|vision_start|><|image_pad|><|vision_end|>"
    video: str = "<|vision_start|><|video_pad|><|vision_end|>"
    more: dict[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


PIXELS = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}
WRAPPERS = {
    "Qwen2-VL": Wrapper(
        config="Qwen2VLConfig",
        processor="Qwen2VLProcessor",
        images="Qwen2VLImageProcessorFast",
        videos="Qwen2VLVideoProcessor",
        tower={"depth": 3, "embed_dim": 64, "hidden_size": SIZES["hidden_size"], "num_heads": 2}
        | {
            "mlp_ratio": 2,
            "in_chans": 3,
        },  # which published configs have, and transformers' has no more
        sizes={"size": PIXELS},
    ),
    "Qwen2.5-VL": Wrapper(
        config="Qwen2_5_VLConfig",
        processor="Qwen2_5_VLProcessor",
        images="Qwen2VLImageProcessorFast",
        videos="Qwen2VLVideoProcessor",
        tower=TOWER | {"fullatt_block_indexes": [1], "window_size": 56},
        sizes={"size": PIXELS},
    ),
    "Qwen3-VL": Wrapper(
        config="Qwen3VLConfig",
        processor="Qwen3VLProcessor",
        images="Qwen2VLImageProcessorFast",
        videos="Qwen3VLVideoProcessor",
        tower=TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64},
        sizes={"size": PIXELS, "patch_size": 16},
        text=INTERLEAVED,
    ),
    "Qwen3-VL-MoE": Wrapper(
        config="Qwen3VLMoeConfig",
        processor="Qwen3VLProcessor",
        images="Qwen2VLImageProcessorFast",
        videos="Qwen3VLVideoProcessor",
        tower=TOWER
        | {"depth": 3, "deepstack_visual_indexes": [0, 1, 2], "num_position_embeddings": 64},
        sizes={"size": PIXELS, "patch_size": 16},
        text=INTERLEAVED | EXPERTS,
    ),
    "Qwen3.5": Wrapper(
        config="Qwen3_5Config",
        processor="Qwen3VLProcessor",
        images="Qwen2VLImageProcessorFast",
        videos="Qwen3VLVideoProcessor",
        tower=TOWER | {"num_position_embeddings": 64, "deepstack_visual_indexes": []},
        sizes={"size": PIXELS, "patch_size": 16},
        # Three value heads to one of keys, as 27B has: the release makes their gates on a way of its own.
        text=INTERLEAVED | DELTA_NETS | {"linear_num_value_heads": 6},
    ),
    "Qwen3.5-MoE": Wrapper(
        config="Qwen3_5MoeConfig",
        processor="Qwen3VLProcessor",
        images="Qwen2VLImageProcessorFast",
        videos="Qwen3VLVideoProcessor",
        tower=TOWER | {"num_position_embeddings": 64, "deepstack_visual_indexes": []},
        sizes={"size": PIXELS, "patch_size": 16},
        text=INTERLEAVED | DELTA_NETS | SHARED_EXPERTS,
    ),
    "GLM-4.1V": Wrapper(
        config="Glm4vConfig",
        processor="Glm4vProcessor",
        images="Glm4vImageProcessorFast",
        videos="Glm4vVideoProcessor",
        tower=TOWER | {"image_size": 112},
        sizes={"size": PIXELS},
        text={
            "rope_parameters": MROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
        },
        tokens=GLM_TOKENS,
        picture="<|begin_of_image|><|image|><|end_of_image|>",
        video="<|begin_of_video|><|video|><|end_of_video|>",
    ),
    "GLM-4.5V": Wrapper(
        config="Glm4vMoeConfig",
        processor="Glm4vProcessor",
        images="Glm4vImageProcessorFast",
        videos="Glm4vVideoProcessor",
        tower=TOWER | {"image_size": 112},
        sizes={"size": PIXELS},
        text={
            "n_routed_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 64,
            "rope_parameters": MROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
        },
        tokens=GLM_TOKENS,
        picture="<|begin_of_image|><|image|><|end_of_image|>",
        video="<|begin_of_video|><|video|><|end_of_video|>",
    ),
    "Gemma 3 (with pictures)": Wrapper(
        config="Gemma3Config",
        processor="Gemma3Processor",
        images="Gemma3ImageProcessorFast",
        tower=dict(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=56,
            patch_size=14,
            vision_use_head=False,
        ),
        sizes={"size": {"height": 56, "width": 56}},
        text=WIDE | {"query_pre_attn_scalar": 16},
        tokens=GEMMA_TOKENS,
        picture="<start_of_image>",
        video="",
        more={"image_seq_length": 4},
        arguments=("--enable-multimodal",),
    ),
    # Without experts, which the release does not run on a CPU.
    "Llama 4 (with pictures)": Wrapper(
        config="Llama4Config",
        processor="Llama4Processor",
        images="Llama4ImageProcessorFast",
        tower=dict(
            hidden_size=32,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=56,
            projector_input_dim=32,
            projector_output_dim=32,
            vision_output_dim=32,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        ),
        sizes={"size": {"height": 56, "width": 56}, "max_patches": 4},
        text=dict(
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
            intermediate_size_mlp=SIZES["intermediate_size"],
            interleave_moe_layer_step=100,
            use_qk_norm=False,
            attention_chunk_size=4,
            floor_scale=8,
        ),
        tokens=LLAMA_TOKENS,
        picture="<|image|>",
        video="",
        arguments=("--enable-multimodal",),
    ),
}


def write_wrapper(folder: Path, name: str, embedding: float = 1.0, **sizes: Any) -> PreTrainedModel:
    """Writes a checkpoint with random weights and its processor, and gives its model.

    Args:
        embedding: see `write_target`.
        sizes: of the language model, that differ from those of the others.
    """
    wrapper = WRAPPERS[name]
    more = {"mm_tokens_per_image": 4} if "Gemma" in name else {}
    text = TEXT | wrapper.text | sizes
    config = getattr(transformers, wrapper.config)(
        text_config=text,
        vision_config=wrapper.tower | _ends_in(wrapper.tower, text["hidden_size"]),
        tie_word_embeddings=True,
        **{token: FIRST_SPECIAL + i for i, token in enumerate(wrapper.tokens)},
        **more,
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for weight_name, weight in model.named_parameters():
        fill(weight_name, weight.data)
        if SHARP.search(weight_name):
            weight.data *= 2
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings.mul_(embedding / (text["hidden_size"] ** 0.5 if "Gemma" in name else 1))
        embeddings[MASK] = 0
        model.get_output_embeddings().weight.copy_(embeddings)
    # Llama 4's class looks for its tower in an index of shards.
    model.save_pretrained(folder, max_shard_size="300KB" if "Llama" in name else "5GB")
    if "Qwen3-VL" in name:
        _turn_experts(folder / "model.safetensors")
    _write_processor(folder, wrapper)
    return model


def _ends_in(tower: dict[str, Any], size: int) -> dict[str, int]:
    """Fields that say how large the tower's results are; some towers leave that to a projection."""
    names = ("out_hidden_size", "hidden_size" if "embed_dim" in tower else "out_hidden_size")
    return {name: size for name in names if name in tower}


def _turn_experts(file: Path) -> None:
    """As published checkpoints have them, [experts, in, out]; transformers 5 writes [experts, out, in]."""
    weights = load_file(file)
    turned = {name: w.mT.contiguous() if ".experts." in name else w for name, w in weights.items()}
    save_file(turned, file, metadata={"format": "pt"})


def _write_processor(folder: Path, wrapper: Wrapper) -> None:
    names = {
        "boi_token_index": "boi_token",
        "eoi_token_index": "eoi_token",
        "image_token_index": "image_token",
    }
    extra = {names[key]: token for key, token in wrapper.tokens.items() if key in names}
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER, extra_special_tokens=extra)
    tokenizer.add_special_tokens({"additional_special_tokens": list(wrapper.tokens.values())})
    parts = {"image_processor": getattr(transformers, wrapper.images)(**wrapper.sizes)}
    if wrapper.videos is not None:
        parts["video_processor"] = getattr(transformers, wrapper.videos)(**wrapper.sizes)
    template = CHAT.replace("PICTURE", wrapper.picture).replace("VIDEO", wrapper.video)
    processor = getattr(transformers, wrapper.processor)
    made = processor(tokenizer=tokenizer, chat_template=template, **parts, **wrapper.more)
    made.save_pretrained(folder)


CHAT = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'video' %}VIDEO{% else %}PICTURE{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Noise in colours."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def clip(seed: int, frames: int, width: int, height: int) -> list[Image.Image]:
    """Frames of noise, two a second."""
    return [picture(100 * seed + i, width, height) for i in range(frames)]


def data_url(media: Image.Image | list[Image.Image]) -> str:
    """A picture or a clip as a request sends it."""
    file = io.BytesIO()
    if isinstance(media, list):
        media[0].save(file, "GIF", save_all=True, append_images=media[1:], duration=500)
        kind = "video/gif"
    else:
        media.save(file, "PNG")
        kind = "image/png"
    return f"data:{kind};base64," + base64.b64encode(file.getvalue()).decode()
