"""Penalties of a block's rows against SGLang's penalizers, fed one token after the other."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.drawing.penalties import is_penalized, row_penalties

VOCAB, EOS = 12, 3
TOKENIZER = SimpleNamespace(additional_stop_token_ids={4}, eos_token_id=EOS)


@dataclass(eq=False)
class Batch:
    """What the penalizers read of a batch."""

    reqs: list[Req]
    device: str = "cpu"


def request(output: list[int], **sampling: float) -> Req:
    params = SamplingParams(temperature=0, **sampling)
    params.normalize(None)
    req = Req("r", "", [1, 2], params, vocab_size=VOCAB)
    req.tokenizer, req.output_ids = TOKENIZER, list(output)
    return req


def one_token_at_a_time(req: Req, drafts: list[int], logits: torch.Tensor) -> list[torch.Tensor]:
    """Penalised logits of every row, as plain decoding forms them with overlap switched off."""
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
        row, scaling = logits.clone(), penalizers.accumulate_scaling_penalties()
        penalizers.accumulate_additive_penalties(row)
        if scaling is not None:
            row = torch.where(row < 0, row * scaling, row / scaling)
        return row[0]

    for token in req.output_ids:
        penalizers.cumulate_output_tokens(torch.tensor([token]))
    rows = [penalised()]
    for token in drafts:
        penalizers.cumulate_output_tokens(torch.tensor([token]))
        rows.append(penalised())
    return rows


parameters = st.fixed_dictionaries(
    {},
    optional={
        "frequency_penalty": st.sampled_from([-1.5, 0.25, 2.0]),
        "presence_penalty": st.sampled_from([-0.5, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.3]),
        "min_new_tokens": st.integers(1, 9),
        "stop_token_ids": st.just([7]),
    },
)
tokens = st.integers(0, VOCAB - 1)


@given(
    st.lists(st.tuples(parameters, st.lists(tokens, max_size=8)), min_size=1, max_size=3),
    st.integers(2, 5),
    st.randoms(use_true_random=False),
)
def test_against_the_penalizers(cases: list, width: int, random) -> None:
    reqs = [request(output, **({"max_new_tokens": 64} | sampling)) for sampling, output in cases]
    drafts = [[random.randrange(VOCAB) for _ in range(width - 1)] for _ in reqs]
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(random.randrange(99)))
    additive, scaling = row_penalties(reqs, torch.tensor(drafts), VOCAB)
    penalised = logits + additive
    penalised = torch.where(penalised < 0, penalised * scaling, penalised / scaling)
    for index, (req, row) in enumerate(zip(reqs, drafts, strict=True)):
        expected = torch.stack(one_token_at_a_time(req, row, logits))
        mine = penalised[index * width : (index + 1) * width]
        torch.testing.assert_close(mine, expected)


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
