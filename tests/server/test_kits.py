"""SGLang's own test kits, as they ship in the pinned release, against a server with DFLASH.

docs/kits.md lists them, with the reason for each that is left out.
"""

from __future__ import annotations

import io
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.test import kl_test_utils
from sglang.test.kits import abort_timeout_kit
from sglang.test.kits.abort_timeout_kit import (
    AbortAllMixin,
    RunningTimeoutTwoWaveMixin,
    WaitingTimeoutMixin,
)
from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.kl_divergence_kit import KLDivergenceMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin
from sglang.test.kits.radix_cache_server_kit import gen_radix_tree
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin

from tests.server.harness import CHOSEN_WORKERS, TARGET, Server, mostly_on, running

# Tests of a kit that ask for what the bundled target cannot do, by the reason.
LEFT_OUT = {
    "test_finish_stop_eos": "names the end tokens of Llama",
    "test_finish_stop_str": "waits for a line break, before which the target ends",
    "test_regex_generate_complex_json": "matches an answer that is cut at 128 tokens",
    "test_ebnf_generate_complex_json": "matches with a pattern that is narrower than its grammar",
    "test_ebnf_generate_custom_log_format": "draws a word that may go on beyond 128 tokens",
    "test_regex_generate_custom_log_format": "draws a word that may go on beyond 128 tokens",
    "test_finish_stop_regex_str": "waits for English words that the target does not say",
    "test_json_openai": "cuts the answer at 128 tokens, which the target fills with one string",
    "test_json_generate": "cuts the answer at 128 tokens, which the target fills with one string",
    "test_mix_json_and_other": "cuts the answer at 128 tokens, which the target fills with one string",
}


def run_kit(kit: type, server: Server, **attributes: Any) -> unittest.TestResult:
    """Runs a kit's tests on a server; every failure is this test's failure."""
    fields = {"base_url": server.url, "model": str(TARGET), "process": server.process}
    case = type(kit.__name__, (kit, unittest.TestCase), fields | attributes)
    names = [n for n in unittest.defaultTestLoader.getTestCaseNames(case) if n not in LEFT_OUT]
    out = io.StringIO()
    suite = unittest.TestSuite(case(name) for name in names)
    result = unittest.TextTestRunner(out, failfast=False).run(suite)
    assert result.testsRun == len(names) > 0
    assert result.wasSuccessful(), out.getvalue()
    return result


@pytest.mark.parametrize(
    ("kit", "attributes"),
    [
        # The target's context ends at 2,048 tokens.
        (AbortAllMixin, {"abort_all_max_new_tokens": 1900}),
        (RegexConstrainedMixin, {}),
        (EBNFConstrainedMixin, {}),
        (JSONConstrainedMixin, {}),
        (MatchedStopMixin, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_kit(dflash: Server, kit: type, attributes: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    # The kit that aborts waits for its requests by sleeping.
    arrive = SimpleNamespace(sleep=lambda _: dflash.wait_for_requests(32))
    monkeypatch.setattr(abort_timeout_kit, "time", arrive)
    run_kit(kit, dflash, **attributes)


@mostly_on(0)
def test_kl_divergence(dflash: Server, prompts: list[str], tokenizer, monkeypatch) -> None:
    """Log-probabilities of sampled tokens against those of a prefill over them.

    The kit would download its prompts; it keeps them by tokenizer, and finds these instead.
    """
    ids = [tokenizer.encode(prompt) for prompt in prompts[:16]]
    monkeypatch.setattr(kl_test_utils, "get_input_ids", lambda **_: [list(row) for row in ids])
    short = {f"kl_div_{phase}_max_new_tokens": 60 for phase in ("prefill", "decode")}
    run_kit(KLDivergenceMixin, dflash, kl_div_thres=1e-4, kl_div_max_samples=16, **short)


def test_radix_tree(dflash: Server) -> None:
    """The kit's tree of prompts that branch off each other, cut to the target's context."""
    nodes = [node for node in gen_radix_tree(num_nodes=60, chunk_len=60)]
    ids = [[token % 700 for token in node["input_ids"]][:1500] for node in nodes]
    sampling = [{"max_new_tokens": node["decode_len"], "temperature": 0} for node in nodes]
    response = dflash.post("/generate", {"input_ids": ids, "sampling_params": sampling})
    assert response.status_code == 200
    for answer, params in zip(response.json(), sampling, strict=True):
        assert answer["meta_info"]["completion_tokens"] <= params["max_new_tokens"]


# Who waits is the scheduler's business whatever the worker; who runs has slots that a worker reserved.
def test_waiting_timeout(logs: Path) -> None:
    arguments = ("--max-running-requests", "1")
    variables = {"SGLANG_REQ_WAITING_TIMEOUT": "0.5"}
    with running(logs / "waiting.log", *arguments, worker=CHOSEN_WORKERS[0], **variables) as server:
        run_kit(WaitingTimeoutMixin, server, waiting_timeout_max_new_tokens=1900)
        server.check_idle()


@pytest.mark.parametrize("worker", CHOSEN_WORKERS)
def test_running_timeout(worker: str, logs: Path) -> None:
    variables = {"SGLANG_REQ_RUNNING_TIMEOUT": "1"}
    log, unasked = logs / f"running-{worker}.log", "--skip-server-warmup"  # it has no longer either
    with running(log, unasked, worker=worker, **variables) as server:
        run_kit(RunningTimeoutTwoWaveMixin, server, running_timeout_sleep=0.5)
        server.check_idle()
