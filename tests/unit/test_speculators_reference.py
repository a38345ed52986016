"""Checkpoints of the package `speculators`: the draft model drafts what the package itself drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sglang_dflash.checkpoint.formats.weights import check_weights
from sglang_dflash.checkpoint.load import load_config
from tests.unit import speculators_writer as writer
from tests.unit.drafters import DraftRunner, TargetStub

TARGET = Path(__file__).parents[2] / "checkpoints" / "tiny" / "target"
BLOCK, TOLERANCE = 6, 1e-4
pytestmark = pytest.mark.usefixtures("one_rank")

TRANSFORMER = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
MIXED = {
    "use_sliding_window": True,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
REDUCED = torch.arange(5, 768, 3)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "whole": ({}, {}),
    "reduced": ({}, {"draft_ids": REDUCED}),
    "sliding": (MIXED, {}),
    "sliding both ways": (MIXED, {"sliding_window_non_causal": True}),
    "sliding and reduced": (MIXED, {"draft_ids": REDUCED}),
    "both ways without sliding": ({}, {"sliding_window_non_causal": True}),
    "llama": ({"model_type": "llama"}, {}),
    "biases": ({"attention_bias": True}, {"layer_ids": [4, 1]}),
    "YaRN": (
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        {"layer_ids": [0, 2]},
    ),
}


def randomize(model: nn.Module) -> None:
    """Large enough that norms, attention and MLP all matter."""
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name or "verifier" in name:
            continue
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.3)
        else:
            nn.init.uniform_(parameter, 0.5, 1.5)


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_drafts(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    transformer, changes = VARIANTS[name]
    options = {"layer_ids": [1, 2, 3], "mask_token_id": 3, "block_size": BLOCK} | changes
    model = writer.build(TRANSFORMER | transformer, TARGET, **options)
    randomize(model.layers), randomize(model.fc), randomize(model.norm)
    if "draft_ids" in options:
        nn.init.normal_(model.lm_head.weight)  # its own, not rows of the verifier's
    model.save_pretrained(tmp_path)

    length, anchors = 120, [1, 2, 5, 19, 20, 21, 22, 50, 51, 90, 110, 113]
    ids = torch.randint(0, 768, (length,))
    layers = torch.randn(5, length, 256)  # the embedding and the outputs of four layers
    aux = torch.cat([layers[i] for i in options["layer_ids"]], dim=-1)
    expected, expected_tokens = writer.drafts(model, ids, aux, anchors)

    config = load_config(str(tmp_path))
    check_weights(config)
    stub = TargetStub(model.embed_tokens.weight)
    draft = DraftRunner(tmp_path, stub, requests=len(anchors), context=length + BLOCK)
    taps = torch.cat([layers[layer + 1] for layer in config.taps], dim=-1)
    for row, anchor in enumerate(anchors):
        draft.write_context(row, taps[:anchor])
    starts = torch.tensor(anchors)
    states = draft.draft_states(ids[starts], starts, BLOCK)
    logits = draft.model.vocabulary.logits(states).view(expected.shape)
    assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert torch.equal(draft.draft_tokens(ids[starts], starts, BLOCK), expected_tokens)
    assert len(expected_tokens.unique()) > 6
    if "draft_ids" in options:
        assert set(expected_tokens.flatten().tolist()) <= set(REDUCED.tolist())
