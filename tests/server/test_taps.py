"""A drafter that reads the target's embeddings, on two kinds of target."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.harness import CHOSEN_WORKERS, running
from tests.unit.drafters import TARGET, save, save_random, speculators_config, zlab_config

TAPS = {"mask_token_id": 3, "target_layer_ids": [-1, 2]}
PROMPTS = [list(range(5, 5 + n)) for n in (3, 20, 41)]
ROPE = {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


def target(folder: Path, kind: str) -> Path:
    """config.json of a model without weights."""
    own = {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "max_position_embeddings": 320,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return save(folder, TARGET | own | ROPE)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_the_embedding_as_a_tap(kind: str, tmp_path: Path, logs: Path) -> None:
    """The answers of plain decoding; a drafter with random weights is seldom right."""
    model = target(tmp_path / "target", kind)
    raw = speculators_config(zlab_config(dflash_config=TAPS), str(model))
    assert raw["aux_hidden_state_layer_ids"] == [0, 3]  # this format counts from the embedding
    drafter = save_random(tmp_path / "drafter", raw)
    dummy = ("--model-path", str(model), "--load-format", "dummy", "--skip-tokenizer-init")
    with running(logs / f"taps-{kind}-plain.log", *dummy) as plain:
        expected = [plain.generate(ids, max_new_tokens=40, ignore_eos=True) for ids in PROMPTS]
    worker = CHOSEN_WORKERS[-1]
    arguments = (*dummy, "--speculative-draft-model-path", str(drafter))
    with running(logs / f"taps-{kind}-{worker}.log", *arguments, worker=worker) as server:
        for ids, reference in zip(PROMPTS, expected, strict=True):
            answer = server.generate(ids, max_new_tokens=40, ignore_eos=True)
            assert answer["output_ids"] == reference["output_ids"]
            assert answer["meta_info"]["spec_verify_ct"] > 0
        server.check_idle()
