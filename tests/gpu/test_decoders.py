"""Targets of many architectures in graphs: answers of plain decoding. docs/targets.md has what was seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.test_states_and_latents import COMMON, ONCE_IDLE, TARGETS, TIE
from tests.server.checks import accept_length, assert_tie
from tests.server.harness import CHOSEN_WORKERS, running
from tests.unit.decoders import ARCHITECTURES, write_drafter, write_target
from tests.unit.sliding import DRAFTER_ON_GPUS

TOKENS = {"max_new_tokens": 60, "ignore_eos": True}
# The longest are beyond Gemma's windows.
PROMPTS = [[(7 * n + 31 * i) % 300 + 5 for i in range(n)] for n in (1, 2, 5, 13, 34, 60, 150, 300)]
# Heads that all kernels of a GPU know; they fill what is hidden, which some classes take for granted.
SIZES = COMMON | dict(num_attention_heads=2, num_key_value_heads=1, head_dim=64, embedding=0.4)
OWN: dict[str, dict[str, Any]] = TARGETS | {
    "DeepSeek-V2-Lite": TARGETS["DeepSeek-V3"],
    # Which a CPU does not compute.
    "Gemma 2": dict(attn_logit_softcapping=20.0, final_logit_softcapping=30.0),
    "OLMo": dict(num_key_value_heads=2),
    "OLMoE": dict(num_key_value_heads=2),
    # Others say the same token all the time, with which nothing is seen.
    "StarCoder2": dict(embedding=0.15, intermediate_size=192, num_key_value_heads=2),
    "Qwen2-MoE": dict(embedding=0.15),
    "MiniMax-M2": dict(embedding=0.15),
}
# Logits of these are of 1 to 4, of 4 to 8, of the others of 16.
SMALL, SMALL_TIE = ("Cohere", "Gemma", "Granite"), 0.06
MIDDLE, MIDDLE_TIE = ("StarCoder2", "Qwen2-MoE", "MiniMax-M2"), 0.12


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("drafter"), **DRAFTER_ON_GPUS)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equal(name: str, drafter: Path, tmp_path: Path, logs: Path) -> None:
    """Alone, and all at once with prompts beside rounds."""
    write_target(tmp_path, name, **SIZES | OWN.get(name, {}))
    given, log = ("--model-path", str(tmp_path), "--skip-tokenizer-init"), name.replace(" ", "-")
    tie = SMALL_TIE if name.startswith(SMALL) else MIDDLE_TIE if name in MIDDLE else TIE
    with running(logs / f"{log}-plain.log", *given, **ONCE_IDLE) as plain:
        expected = [plain.generate(ids, **TOKENS)["output_ids"] for ids in PROMPTS]
        assert sum(len(set(ids)) > 1 for ids in expected) >= 3
        given += ("--speculative-draft-model-path", str(drafter))
        for worker in CHOSEN_WORKERS:
            file = logs / f"{log}-{worker}.log"
            with running(file, *given, worker=worker, **ONCE_IDLE) as server:
                assert "without CUDA graphs" not in file.read_text()
                for concurrency in (1, len(PROMPTS)):
                    answers = server.generate_all(PROMPTS, concurrency, **TOKENS)
                    for ids, answer, its in zip(PROMPTS, answers, expected, strict=True):
                        if answer["output_ids"] != its:
                            assert_tie(answer["output_ids"], its, plain, ids, tie)
                    assert accept_length(answers) > 1.1
                server.check_idle()
