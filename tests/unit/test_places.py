"""Replicas, nodes and GPUs that cannot be are refused, and those that can are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_dflash.errors import DFlashError
from sglang_dflash.serving.places import check_gpus
from tests.unit.test_arguments import arguments, refusal

MEET = {"dist_init_addr": "127.0.0.1:20000"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dp_size": 0}, "--dp-size 0 is below 1"),
        ({"nnodes": 0}, "--nnodes 0 is below 1"),
        ({"node_rank": 1}, "--node-rank 1 is none of --nnodes 1"),
        ({"nnodes": 2, "node_rank": -1, "tp_size": 2}, "--node-rank -1 is none of --nnodes 2"),
        ({"nnodes": 2, "tp_size": 2}, "--nnodes 2 needs --dist-init-addr"),
        ({"nnodes": 2} | MEET, "--tp-size 1 is not divisible by --nnodes 2"),
        ({"nnodes": 2, "dp_size": 2, "tp_size": 2} | MEET, "--dp-size 2 with --nnodes 2 is not"),
        ({"tokenizer_worker_num": 0}, "--tokenizer-worker-num 0 is below 1"),
        ({"tokenizer_worker_num": 3, "api_key": "x"}, "--tokenizer-worker-num 3 with --api-key"),
        (
            {"tokenizer_worker_num": 2, "admin_api_key": "x"},
            "--tokenizer-worker-num 2 with --admin",
        ),
    ],
)
def test_refused(changes: dict[str, Any], named: str) -> None:
    assert refusal(**changes).startswith(named)


@pytest.mark.parametrize(
    "changes",
    [
        {"dp_size": 2},
        {"tokenizer_worker_num": 2},
        {"api_key": "x"},
        {"nnodes": 2, "node_rank": 1, "tp_size": 2} | MEET,
    ],
)
def test_accepted(changes: dict[str, Any]) -> None:
    assert arguments(**changes).speculative_num_draft_tokens == 16


@pytest.mark.parametrize(
    ("changes", "needed", "named"),
    [
        ({"tp_size": 2}, 2, "--tp-size 2 needs 2 GPUs on this node, and 1 are visible"),
        ({"dp_size": 2, "tp_size": 2}, 4, "--dp-size 2 with --tp-size 2 needs 4 GPUs"),
        ({"nnodes": 2, "tp_size": 4} | MEET, 2, "--tp-size 4 with --nnodes 2 needs 2 GPUs"),
        ({"base_gpu_id": 3}, 4, "--tp-size 1 and --base-gpu-id 3 needs 4 GPUs"),
        ({"dp_size": 3, "gpu_id_step": 2}, 5, "--dp-size 3 with --tp-size 1 and --gpu-id-step 2"),
    ],
)
def test_gpus(changes: dict[str, Any], needed: int, named: str) -> None:
    args = arguments(**changes)
    check_gpus(args, needed)
    with pytest.raises(DFlashError) as caught:
        check_gpus(args, needed - 1)
    assert str(caught.value).startswith(named.replace("1 are", f"{needed - 1} are"))


def test_gpus_of_this_machine() -> None:
    count = torch.cuda.device_count()
    told = refusal(device="cuda", attention_backend="triton", dp_size=count + 1)
    assert f"needs {count + 1} GPUs on this node, and {count} are visible" in told
