"""What a draft checkpoint is and how it will be run: `python -m sglang_dflash.inspect PATH`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_dflash.checkpoint.formats.config import DraftConfig
from sglang_dflash.checkpoint.formats.weights import check_weights
from sglang_dflash.checkpoint.load import load_config
from sglang_dflash.checkpoint.target_class import check_model
from sglang_dflash.errors import DFlashError

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

RUNS, REFUSED, MISFIT = 0, 1, 3  # 2 is argparse's

_EXAMPLE = """exit status: 0 it can be served (and fits TARGET), 1 it is refused, 2 usage, 3 it does not fit TARGET
example: python -m sglang_dflash.inspect z-lab/Qwen3-8B-DFlash-b16 --target Qwen/Qwen3-8B"""


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        config = load_config(args.path, args.revision, flag="PATH")
        check_weights(config)
        target = _target_config(args.target) if args.target else None
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    for name, value in describe(config):
        print(f"{name:<16} {value}")
    if target is None:
        return RUNS
    try:
        check_model(config, target, args.target, "--target")
    except DFlashError as error:
        print(f"{'fits the target':<16} no")
        print(f"error: {error}", file=sys.stderr)
        return MISFIT
    print(f"{'fits the target':<16} yes: {args.target}")
    return RUNS


def describe(config: DraftConfig) -> list[tuple[str, str]]:
    """Name and value of each line that is printed."""
    c = config
    vocabulary = f"{c.vocab_size} tokens"
    if c.reduced_vocabulary:
        vocabulary = f"{c.draft_vocab_size} of the target's {c.vocab_size} tokens"
    rope = {name: value for name, value in c.rope.items() if name != "rope_type"}
    if rope["partial_rotary_factor"] == 1:
        del rope["partial_rotary_factor"]
    return [
        ("checkpoint", c.path),
        ("format", c.format),
        ("verifier", c.verifier or "not named"),
        ("block", f"{c.block_size} tokens, the bonus token included; {c.default_width} by default"),
        ("mask token", str(c.mask_token_id)),
        ("taps", _taps(c)),
        (
            "transformer",
            f"{c.num_hidden_layers} layers, width {c.hidden_size}, {c.num_attention_heads} heads, "
            f"{c.num_key_value_heads} KV heads of {c.head_dim}, MLP {c.intermediate_size}",
        ),
        ("attention", _layers(c)),
        (
            "heads",
            f"Q and K {'normed' if c.qk_norm else 'not normed'}, {'with' if c.attention_bias else 'without'} biases",
        ),
        ("weights", _stored(c)),
        ("RoPE", ", ".join([c.rope["rope_type"], *(f"{k} {v}" for k, v in rope.items())])),
        ("vocabulary", vocabulary),
        ("embedding", _embedding(c)),
        ("LM head", _head(c)),
        ("KV a token", _kv_bytes(c)),
    ]


def _taps(c: DraftConfig) -> str:
    layers = ", ".join("embedding" if i < 0 else str(i) for i in c.target_layer_ids)
    depth = f" of a target of {c.num_target_layers} layers" if c.num_target_layers else ""
    return f"after layers {layers}{depth}, width {c.target_hidden_size}"


def _stored(c: DraftConfig) -> str:
    stored = (c.quantization or {}).get("quant_method")
    return f"quantized ({stored}), read as plain ones" if stored else "plain"


def _layers(c: DraftConfig) -> str:
    kinds = dict.fromkeys(c.layers)
    if len(kinds) == 1:
        return f"all layers see {_sight(c, 0)}"
    return "; ".join(f"layer {i} sees {_sight(c, i)}" for i in range(len(c.layers)))


def _sight(c: DraftConfig, layer: int) -> str:
    sight = c.layers[layer]
    return f"all of the context, {sight}" if sight.window is None else str(sight)


def _embedding(c: DraftConfig) -> str:
    whose = "its own" if c.own_embedding else "the target's"
    return whose if c.embedding_scale == 1 else f"{whose}, times {c.embedding_scale}"


def _head(c: DraftConfig) -> str:
    if not c.own_head:
        part = ", of which only the draft vocabulary's rows count" if c.reduced_vocabulary else ""
        return f"the target's{part}"
    return "its own embedding" if c.tied else "its own"


def _kv_bytes(c: DraftConfig) -> str:
    elements = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
    text = f"{elements * 2} bytes in bfloat16, {elements * 4} in float32, over all ranks"
    if any(sight.window is not None for sight in c.layers):
        text += "; layers with a window keep the whole context, too"
    return text


def _target_config(path: str) -> ModelConfig:
    """What the server knows of a target before it is loaded, read without running code that comes with it."""
    from sglang.srt.configs.model_config import ModelConfig

    try:
        return ModelConfig(path, trust_remote_code=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise DFlashError(
            f"--target {path} has no config that SGLang can read ({reason}): give the target's folder or "
            "Hugging Face id."
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_dflash.inspect",
        description="Prints what a draft checkpoint is and how DFLASH will run it.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="PATH", help="folder or Hugging Face id of the drafter")
    parser.add_argument("--revision", help="branch, tag or commit of a drafter on Hugging Face")
    parser.add_argument("--target", help="folder or Hugging Face id of the target that it must fit")
    return parser


if __name__ == "__main__":
    sys.exit(main())
