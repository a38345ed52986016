"""Checkpoints of a target whose products are quantized, in the layouts in which they are published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file

Parts = dict[str, torch.Tensor]
GROUP, BLOCK = 64, 128
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _fp8_tensor(weight: torch.Tensor) -> Parts:
    scale = weight.abs().max() / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def _fp8_block(weight: torch.Tensor) -> Parts:
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    whole = weight.new_zeros(rows * BLOCK, columns * BLOCK)
    whole[: weight.shape[0], : weight.shape[1]] = weight
    blocks = whole.view(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax((1, 3)) / 448
    numbers = (blocks / scale[:, None, :, None]).view_as(whole).to(torch.float8_e4m3fn)
    numbers = numbers[: weight.shape[0], : weight.shape[1]].contiguous()
    return {"weight": numbers, "weight_scale_inv": scale}


def _grouped(weight: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[out, in] → 4 bits [in, out], zeros and scales [groups, out]; `order` has the rows of each group together."""
    groups = weight.T[order].view(-1, GROUP, len(weight))
    low, high = groups.amin(1), groups.amax(1)
    scales = ((high - low) / 15).to(torch.float16)
    zeros = (-low / scales.float()).round().clamp(1, 15)
    numbers = (groups / scales[:, None] + zeros[:, None]).round().clamp(0, 15)
    back = torch.empty(len(order), len(weight), dtype=torch.int32)
    back[order] = numbers.flatten(0, 1).int()
    return back, zeros.int(), scales


def _packed(numbers: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """[rows, columns] of 4 bits → [rows, columns / 8] int32."""
    parts = numbers.view(len(numbers), -1, 8)[..., torch.tensor(order)].long()
    whole = (parts << (4 * torch.arange(8))).sum(-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).int()


def _awq(weight: torch.Tensor) -> Parts:
    numbers, zeros, scales = _grouped(weight, torch.arange(weight.shape[1]))
    qweight, qzeros = (_packed(each, _AWQ_ORDER) for each in (numbers, zeros))
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales}


def _gptq(weight: torch.Tensor, in_order: bool = True) -> Parts:
    order = torch.arange(weight.shape[1])
    if not in_order:
        order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(0))]
    numbers, zeros, scales = _grouped(weight, order)
    g_idx = torch.empty(len(order), dtype=torch.int32)
    g_idx[order] = torch.arange(len(order), dtype=torch.int32) // GROUP
    qweight = _packed(numbers.T.contiguous()).T.contiguous()
    return {"qweight": qweight, "qzeros": _packed(zeros - 1), "scales": scales, "g_idx": g_idx}


def _compressed(weight: torch.Tensor) -> Parts:
    config = QuantizationConfig.model_validate(PACKED)
    scheme = config.config_groups["group_0"]
    scale = weight.view(len(weight), -1, GROUP).abs().amax(-1) / 7.5
    compressor = BaseCompressor.get_value_from_registry(config.format)
    return compressor.compress({"weight": weight, "weight_scale": scale}, scheme)


def _fp8_rows(weight: torch.Tensor) -> Parts:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def _scheme(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    if weights["type"] == "float":
        rows = dict(num_bits=8, type="float", symmetric=True, strategy="token", dynamic=True)
        group["input_activations"] = rows
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


PACKED = _scheme(
    "pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP
)
_DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_OF_FOUR = {"bits": 4, "group_size": GROUP}

# Kind → what config.json says, and how a weight is written.
KINDS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Parts]]] = {
    "fp8": (_DYNAMIC, _fp8_tensor),
    "fp8-blocks": (_DYNAMIC | {"weight_block_size": [BLOCK, BLOCK]}, _fp8_block),
    "awq": (
        {"quant_method": "awq", "version": "gemm", "zero_point": True} | _OF_FOUR,
        _awq,
    ),
    "gptq": (
        {"quant_method": "gptq", "desc_act": False, "sym": False} | _OF_FOUR,
        _gptq,
    ),
    "gptq-act-order": (
        {"quant_method": "gptq", "desc_act": True, "sym": False} | _OF_FOUR,
        lambda weight: _gptq(weight, in_order=False),
    ),
    "packed": (PACKED, _compressed),
    "fp8-rows": (
        _scheme("float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel"),
        _fp8_rows,
    ),
}


def write_quantized(source: Path, folder: Path, kind: str, head: bool = False) -> Path:
    """A checkpoint like `source`, its products quantized.

    Args:
        head: whether the LM head is, too; it is then one of its own.
    """
    said, write = KINDS[kind]
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    file = folder / "model.safetensors"
    weights = load_file(file)
    if head:
        said = said | {"lm_head": True, "ignore": []}
        config["tie_word_embeddings"] = False
        embeddings = weights["model.embed_tokens.weight"]
        weights.setdefault("lm_head.weight", embeddings.clone())
    made = {}
    for name, weight in weights.items():
        product, _, part = name.rpartition(".")
        ours = product.endswith("_proj") or (head and product == "lm_head")
        if part != "weight" or not ours:
            made[name] = weight
            continue
        parts = write(weight.float())
        made |= {f"{product}.{key}": value.contiguous() for key, value in parts.items()}
    save_file(made, file, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return folder
