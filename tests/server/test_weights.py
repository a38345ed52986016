"""What RL frameworks ask of a server: memory released and resumed, new weights, and the drafter kept throughout."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.utils import MultiprocessingSerializer, init_custom_process_group
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from tests.server.checks import accept_length, assert_same
from tests.server.harness import (
    CHOSEN_WORKERS,
    DEVICE,
    DRAFTER,
    RANKS,
    TARGET,
    Server,
    decodes,
    free_port,
    generate_body,
    running,
)

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu/test_weights.py is for GPUs")

Tensors = dict[str, torch.Tensor]

ASKED = dict(max_new_tokens=100)


def write_target(folder: Path, tensors: Tensors) -> Path:
    shutil.copytree(TARGET, folder)
    for file in folder.glob("*.safetensors"):
        save_file({name: tensors[name] for name in load_file(file)}, file, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def weights() -> Tensors:
    """The target's."""
    return {k: v for file in TARGET.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.fixture(scope="module")
def others(weights: Tensors) -> Tensors:
    """Those of a target that says something else: with another embedding, which the drafter borrows, and layer."""
    turned = max(name for name in weights if name.endswith("mlp.down_proj.weight"))
    changed = {turned: -weights[turned]}
    embedding = weights["model.embed_tokens.weight"].clone()
    embedding[:, ::7] *= 1.25
    changed["model.embed_tokens.weight"] = embedding
    return weights | changed


@pytest.fixture(scope="module")
def folder(others: Tensors, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("weights") / "target", others)


@pytest.fixture(scope="module")
def answered(_plain: Server, folder: Path, prompts: list[str]) -> Iterator[dict[str, list[dict]]]:
    """What plain decoding says with the target's own weights, and with others."""
    first = _plain.generate_all(prompts[:6], 3, **ASKED)
    _plain.wait_until_idle()
    assert updated(_plain, "disk", model_path=str(folder))[0]
    second = _plain.generate_all(prompts[:6], 3, **ASKED)
    _plain.wait_until_idle()
    assert updated(_plain, "disk", model_path=str(TARGET))[0]
    assert all(a["output_ids"] != b["output_ids"] for a, b in zip(first, second, strict=True))
    return {"own": first, "others": second}


@pytest.fixture(scope="module", params=CHOSEN_WORKERS)
def saver(request: pytest.FixtureRequest, logs: Path) -> Iterator[Server]:
    log = logs / f"{request.param}-saver.log"
    given = ("--enable-memory-saver", "--enable-metrics", "--context-length", "2048")
    with running(log, *given, worker=request.param) as server:
        yield server


@pytest.fixture
def server(saver: Server) -> Iterator[Server]:
    """As it was started, whatever a test does; after each every KV slot is free."""
    yield saver
    assert saver.post("/resume_memory_occupation", {}).status_code == 200
    assert updated(saver, "disk", model_path=str(TARGET))[0]
    saver.check_idle()


def updated(server: Server, way: str, **body: Any) -> tuple[bool, str]:
    """Whether weights were taken, and what the answer says."""
    response = server.post(f"/update_weights_from_{way}", body)
    told = response.json()
    assert (response.status_code == 200) == told["success"], response.text
    return told["success"], told["message"]


def occupy(server: Server, what: str, *tags: str) -> None:
    """Releases or resumes memory."""
    response = server.post(f"/{what}_memory_occupation", {"tags": [*tags]} if tags else {})
    assert response.status_code == 200, response.text


def refused(server: Server, path: str, body: Any = None, status: int = 400) -> str:
    """The sentence of a refusal."""
    response = server.post(path, body)
    assert response.status_code == status, response.text
    told = response.json()
    told = told.get("error", told)
    return told["message"]


def assert_answers(server: Server, prompts: list[str], expected: list[dict]) -> float:
    """The drafts that a verify step accepts, and the bonus token."""
    answers = server.generate_all(prompts[: len(expected)], 3, **ASKED)
    for answer, reference in zip(answers, expected, strict=True):
        assert_same(answer, reference)
    return accept_length(answers)


def test_released_and_updated_from_disk(
    server: Server, prompts: list[str], answered: dict, folder: Path
) -> None:
    """As RL frameworks do: all is released, weights come back and are written, then K/V; the drafter is as before."""
    before = assert_answers(server, prompts, answered["own"])
    occupy(server, "release", "kv_cache")
    occupy(server, "release", "weights")
    occupy(server, "resume", "weights")
    assert updated(server, "disk", model_path=str(folder)) == (
        True,
        "Succeeded to update model weights.",
    )
    occupy(server, "resume", "kv_cache")
    assert_answers(server, prompts, answered["others"])
    occupy(server, "release")
    occupy(server, "resume")
    assert updated(server, "disk", model_path=str(TARGET))[0]
    assert assert_answers(server, prompts, answered["own"]) == pytest.approx(before, rel=0.01)


def test_acceptance_that_falls_is_told(
    server: Server, prompts: list[str], answered: dict, folder: Path
) -> None:
    """By more than a half: here nearly nothing is accepted with the other weights."""
    server.generate_all(prompts[:40], 8, **ASKED)
    assert updated(server, "disk", model_path=str(folder))[0]
    assert assert_answers(server, prompts, answered["others"]) < 2
    assert " of the target's weights 0." in server.log.read_text()


def test_weights_are_lost(server: Server, prompts: list[str], answered: dict) -> None:
    """What is released is gone, as on a GPU; else these tests would show nothing."""
    occupy(server, "release", "weights")
    occupy(server, "resume", "weights")
    response = server.post("/generate", generate_body(prompts[0], **ASKED))
    assert response.status_code != 200 or (
        response.json()["output_ids"] != answered["own"][0]["output_ids"]
    )


def test_kv_cache_alone(server: Server, prompts: list[str], answered: dict) -> None:
    """The weights of both models stay, and no prefix of before is found."""
    before = assert_answers(server, prompts, answered["own"])
    occupy(server, "release", "kv_cache")
    occupy(server, "resume", "kv_cache")
    answer = server.generate(prompts[0], **ASKED)
    assert answer["meta_info"]["cached_tokens"] == 0
    assert assert_answers(server, prompts, answered["own"]) == pytest.approx(before, rel=0.01)


def test_while_released(server: Server, prompts: list[str], answered: dict, folder: Path) -> None:
    """What cannot be done is refused with a sentence, what is done already is nothing to do; the server is well."""
    for _ in range(2):
        occupy(server, "release")
    body = {"text": prompts[0], "sampling_params": {"max_new_tokens": 4}}
    for tag in ("kv_cache", "weights"):
        assert refused(server, "/generate", body, status=503).startswith(
            "The server has released its memory ("
        )
        chat = {"model": "a", "messages": [{"role": "user", "content": "How many?"}]}
        assert refused(server, "/v1/chat/completions", chat, status=503)
        assert server.get("/health").status_code == 200
        assert server.post("/flush_cache").status_code == 200
        if tag == "kv_cache":
            ok, told = updated(server, "disk", model_path=str(folder))
            assert not ok and told.startswith("The memory of the weights is released: call")
            assert not updated(server, "tensor", serialized_named_tensors=["x"])[0]
            told = refused(server, "/weights_checker", {"action": "snapshot"})
            assert told.startswith("The memory of the weights is released: call")
            refused(server, "/get_weights_by_name", {"name": "model.norm.weight"})
        occupy(server, "resume", tag)
    for _ in range(2):
        occupy(server, "resume")
    assert updated(server, "disk", model_path=str(TARGET))[0]
    assert assert_answers(server, prompts, answered["own"]) > 2


def test_refused_tags(server: Server) -> None:
    for what in ("release", "resume"):
        told = refused(server, f"/{what}_memory_occupation", {"tags": ["weights", "disk"]})
        assert told == (
            "tags has 'disk', which names no memory: choose of kv_cache, weights, cuda_graph."
        )


def test_release_while_requests_run(server: Server, prompts: list[str], answered: dict) -> None:
    with ThreadPoolExecutor(1) as pool:
        stream = server.stream(prompts[0], max_new_tokens=1500, ignore_eos=True)
        decodes(stream)
        asked = pool.submit(list, stream)
        told = refused(server, "/release_memory_occupation", {})
        assert told.startswith("Memory cannot be released while requests run (1) or wait (0): let")
        assert server.post("/pause_generation", {"mode": "in_place"}).status_code == 200
        ok, told = updated(server, "disk", model_path=str(TARGET))
        assert not ok and told.startswith("K/V of the old weights cannot be flushed while")
        assert server.post("/continue_generation", {}).status_code == 200
        answer = asked.result()[-1]["output_ids"]
    first = answered["own"][0]["output_ids"]
    assert answer[: len(first)] == first
    # Right after their last tokens, when a round in vain may still run.
    for _ in range(5):
        copies = server.generate(prompts[0], n=16)
        assert {answer["meta_info"]["finish_reason"]["type"] for answer in copies} == {"stop"}
        occupy(server, "release", "kv_cache")
        occupy(server, "resume", "kv_cache")


def serialized(tensors: Tensors, bucket: bool = False, ranks: int = 1) -> dict[str, Any]:
    """Body of `/update_weights_from_tensor`."""
    # Names of shared memory; descriptors would need a server in this process that the other one may ask.
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        named: Any = [*tensors.items()]
        if bucket:
            made = FlattenedTensorBucket(named_tensors=named)
            named = {
                "flattened_tensor": made.get_flattened_tensor(),
                "metadata": made.get_metadata(),
            }
        each = [MultiprocessingSerializer.serialize(named, output_str=True) for _ in range(ranks)]
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    body = {"serialized_named_tensors": each}
    return body | ({"load_format": "flattened_bucket"} if bucket else {})


@pytest.mark.parametrize("bucket", [False, True])
def test_updated_from_tensor(
    server: Server,
    prompts: list[str],
    answered: dict,
    weights: Tensors,
    others: Tensors,
    bucket: bool,
) -> None:
    before = assert_answers(server, prompts, answered["own"])
    body = serialized(others, bucket) | {"weight_version": "7"}
    ok, told = updated(server, "tensor", **body)
    assert ok, told
    assert server.get("/model_info").json()["weight_version"] == "7"
    assert_answers(server, prompts, answered["others"])
    assert updated(server, "tensor", **serialized(weights, bucket))[0]
    assert assert_answers(server, prompts, answered["own"]) == pytest.approx(before, rel=0.01)


@contextmanager
def broadcasting(server: Server, ranks: int = 1) -> Iterator[Callable[[Tensors], tuple[bool, str]]]:
    """Sends tensors from rank 0 of a group whose others are the server's ranks."""
    name, port = "new-weights", free_port()
    group = dict(master_address="127.0.0.1", master_port=port, group_name=name)
    group["world_size"] = 1 + ranks
    with ThreadPoolExecutor(1) as pool:
        body = group | {"rank_offset": 1, "backend": "gloo"}
        joined = pool.submit(server.post, "/init_weights_update_group", body)
        made = init_custom_process_group(
            backend="gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=1 + ranks,
            rank=0,
            group_name=name,
            timeout=timedelta(seconds=60),
        )
        assert joined.result().status_code == 200, joined.result().text

        def send(tensors: Tensors) -> tuple[bool, str]:
            body = dict(
                names=[*tensors],
                dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
                shapes=[[*tensor.shape] for tensor in tensors.values()],
                group_name=name,
            )
            taken = pool.submit(updated, server, "distributed", **body)
            for tensor in tensors.values():
                torch.distributed.broadcast(tensor, src=0, group=made)
            return taken.result()

        yield send
        torch.distributed.destroy_process_group(made)
        response = server.post("/destroy_weights_update_group", {"group_name": name})
        assert response.status_code == 200, response.text


def test_updated_from_distributed(
    server: Server, prompts: list[str], answered: dict, weights: Tensors, others: Tensors
) -> None:
    """With memory released before, and K/V resumed last."""
    before = assert_answers(server, prompts, answered["own"])
    with broadcasting(server) as broadcast:
        for sent, answers in ((others, "others"), (weights, "own")):
            occupy(server, "release")
            occupy(server, "resume", "weights")
            ok, told = broadcast(sent)
            assert ok, told
            occupy(server, "resume", "kv_cache", "cuda_graph")
            accepted = assert_answers(server, prompts, answered[answers])
        assert accepted == pytest.approx(before, rel=0.01)
        ok, told = broadcast({"model.norm.weight": torch.zeros(3)})
        assert not ok and "partially updated" in told


def test_two_ranks(
    logs: Path, prompts: list[str], answered: dict, weights: Tensors, others: Tensors
) -> None:
    """Each puts back its part of the drafter, and takes its part of new weights."""
    given = ("--enable-memory-saver", "--tp-size", "2", "--context-length", "2048")
    with running(logs / "saver-ranks.log", *given, worker=CHOSEN_WORKERS[-1], **RANKS) as server:
        before = assert_answers(server, prompts, answered["own"])
        for sent, answers in ((others, "others"), (weights, "own")):
            occupy(server, "release")
            occupy(server, "resume", "weights")
            ok, told = updated(server, "tensor", **serialized(sent, ranks=2))
            assert ok, told
            occupy(server, "resume")
            assert_answers(server, prompts, answered[answers])
        with broadcasting(server, ranks=2) as broadcast:
            for sent, answers in ((others, "others"), (weights, "own")):
                ok, told = broadcast(sent)
                assert ok, told
                accepted = assert_answers(server, prompts, answered[answers])
        assert accepted == pytest.approx(before, rel=0.01)
        assert not updated(
            server, "tensor", **serialized({"model.norm.weight": torch.zeros(3)}, ranks=2)
        )[0]
        server.check_idle()


def test_what_does_not_fit(
    server: Server, prompts: list[str], answered: dict, others: Tensors, tmp_path: Path
) -> None:
    """A sentence, and the server goes on."""
    wrong = others | {"model.norm.weight": torch.zeros(3)}
    ok, told = updated(server, "disk", model_path=str(write_target(tmp_path / "wrong", wrong)))
    assert not ok and told.startswith("The weights of ") and told.endswith("are loaded again.")
    assert_answers(server, prompts, answered["own"])
    assert not updated(server, "disk", model_path=str(tmp_path / "nowhere"))[0]
    ok, told = updated(server, "disk", model_path=str(DRAFTER))
    assert not ok and "is a DFlash drafter, and new weights are the target's: give" in told
    assert_answers(server, prompts, answered["own"])
    for tensors in (
        serialized({"model.norm.weight": torch.zeros(3)}),
        {"serialized_named_tensors": ["x"]},
    ):
        ok, told = updated(server, "tensor", **tensors)
        assert not ok and told.startswith("The tensors do not fit (")
    body = dict(names=["model.norm.weight"], dtypes=["float32"], shapes=[[3]], group_name="x")
    ok, told = updated(server, "distributed", **body)
    assert not ok and told.startswith("group_name 'x' is not among the groups []: call /init_")
    assert_answers(server, prompts, answered["own"])


def test_other_routes(server: Server) -> None:
    body = {"new_version": "8", "abort_all_requests": False}
    assert server.post("/update_weight_version", body).status_code == 200
    assert server.get("/model_info").json()["weight_version"] == "8"
    assert server.post("/weights_checker", {"action": "snapshot"}).status_code == 200
