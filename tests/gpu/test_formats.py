"""Drafters of every kind in captured rounds: what they are must not change what is answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.server.checks import accept_length, assert_same
from tests.server.harness import CHOSEN_WORKERS, DRAFTER, TARGET, Server, running
from tests.unit.drafters import reduced_vocabulary, speculators_config

PROBLEMS, WINDOW = 100, 48
Weights = dict[str, torch.Tensor]
Made = tuple[dict, Weights]


def head() -> torch.Tensor:
    """Of the bundled target, whose embedding it is, too."""
    return load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"]


def own_vocabulary(raw: dict, weights: Weights) -> Made:
    """An embedding and an LM head of its own, equal to the target's."""
    return raw, weights | {"embed_tokens.weight": head(), "lm_head.weight": head().clone()}


def biases(raw: dict, weights: Weights) -> Made:
    """Attention with biases that are 0."""
    heads, kv_heads = (raw[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
    added: Weights = {}
    for i in range(raw["num_hidden_layers"]):
        for name, n in sizes.items():
            added[f"layers.{i}.self_attn.{name}_proj.bias"] = torch.zeros(n * raw["head_dim"])
        added[f"layers.{i}.self_attn.o_proj.bias"] = torch.zeros(raw["hidden_size"])
    return raw | {"attention_bias": True}, weights | {
        name: bias.to(torch.bfloat16) for name, bias in added.items()
    }


def windows(raw: dict, weights: Weights) -> Made:
    """A full and a sliding layer, in speculators' format, both ways inside the block."""
    layers = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}
    raw = raw | layers | {"sliding_window": WINDOW}
    return speculators_config(raw, str(TARGET), sliding_window_non_causal=True), weights


def reduced(raw: dict, weights: Weights) -> Made:
    """A vocabulary without the last hundred tokens."""
    ids = torch.arange(raw["vocab_size"] - 100)
    config = speculators_config(raw, str(TARGET), draft_vocab_size=len(ids))
    return config, weights | reduced_vocabulary(head(), ids)


# What is changed, tokens of a round at least, and arguments.
CASES: dict[str, tuple[Callable[[dict, Weights], Made], float, tuple[str, ...]]] = {
    "own vocabulary": (own_vocabulary, 7.2, ()),
    "biases": (biases, 7.2, ()),
    "windows": (windows, 5.0, ()),
    "windows triton": (windows, 5.0, ("--speculative-dflash-attention", "triton")),
    "reduced": (reduced, 4.0, ()),
}


@pytest.mark.parametrize("worker", CHOSEN_WORKERS)
@pytest.mark.parametrize("case", CASES)
def test_format(
    case: str, worker: str, logs: Path, tmp_path: Path, plain: Server, prompts: list[str]
) -> None:
    change, shortest, arguments = CASES[case]
    raw = json.loads((DRAFTER / "config.json").read_text())
    config, weights = change(raw, load_file(DRAFTER / "model.safetensors"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: w.contiguous() for name, w in weights.items()}, tmp_path / "model.safetensors")
    path = ("--speculative-draft-model-path", str(tmp_path), "--reasoning-parser", "qwen3")
    log = logs / f"{case.replace(' ', '-')}-{worker}.log"
    with running(log, *path, *arguments, worker=worker) as server:
        assert "DFLASH captured" in log.read_text(errors="replace")
        answers = server.generate_all(prompts[:PROBLEMS], concurrency=8)
        expected = plain.generate_all(prompts[:PROBLEMS], concurrency=8)
        for prompt, answer, reference in zip(prompts, answers, expected, strict=False):
            assert_same(answer, reference, plain, prompt)
        print(case, worker, accept_length(answers))
        assert accept_length(answers) >= shortest
        server.check_idle()
