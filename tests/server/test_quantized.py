"""Targets whose weights are quantized, LM heads included, and FP8 drafters: the answers of plain decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.server.checks import assert_same, assert_speculated
from tests.server.harness import (
    CHOSEN_WORKERS,
    DEVICE,
    DFLASH,
    DRAFTER,
    TARGET,
    Server,
    fails_to_start,
    generate_body,
    in_long,
    prompts_of,
    running,
    tail,
)
from tests.unit.quantized import KINDS, write_quantized

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu/test_quantized.py does this")

FIRST = ("fp8-blocks", "gptq")
ASKED = 8


def logprobs(server: Server, prompt: str) -> list[float]:
    """Of an answer's tokens, and of the two likeliest at each."""
    body = generate_body(prompt) | {"return_logprob": True, "top_logprobs_num": 2}
    meta = server.post("/generate", body).json()["meta_info"]
    rows = [meta["output_token_logprobs"], *meta["output_top_logprobs"]]
    return [number for row in rows for number, *_ in row]


@pytest.mark.parametrize("head", [False, *in_long(True)])
@pytest.mark.parametrize("kind", [*FIRST, *in_long(*(kind for kind in KINDS if kind not in FIRST))])
def test_equal(kind: str, head: bool, tmp_path: Path, logs: Path, prompts: list[str]) -> None:
    """Alone and all at once, with log-probabilities; the drafter, trained for weights before that, is often right."""
    target = write_quantized(Path(TARGET), tmp_path / "target", kind, head)
    drafter = DRAFTER
    if kind.startswith("fp8"):
        drafter = write_quantized(Path(DRAFTER), tmp_path / "drafter", kind)
    pair, asked = ("--model-path", str(target)), prompts[: prompts_of(ASKED)]
    name = f"quantized-{kind}-{head}"
    with running(logs / f"{name}-plain.log", *pair) as plain:
        expected = logprobs(plain, asked[0])
        pair += ("--speculative-draft-model-path", str(drafter))
        for worker in CHOSEN_WORKERS:
            log = logs / f"{name}-{worker}.log"
            with running(log, *pair, worker=worker) as server:
                for concurrency in (1, len(asked)):
                    for prompt, answer in zip(
                        asked, server.generate_all(asked, concurrency), strict=True
                    ):
                        assert_same(answer, plain.reference(prompt), plain, prompt)
                        assert_speculated(answer, 2)
                assert logprobs(server, asked[0]) == pytest.approx(expected, abs=1e-4)
                server.check_idle()
            assert ("which are quantized" in log.read_text()) == (drafter != DRAFTER)


def write_config(folder: Path, **changes: object) -> Path:
    """The bundled target as another checkpoint."""
    write_quantized(Path(TARGET), folder, "fp8")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "has quant_method bitsandbytes, and without a GPU's"),
        ({"quant_method": "magic"}, "cannot be served by this SGLang (Unknown quantization method"),
    ],
)
def test_refused(said: dict[str, str], words: str, tmp_path: Path, logs: Path) -> None:
    """Before weights are loaded, with the release's reason where it has one."""
    target = write_config(tmp_path, quantization_config=said)
    log = logs / f"{said['quant_method']}.log"
    status, output = fails_to_start(log, *DFLASH, target=target)
    last = output.strip().splitlines()[-1]
    assert status != 0 and last.startswith("error: ") and words in last, tail(log)
    assert "Traceback" not in output
