"""Shapes of target and drafter pairs, written as checkpoints that hold a config and no weights.

What a round costs depends on the shape and not on the weights, so servers load them with
`--load-format dummy`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmark.families import FAMILIES, FP8_BLOCKS, QWEN35_TOKENS, drafter_of

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "checkpoints" / "tiny"


@dataclass(frozen=True)
class Shape:
    """A pair of target and drafter.

    Attributes:
        target: what its config.json has beside the fields that all Qwen3 models share.
        drafter: fields in which the drafter's config.json differs from the target's.
        folder: holds target/ and drafter/ with real weights; None for dummy weights.
        other: whether the drafter has nothing of the target's config.json but what it says itself.
        wrapper: what the target's config.json has around that of its text model; None if it is that.
    """

    target: dict[str, Any] = field(default_factory=dict)
    drafter: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    other: bool = False
    wrapper: dict[str, Any] | None = None


def _qwen3(**fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 128,
        "num_attention_heads": 32,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    } | fields


def _drafter(layers: int, taps: list[int], block: int = 16, mask: int = 151669) -> dict[str, Any]:
    """A drafter of z-lab's, with as many slots in a block."""
    return {
        "num_hidden_layers": layers,
        "block_size": block,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": taps},
    }


SHAPES = {
    "qwen3-8b": Shape(
        _qwen3(
            hidden_size=4096, num_hidden_layers=36, num_key_value_heads=8, intermediate_size=12288
        ),
        _drafter(5, [1, 9, 17, 25, 33]),
    ),
    "qwen3-4b": Shape(
        _qwen3(
            hidden_size=2560,
            num_hidden_layers=36,
            num_key_value_heads=8,
            intermediate_size=9728,
            tie_word_embeddings=True,
        ),
        _drafter(5, [1, 9, 17, 25, 33]),
    ),
    "qwen3-30b-a3b": Shape(
        _qwen3(
            architectures=["Qwen3MoeForCausalLM"],
            model_type="qwen3_moe",
            hidden_size=2048,
            num_hidden_layers=48,
            num_key_value_heads=4,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
        _drafter(8, [1, 12, 23, 34, 45]),
    ),
    "qwen3-32b": Shape(
        _qwen3(
            hidden_size=5120,
            num_hidden_layers=64,
            num_attention_heads=64,
            num_key_value_heads=8,
            intermediate_size=25600,
        ),
        # z-lab has none for it; that of its 27B target, which has as many layers, has these taps.
        _drafter(5, [1, 16, 31, 46, 61]),
    ),
    "llama-3.1-8b": Shape(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 14336,
            "mlp_bias": False,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009],
            "tie_word_embeddings": False,
        },
        _drafter(5, [1, 8, 15, 22, 29], block=10, mask=128002),  # its layers are Qwen3's
    ),
    "tiny": Shape(folder=TINY),
}
SHAPES["qwen3-8b-fp8"] = Shape(
    SHAPES["qwen3-8b"].target | {"quantization_config": FP8_BLOCKS}, SHAPES["qwen3-8b"].drafter
)
SHAPES |= {
    name: Shape(target, drafter_of(target, inner), other=True, wrapper=wrapper)
    for name, (target, inner, wrapper) in FAMILIES.items()
}

_NOT_OF_DRAFTERS = (
    "quantization_config",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)


def plain_shapes() -> list[str]:
    """Those of Llama's and Qwen3's plain weights, into which a smaller pair can be written."""
    return [
        name
        for name, shape in SHAPES.items()
        if not (shape.folder or shape.other or "quantization_config" in shape.target)
    ]


def target_config(shape: Shape) -> dict[str, Any]:
    """Content of the target's config.json."""
    rope_theta = 1000000.0
    text = {
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-06,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        # Transformers 5 reads rope_parameters, earlier releases rope_theta.
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.target.get("num_hidden_layers"),
        "use_cache": True,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "dtype": "bfloat16",
    } | shape.target
    return text if shape.wrapper is None else shape.wrapper | {"text_config": text}


def drafter_config(shape: Shape) -> dict[str, Any]:
    """Content of the drafter's config.json, in z-lab's format."""
    target = target_config(Shape()) if shape.other else target_config(shape)
    dense = {name: value for name, value in target.items() if name not in _NOT_OF_DRAFTERS}
    layers = shape.drafter["num_hidden_layers"]
    own = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_target_layers": shape.target["num_hidden_layers"],
        "layer_types": ["full_attention"] * layers,
        "max_window_layers": layers,
    }
    return dense | own | shape.drafter


def write_pair(shape: Shape, folder: Path) -> tuple[Path, Path]:
    """Folders of target and drafter; those of a shape without weights are written to `folder`."""
    if shape.folder:
        return shape.folder / "target", shape.folder / "drafter"
    target, drafter = folder / "target", folder / "drafter"
    for path, config in ((target, target_config(shape)), (drafter, drafter_config(shape))):
        path.mkdir(parents=True, exist_ok=True)
        _write(path / "config.json", config)
    _write_tokenizer(target, shape.target["vocab_size"], shape.wrapper is not None)
    if shape.wrapper is not None:
        _write_processor(target)
    return target, drafter


def read_config(folder: Path) -> dict[str, Any]:
    """Of a checkpoint, or of the text model in it."""
    raw = json.loads((folder / "config.json").read_text())
    return raw.get("text_config", raw)


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def _write_tokenizer(folder: Path, vocab_size: int, pictures: bool) -> None:
    """A tokenizer that knows numbers only, and tokens of pictures; for servers that insist on having one."""
    named = QWEN35_TOKENS if pictures else {}
    vocab = {named.get(token, str(token)): token for token in range(vocab_size)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "0"}
    whole = {"version": "1.0", "added_tokens": [], "model": model}
    for part in ("truncation", "padding", "normalizer", "post_processor", "decoder"):
        whole[part] = None
    whole["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    _write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "0", "eos_token": "1"},
    )


def _write_processor(folder: Path) -> None:
    """Of pictures, which servers of such a target want to have; nobody sends any."""
    common = {"processor_class": "Qwen3VLProcessor", "patch_size": 16, "merge_size": 2}
    pixels = {"shortest_edge": 65536, "longest_edge": 16777216}
    for name, kind in (("preprocessor", "image"), ("video_preprocessor", "video")):
        made = {"image": "Qwen2VLImageProcessorFast", "video": "Qwen3VLVideoProcessor"}[kind]
        content = common | {f"{kind}_processor_type": made, "size": pixels}
        _write(folder / f"{name}_config.json", content)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
