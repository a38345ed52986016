"""`--speculative-dflash-draft-window-size`: long contexts of which the drafter sees the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.checks import accept_length, assert_same, assert_speculated
from tests.server.harness import CHOSEN_WORKERS, DEVICE, Server, running

WINDOW = 64
# Pages of 16 in v2, so that windows begin inside the page that they must begin with.
PAGES = {"v1": "1", "v2": "16"}


@pytest.fixture(scope="module", params=CHOSEN_WORKERS)
def windowed(request: pytest.FixtureRequest, logs: Path) -> Iterator[Server]:
    size = ("--speculative-dflash-draft-window-size", str(WINDOW))
    log = logs / f"windowed-{request.param}.log"
    with running(log, "--page-size", PAGES[request.param], *size, worker=request.param) as server:
        server.worker = request.param
        yield server


@pytest.fixture
def everything(windowed: Server, _servers: Callable) -> Server:
    """The same without a window."""
    return _servers(windowed.worker, "page" + PAGES[windowed.worker])


@pytest.fixture(scope="module")
def long_prompts(prompts: list[str], problems: list[dict[str, str]]) -> list[str]:
    """Questions after three solved problems: more than four windows of context."""
    texts = []
    for i in range(16):
        solved = range(100 + 3 * i, 103 + 3 * i)
        texts.append("".join(f"{prompts[j]}{problems[j]['answer']}<|im_end|>\n" for j in solved))
    return [text + prompts[i] for i, text in enumerate(texts)]


def test_long_contexts(
    windowed: Server, plain: Server, everything: Server, long_prompts: list[str]
) -> None:
    """Outputs of plain decoding, and an accept length near that of a drafter that sees everything."""
    answers = windowed.generate_all(long_prompts, concurrency=4)
    expected = plain.references(long_prompts)
    for prompt, answer, reference in zip(long_prompts, answers, expected, strict=True):
        assert answer["meta_info"]["prompt_tokens"] > 4 * WINDOW
        assert_same(answer, reference, plain, prompt)
        assert_speculated(answer)
    whole = everything.generate_all(long_prompts, concurrency=4)
    assert accept_length(answers) > 0.8 * accept_length(whole)
    # It does look at less.
    rounds = [[a["meta_info"]["spec_verify_ct"] for a in each] for each in (answers, whole)]
    assert rounds[0] != rounds[1]
    windowed.check_idle()


@pytest.mark.skipif(DEVICE != "cpu", reason="exact only where a batch changes no rounding")
def test_short_contexts(
    windowed: Server, everything: Server, tokenizer, prompts: list[str]
) -> None:
    """A context that fits the window is drafted for as without one, round for round."""
    short = [p for p in prompts if len(tokenizer.encode(p)) < WINDOW - 16][:8]
    assert len(short) == 8
    for prompt in short:
        size = {"max_new_tokens": WINDOW - len(tokenizer.encode(prompt))}
        mine = windowed.generate(prompt, **size)
        whole = everything.generate(prompt, **size)
        assert_same(mine, whole)
        assert mine["meta_info"]["spec_verify_ct"] == whole["meta_info"]["spec_verify_ct"]
