"""LoRA adapters on the attention of a mixture of experts: answers of plain decoding with the same adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.adapters import ATTENTION, write_adapter
from tests.server.checks import accept_length, assert_tie
from tests.server.harness import CHOSEN_WORKERS, DEVICE, running
from tests.server.test_decoders import PROMPTS, TOKENS
from tests.server.test_lora import BACKEND, ask_all
from tests.unit.decoders import write_drafter, write_target
from tests.unit.sliding import DRAFTER_ON_GPUS

# Heads that a GPU's kernels know, and at what distance two tokens are alike there, where logits are of 16 to 32.
ON_GPUS = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
SIZES, DRAFTER_SIZES = (ON_GPUS, DRAFTER_ON_GPUS) if DEVICE == "cuda" else ({}, {})
TIE = 0.5


@pytest.mark.long
def test_equal(tmp_path: Path, logs: Path) -> None:
    """Requests of no adapter and of two, side by side."""
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    target.mkdir()
    drafter.mkdir()
    write_target(target, "Qwen3-MoE", embedding=0.4, **SIZES)
    write_drafter(drafter, **DRAFTER_SIZES)
    paths = [
        f"{seed}={write_adapter(tmp_path / str(seed), seed, target, scale=0.3, modules=ATTENTION)}"
        for seed in range(2)
    ]
    flags = ("--model-path", str(target), "--skip-tokenizer-init", "--lora-paths", *paths)
    flags += ("--lora-backend", BACKEND)
    asked = [(ids, name) for ids in PROMPTS for name in (None, "0", "1")]
    with running(logs / "lora-experts.log", *flags) as plain:
        expected = [answer["output_ids"] for answer in ask_all(plain, asked, 8, **TOKENS)]
        assert all(len({tuple(ids) for ids in expected[i : i + 3]}) == 3 for i in (0, 3, 6))
        flags += ("--speculative-draft-model-path", str(drafter))
        for worker in CHOSEN_WORKERS:
            with running(logs / f"lora-experts-{worker}.log", *flags, worker=worker) as server:
                answers = ask_all(server, asked, 8, **TOKENS)
                assert accept_length(answers) > 1.2
                server.check_idle()
            for (ids, name), answer, its in zip(asked, answers, expected, strict=True):
                if DEVICE == "cuda" and answer["output_ids"] != its:
                    assert_tie(answer["output_ids"], its, plain, ids, TIE, name)
                else:
                    assert answer["output_ids"] == its
