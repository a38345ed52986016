"""The overlapped worker where nothing overlaps, as on any user's CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.checks import accept_length, assert_same
from tests.server.harness import DEVICE, Server, running
from tests.server.test_pool import CARELESS

pytestmark = pytest.mark.skipif(
    DEVICE != "cpu",
    reason="only on a CPU results are seen first: a GPU computes while the host goes on",
)
GRAMMAR = {"regex": r"([^#]|#{4}|\n){900,}"}


def count_of(server: Server, what: str) -> float:
    """Nothing is told of what never happened."""
    lines = server.get("/metrics").text.splitlines()
    name = f"sglang:dflash_{what}_total{{"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("chunks", [(), ("--chunked-prefill-size", "32")], ids=["whole", "chunks"])
def test_no_round_is_launched_ahead(
    chunks: tuple[str, ...], logs: Path, plain: Server, prompts: list[str]
) -> None:
    """Answers are plain decoding's, also with grammars and in a pool too small, and no round is in vain."""
    arguments = (*chunks, "--max-total-tokens", "900", "--enable-metrics")
    variables = CARELESS | {"SGLANG_DFLASH_OVERLAP_ON_CPU": ""}
    log = logs / f"look-first-{len(chunks)}.log"
    with running(
        log, *arguments, "--reasoning-parser", "qwen3", worker="v2", **variables
    ) as server:
        answers = server.generate_all(prompts[:24], concurrency=8)
        for prompt, answer in zip(prompts, answers, strict=False):
            assert_same(answer, plain.reference(prompt), plain, prompt)
        assert accept_length(answers) > 6
        assert count_of(server, "rounds") > 100 and count_of(server, "rounds_in_vain") == 0
        asked = {"max_new_tokens": 100, "ignore_eos": True}
        for sampling in (asked, asked | GRAMMAR):
            body = {"text": prompts[:20], "sampling_params": {"temperature": 0} | sampling}
            answers = server.post("/generate", body).json()
            assert sum(answer["meta_info"]["total_retractions"] for answer in answers) > 0
            expected = plain.references(prompts[:20], **sampling)
            for prompt, answer, reference in zip(prompts, answers, expected, strict=False):
                assert_same(answer, reference, plain, prompt)
        server.check_idle()
