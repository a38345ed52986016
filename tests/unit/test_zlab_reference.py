"""The draft model against the reference implementation, the PyPI package `dflash`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash import DFlashDraftModel, extract_context_feature
from torch import nn

from sglang_dflash.checkpoint.load import load_config
from tests.unit.drafters import CONTEXT, DraftRunner, TargetStub, save_random, zlab_config

TOLERANCE = 1e-4
VOCABULARY = 200
pytestmark = pytest.mark.usefixtures("one_rank")


def random_config(seed: int) -> dict[str, Any]:
    """A config.json in which everything that the package reads may vary."""
    r = random.Random(seed)
    depth, target_depth = r.randint(1, 4), r.randint(4, 9)
    kv_heads = r.choice([1, 2, 3])
    types = [r.choice(["full_attention", "sliding_attention"]) for _ in range(depth)]
    dflash: dict[str, Any] = {"mask_token_id": r.randrange(VOCABULARY)}
    if r.random() < 0.7:  # in any order, and a layer may be tapped twice
        dflash["target_layer_ids"] = [r.randrange(target_depth - 1) for _ in range(r.randint(1, 4))]
    if r.random() < 0.3:
        dflash["input_embedding_scale"] = r.choice([0.5, 3.0])
    raw = zlab_config(
        hidden_size=r.choice([32, 48, 80]),
        num_hidden_layers=depth,
        num_attention_heads=kv_heads * r.choice([1, 2, 4]),
        num_key_value_heads=kv_heads,
        head_dim=r.choice([8, 16, 32]),
        intermediate_size=r.choice([48, 96]),
        vocab_size=VOCABULARY,
        num_target_layers=target_depth,
        layer_types=types,
        use_sliding_window=True,
        sliding_window=r.choice([1, 3, 17, 64, 500]),
        attention_bias=r.random() < 0.3,
        dflash_config=dflash,
    )
    raw |= r.choice(ROPES)
    block_size = r.randint(2, 16)
    (dflash if r.random() < 0.5 else raw)["block_size"] = block_size
    if "block_size" in dflash:
        del raw["block_size"]
    if r.random() < 0.4:
        raw["is_causal"] = r.random() < 0.5
    return raw


ROPES: list[dict[str, Any]] = [
    {"rope_theta": 1e4, "rope_parameters": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    {"rope_theta": 2e4, "rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
        }
    },
    {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
]


class Target(nn.Module):
    """An embedding and an LM head."""

    def __init__(self, width: int):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.3)


@pytest.mark.parametrize("seed", range(50))
@torch.no_grad()
def test_logits(tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    raw = random_config(seed)
    folder = save_random(tmp_path, raw, seed)
    reference = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    config = load_config(str(folder))
    assert list(config.target_layer_ids) == list(reference.target_layer_ids)
    assert (config.block_size, config.mask_token_id) == (
        reference.block_size,
        reference.mask_token_id,
    )
    width = random.Random(seed).randint(2, config.block_size)
    context = 1 + seed * 299 // 49  # 1 to 300
    target = Target(config.hidden_size)
    # The target's embedding and the outputs of its layers.
    states = [torch.randn(1, context, config.hidden_size) for _ in range(12)]

    block = torch.full((1, width), config.mask_token_id)
    block[0, 0] = seed
    hidden = reference(
        position_ids=torch.arange(context + width)[None],
        noise_embedding=target.embed_tokens(block)
        * raw["dflash_config"].get("input_embedding_scale", 1.0),
        target_hidden=extract_context_feature(states, reference.target_layer_ids),
    )
    expected = reference.compute_logits(hidden[0, 1:], target.lm_head)

    stub = TargetStub(target.embed_tokens.weight, target.lm_head.weight)
    draft = DraftRunner(folder, stub)
    draft.write_context(0, torch.cat([states[layer + 1][0] for layer in config.taps], dim=-1))
    bonus, starts = torch.tensor([seed]), torch.tensor([context])
    logits = draft.model.vocabulary.logits(draft.draft_states(bonus, starts, width))
    assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()
    # What is drafted is the likeliest token, up to that difference.
    drafted = draft.draft_tokens(bonus, starts, width)[0]
    chosen = expected.gather(1, drafted[:, None])[:, 0]
    assert (chosen >= expected.max(1).values - TOLERANCE * expected.abs().max()).all()


def test_configurations_vary() -> None:
    """The 50 differ in what they are to cover."""
    raws = [random_config(seed) for seed in range(50)]
    sliding = ["sliding_attention" in raw["layer_types"] for raw in raws]
    assert 10 < sum(sliding) < 50
    assert {raw.get("is_causal") for raw in raws} == {None, True, False}
    assert {raw["attention_bias"] for raw in raws} == {True, False}
    assert {raw["num_hidden_layers"] for raw in raws} == {1, 2, 3, 4}
    assert sum("target_layer_ids" not in raw["dflash_config"] for raw in raws) > 5
    assert len({str(raw.get("rope_parameters")) for raw in raws}) == 4
    assert max(raw["sliding_window"] for raw in raws) > CONTEXT
