"""What `test_shapes.py` does, on a CPU with narrow layers: `python -m tests.gpu.tiny_shapes NAME …`."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmark.shapes import SHAPES, Shape
from tests.gpu.test_shapes import NAMES, check
from tests.unit.decoders import DEEPSEEK_LITE

ON_CPUS = [name for name in NAMES if name != "gpt-oss-20b"]  # which does not start on a CPU
SIZES: dict[str, Any] = dict(
    hidden_size=128,
    vocab_size=2048,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=1024,
)
OWN: dict[str, dict[str, Any]] = {
    "gemma-3-12b": dict(query_pre_attn_scalar=32, sliding_window=64),
    "deepseek-v2-lite": dict(
        num_key_value_heads=4,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        moe_intermediate_size=64,
        n_routed_experts=16,
        # On a CPU the release knows no other for latents.
        rope_parameters=DEEPSEEK_LITE["rope_parameters"],
    ),
}
DELTA_NETS = dict(
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
EXPERTS = dict(moe_intermediate_size=64, shared_expert_intermediate_size=64, num_experts=16)
LINEAR_DEPTH = 16  # a CPU's linear attention takes a row after the other
STATES = ("--max-mamba-cache-size", "96")
EXACT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}  # as all else
TOWER = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=128)


def narrow(name: str, **more: Any) -> Shape:
    shape = SHAPES[name]
    sizes = SIZES | OWN.get(name, {})
    if "linear_num_key_heads" in shape.target:
        rope = shape.target["rope_parameters"] | {"mrope_section": [2, 1, 1]}
        sizes |= DELTA_NETS | {"rope_parameters": rope, "num_hidden_layers": LINEAR_DEPTH}
        sizes["layer_types"] = shape.target["layer_types"][:LINEAR_DEPTH]
        if "num_experts" in shape.target:
            sizes |= EXPERTS
        else:
            sizes["linear_num_value_heads"] = 6  # three to one of keys, as 27B has them
    wrapper = shape.wrapper
    if wrapper is not None:
        wrapper = wrapper | {"vision_config": wrapper["vision_config"] | TOWER}
    target = shape.target | sizes | more
    target.pop("quantization_config", None)  # for which CPUs have no kernels
    return replace(shape, target=target, wrapper=wrapper)


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in names or ON_CPUS:
            own = Path(folder, name)
            own.mkdir()
            linear = "qwen3.5" in name
            states = STATES if linear else ()
            check(name, narrow(name), own, own, *states, **EXACT if linear else {})


if __name__ == "__main__":
    main(sys.argv[1:])
