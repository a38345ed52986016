"""Shapes of published models in full size, with weights that nobody trained: 200 answers are those of plain decoding.

A card holds one server at a time, so the plain one says of each of its tokens what it found about as likely, and ends.
On an H200: DFLASH_TEST_DEVICE=cuda DFLASH_TEST_MEMORY=0.85 DFLASH_TEST_WORKERS=v2 pytest tests/gpu/test_shapes.py -s

`python -m tests.gpu.tiny_shapes` runs the same on a CPU, in small sizes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from benchmark.shapes import SHAPES, Shape, write_pair
from sglang_dflash.checkpoint.formats.weights import expected_weights
from sglang_dflash.checkpoint.load import load_config
from tests.gpu.filled import MASK
from tests.server.checks import accept_length
from tests.server.harness import CHOSEN_WORKERS, DEVICE, Server, generate_body, running
from tests.unit.drafters import save, zlab_config

pytestmark = pytest.mark.long

NAMES = (
    "gpt-oss-20b",
    "qwen3.5-27b",
    "qwen3.5-35b-a3b",
    "deepseek-v2-lite",
    "gemma-3-12b",
    "qwen3-8b-fp8",
)
# What `fill` takes where its default makes too many tokens, or too few, their own successors. Gemma's norms make what
# attention finds in a long context, which changes little from token to token, as large as in a short one.
REPEATS = {"gemma-3-12b": "0.4", "qwen3-8b-fp8": "0.8", "deepseek-v2-lite": "1.6"}
COUNT, ALONE, FEWER, AT_ONCE = 200, 10, 8, 32
TOKENS = {"max_new_tokens": 40, "ignore_eos": True}
# Of the tokens that plain decoding found likeliest it tells so many.
TOLD = 5
# nat; a token's logit varies by 1.5, or by 3 if its row is long. bfloat16 has steps of a sixteenth there.
TIE = 0.5 if DEVICE == "cuda" else 0.001
COMMON = (
    *("--load-format", "dummy", "--skip-tokenizer-init"),
    *("--max-running-requests", str(AT_ONCE), "--max-total-tokens", "20000"),
)
# With overlap the release frees states of linear attention that a step in vain still writes (`hand_on_in_order`).
PLAIN = ("--disable-overlap-schedule",)
ON_GPUS = ("--cuda-graph-max-bs", str(AT_ONCE), "--speculative-dflash-verify", "auto")
LAUNCHER = ("tests.gpu.filled_server",)
# The release's check of slots while requests run knows no states; its check of an idle server does.
ONCE_IDLE = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "0"}


@pytest.mark.parametrize("name", NAMES)
def test_equal(name: str, tmp_path: Path, logs: Path) -> None:
    check(name, SHAPES[name], tmp_path, logs, *ON_GPUS)


def check(
    name: str, shape: Shape, folder: Path, logs: Path, *arguments: str, **variables: str
) -> None:
    """Some alone, then all at once; what was seen is printed.

    Args:
        arguments, variables: of all servers.
    """
    target, _ = write_pair(shape, folder)
    drafter = write_repeater(folder / "repeater", shape)
    prompts = random_prompts(shape.target["vocab_size"])
    given = (*COMMON, *arguments, "--model-path", str(target))
    more: dict[str, Any] = {"launcher": LAUNCHER, "by_itself": True} | ONCE_IDLE | variables
    if name in REPEATS:
        more["DFLASH_TEST_REPEAT"] = REPEATS[name]
    with running(logs / f"{name}-plain.log", *given, *PLAIN, **more) as plain:
        expected = ask(plain, prompts, AT_ONCE, return_logprob=True, top_logprobs_num=TOLD)
        again = ask(plain, prompts, FEWER)
        read = read_again(plain, prompts, expected)
    check_varied(name, [answer["output_ids"] for answer in expected])
    in_fewer = left(f"{name} plain, {FEWER} at once", again, expected)
    as_prompts = left(f"{name} plain, its answers as prompts", read, expected)
    say_chosen_again(f"{name} plain", read, expected)
    own = Left(*map(max, in_fewer, as_prompts))
    given += ("--speculative-draft-model-path", str(drafter))
    given += ("--speculative-draft-load-format", "auto")  # the target's alone are dummies
    for worker in CHOSEN_WORKERS:
        with running(logs / f"{name}-{worker}.log", *given, worker=worker, **more) as server:
            for asked, at_once in ((prompts[:ALONE], 1), (prompts, AT_ONCE)):
                answers = ask(server, asked, at_once)
                found = left(f"{name} {worker}, {at_once} at once", answers, expected)
                compare(answers, found, own)
            say_chosen_again(f"{name} {worker}", read_again(server, prompts, answers), answers)
            its = read_again(server, prompts, expected)
            compare_found(f"{name} {worker}", its, read, expected)
            server.check_idle()


def random_prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    lengths = [rng.randint(8, 120) for _ in range(COUNT)]
    return [[rng.randrange(MASK + 1, vocab_size) for _ in range(length)] for length in lengths]


def ask(server: Server, prompts: Sequence[list[int]], at_once: int, **more: Any) -> list[dict]:
    def answer(prompt: list[int]) -> dict:
        response = server.post("/generate", generate_body(prompt, **TOKENS) | more)
        assert response.status_code == 200, response.text
        return response.json()

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(answer, prompts))


def read_again(server: Server, prompts: Sequence[list[int]], answers: Sequence[dict]) -> list[dict]:
    """What a server finds likeliest after each token of its answers when it reads them, many rows in a pass.

    So a target verifies, with other kernels for rows of attention, experts and products than decoding has.
    """

    def read(prompt: list[int], answer: dict) -> dict:
        ids = answer["output_ids"]
        body = generate_body([*prompt, *ids[:-1]], max_new_tokens=1, ignore_eos=True)
        body |= {
            "return_logprob": True,
            "logprob_start_len": len(prompt) - 1,
            "top_logprobs_num": 1,
        }
        meta = server.post("/generate", body).json()["meta_info"]
        # The last rows are those of the answer; each is told with the token that it leads to.
        told = [*meta["input_top_logprobs"][1 - len(ids) :], *meta["output_top_logprobs"]]
        found = [row[0] for row in meta["input_token_logprobs"][1 - len(ids) :]]
        return {
            "output_ids": [likeliest[1] for (likeliest, *_) in told],
            "found": found,
            "meta_info": {},
        }

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(read, prompts, answers))


def check_varied(name: str, answers: list[list[int]]) -> None:
    """What would be the same whatever a server did tells nothing."""
    different, kinds = len(set(map(tuple, answers))), [len(set(ids)) for ids in answers]
    again = sum(a == b for ids in answers for a, b in zip(ids, ids[1:], strict=False))
    said = {token for ids in answers for token in ids}
    print(
        f"\n{name} plain: {different} different answers, {sum(kinds) / len(kinds):.1f} different tokens in one, "
        f"{len(said)} in all; {again / sum(len(ids) - 1 for ids in answers):.0%} are the one before again"
    )
    assert different > len(answers) / 2
    assert sum(kind > 2 for kind in kinds) > len(kinds) / 4


def say_chosen_again(name: str, read: Sequence[dict], answers: Sequence[dict]) -> None:
    """How many tokens a server finds likeliest again where it reads them, whether or not they are plain decoding's."""
    pairs = [
        pair
        for mine, its in zip(read, answers, strict=True)
        for pair in zip(mine["output_ids"], its["output_ids"], strict=True)
    ]
    again = sum(mine == other for mine, other in pairs) / len(pairs)
    print(f"{name} chooses {again:.1%} of its tokens again where it reads them")


def compare_found(
    name: str, its: Sequence[dict], plain: Sequence[dict], answers: Sequence[dict]
) -> None:
    """How likely passes with DFLASH find the tokens of plain decoding's answers when they read them.

    They are about as near to what plain decoding found as its own passes over prompts are, which have the prompt itself
    in common with it. One other token changes nothing here, however little decides which experts a router takes. What
    computes something else is off by more than a nat.
    """
    told = [row[0] for each in answers for row in each["meta_info"]["output_token_logprobs"][:-1]]
    off = {}
    for whose, read in ((name, its), ("plain", plain)):
        found = [chance for each in read for chance in each["found"]]
        gaps = sorted(abs(mine - its) for mine, its in zip(found, told, strict=True))
        off[whose] = [gaps[int(part * (len(gaps) - 1))] for part in (0.5, 0.9, 0.99)]
        said = ", ".join(f"{gap:.4f}" for gap in off[whose])
        print(f"{name}: reading finds answers off by {said} nat ({whose}; half, 90%, 99%)")
    for mine, own in zip(off[name], off["plain"], strict=True):
        assert mine <= 3 * own + TIE / 10


class Left(NamedTuple):
    """How many answers left plain decoding's, and how many of them at a token that it had not found about as likely."""

    all: int
    elsewhere: int


def left(name: str, answers: list[dict], expected: list[dict]) -> Left:
    gaps = [
        gap
        for answer, its in zip(answers, expected, strict=False)
        if (gap := gap_where_left(answer["output_ids"], its)) is not None
    ]
    far = sorted(gap for gap in gaps if gap > TIE)
    print(
        f"{name}: of {len(answers)} answers {len(answers) - len(gaps)} are the same, {len(gaps) - len(far)} left at a "
        f"tie, {len(far)} elsewhere ({', '.join(f'{gap:.2f}' for gap in far)} nat); accept length {length_of(answers)}"
    )
    return Left(len(gaps), len(far))


def length_of(answers: list[dict]) -> str:
    speculated = "spec_verify_ct" in answers[0]["meta_info"]
    return f"{accept_length(answers):.2f}" if speculated else "none"


def compare(answers: list[dict], found: Left, own: Left) -> None:
    """Answers leave plain decoding's about as often as plain decoding does in smaller batches, or where it reads them.

    Which expert a router takes, rounding may decide, and then a token that was not near comes out on top.
    """
    assert found.elsewhere <= 2 * own.elsewhere + 1
    assert found.all <= 2 * own.all + len(answers) / 20
    assert accept_length(answers) > 1.1


def gap_where_left(ids: list[int], expected: dict) -> float | None:
    """By how much plain decoding found the first other token less likely than its own; None if there is no other."""
    its = expected["output_ids"]
    assert len(ids) == len(its)
    others = (at for at, (mine, other) in enumerate(zip(ids, its, strict=True)) if mine != other)
    if (at := next(others, None)) is None:
        return None
    there = expected["meta_info"]["output_top_logprobs"][at]
    told = {token: chance for chance, token, *_ in there}
    return told[its[at]] - told.get(ids[at], -math.inf)


def write_repeater(folder: Path, shape: Shape) -> Path:
    """Writes a drafter that drafts the token that its context has most often: see `tests.unit.decoders`."""
    sizes = {field: shape.target[field] for field in ("hidden_size", "vocab_size")}
    dim = 128 if sizes["hidden_size"] >= 1024 else 32
    heads = -(-sizes["hidden_size"] // dim)
    config = zlab_config(
        num_hidden_layers=1,
        num_target_layers=shape.target["num_hidden_layers"],
        block_size=16,
        max_position_embeddings=4096,
        intermediate_size=128,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=dim,
        dflash_config={"mask_token_id": MASK, "target_layer_ids": [0, 2]},
        **sizes,
    )
    save(folder, config)
    weights = {}
    for name, size in expected_weights(load_config(str(folder))).items():
        weights[name] = torch.ones(size, dtype=torch.bfloat16)
        if len(size) > 1:
            weights[name].zero_()
        if name.endswith(("fc.weight", "v_proj.weight", "o_proj.weight")):
            weights[name].fill_diagonal_(1)
    return save(folder, None, model=weights)
