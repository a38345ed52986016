"""Penalties of a block's rows against SGLang's penalizers, fed one token after the other."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.drawing.not_finite import NOT_FINITE
from sglang_dflash.drawing.penalties import Penalizer, Penalties, is_penalized

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, EOS, ROWS = 12, 3, 30
TOKENIZER = SimpleNamespace(additional_stop_token_ids={4}, eos_token_id=EOS)


@dataclass(eq=False)
class Batch:
    """What the penalizers read of a batch."""

    reqs: list[Req]
    device: str = "cpu"


def request(output: list[int], row: int | None = None, **sampling: float) -> Req:
    params = SamplingParams(temperature=0, **({"max_new_tokens": 64} | sampling))
    params.normalize(None)
    req = Req("r", "", [1, 2], params, vocab_size=VOCAB)
    req.tokenizer, req.output_ids, req.req_pool_idx = TOKENIZER, list(output), row
    return req


def one_token_at_a_time(req: Req, tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Logits after a request's output, and after each of `tokens`, as the release's overlapped scheduler has them
    penalised when its penalizers have seen every token: [len(tokens) + 1, VOCAB]."""
    batch = Batch([req])
    penalizers = BatchedPenalizerOrchestrator(
        VOCAB,
        batch,
        {
            BatchedFrequencyPenalizer,
            BatchedMinNewTokensPenalizer,
            BatchedPresencePenalizer,
            BatchedRepetitionPenalizer,
        },
    )

    def penalised() -> torch.Tensor:
        additive = torch.zeros(1, VOCAB)
        penalizers.accumulate_additive_penalties(additive)
        row, scaling = logits + additive, penalizers.accumulate_scaling_penalties()
        if scaling is not None:
            row = torch.where(row < 0, row * scaling, row / scaling)
        return row[0]

    for token in req.output_ids:
        penalizers.cumulate_output_tokens(torch.tensor([token]))
    rows = [penalised()]
    for token in tokens:
        penalizers.cumulate_output_tokens(torch.tensor([token]))
        rows.append(penalised())
    return torch.stack(rows)


def tensor(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def rows_of(reqs: list[Req]) -> torch.Tensor:
    return tensor([req.req_pool_idx for req in reqs])


def penalties() -> Penalties:
    return Penalties(ROWS, VOCAB, DEVICE)


def applied(penalizer: Penalizer, logits: torch.Tensor) -> torch.Tensor:
    """The same logits ([1, VOCAB]) of every row of the blocks, penalised: [bs, width, VOCAB]."""
    bs, width = len(penalizer.rows), penalizer.drafts.shape[1] + 1
    rows = logits.repeat(bs * width, 1).to(DEVICE)
    penalizer.apply(rows)
    return rows.view(bs, width, VOCAB).cpu()


def assert_penalised(penalizer: Penalizer, reqs: list[Req], logits: torch.Tensor) -> None:
    drafts = penalizer.drafts.tolist()
    expected = [one_token_at_a_time(*each, logits) for each in zip(reqs, drafts, strict=True)]
    # A GPU divides as the release's compiled kernel does, which is not quite as PyTorch does.
    rtol = 0 if DEVICE == "cpu" else 1e-6
    mine = applied(penalizer, logits)
    torch.testing.assert_close(mine, torch.stack(expected), rtol=rtol, atol=0)


parameters = st.fixed_dictionaries(
    {},
    optional={
        "frequency_penalty": st.sampled_from([-1.5, 0.1, 0.25, 2.0]),
        "presence_penalty": st.sampled_from([-0.5, 0.3, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.3]),
        "min_new_tokens": st.integers(1, 9),
        "stop_token_ids": st.just([7]),
    },
)
tokens = st.integers(0, VOCAB - 1)


@settings(deadline=None)
@given(
    st.lists(st.tuples(parameters, st.lists(tokens, max_size=8)), min_size=1, max_size=3),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_against_the_penalizers(cases: list, width: int, random) -> None:
    """A prefill, also of requests that were retracted, and rounds; the host is told nothing of them."""
    reqs = [request(output, row, **each) for row, (each, output) in enumerate(cases)]
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(random.randrange(99)))
    kept = penalties()
    penalizer = kept.start(reqs, rows_of(reqs))
    assert (penalizer is None) == (not any(map(is_penalized, reqs)))
    if penalizer is None:
        return
    assert_penalised(penalizer, reqs, logits)

    def drawn(n: int) -> list[list[int]]:
        return [[random.randrange(VOCAB) for _ in range(n)] for _ in reqs]

    committed, lengths = drawn(1), [1] * len(reqs)
    for _ in range(4):
        kept.count(rows_of(reqs), tensor(committed), tensor(lengths))
        for req, row, length in zip(reqs, committed, lengths, strict=True):
            req.output_ids += row[:length]
        drafts = tensor(drawn(width - 1)).view(len(reqs), width - 1)
        assert_penalised(kept.of(rows_of(reqs), drafts), reqs, logits)
        committed, lengths = drawn(width), [random.randint(1, width) for _ in reqs]


def test_a_minimum_that_was_reached_before_a_retraction() -> None:
    """It is no penalty then, nor is one counted for another request in its row."""
    kept, logits = penalties(), torch.randn(1, VOCAB)
    other, met = request([5], 0, frequency_penalty=1), request([1, 2, 8], 1, min_new_tokens=3)
    penalizer = kept.start([other, met], tensor([0, 1]))
    assert torch.equal(applied(penalizer, logits)[1, 0], logits[0])


def test_a_chunked_prompt() -> None:
    """What a chunk draws is no token of the output."""
    kept, logits = penalties(), torch.randn(1, VOCAB)
    req = request([9], 4, presence_penalty=1, min_new_tokens=5)
    for token in (6, NOT_FINITE, 8):
        penalizer = kept.start([req], tensor([4]))
        assert_penalised(penalizer, [req], logits)
        kept.count(tensor([4]), tensor([[token]]), tensor([1]))
    req.output_ids.append(8)
    assert_penalised(kept.of(tensor([4]), tensor([[2, 8]])), [req], logits)


def test_what_nan_chose_is_not_counted() -> None:
    kept, logits = penalties(), torch.randn(1, VOCAB)
    req = request([], 4, frequency_penalty=1)
    kept.start([req], tensor([4]))
    kept.count(tensor([4]), tensor([[5, NOT_FINITE, 6]]), tensor([2]))
    req.output_ids = [5]
    assert_penalised(kept.of(tensor([4]), tensor([[2, 8]])), [req], logits)


def test_a_stop_token_that_is_none() -> None:
    """It is withheld from nobody, neither in its own place nor in the next one."""
    kept, logits = penalties(), torch.randn(1, VOCAB)
    odd = request([], 4, min_new_tokens=2, stop_token_ids=[VOCAB, VOCAB + 5, -2])
    reqs = [odd, request([], 5, min_new_tokens=2)]
    withheld = applied(kept.start(reqs, rows_of(reqs)), logits)[:, 0].isinf()
    assert withheld.nonzero()[:, 1].tolist() == [EOS, 4] * 2


@pytest.mark.parametrize("sampling", [{}, {"presence_penalty": 1.0}])
def test_the_next_request_in_a_row(sampling: dict) -> None:
    """It begins with nothing, whether the one before it is known to have finished or not."""
    kept, logits = penalties(), torch.randn(1, VOCAB)
    first, second = (
        request([], 4, frequency_penalty=1, min_new_tokens=9),
        request([], 4, **sampling),
    )
    kept.start([first], tensor([4]))
    kept.count(tensor([4]), tensor([[5, 6]]), tensor([2]))
    kept.start([second], tensor([4]))
    assert torch.equal(applied(kept.of(tensor([4]), tensor([[]]).view(1, 0)), logits)[0], logits)


@pytest.mark.parametrize("gone", ["finished", "retracted"])
def test_a_round_in_vain_counts_for_nobody(gone: str) -> None:
    """Its row may rest while its place already belongs to another request."""
    kept, logits = penalties(), torch.randn(1, VOCAB)
    first, second = (request([], row, frequency_penalty=1) for row in (4, 5))
    kept.start([first], tensor([4]))
    if gone == "finished":
        first.finished_reason = FINISH_LENGTH(1)
    else:
        first.req_pool_idx = None
    kept.start([second], tensor([5]))
    assert len(set(kept.counted.places.tolist())) == 2  # none, and that of the second
    kept.count(tensor([4, 5]), tensor([[7], [8]]), tensor([1, 1]))
    second.output_ids = [8]
    assert_penalised(kept.of(tensor([5]), tensor([[2]])), [second], logits)
    assert torch.equal(applied(kept.of(tensor([4]), tensor([[2]])), logits)[0, 1], logits[0])


def test_as_many_places_as_requests_ran_at_once() -> None:
    """What was counted stays when there are more of them, and nothing grows when they come one by one."""
    kept, logits, rows = penalties(), torch.randn(1, VOCAB), itertools.cycle(range(ROWS))
    assert kept.start([request([], 1)], tensor([1])) is None
    assert kept.counted.sums.numel() == 0
    running: list[Req] = []
    for n in (1, 10, 3):
        new = [request([n], next(rows), frequency_penalty=0.1 * n) for _ in range(n)]
        kept.start(new, rows_of(new))
        running += new
    assert len(kept.counted.marks) == 16
    drafts = tensor([[2, 2]]).repeat(len(running), 1)
    assert_penalised(kept.of(rows_of(running), drafts), running, logits)
    for req in running:
        req.finished_reason = FINISH_LENGTH(1)
    for _ in range(3 * ROWS):
        one = request([], next(rows), presence_penalty=1)
        kept.start([one], rows_of([one]))
        one.finished_reason = FINISH_LENGTH(1)
    assert len(kept.counted.marks) == 16
    assert (kept.counted.places >= 0).sum() == 1


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, False),
        ({"repetition_penalty": 1.0, "min_new_tokens": 0}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"min_new_tokens": 1}, True),
    ],
)
def test_is_penalized(sampling: dict, expected: bool) -> None:
    assert is_penalized(request([], **sampling)) == expected
