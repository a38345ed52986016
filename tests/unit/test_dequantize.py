"""Quantized products as plain weights: what was written is read, and what is not read is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sglang_dflash.checkpoint.dequantize import plain_weights, reader_of
from sglang_dflash.errors import DFlashError
from tests.server.harness import TARGET
from tests.unit.quantized import KINDS, write_quantized

# Of a weight's length, what rounding to so few bits may change.
ROUNDED = {"fp8": 0.04, "fp8-blocks": 0.04, "fp8-rows": 0.04}
FOUR_BITS = 0.15


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_read(tmp_path: Path, kind: str, head: bool) -> None:
    """All weights of the checkpoint that it was made of, nearly; those of few bits exactly what these say."""
    before = load_file(Path(TARGET) / "model.safetensors")
    folder = write_quantized(Path(TARGET), tmp_path / "made", kind, head)
    written = load_file(folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    read = dict(plain_weights(written.items(), said, str(folder)))
    if head:
        before["lm_head.weight"] = before["model.embed_tokens.weight"]
    assert read.keys() == before.keys()
    for name, weight in before.items():
        if not name.endswith("_proj.weight") and name != "lm_head.weight":
            assert torch.equal(read[name], weight)
            continue
        off = (read[name] - weight.float()).norm() / weight.float().norm()
        assert 0 < off < ROUNDED.get(kind, FOUR_BITS), name


def test_a_part_is_missing(tmp_path: Path) -> None:
    folder = write_quantized(Path(TARGET), tmp_path, "awq")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.scales"]
    said = KINDS["awq"][0]
    with pytest.raises(DFlashError, match="^ours misses scales of model.layers.1.mlp.up_proj, "):
        list(plain_weights(weights.items(), said, "ours"))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method bitsandbytes, and .* reads fp8, awq, "),
        ({}, "quant_method none, and"),
        ({"quant_method": "awq", "bits": 8}, "bits 8, and without a GPU's kernels DFLASH reads 4:"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version gemv, and .* gemm:"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3, and .* reads 2, 4 or 8:"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "format marlin, and"),
        (
            {"quant_method": "compressed-tensors", "config_groups": 5},
            r"cannot be read \(.*\): down",
        ),
    ],
)
def test_not_read(said: dict[str, Any], words: str) -> None:
    with pytest.raises(DFlashError, match=f"^quantization_config of ours .*{words}") as caught:
        reader_of(said, "ours")
    assert "\n" not in str(caught.value)
