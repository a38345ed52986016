"""What a batch asks of its draws: from the requests that it has, not from those that it had."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang_dflash.drawing import sampling as sampling_module
from sglang_dflash.drawing.penalties import Penalties
from sglang_dflash.drawing.sampling import Sampling, needs_history

VOCABULARY = 20


@pytest.fixture(autouse=True)
def arguments() -> ServerArgs:
    made = ServerArgs(model_path="dummy")
    set_global_server_args_for_scheduler(made)
    return made


def request(**sampling) -> Req:
    params = SamplingParams(**{"temperature": 0, "max_new_tokens": 50} | sampling)
    params.normalize(None)
    req = Req("id", "", [5, 6], params, eos_token_ids={2}, vocab_size=VOCABULARY)
    req.tokenizer = SimpleNamespace(eos_token_id=2, additional_stop_token_ids=None)
    return req


class Batch:
    """What is read of a decode batch."""

    device, top_logprobs_nums, token_ids_logprobs = "cpu", None, None

    def __init__(self, *reqs: Req):
        self.reqs, self.req_pool_indices = list(reqs), torch.arange(len(reqs))
        self.sampling_info = SamplingBatchInfo.from_schedule_batch(self, VOCABULARY)


def keep(made: Batch, *indices: int) -> Batch:
    """The batch when the other requests have finished, as the release leaves it."""
    made.reqs = [made.reqs[i] for i in indices]
    made.sampling_info.filter_batch(list(indices), torch.tensor(indices))
    return made


def asked(batch: Batch, detect_nan: bool = False) -> Sampling | None:
    return Sampling.of(batch, Penalties(8, VOCABULARY, "cpu"), detect_nan)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7},
        {"logit_bias": {"3": 5.0}},
        {"temperature": 0.7, "logit_bias": {"3": 5.0}},
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 5},
    ],
)
def test_who_has_left_asks_nothing(sampling: dict) -> None:
    made = Batch(request(), request(**sampling), request())
    assert asked(made) is not None
    assert asked(keep(made, 0, 2)) is None


def test_a_bias_that_is_left_alone_is_still_applied() -> None:
    made = Batch(request(temperature=0.7), request(logit_bias={"3": 5.0}))
    sampling = asked(keep(made, 1))
    assert sampling.info.is_all_greedy
    assert sampling.info.logit_bias[0, 3] == 5


def test_who_stays_is_not_greedy_because_another_is() -> None:
    made = Batch(request(), request(temperature=0.7))
    assert not asked(made).info.is_all_greedy
    assert not asked(keep(made, 1)).info.is_all_greedy


def test_a_minimum_that_is_met_is_no_penalty() -> None:
    req = request(min_new_tokens=3)
    for produced, asks in ((0, True), (2, True), (3, False), (9, False)):
        req.output_ids = [7] * produced
        sampling = asked(Batch(req))
        assert (sampling is not None) == asks
        assert sampling is None or sampling.penalties is not None


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, False),
        ({"grammar": object()}, True),
        ({"custom_logit_processor": "one"}, True),
    ],
)
def test_what_needs_history(changes: dict, needs: bool) -> None:
    """Penalties and a minimum do not: what they count is on the device."""
    req = request(frequency_penalty=1, presence_penalty=1, repetition_penalty=2, min_new_tokens=5)
    vars(req).update(changes)
    assert needs_history([request(), req]) == needs


@pytest.mark.parametrize("algorithm", [None, "DFLASH"])
def test_whose_penalizers_count(algorithm: str | None, arguments: ServerArgs) -> None:
    """The release's own, tensors of requests times vocabulary, are for plain decoding alone."""
    arguments.speculative_algorithm = algorithm
    made = Batch(request(frequency_penalty=1.0), request(min_new_tokens=5))
    assert made.sampling_info.penalizer_orchestrator.is_required == (algorithm is None)
    made.sampling_info.update_penalties()
    assert (made.sampling_info.acc_additive_penalties is None) == (algorithm == "DFLASH")


def test_greedy_requests_ask_nothing() -> None:
    assert asked(Batch(request(), request())) is None
    assert asked(Batch(request()), True) is not None


class Letters:
    """A grammar over the vocabulary: after token n only n + 1 and n + 2, of which those that are drafted are told."""

    finished = False

    def __init__(self, last: int):
        self.last, self.told = last, []

    def is_terminated(self) -> bool:
        return False

    def allocate_vocab_mask(self, vocab_size: int, rows: int, device: str) -> torch.Tensor:
        return torch.zeros(rows, vocab_size, dtype=torch.bool)

    def fill_vocab_mask(self, mask: torch.Tensor, row: int) -> None:
        mask[row] = True
        mask[row, self.last + 1 : self.last + 3] = False

    def accept_token(self, token: int) -> None:
        self.told.append(self.last)
        self.last = token

    def rollback(self, tokens: int) -> None:
        self.last = self.told[-tokens]
        del self.told[-tokens:]

    @staticmethod
    def move_vocab_mask(mask: torch.Tensor, device: str) -> torch.Tensor:
        return mask

    @staticmethod
    def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        logits.masked_fill_(vocab_mask, float("-inf"))


@pytest.mark.parametrize("rows_at_once", [3, 128])
@pytest.mark.parametrize("others", [{}, {"logit_bias": {"9": 50.0}}])
@pytest.mark.parametrize("ahead", [False, True], ids=["now", "ahead"])
def test_rows_of_grammars(
    monkeypatch: pytest.MonkeyPatch, rows_at_once: int, others: dict, ahead: bool
) -> None:
    """Rows that are drawn by themselves are drawn as among all rows of their blocks, each under its own mask."""
    monkeypatch.setattr(sampling_module, "ROWS_AT_ONCE", rows_at_once)
    reqs = [request(), request(**others), request()]
    for req, last in zip(reqs, (3, None, 10), strict=True):
        req.grammar = None if last is None else Letters(last)
    drafts = torch.tensor(
        [[4, 5, 9], [1, 2, 3], [12, 13, 14]]
    )  # the first grammar takes two of its three
    logits = torch.randn(12, VOCABULARY, generator=torch.Generator().manual_seed(0))
    made = asked(Batch(*reqs), detect_nan=True)
    assert made.has_grammar and made.alike

    def of(rows: torch.Tensor):
        return lambda at: LogitsProcessorOutput(next_token_logits=logits[rows][at].clone())

    def likeliest(output: LogitsProcessorOutput, *_: object) -> torch.Tensor:
        return output.next_token_logits.argmax(dim=-1)

    positions = torch.arange(12)
    whole, _ = made.draw(likeliest, of(positions), positions, 4, drafts)
    source = torch.tensor([0, 1, 2, 4, 8, 9, 10, 11])
    counts = torch.tensor([3, 1, 4])
    if ahead:
        made = made.after(drafts, counts)
    some = made.draw_rows(likeliest, of(source), positions, source, counts, drafts)
    assert some.tolist() == whole.flatten()[source].tolist()
    assert whole[0, :3].tolist() != logits[:3].argmax(dim=-1).tolist()
    for row, last in zip((0, 1, 2, 8, 9, 10, 11), (3, 4, 5, 10, 12, 13, 14), strict=True):
        assert int(whole.flatten()[row]) in (last + 1, last + 2)
    assert [req.grammar and req.grammar.last for req in reqs] == [3, None, 10]
