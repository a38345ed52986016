"""Targets with linear attention, or with latents of MLA, in graphs: answers of plain decoding of the same build."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.checks import accept_length, assert_tie
from tests.server.harness import CHOSEN_WORKERS, Server, running
from tests.unit.decoders import write_drafter, write_target
from tests.unit.sliding import DRAFTER_ON_GPUS, PROMPTS, TOKENS

# Sizes for which a GPU's kernels are made.
COMMON = dict(hidden_size=128, max_position_embeddings=1024, embedding=0.5)
TARGETS = {
    "Qwen3-Next": dict(
        num_attention_heads=4,
        head_dim=64,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    ),
    "DeepSeek-V3": dict(
        num_attention_heads=16,
        num_key_value_heads=16,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
}
WAYS = {
    "auto": (),
    "pages": ("--page-size", "64"),
    "triton": ("--speculative-dflash-attention", "triton"),
    "backend": ("--speculative-dflash-attention", "backend"),
    "random rows": ("--speculative-dflash-verify", "auto"),
}
# Logits of these targets are of 16 to 32, where bfloat16 has steps of an eighth.
TIE = 0.5
# The release's check of slots while requests run knows no states; its check of an idle server does.
ONCE_IDLE = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "0"}


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("drafter"), **DRAFTER_ON_GPUS)


@pytest.fixture(scope="module", params=TARGETS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, logs: Path
) -> Iterator[tuple[str, Path, Server, list[list[int]]]]:
    """A target, plain decoding of it, and what that answers."""
    name, folder = request.param, tmp_path_factory.mktemp("target")
    write_target(folder, name, **COMMON | TARGETS[name])
    with running(
        logs / f"{name}-plain.log",
        *("--model-path", str(folder), "--skip-tokenizer-init"),
        **ONCE_IDLE,
    ) as plain:
        expected = [plain.generate(ids, **TOKENS)["output_ids"] for ids in PROMPTS]
        yield name, folder, plain, expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("worker", CHOSEN_WORKERS)
def test_equal(
    worker: str,
    way: str,
    drafter: Path,
    pair: tuple[str, Path, Server, list[list[int]]],
    logs: Path,
) -> None:
    """Alone, all at once, and with what the prefix cache has; rounds from graphs unless they are asked not to be."""
    name, folder, plain, expected = pair
    if name == "DeepSeek-V3" and way == "triton":
        pytest.skip("Triton's attention of blocks reads no latents")
    log = logs / f"{name}-{worker}-{way.replace(' ', '-')}.log"
    given = ("--model-path", str(folder), "--skip-tokenizer-init")
    given += ("--speculative-draft-model-path", str(drafter), *WAYS[way])
    random_rows = {"SGLANG_DFLASH_RANDOM_ROWS": "1"} if way == "random rows" else {}
    with running(log, *given, worker=worker, **ONCE_IDLE, **random_rows) as server:
        assert ("without CUDA graphs" in log.read_text()) == (way == "backend")
        for concurrency in (1, len(PROMPTS), 3):
            answers = server.generate_all(PROMPTS, concurrency, **TOKENS)
            for prompt, answer, ids in zip(PROMPTS, answers, expected, strict=True):
                if answer["output_ids"] != ids:
                    assert_tie(answer["output_ids"], ids, plain, prompt, TIE)
            assert accept_length(answers) > 1.1
        server.check_idle()


@pytest.mark.parametrize("worker", CHOSEN_WORKERS)
def test_random_widths(
    worker: str,
    drafter: Path,
    pair: tuple[str, Path, Server, list[list[int]]],
    logs: Path,
) -> None:
    """States and latents of 1,000 rounds of many widths, and prompts behind what they leave in the prefix cache."""
    name, folder, plain, expected = pair
    widths = {"SGLANG_DFLASH_RANDOM_WIDTHS": "1,2,4,8,16"}
    given = ("--model-path", str(folder), "--skip-tokenizer-init")
    given += ("--speculative-draft-model-path", str(drafter))
    log = logs / f"{name}-{worker}-widths.log"
    rounds = 0
    with running(log, *given, worker=worker, **ONCE_IDLE, **widths) as server:
        while rounds < 1000:
            answers = server.generate_all(PROMPTS, 4, **TOKENS)
            rounds += sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
            for prompt, answer, ids in zip(PROMPTS, answers, expected, strict=True):
                if answer["output_ids"] != ids:
                    assert_tie(answer["output_ids"], ids, plain, prompt, TIE)
        later = [ids + answer[:60] for ids, answer in zip(PROMPTS, expected, strict=True)]
        for prompt, answer in zip(later, server.generate_all(later, 4, **TOKENS), strict=True):
            reference = plain.generate(prompt, **TOKENS)["output_ids"]
            if answer["output_ids"] != reference:
                assert_tie(answer["output_ids"], reference, plain, prompt, TIE)
        server.check_idle()
