"""The likeliest token as rounds find it against the release's own logits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessor

from sglang_dflash.drafter.vocabulary import BorrowedVocabulary, embedding_of
from tests.unit.drafters import TargetStub

pytestmark = pytest.mark.usefixtures("one_rank")


@torch.no_grad()
def test_float32_head() -> None:
    """--enable-fp32-lm-head: logits that are one in bfloat16 have an order in float32."""
    torch.manual_seed(0)
    stub = TargetStub(torch.randn(640, 64)).to(torch.bfloat16)
    hidden = torch.randn(500, 64, dtype=torch.bfloat16)
    processor = SimpleNamespace(use_fp32_lm_head=True)
    logits = LogitsProcessor._compute_lm_head(processor, hidden, stub.lm_head)[:, :640]
    assert logits.dtype == torch.float32
    expected = logits.argmax(dim=-1)
    assert torch.equal(BorrowedVocabulary(stub, fp32=True).argmax(hidden), expected)
    assert not torch.equal(BorrowedVocabulary(stub).argmax(hidden), expected)


@torch.no_grad()
def test_scaled_logits() -> None:
    """Command R+'s scale, which is no power of two, leaves one of two logits in bfloat16."""
    torch.manual_seed(0)
    stub = TargetStub(torch.randn(640, 64)).to(torch.bfloat16)
    hidden = torch.randn(500, 64, dtype=torch.bfloat16)
    processor = SimpleNamespace(use_fp32_lm_head=False)
    logits = LogitsProcessor._compute_lm_head(processor, hidden, stub.lm_head)[:, :640]
    expected = logits.mul_(5 / 6).argmax(dim=-1)
    assert torch.equal(BorrowedVocabulary(stub, scale=5 / 6).argmax(hidden), expected)
    assert not torch.equal(BorrowedVocabulary(stub).argmax(hidden), expected)


def test_an_embedding_by_another_name() -> None:
    stub = TargetStub(torch.randn(64, 8))
    stub.model.word_embeddings = stub.model._modules.pop("embed_tokens")
    assert embedding_of(stub) is stub.model.word_embeddings
