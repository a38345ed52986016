"""What a request takes of a round: real requests of the release."""

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.commit import commit_tokens

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
