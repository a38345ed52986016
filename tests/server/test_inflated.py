"""A pair in the shape of a larger one is served as the small one: same answers in as many rounds."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmark.shapes import Shape
from checkpoints.inflate.pair import inflate
from tests.server.checks import accept_length, assert_same
from tests.server.harness import CHOSEN_WORKERS, DRAFTER, TARGET, Server, running

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 1024,
    "vocab_size": 1024,
}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DRAFT = {
    "num_hidden_layers": 3,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 2, 4]},
}
SHAPES = {"dense": Shape(DENSE, DRAFT), "experts": Shape(DENSE | EXPERTS, DRAFT)}
# The draws of a seed are the same then, so that sampled answers can be compared, too.
SEEDED = "--enable-deterministic-inference"
SAMPLING = ({}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 2.0})


@pytest.mark.long
@pytest.mark.parametrize(
    ("worker", "shape"),
    [*((worker, "dense") for worker in CHOSEN_WORKERS), (CHOSEN_WORKERS[-1], "experts")],
)
def test_inflated(worker: str, shape: str, logs: Path, tmp_path: Path, prompts: list[str]) -> None:
    inflate(SHAPES[shape], shape, TARGET, [DRAFTER], tmp_path)
    models = {
        "small": (TARGET, DRAFTER),
        "large": (tmp_path / "target", tmp_path / "drafter"),
    }
    with ExitStack() as stack:
        small, large = (
            stack.enter_context(
                running(
                    logs / f"inflated-{shape}-{name}-{worker}.log",
                    *(SEEDED, "--model-path", str(target)),
                    *("--speculative-draft-model-path", str(drafter)),
                    worker=worker,
                )
            )
            for name, (target, drafter) in models.items()
        )
        for sampling in SAMPLING:
            expected, answers = (ask(server, prompts[:8], **sampling) for server in (small, large))
            for answer, reference in zip(answers, expected, strict=True):
                assert_same(answer, reference)
                assert rounds(answer) == rounds(reference)
            assert accept_length(answers) > (1.5 if sampling else 6)
        large.check_idle()


def ask(server: Server, prompts: Sequence[str], **sampling: float) -> list[dict]:
    """Answers, each with the number of its prompt as the seed."""
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(server.generate, prompt, max_new_tokens=80, sampling_seed=seed, **sampling)
            for seed, prompt in enumerate(prompts)
        ]
        return [each.result() for each in asked]


def rounds(answer: dict) -> int:
    return answer["meta_info"]["spec_verify_ct"]
