"""The likeliest token as rounds find it against the release's own logits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from torch import nn

from sglang_dflash.drafter.vocabulary import BorrowedVocabulary, embedding_of, of_all_parts
from sglang_dflash.gpu.kernels.argmax import row_max_and_rest
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


class _Halves:
    """Stands for a kernel: weights are kept as their halves, in int8."""

    @staticmethod
    def apply(head: nn.Module, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        assert bias is None
        return hidden @ (2.0 * head.halves).T.to(hidden.dtype)


@torch.no_grad()
@pytest.mark.parametrize("fp32", [False, True])
def test_a_head_that_is_quantized(fp32: bool) -> None:
    """Its method makes the logits, as in the release; what pads the vocabulary never wins."""
    torch.manual_seed(0)
    halves = torch.randint(-8, 8, (640, 64), dtype=torch.int8)
    stub = TargetStub(torch.randn(600, 64), head=torch.zeros(600, 64)).to(torch.bfloat16)
    head = stub.lm_head
    del head.weight
    halves[600:] = 100
    head.register_parameter("halves", nn.Parameter(halves, requires_grad=False))
    head.quant_method = _Halves
    hidden = torch.randn(50, 64, dtype=torch.bfloat16)
    processor = SimpleNamespace(use_fp32_lm_head=fp32)
    logits = LogitsProcessor._compute_lm_head(processor, hidden, head)[:, :600]
    assert logits.dtype == (torch.float32 if fp32 else torch.bfloat16)
    vocabulary = BorrowedVocabulary(stub, fp32=fp32)
    assert torch.equal(vocabulary.logits(hidden), logits)
    assert torch.equal(vocabulary.argmax(hidden), logits.argmax(dim=-1))


def test_odds_of_a_vocabulary_in_parts() -> None:
    """As of the whole; where two are as likely, where a part has nothing that can be drafted, and none but one."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(6, 40)
    logits[1, 7] = logits[1, 33] = 20.0
    logits[2, 20:] = logits[3, 1:] = float("-inf")
    parts = [row_max_and_rest(part) for part in logits.split(20, dim=1)]
    values, ids, rests = (torch.stack(each).double() for each in zip(*parts, strict=True))
    ids[1] += 20
    token, log_odds = of_all_parts(values, ids, rests)
    assert torch.equal(token, logits.argmax(dim=1))
    torch.testing.assert_close(log_odds, logits.softmax(dim=1).amax(dim=1).logit())
    vocabulary = BorrowedVocabulary(TargetStub(torch.randn(40, 8)))
    vocabulary.logits = lambda hidden: logits
    alone = vocabulary.likeliest_with_odds(logits)
    assert torch.equal(alone[0], token)
    torch.testing.assert_close(alone[1], log_odds)


def test_an_embedding_by_another_name() -> None:
    stub = TargetStub(torch.randn(64, 8))
    stub.model.word_embeddings = stub.model._modules.pop("embed_tokens")
    assert embedding_of(stub) is stub.model.word_embeddings
