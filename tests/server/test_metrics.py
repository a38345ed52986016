"""`/metrics`: what is counted is what the answers say of themselves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.server.checks import counted
from tests.server.harness import DEVICE, Server, events, generate_body, running

WIDTH = 16
PENALTIES = {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.1}


def test_rounds(dflash: Server, prompts: list[str]) -> None:
    """Every count moves by what the requests' own statistics add up to."""
    before = counted(dflash)
    limits = {"max_new_tokens": 45}
    answers = dflash.generate_all(prompts[50:66], concurrency=4, **limits)
    moved = counted(dflash) - before
    metas = [answer["meta_info"] for answer in answers]
    rounds = sum(meta["spec_verify_ct"] for meta in metas)
    accepted = sum(meta["spec_accept_token_num"] for meta in metas)
    assert rounds > 16 and accepted > rounds
    assert moved["rounds_total", ""] == moved["accept_length_count", ""] == rounds
    # With overlap the next round is launched before the result that ends a request is seen.
    overlaps = not dflash.get("/server_info").json()["disable_overlap_schedule"]
    in_vain = moved["rounds_in_vain_total", ""]
    assert 0 < in_vain <= len(answers) if overlaps else in_vain == 0
    assert overlaps == (0 < counted(dflash)["host_step_seconds", "without_prompts"] < 5)
    assert moved["accepted_tokens_total", ""] == accepted
    assert moved["accept_length_sum", ""] == accepted + rounds
    assert moved["drafted_tokens_total", ""] == rounds * (WIDTH - 1)
    histogram: Counter[int] = Counter()
    for meta in metas:
        histogram.update(dict(enumerate(meta["spec_accept_histogram"])))
    for position in range(1, WIDTH):
        own = str(position)
        assert moved["drafted_at_position_total", own] == rounds
        expected = sum(times for length, times in histogram.items() if length >= position)
        assert moved["accepted_at_position_total", own] == expected


def test_no_round_in_vain_where_the_end_is_known(dflash: Server, prompts: list[str]) -> None:
    """A limit that the pending result reaches in any case: with the prefill, or with one token more."""
    before = counted(dflash)
    for prompt in prompts[60:64]:
        whole = dflash.generate(prompt, max_new_tokens=1)["output_ids"]
        assert len(whole) == 1
    dflash.check_idle()
    moved = counted(dflash) - before
    assert moved["rounds_in_vain_total", ""] == moved["rounds_total", ""] == 0


def test_aborted(dflash: Server, prompts: list[str]) -> None:
    """Rounds count until the abort; those that were under way then count no more than in the answer."""
    before = counted(dflash)
    body = generate_body(prompts[66], max_new_tokens=1500, ignore_eos=True)
    with dflash.post("/generate", body | {"stream": True, "rid": "gone"}, stream=True) as response:
        stream = events(response)
        next(stream)
        dflash.post("/abort_request", {"rid": "gone"})
        meta = list(stream)[-1]["meta_info"]
    dflash.check_idle()
    moved = counted(dflash) - before
    assert meta["finish_reason"]["type"] == "abort" and meta["spec_verify_ct"] > 0
    assert moved["rounds_total", ""] == meta["spec_verify_ct"]
    assert moved["accepted_tokens_total", ""] == meta["spec_accept_token_num"]
    assert moved["accept_length_sum", ""] == meta["completion_tokens"] - 1


def test_draft_kv(dflash: Server, prompts: list[str]) -> None:
    """What the radix cache keeps counts as used, in tokens and in bytes."""
    dflash.post("/flush_cache")
    dflash.generate(prompts[67], max_new_tokens=20)
    now = counted(dflash)
    used = now["draft_kv_used_tokens", ""]
    assert 40 < used < 400
    itemsize = {"cpu": 4, "cuda": 2}[DEVICE]
    assert now["draft_kv_used_bytes", ""] == used * 2 * 2 * 2 * 64 * itemsize  # K, V, layers, heads


def test_refusals(dflash: Server, prompts: list[str]) -> None:
    before = counted(dflash)
    body = {"text": prompts[0], "sampling_params": {"max_new_tokens": 4}}
    for wrong in (
        {"sampling_params": {"temperature": -1}},
        {"sampling_params": {"temperature": "hot"}},
        {"lora_path": "somewhere"},
        {"logprob_start_len": 10**6, "return_logprob": True},
    ):
        assert dflash.post("/generate", body | wrong).status_code == 400
    moved = counted(dflash) - before
    reasons = {own: n for (name, own), n in moved.items() if name == "refusals_total"}
    assert sum(reasons.values()) >= 3 and reasons.keys() <= {
        "unreadable",
        "sampling_params",
        "out_of_range",
        "unsupported",
    }
    assert reasons["sampling_params"] == reasons["unreadable"] == reasons["unsupported"] == 1


@pytest.mark.parametrize(
    "sampling",
    [
        {"regex": "[^#]{20,100}#### [0-9]{1,2}"},
        {
            "regex": "[^#]{20,100}#### [0-9]{1,2}",
            "frequency_penalty": 0.1,
        },  # with masks in every round
        PENALTIES | {"min_new_tokens": 40, "temperature": 0.7},
    ],
)
def test_rounds_overlap(sampling: dict, dflash: Server, prompts: list[str]) -> None:
    """Also where the host needs every token before: a round is under way when the one that ends the request is seen."""
    before = counted(dflash)
    answer = dflash.generate(prompts[0], max_new_tokens=400, **sampling)
    dflash.check_idle()  # a round in vain may last longer than the answer
    moved = counted(dflash) - before
    overlapped = "DFlashWorkerV2" in dflash.log.read_text(errors="replace")
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert moved["rounds_total", ""] > 3 and moved["fallbacks_total", "slots"] == 0
    # Without masks a request may stray, at worst with the first token of a result that has another behind it.
    strayed = moved["fallbacks_total", "strayed"]
    assert overlapped <= moved["rounds_in_vain_total", ""] <= overlapped + 2 * strayed
    assert not strayed or (overlapped and len(sampling) == 1)


def test_loads(dflash: Server, prompts: list[str]) -> None:
    """What `/v1/loads` says of the scheduler, beside `/metrics` that count its requests."""
    dflash.generate_all(
        prompts[:30], concurrency=1, max_new_tokens=20
    )  # 40 rounds are counted at once
    dflash.wait_until_idle()  # a request has its answer before the scheduler lets go of it
    response = dflash.get("/v1/loads")
    assert response.status_code == 200, response.text
    (load,) = response.json()["loads"]
    assert load["num_total_reqs"] == 0 and load["max_running_requests"] == 16
    assert load["speculative"]["accept_length"] > 1
    counted_as = 'http_requests_total{endpoint="/v1/loads",method="GET"} '
    assert f"sglang:{counted_as}" in dflash.get("/metrics").text


def test_accept_length_of_what_was_measured(logs: Path, prompts: list[str]) -> None:
    """After an overlapped round in vain nothing is claimed in the log, and the gauges stay."""
    every_round = ("--decode-log-interval", "1", "--enable-metrics")
    with running(logs / "every-round.log", *every_round, worker="v2") as server:
        for prompt in prompts[:4]:
            server.generate(prompt, max_new_tokens=40)
            assert server.metric("spec_accept_length") >= 1
            assert server.metric("spec_accept_rate") > 0
        log = server.log.read_text(errors="replace")
    lines = [line for line in log.splitlines() if "Decode batch" in line]
    assert any("accept len: " not in line for line in lines), "no round was in vain"
    assert "accept len: 0.00" not in log
