"""The draft model under SGLang against the trainer's own drafter in plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from checkpoints.trainer.drafter import Drafter, DraftShape
from checkpoints.trainer.modules import Shape
from checkpoints.trainer.target import Target
from sglang_dflash.errors import DFlashError
from sglang_dflash.gpu.tilings import Tilings
from sglang_dflash.gpu.triton_attention import TritonBlockAttention
from tests.unit import drafters
from tests.unit.drafters import DraftRunner, TargetStub, zlab_config

BLOCK, TAPS, CONTEXT = 8, (0, 2, 3), 200
SHAPE = Shape(
    num_layers=3,
    hidden_size=96,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=128,
    vocab_size=320,
)
pytestmark = pytest.mark.usefixtures("one_rank")


def reference() -> tuple[Target, Drafter]:
    """Random weights, large enough that norms, attention and MLP all matter."""
    torch.manual_seed(0)
    target, drafter = Target(SHAPE), Drafter(DraftShape(SHAPE, BLOCK, TAPS))
    for model in (target, drafter):
        for parameter in model.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.2)
            else:
                nn.init.uniform_(parameter, 0.5, 1.5)
    return target.eval(), drafter.eval()


def save(folder: Path, drafter: Drafter) -> Path:
    weights = {name: weight.detach() for name, weight in drafter.state_dict().items()}
    return drafters.save(folder, zlab_config(), model=weights)


@torch.no_grad()
@pytest.mark.parametrize("layers", [True, False], ids=["layers", "attention"])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_states_in_captured_blocks(tmp_path: Path, kv_dtype: torch.dtype, layers: bool) -> None:
    """With attention and layers as graphs hold them, the draft model computes what it computes kernel by kernel."""
    target, drafter = reference()
    stub = TargetStub(target.embed_tokens.weight)
    draft = DraftRunner(save(tmp_path, drafter), stub, 3, CONTEXT, kv_dtype)
    starts, bonus = torch.tensor([1, 17, 90]), torch.tensor([5, 77, 200])
    for row, start in enumerate(starts.tolist()):
        draft.write_context(row, torch.randn(start, len(TAPS) * SHAPE.hidden_size))
    expected = draft.draft_states(bonus, starts, BLOCK)
    if layers:
        draft.model.fuse(Tilings("CPU", 1, lambda *_: pytest.fail("nothing is to be timed")), None)
        assert draft.model.fused is not None
    lengths, table = (starts + BLOCK).int(), draft.req_to_token_pool.req_to_token
    draft.attn_backend = TritonBlockAttention(
        SimpleNamespace(page_size=1, token_to_kv_pool=None, attention_chunk_size=None),
        lengths,
        table,
        BLOCK,
        causal=False,
        short=False,
    )
    made = draft.draft_states(bonus, starts, BLOCK)
    # What is rounded to FP8 may differ by a step where a sum of float32 does.
    torch.testing.assert_close(
        made, expected, atol=1e-4 if kv_dtype.itemsize == 4 else 1e-2, rtol=0
    )


@torch.no_grad()
def test_drafts_of_the_plain_drafter(tmp_path: Path) -> None:
    """Same draft tokens from contexts of different lengths, written in pieces as rounds do."""
    target, drafter = reference()
    stub = TargetStub(target.embed_tokens.weight)
    draft = DraftRunner(save(tmp_path, drafter), stub, requests=4, context=CONTEXT)
    starts = torch.tensor([1, 17, 90, CONTEXT - BLOCK])
    taps = torch.randn(4, CONTEXT, len(TAPS) * SHAPE.hidden_size)
    bonus = torch.tensor([5, 77, 200, 319])
    for row, start in enumerate(starts.tolist()):
        draft.write_context(row, taps[row, :start])
    drafted = draft.draft_tokens(bonus, starts, BLOCK)

    for row, start in enumerate(starts.tolist()):
        logits = drafter(
            target, bonus[row].view(1, 1), torch.tensor([[start]]), taps[row : row + 1, :start]
        )
        assert drafted[row].tolist() == logits[0, 0].argmax(-1).tolist()
    assert len(set(drafted.flatten().tolist())) > 10  # not one token for everything


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    target, drafter = reference()
    draft = DraftRunner(save(tmp_path, drafter), TargetStub(target.embed_tokens.weight))
    weights = drafter.state_dict()
    del weights["layers.1.self_attn.k_proj.weight"]
    weights["last.weight"] = weights["norm.weight"]
    with pytest.raises(DFlashError) as caught:
        draft.model.load_weights(weights.items())
    assert "misses ['layers.1.self_attn.k_proj.weight']" in str(caught.value)
    assert "has left over ['last.weight']" in str(caught.value)


def test_a_target_without_a_head(tmp_path: Path) -> None:
    target, drafter = reference()
    stub = TargetStub(target.embed_tokens.weight)
    del stub.lm_head
    with pytest.raises(DFlashError, match="has no LM head"):
        DraftRunner(save(tmp_path, drafter), stub)
