"""Targets of many architectures: the answers of plain decoding, or a sentence; and the table that says so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from tests.server.checks import accept_length
from tests.server.harness import (
    CHOSEN_WORKERS,
    DEVICE,
    DFLASH,
    LAUNCHER,
    ROOT,
    fails_to_start,
    in_long,
    running,
)
from tests.unit.decoders import ARCHITECTURES, SIZES, write_drafter, write_target

TABLE, HEAD = ROOT / "docs" / "targets.md", "| target | "
TOKENS = {"max_new_tokens": 40, "ignore_eos": True}
PROMPTS = [[(7 * n + 31 * i) % 300 + 5 for i in range(n)] for n in (1, 2, 3, 5, 8, 13, 21, 34)]
# And the passes over prompts and blocks that a GPU captures.
PASSES = ("tests.server.eager_passes", "--piecewise-cuda-graph-max-tokens", "128")
WAYS = [(worker, *LAUNCHER) for worker in CHOSEN_WORKERS] + [(CHOSEN_WORKERS[-1], *PASSES)] * (
    DEVICE == "cpu"
)
FIRST = ("Gemma 3 (text)", "Granite")
OTHERS = in_long(*(name for name in ARCHITECTURES if name not in FIRST))
PICTURES = "Gemma 3 (with pictures)"
# Config and model class of transformers.
REFUSED = {
    PICTURES: ("Gemma3Config", "Gemma3ForConditionalGeneration"),
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel"),
    "Phi": ("PhiConfig", "PhiForCausalLM"),
    "Helium": ("HeliumConfig", "HeliumForCausalLM"),
}

OUTCOMES: dict[str, dict[str, str]] = {}


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("drafter"))


@pytest.mark.parametrize("name", [*FIRST, *OTHERS])
def test_equal(name: str, drafter: Path, tmp_path: Path, logs: Path) -> None:
    """Alone and all at once, with a drafter that is often right, whatever way a server runs."""
    write_target(tmp_path, name, embedding=0.4)
    arguments = ("--model-path", str(tmp_path), "--skip-tokenizer-init")
    log = name.replace(" ", "-")
    with running(logs / f"{log}-plain.log", *arguments) as plain:
        expected = [plain.generate(ids, **TOKENS)["output_ids"] for ids in PROMPTS]
    assert sum(len(set(ids)) > 1 for ids in expected) >= 3
    arguments += ("--speculative-draft-model-path", str(drafter))
    for worker, launcher, *more in WAYS if name in FIRST else WAYS[: len(CHOSEN_WORKERS)]:
        file = logs / f"{log}-{worker}-{launcher}.log"
        given = (*arguments, *more)
        with running(file, *given, worker=worker, launcher=(launcher,)) as server:
            for concurrency in (1, len(PROMPTS)):
                answers = server.generate_all(PROMPTS, concurrency, **TOKENS)
                assert [answer["output_ids"] for answer in answers] == expected
                assert accept_length(answers) > 1.2
            server.check_idle()
        OUTCOMES.setdefault(name, {})[worker] = "equal"


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, drafter: Path, tmp_path: Path) -> None:
    """In the last line, before any weight is looked for: there are none."""
    target, log = tmp_path / "target", tmp_path / "log"
    config_class, model_class = REFUSED[name]
    sizes = {"text_config": SIZES} if name == PICTURES else SIZES
    config = getattr(transformers, config_class)(architectures=[model_class], **sizes)
    config.save_pretrained(target)
    given = (*DFLASH, "--speculative-draft-model-path", str(drafter), "--skip-tokenizer-init")
    status, output = fails_to_start(log, *given, target=target)
    last = output.strip().splitlines()[-1]
    assert status == 1 and last.startswith("error: --model-path"), output
    assert "Traceback" not in output
    sentence = last.removeprefix("error: ").replace(str(target), "…")
    outcomes = [
        f"refused: {sentence}",
        *["the same"] * (len(CHOSEN_WORKERS) - 1),
    ]  # no worker is asked
    OUTCOMES[name] = dict(zip(CHOSEN_WORKERS, outcomes, strict=True))


def table(outcomes: dict[str, dict[str, str]]) -> Iterator[str]:
    yield HEAD + " | ".join(f"{worker}, CPU" for worker in CHOSEN_WORKERS) + " | H200 |"
    yield "|---|" + "---|" * len(CHOSEN_WORKERS) + "---|"
    for name, by_worker in outcomes.items():
        cells = " | ".join(by_worker[worker] for worker in CHOSEN_WORKERS)
        yield f"| {name} | {cells} | not tried |"


def test_table() -> None:
    """The table that ends the docs says what was just seen; DFLASH_WRITE_DOCS=1 writes it."""
    if not OUTCOMES or len(CHOSEN_WORKERS) < 2:
        pytest.skip("no target was run by both workers")
    foreword, _, told = TABLE.read_text().partition(HEAD)
    rows = [line[2:-2].split(" | ") for line in told.splitlines() if line[:2] == "| "]
    known = {name: dict(zip(CHOSEN_WORKERS, cells, strict=False)) for name, *cells in rows}
    unknown = dict.fromkeys(CHOSEN_WORKERS, "not tried")
    names = (*ARCHITECTURES, *REFUSED)
    seen = {name: OUTCOMES.get(name) or known.get(name, unknown) for name in names}
    text = foreword + "\n".join(table(seen)) + "\n"
    if os.environ.get("DFLASH_WRITE_DOCS"):
        TABLE.write_text(text)
    assert TABLE.read_text() == text, "run this file with DFLASH_WRITE_DOCS=1"
