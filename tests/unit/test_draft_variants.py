"""Draft models that the reference implementation has no class for, against it with parts replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dflash import DFlashDraftModel
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from sglang_dflash.checkpoint.formats.weights import check_weights, expected_weights
from sglang_dflash.checkpoint.load import load_config
from sglang_dflash.drafter.context_kv import rotate
from sglang_dflash.drafter.model import fold_taps
from sglang_dflash.drafter.rope import draft_rope
from tests.unit.drafters import (
    TARGET,
    DraftRunner,
    TargetStub,
    random_weights,
    reduced_vocabulary,
    save,
    save_random,
    speculators_config,
    zlab_config,
)

WIDTH, START, VOCABULARY = 6, 40, TARGET["vocab_size"]
pytestmark = pytest.mark.usefixtures("one_rank")


def matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.3


def reference(raw: dict[str, Any], weights: dict[str, torch.Tensor]) -> DFlashDraftModel:
    """The reference implementation with whatever of it the weights fill."""
    names = {name: value for name, value in raw.items() if name != "architectures"}
    model = DFlashDraftModel(Qwen3Config(**names)).eval()
    for layer in model.layers if "layers.0.self_attn.q_norm.weight" not in weights else ():
        layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()
    model.fc = nn.Linear(weights["fc.weight"].shape[1], raw["hidden_size"], bias=False)
    own = ("embed_tokens.weight", "lm_head.weight")
    body = {name: weight for name, weight in weights.items() if name not in own}
    model.load_state_dict(body)
    return model


@torch.no_grad()
def expected_logits(
    model: DFlashDraftModel, hidden: torch.Tensor, embedding: torch.Tensor, head: torch.Tensor
) -> torch.Tensor:
    """[WIDTH - 1, vocabulary] of a block after START tokens of context."""
    block = torch.full((1, WIDTH), 3)
    block[0, 0] = 17
    states = model(
        position_ids=torch.arange(START + WIDTH)[None],
        noise_embedding=embedding[block],
        target_hidden=hidden[None],
    )
    return states[0, 1:] @ head.T


@torch.no_grad()
def our_drafts(
    folder: Path, hidden: torch.Tensor, embedding: torch.Tensor, head: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [WIDTH - 1, draft vocabulary] and tokens [WIDTH - 1] of the same block."""
    check_weights(load_config(str(folder)))
    draft = DraftRunner(folder, TargetStub(embedding, head))
    draft.write_context(0, hidden)
    block = torch.tensor([17]), torch.tensor([START]), WIDTH
    return draft.model.vocabulary.logits(draft.draft_states(*block)), draft.draft_tokens(*block)[0]


def assert_equal(mine: torch.Tensor, expected: torch.Tensor) -> None:
    assert (mine - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_llama_layers(tmp_path: Path) -> None:
    raw = zlab_config(model_type="llama", attention_bias=True)
    folder = save_random(tmp_path, raw)
    weights = random_weights(expected_weights(load_config(str(folder))))
    assert not any(".q_norm." in name for name in weights)
    embedding, head = matrix(VOCABULARY, 96, 1), matrix(VOCABULARY, 96, 2)
    hidden = matrix(START, 3 * 96, 3)
    expected = expected_logits(reference(raw, weights), hidden, embedding, head)
    logits, tokens = our_drafts(folder, hidden, embedding, head)
    assert_equal(logits, expected)
    assert torch.equal(tokens, expected.argmax(1))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("width", [96, 160])
def test_own_embedding_and_head(tmp_path: Path, tied: bool, width: int) -> None:
    """Of a drafter as wide as its target, and of one that is narrower."""
    raw = zlab_config(target_hidden_size=width, tie_word_embeddings=tied)
    save(tmp_path, raw)
    weights = random_weights(expected_weights(load_config(str(tmp_path))))
    weights["embed_tokens.weight"] = own = matrix(VOCABULARY, 96, 1)
    if not tied:
        weights["lm_head.weight"] = own = matrix(VOCABULARY, 96, 2)
    save(tmp_path, None, model=weights)
    hidden = matrix(START, 3 * width, 3)
    expected = expected_logits(reference(raw, weights), hidden, weights["embed_tokens.weight"], own)
    others = matrix(VOCABULARY, width, 4), matrix(VOCABULARY, width, 5)
    logits, tokens = our_drafts(tmp_path, hidden, *others)
    assert_equal(logits, expected)
    assert torch.equal(tokens, expected.argmax(1))


@pytest.mark.parametrize("own_head", [True, False])
def test_reduced_vocabulary(tmp_path: Path, own_head: bool) -> None:
    """With a head of its own, or with the rows of the target's head that t2d lists."""
    zlab = zlab_config()
    save(tmp_path, zlab)
    weights = random_weights(expected_weights(load_config(str(tmp_path))))
    embedding, head = matrix(VOCABULARY, 96, 1), matrix(VOCABULARY, 96, 2)
    ids = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))[:40].sort().values
    reduced = reduced_vocabulary(head, ids)
    if not own_head:
        del reduced["lm_head.weight"]
    save(tmp_path, speculators_config(zlab, "t", draft_vocab_size=40), model=weights | reduced)
    hidden = matrix(START, 3 * 96, 3)
    whole = expected_logits(reference(zlab, weights), hidden, embedding, head)
    logits, tokens = our_drafts(tmp_path, hidden, embedding, head)
    assert_equal(logits if own_head else logits[:, ids], whole[:, ids])
    assert torch.equal(tokens, ids[whole[:, ids].argmax(1)])
    assert not torch.equal(tokens, whole.argmax(1))  # the likeliest of all is not in it


def test_fold_taps() -> None:
    """Any order, and a layer that is listed twice: the same projection of what the target gives."""
    ids, width = (4, 0, 4, 2), 5
    weight = matrix(7, len(ids) * width, 0)
    layers = {layer: matrix(3, width, layer) for layer in ids}
    listed = torch.cat([layers[layer] for layer in ids], dim=1)
    handed_out = torch.cat([layers[layer] for layer in sorted(layers)], dim=1)
    torch.testing.assert_close(handed_out @ fold_taps(weight, ids).T, listed @ weight.T)


@pytest.mark.parametrize("part", [0.25, 0.5])
@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_partial_rotary(tmp_path: Path, part: float, kind: str) -> None:
    """Queries and keys of a block turn as those of the context do; the rest of a head stays."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "partial_rotary_factor": part}
    if kind == "yarn":
        rope |= {"factor": 4.0, "original_max_position_embeddings": 16}
    config = load_config(str(save(tmp_path, zlab_config(rope_parameters=rope))))
    rotary = draft_rope(config, 64)
    dim = int(config.head_dim * part)
    assert rotary.rotary_dim == dim and rotary.cos_sin_cache.shape == (64, dim)
    q, positions = torch.randn(9, 4 * config.head_dim), torch.arange(0, 63, 7)
    turned, _ = rotary(positions, q.clone(), q.clone())
    heads = q.view(9, 4, -1)
    expected = rotate(heads, rotary.cos_sin_cache[positions])
    torch.testing.assert_close(turned.view(9, 4, -1), expected)
    assert torch.equal(expected[..., dim:], heads[..., dim:])
    assert not torch.equal(expected[1:, :, :dim], heads[1:, :, :dim])


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_scaled_rope(tmp_path: Path, kind: str) -> None:
    """The table is that of transformers, whatever the target's RoPE."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind != "linear":
        rope["original_max_position_embeddings"] = 16
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    raw = zlab_config(rope_parameters=rope)
    config = load_config(str(save(tmp_path, raw)))
    theirs = Qwen3RotaryEmbedding(Qwen3Config(**raw))
    cos, sin = theirs(torch.zeros(1), torch.arange(64)[None])
    half = config.head_dim // 2
    expected = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=1)
    torch.testing.assert_close(draft_rope(config, 64).cos_sin_cache, expected)
