"""A tiny random Kimi-K2.5: the language model by transformers, which has no class for the whole, the tower by hand."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sglang.srt.configs import KimiK25Config
from transformers import AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel

from tests.unit.decoders import DEEPSEEK, MASK, SIZES, fill
from tests.unit.kimi_processor import MERGED, PATCH, KimiProcessor
from tests.unit.wrappers import CHAT, FIRST_SPECIAL, SHARP, TEXT, TOKENIZER

KIMI = "Kimi-K2.5"
PICTURE = "<|media_pad|>"
ARGUMENTS = ("--trust-remote-code",)
WIDTH, INNER, LAYERS = 32, 48, 2  # of the tower
TOWER = dict(
    hidden_size=WIDTH,
    vt_hidden_size=WIDTH,  # the release reads it under either name
    intermediate_size=INNER,
    num_hidden_layers=LAYERS,
    num_attention_heads=2,
    patch_size=PATCH,
    merge_kernel_size=[MERGED, MERGED],
    init_pos_emb_height=8,
    init_pos_emb_width=8,
    text_hidden_size=SIZES["hidden_size"],
)


def write_kimi(folder: Path, embedding: float = 1.0) -> PreTrainedModel:
    """Writes a checkpoint with random weights and its processor, and gives its language model.

    Args:
        embedding: see `write_target`.
    """
    text = DeepseekV3Config(**TEXT | DEEPSEEK)
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM._from_config(text, dtype=torch.float32).eval()
    tower = {name: torch.zeros(shape) for name, shape in _tower_weights().items()}
    for name, weight in (*model.named_parameters(), *tower.items()):
        fill(name, weight.data)
        if SHARP.search("language_model." + name):
            weight.data *= 2
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings.mul_(embedding)
        embeddings[MASK] = 0
        model.get_output_embeddings().weight.copy_(embeddings)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = {"language_model." + name: weight for name, weight in load_file(file).items()}
    save_file(weights | tower, file, metadata={"format": "pt"})
    config = KimiK25Config(
        architectures=["KimiK25ForConditionalGeneration"],
        text_config=text.to_dict(),
        vision_config=TOWER,
        media_placeholder_token_id=FIRST_SPECIAL,
        bos_token_id=SIZES["bos_token_id"],
        eos_token_id=SIZES["eos_token_id"],
    )
    config.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": [PICTURE]})
    KimiProcessor.register_for_auto_class()
    KimiProcessor(tokenizer, chat_template=CHAT.replace("PICTURE", PICTURE)).save_pretrained(folder)
    return model


def _tower_weights() -> dict[str, tuple[int, ...]]:
    """Names and shapes as published."""
    linear = {
        "vision_tower.patch_embed.proj": (WIDTH, 3, PATCH, PATCH),
        "mm_projector.proj.0": (WIDTH * MERGED**2, WIDTH * MERGED**2),
        "mm_projector.proj.2": (SIZES["hidden_size"], WIDTH * MERGED**2),
    }
    norms = ["vision_tower.encoder.final_layernorm", "mm_projector.pre_norm"]
    for layer in range(LAYERS):
        block = f"vision_tower.encoder.blocks.{layer}."
        norms += [block + "norm0", block + "norm1"]
        linear |= {
            block + "wqkv": (3 * WIDTH, WIDTH),
            block + "wo": (WIDTH, WIDTH),
            block + "mlp.fc0": (INNER, WIDTH),
            block + "mlp.fc1": (WIDTH, INNER),
        }
    shapes = {name: (WIDTH,) for name in norms} | linear
    weights = {f"{name}.weight": shape for name, shape in shapes.items()}
    weights |= {f"{name}.bias": shape[:1] for name, shape in shapes.items()}
    side = TOWER["init_pos_emb_height"]
    return weights | {"vision_tower.patch_embed.pos_emb.weight": (side, side, WIDTH)}
