"""What a request takes of a round: real requests of the release."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.scheduler.results import (
    Committed,
    _commit_one_by_one,
    commit_round,
    commit_tokens,
    count_last_token,
)

EOS = 2


def request(**sampling) -> Req:
    """A request whose prefill gave one token."""
    params = SamplingParams(temperature=0, **sampling)
    params.normalize(None)
    req = Req("id", "", [5, 6, 7], params, eos_token_ids={EOS}, vocab_size=100)
    req.output_ids.append(10)
    req.kv_committed_len = 3
    return req


def test_all_tokens() -> None:
    req = request(max_new_tokens=50)
    assert commit_tokens(req, [11, 12, 13]) == 3
    assert req.output_ids == [10, 11, 12, 13]
    assert req.kv_committed_len == 6
    assert not req.finished()


def test_counts_over_rounds() -> None:
    req = request(max_new_tokens=50)
    for tokens in ([11, 12, 13], [14], [15, 16, 17]):
        commit_tokens(req, tokens)
    assert req.spec_verify_ct == 3
    assert req.spec_accepted_tokens == 4
    assert req.spec_acceptance_histogram == [1, 0, 2]
    assert len(req.output_ids) == 8


def test_limit_inside_the_round() -> None:
    req = request(max_new_tokens=3)
    assert commit_tokens(req, [11, 12, 13, 14]) == 2
    assert req.output_ids == [10, 11, 12]
    assert req.finished_reason.to_json() == {"type": "length", "length": 3}
    assert req.spec_acceptance_histogram == [0, 1]
    assert req.kv_committed_len == 5


def test_stop_token_wins_over_a_later_limit() -> None:
    req = request(max_new_tokens=4)
    assert commit_tokens(req, [11, EOS, 13, 14]) == 2
    assert req.output_ids == [10, 11, EOS]
    assert req.finished_reason.to_json()["type"] == "stop"


def test_limit_wins_over_a_stop_token_at_it() -> None:
    """As in plain decoding, which looks at the length first."""
    req = request(max_new_tokens=3)
    assert commit_tokens(req, [11, EOS, 13]) == 2
    assert req.finished_reason.to_json()["type"] == "length"


def test_limit_wins_over_a_later_stop_token() -> None:
    req = request(max_new_tokens=2)
    assert commit_tokens(req, [11, EOS]) == 1
    assert req.finished_reason.to_json()["type"] == "length"


@pytest.mark.parametrize(
    ("tokens", "slots", "in_flight", "counted"),
    [
        ([11, EOS, 13], 8, 0, True),  # a draft: the target ran it
        ([11, EOS], 8, 0, False),  # a bonus token: nobody did
        ([11, EOS], 8, 1, True),  # the round in vain runs it
        ([11, EOS, 13], 5, 0, False),  # it has no slot
        ([11, 12, 13], 8, 1, False),  # retracted, not finished
    ],
)
def test_last_token(tokens: list[int], slots: int, in_flight: int, counted: bool) -> None:
    """Its K/V is counted where it is there, for whoever has the same prefix next."""
    req = request(max_new_tokens=50)
    req.kv_allocated_len, req.results_in_flight = slots, in_flight
    before = 3 + commit_tokens(req, tokens)
    assert req.kv_committed_len == before
    count_last_token(req)
    assert req.kv_committed_len == before + counted


def test_ignored_stop_token() -> None:
    req = request(max_new_tokens=50, ignore_eos=True)
    assert commit_tokens(req, [11, EOS, 13]) == 3
    assert not req.finished()


def test_stop_token_of_the_request() -> None:
    req = request(max_new_tokens=50, stop_token_ids=[12])
    assert commit_tokens(req, [11, 12, 13]) == 2
    assert req.output_ids == [10, 11, 12]


def test_aborted_request_takes_one_token() -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req = request(max_new_tokens=50)
    req.to_finish = FINISH_ABORT()
    assert commit_tokens(req, [11, 12, 13]) == 1
    assert req.finished_reason.to_json()["type"] == "abort"


class Counting:
    """A grammar that takes the numbers from 11 on and ends after `last`."""

    def __init__(self, last: int):
        self.next, self.last, self.finished = 11, last, False

    def accept_token(self, token: int) -> None:
        if token != self.next:
            raise ValueError(f"{token} is not {self.next}")
        self.next += 1

    def is_terminated(self) -> bool:
        return self.next > self.last


def test_grammar_advances_with_what_is_taken() -> None:
    req = request(max_new_tokens=50)
    req.grammar = Counting(last=90)
    assert commit_tokens(req, [11, 12, 13]) == 3
    assert req.grammar.next == 14
    assert not req.grammar.finished


def test_end_of_a_grammar_shows_a_token_later() -> None:
    """As in plain decoding, which looks for the end before it feeds the token."""
    req = request(max_new_tokens=50)
    req.grammar = Counting(last=12)
    assert commit_tokens(req, [11, 12, 13, 14]) == 3
    assert req.finished_reason.to_json() == {"type": "stop", "matched": 13}
    assert req.grammar.finished


def test_token_against_the_grammar_aborts_the_request() -> None:
    req = request(max_new_tokens=50)
    req.grammar = Counting(last=90)
    assert commit_tokens(req, [11, 99, 13, 14]) == 3
    reason = req.finished_reason.to_json()
    assert reason["type"] == "abort"
    assert reason["message"] == "The grammar does not accept token 99: 99 is not 12"


def output(rows: int) -> LogitsProcessorOutput:
    """Row r has log-probability -r, top tokens r and r + 1, and hidden state [r, r]."""
    ids = torch.arange(rows)
    return LogitsProcessorOutput(
        next_token_logits=None,
        next_token_logprobs=-ids.float().view(-1, 4),
        next_token_top_logprobs_val=[torch.tensor([-r, -r - 1.0]) for r in range(rows)],
        next_token_top_logprobs_idx=[torch.tensor([r, r + 1]) for r in range(rows)],
        next_token_token_ids_logprobs_val=[torch.tensor([float(r)]) for r in range(rows)],
        next_token_token_ids_logprobs_idx=[[7] for _ in range(rows)],
        hidden_states=torch.stack([ids, ids], dim=1),
    )


def test_what_a_request_wants_to_know() -> None:
    """Of the tokens it took, in its own rows; a request that asks for nothing gets nothing."""
    silent, asking = request(max_new_tokens=50), request(max_new_tokens=3)
    asking.return_logprob, asking.top_logprobs_num, asking.token_ids_logprob = True, 2, [7]
    asking.return_hidden_states, asking.hidden_states = True, []
    for name in ("token", "top", "token_ids"):
        kind = "token_logprobs" if name == "token" else f"{name}_logprobs"
        setattr(asking, f"output_{kind}_val", [])
        setattr(asking, f"output_{kind}_idx", [])
    tokens = torch.tensor([[11, 12, 13, 14], [21, 22, 23, 24]])
    committed = commit_round([silent, asking], tokens, torch.tensor([4, 3]), output(8))
    assert committed.lengths == [4, 3] and committed.failed == 0
    assert committed.taken == [[11, 12, 13, 14], [21, 22]]
    assert asking.output_token_logprobs_val == [-4, -5]
    assert asking.output_token_logprobs_idx == [21, 22]
    assert asking.output_top_logprobs_val == [[-4, -5], [-5, -6]]
    assert asking.output_top_logprobs_idx == [[4, 5], [5, 6]]
    assert asking.output_token_ids_logprobs_val == [[4], [5]]
    assert asking.output_token_ids_logprobs_idx == [[7], [7]]
    assert asking.hidden_states == [[4, 4], [5, 5]]
    assert not silent.return_logprob


@pytest.mark.parametrize("state", ["finished", "retracted"])
def test_round_in_vain(state: str) -> None:
    req = request(max_new_tokens=1 if state == "finished" else 9)
    req.check_finished()
    req.is_retracted = state == "retracted"
    committed = commit_round([req], torch.tensor([[11, 12]]), torch.tensor([2]), None)
    assert committed == Committed(taken=[[]], lengths=[], failed=0)
    assert req.output_ids == [10] and req.spec_verify_ct == 0


class Words:
    """A tokenizer whose tokens are pieces of words, and of characters: 50 and 51 are the two halves of one."""

    eos_token_id, additional_stop_token_ids = EOS, {3}
    pieces = {10: "a", 11: "b", 12: "ab", 13: " ", 50: b"\xc3", 51: b"\xa9"}

    def decode(self, ids: list[int]) -> str:
        parts = (self.pieces.get(i, "") for i in ids)
        text = b"".join(p if isinstance(p, bytes) else p.encode() for p in parts)
        return text.decode(errors="replace")

    def encode(self, text: str, **options) -> list[int]:
        return [10] * len(text)


class Without:
    """A grammar that refuses some tokens and ends after so many others."""

    def __init__(self, refused: set[int], most: int):
        self.refused, self.most, self.taken, self.finished = refused, most, [], False

    def accept_token(self, token: int) -> None:
        if self.is_terminated():
            return
        if token in self.refused:
            raise ValueError(f"{token} is refused")
        self.taken.append(token)

    def is_terminated(self) -> bool:
        return len(self.taken) >= self.most


@given(
    rounds=st.lists(
        st.lists(st.sampled_from([10, 11, 12, 13, 50, 51, 60, 3, EOS, 7]), min_size=1, max_size=16),
        max_size=6,
    ),
    stop=st.lists(st.sampled_from(["bb", "aab", "b a", "\u00e9a", "\ufffd", " "]), max_size=2),
    stop_token_ids=st.sampled_from([None, [60]]),
    limit=st.integers(1, 60),
    ignore_eos=st.booleans(),
    grammar=st.none()
    | st.tuples(st.sets(st.sampled_from([3, 7, 13, 50]), max_size=2), st.integers(0, 60)),
)
@settings(max_examples=400, deadline=None)
def test_as_one_by_one(rounds, stop, stop_token_ids, limit, ignore_eos, grammar) -> None:
    """What cannot end a request is appended at once, and nothing else differs from looking at each token."""
    sampling = dict(
        max_new_tokens=limit, stop=stop, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos
    )
    found = []
    for commit in (commit_tokens, _commit_one_by_one):
        req = request(**sampling)
        req.sampling_params.normalize(Words())
        req.tokenizer = Words()
        req.grammar = grammar and Without(*grammar)
        for tokens in rounds:
            if not req.finished():
                commit(req, tokens)
        reason = req.finished_reason and req.finished_reason.to_json()
        found.append((req.output_ids, reason, grammar and vars(req.grammar)))
    assert found[0] == found[1]


def test_a_text_is_made_once_a_round() -> None:
    """Not once a token, which would be the most that the host does for many requests."""
    req, calls = request(max_new_tokens=500, stop=["zz"]), []
    req.sampling_params.normalize(Words())
    req.tokenizer = Words()
    req.tokenizer.decode = lambda ids: calls.append(ids) or ""
    for _ in range(4):
        commit_tokens(req, [10, 11] * 8)
    assert len(calls) == 4 and len(req.output_ids) == 65
