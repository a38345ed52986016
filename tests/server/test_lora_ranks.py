"""LoRA adapters on two ranks: answers of plain decoding of one with the same adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.adapters import ATTENTION, MLP, write_adapter
from tests.server.checks import accept_length, assert_same
from tests.server.harness import CHOSEN_WORKERS, RANKS, in_long, needs_gpus, running
from tests.server.test_lora import BACKEND, ask_all

MADE = {"attention": ATTENTION, "layers": (*ATTENTION, *MLP)}


@needs_gpus(2)
@pytest.mark.parametrize("worker", [CHOSEN_WORKERS[-1], *in_long(*CHOSEN_WORKERS[:-1])])
def test_equal(worker: str, tmp_path: Path, logs: Path, prompts: list[str]) -> None:
    """Alone and side by side, of no adapter and of two."""
    paths = [
        f"{name}={write_adapter(tmp_path / name, seed, scale=0.06, modules=modules)}"
        for seed, (name, modules) in enumerate(MADE.items())
    ]
    flags = ("--lora-paths", *paths, "--lora-backend", BACKEND)
    asked = [(prompt, name) for prompt in prompts[:6] for name in (None, *MADE)]
    with running(logs / "lora-one.log", *flags) as plain:
        expected = ask_all(plain, asked, 8)
        log = logs / f"lora-two-{worker}.log"
        with running(log, *flags, "--tp-size", "2", worker=worker, **RANKS) as server:
            for at_once in (1, 8):
                answers = ask_all(server, asked, at_once)
                for (prompt, name), answer, its in zip(asked, answers, expected, strict=True):
                    assert_same(answer, its, plain, prompt, adapter=name)
                assert accept_length(answers) > 2
            server.check_idle()
