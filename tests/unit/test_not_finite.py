"""NaN in logits: which rows it marks, which requests it ends, and where it never gets."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_dflash.drawing.not_finite import NOT_FINITE, mark, take_out
from sglang_dflash.scheduler.results import end_marked

NAN, INF = float("nan"), float("inf")


def request(chunked: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        rid="r", seqlen=7, is_chunked=chunked, eos_token_ids={9, 4}, to_finish=None
    )


def test_mark() -> None:
    tokens = mark(torch.tensor([3, 4, 5]), torch.tensor([1.0, NAN, INF]))
    assert tokens.tolist() == [3, NOT_FINITE, 5]


def test_take_out() -> None:
    """Only NaN is taken out: a grammar's mask and what it leaves stay."""
    logits = torch.tensor([[1.0, -INF, INF], [NAN, -INF, 2.0], [NAN, NAN, NAN]])
    assert take_out(logits).tolist() == [False, True, True]
    assert logits.tolist() == [[1.0, -INF, INF], [0.0, -INF, 2.0], [0.0, 0.0, 0.0]]


def test_prefilled_requests() -> None:
    """Of a chunk that is not the last no token is wanted."""
    reqs = [request(), request(), request(chunked=1)]
    assert end_marked(reqs, [3, NOT_FINITE, NOT_FINITE]) == ([3, 4, 0], 1)
    assert [req.to_finish is None for req in reqs] == [True, False, True]
    assert isinstance(reqs[1].to_finish, FINISH_ABORT)
    assert "NaN after 7 tokens" in reqs[1].to_finish.message
    assert reqs[1].not_finite and not hasattr(reqs[2], "not_finite")
