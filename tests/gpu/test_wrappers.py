"""Targets with pictures in graphs: answers of plain decoding. docs/targets.md has what was seen."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.test_states_and_latents import ONCE_IDLE, TIE
from tests.server.harness import CHOSEN_WORKERS, Server, running
from tests.server.test_decoders import LINEAR, requests_with_pictures
from tests.unit.decoders import write_drafter
from tests.unit.wrappers import VOCABULARY, WRAPPERS, write_wrapper

HEAD, HEADS = 64, {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
DELTA_HEADS = dict(linear_key_head_dim=128, linear_value_head_dim=128)
# The heads of the towers are smaller.
TOWERS = ("--mm-attention-backend", "sdpa")
# With overlap the release hands on states of linear attention that a step in vain still writes.
IN_ORDER = ("--disable-overlap-schedule",)
ALTERNATIVES = {"return_logprob": True, "top_logprobs_num": 8}


def sizes_of(name: str) -> dict[str, Any]:
    """Heads that kernels of a GPU know, with sections of M-RoPE that fill what is rotated of one, as published ones do.

    Where there is no linear attention, heads fill what is hidden: some classes take that for granted.
    """
    linear = name in LINEAR
    sizes = HEADS | ({"hidden_size": 128} | DELTA_HEADS if linear else {"hidden_size": 256})
    rope = WRAPPERS[name].text.get("rope_parameters", {})
    if sections := rope.get("mrope_section"):
        rotated = HEAD * rope.get("partial_rotary_factor", 0.25 if linear else 1.0)
        factor = int(rotated) // 2 // sum(sections)
        sizes["rope_parameters"] = rope | {"mrope_section": [factor * n for n in sections]}
    return sizes


def drafter_for(hidden_size: int, folder: Path) -> Path:
    heads = {"num_attention_heads": hidden_size // HEAD, "num_key_value_heads": hidden_size // HEAD}
    folder.mkdir()
    return write_drafter(
        folder, vocab_size=VOCABULARY, hidden_size=hidden_size, head_dim=HEAD, **heads
    )


def ask_all(server: Server, bodies: list[dict], concurrency: int) -> list[dict]:
    def ask(body: dict) -> dict:
        response = server.post("/generate", body)
        assert response.status_code == 200, response.text
        return response.json()

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(ask, bodies))


def assert_same_or_tie(number: int, ids: list[int], expected: dict) -> None:
    """Where `ids` leave the expected answer, plain decoding found both tokens about as likely."""
    pairs = enumerate(zip(ids, expected["output_ids"], strict=True))
    at = next((i for i, (mine, its) in pairs if mine != its), None)
    if at is None:
        return
    told = expected["meta_info"]["output_top_logprobs"][at]
    # The likeliest comes first, and of two that are as likely it may be the other one.
    best, mine = (
        told[0][0],
        next((chance for chance, token, *_ in told if token == ids[at]), -math.inf),
    )
    assert best - mine <= TIE, (
        f"answer {number}: token {at} is {best - mine:.3f} nat below the likeliest"
    )


@pytest.mark.parametrize("name", WRAPPERS)
def test_equal(name: str, tmp_path: Path, logs: Path) -> None:
    """Of texts, one picture and two: alone, all at once with prompts beside rounds, and with what the cache has."""
    wrapper, log = WRAPPERS[name], name.replace(" ", "-")
    target, sizes = tmp_path / "target", sizes_of(name)
    write_wrapper(target, name, embedding=0.5, **sizes)
    given = ("--model-path", str(target), *TOWERS, *wrapper.arguments)
    asked = requests_with_pictures(wrapper.picture)
    bodies = [body for path, body in asked if path == "/generate"]
    in_order = IN_ORDER if name in LINEAR else ()
    with running(logs / f"{log}-plain.log", *given, *in_order, **ONCE_IDLE) as plain:
        expected = ask_all(plain, [body | ALTERNATIVES for body in bodies], 1)
    assert len({str(answer["output_ids"]) for answer in expected}) > len(bodies) / 2
    drafter = drafter_for(sizes["hidden_size"], tmp_path / "drafter")
    given += ("--speculative-draft-model-path", str(drafter))
    for worker in CHOSEN_WORKERS:
        file = logs / f"{log}-{worker}.log"
        with running(file, *given, worker=worker, **ONCE_IDLE) as server:
            assert "without CUDA graphs" not in file.read_text()
            for concurrency in (1, len(bodies), len(bodies)):
                answers = ask_all(server, bodies, concurrency)
                for number, (answer, its) in enumerate(zip(answers, expected, strict=True)):
                    assert_same_or_tie(number, answer["output_ids"], its)
                accepted = [answer["meta_info"]["spec_accept_length"] for answer in answers]
                assert sum(length > 1 for length in accepted) >= 2
            server.check_idle()
