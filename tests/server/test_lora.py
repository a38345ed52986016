"""LoRA adapters on the target: answers of plain decoding with the same adapter, alone and side by side."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.adapters import ATTENTION, ENDS, MLP, write_adapter
from tests.server.checks import accept_length, assert_same, counted
from tests.server.harness import (
    CHOSEN_WORKERS,
    DEVICE,
    DFLASH,
    Server,
    fails_to_start,
    generate_body,
    in_long,
    running,
    tail,
)

BASE = None
# Which modules, how strong, and of what rank: drafts survive the first two often, and the last never.
MADE: dict[str, dict[str, Any]] = {
    "attention": {"modules": ATTENTION, "rank": 4, "scale": 0.07},
    "layers": {"modules": (*ATTENTION, *MLP), "scale": 0.06},
    "all": {"modules": (*ATTENTION, *MLP, *ENDS), "rank": 6, "scale": 0.035},
    "strong": {"modules": (*ATTENTION, *MLP), "scale": 0.12},
}
BACKEND = {"cpu": "torch_native", "cuda": "triton"}[DEVICE]
# v1 with pages, and prompts in chunks; in v2 some rounds have a row of each request, and draft nothing.
OWN: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "v1": (("--page-size", "16", "--chunked-prefill-size", "64"), {}),
    "v2": ((), {"SGLANG_DFLASH_RANDOM_WIDTHS": "1,4,16,16"}),
}
Asked = tuple[str | list[int], str | None]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(folder / name, seed, **made)
        for seed, (name, made) in enumerate(MADE.items())
    }


@pytest.fixture(scope="module")
def flags(adapters: dict[str, Path]) -> tuple[str, ...]:
    paths = [f"{name}={path}" for name, path in adapters.items()]
    return ("--lora-paths", *paths, "--lora-backend", BACKEND, "--max-loras-per-batch", "3")


@pytest.fixture(scope="module")
def plain(logs: Path, flags: tuple[str, ...]) -> Iterator[Server]:
    """Plain decoding with the same adapters."""
    with running(logs / "lora-plain.log", *flags, "--disable-overlap-schedule") as server:
        yield server


@pytest.fixture(scope="module")
def _adapted(
    request: pytest.FixtureRequest, logs: Path, flags: tuple[str, ...]
) -> Iterator[Server]:
    worker = request.param
    arguments, variables = OWN[worker]
    log = logs / f"lora-{worker}.log"
    given = (*flags, *arguments, "--enable-metrics")
    with running(log, *given, worker=worker, **variables) as server:
        yield server


@pytest.fixture
def adapted(_adapted: Server) -> Iterator[Server]:
    """Speculation; after each test every KV slot is free."""
    yield _adapted
    _adapted.check_idle()


each_worker = pytest.mark.parametrize("_adapted", CHOSEN_WORKERS, indirect=True, scope="module")
one_worker = pytest.mark.parametrize(
    "_adapted",
    [CHOSEN_WORKERS[-1], *in_long(*CHOSEN_WORKERS[:-1])],
    indirect=True,
    scope="module",
)


def ask(server: Server, asked: Asked, **sampling: Any) -> dict:
    prompt, adapter = asked
    body = generate_body(prompt, **({"max_new_tokens": 96} | sampling))
    response = server.post("/generate", body | {"lora_path": adapter})
    assert response.status_code == 200, response.text
    return response.json()


def ask_all(server: Server, asked: Sequence[Asked], at_once: int, **sampling: Any) -> list[dict]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda each: ask(server, each, **sampling), asked))


@pytest.fixture(scope="module")
def asked(prompts: list[str]) -> list[Asked]:
    """Held-out problems, each of every adapter and of the target alone, those of one problem side by side."""
    return [(prompt, name) for prompt in prompts[:5] for name in (BASE, *MADE)]


@pytest.fixture(scope="module")
def expected(plain: Server, asked: list[Asked]) -> list[dict]:
    return ask_all(plain, asked, 8)


def of(name: str | None, asked: Sequence[Asked], answers: Sequence[dict]) -> list[dict]:
    return [each for (_, own), each in zip(asked, answers, strict=True) if own == name]


@each_worker
@pytest.mark.parametrize("at_once", [1, 12])
def test_equal(
    adapted: Server, plain: Server, asked: list[Asked], expected: list[dict], at_once: int
) -> None:
    """One at a time, and all adapters and none beside each other, of which three fit into a batch."""
    adapted.post("/flush_cache")
    answers = ask_all(adapted, asked, at_once)
    for (prompt, name), answer, its in zip(asked, answers, expected, strict=True):
        assert_same(answer, its, plain, prompt, adapter=name)
        assert answer["meta_info"]["spec_verify_ct"] > 0
    base = [each["output_ids"] for each in of(BASE, asked, expected)]
    for name in MADE:
        # The adapter says other things, so equality is not the target's own.
        assert [each["output_ids"] for each in of(name, asked, answers)] != base, name
    for name in (BASE, "attention", "layers", "all"):
        assert accept_length(of(name, asked, answers)) > 1.2, name


@each_worker
def test_shared_rounds(adapted: Server, plain: Server, prompts: list[str]) -> None:
    """Two adapters and none in the same rounds."""
    three = list(zip(prompts[10:13], (BASE, "layers", "all"), strict=True))
    long = {"max_new_tokens": 160, "ignore_eos": True}
    before = counted(adapted)
    answers = ask_all(adapted, three, 3, **long)
    launched = sum(
        n for (name, _), n in (counted(adapted) - before).items() if name == "planned_rounds_total"
    )
    assert launched < 0.75 * sum(each["meta_info"]["spec_verify_ct"] for each in answers)
    for each, answer, its in zip(three, answers, ask_all(plain, three, 3, **long), strict=True):
        assert_same(answer, its, plain, each[0], adapter=each[1])


@each_worker
def test_prefix_cache(adapted: Server, plain: Server, prompts: list[str]) -> None:
    """A prompt's K/V, the drafter's too, serve the adapter under which they were computed and no other."""
    prompt = "".join(prompts[20:23])
    names = (BASE, "layers", "all")
    first = [ask(adapted, (prompt, name)) for name in names]
    again = [ask(adapted, (prompt, name)) for name in names]
    expected = [ask(plain, (prompt, name)) for name in names]
    for cold, warm, its in zip(first, again, expected, strict=True):
        assert cold["meta_info"]["cached_tokens"] == 0
        assert (
            warm["meta_info"]["cached_tokens"] >= warm["meta_info"]["prompt_tokens"] // 16 * 16 - 16
        )
        assert cold["output_ids"] == warm["output_ids"] == its["output_ids"]
        if not OWN[adapted.worker][1]:
            # Draft K/V of another adapter would be drafted from as well, only worse.
            assert cold["meta_info"]["spec_verify_ct"] == warm["meta_info"]["spec_verify_ct"]


@one_worker
def test_openai(adapted: Server, plain: Server, prompts: list[str]) -> None:
    """The adapter behind the model's name."""
    body = {"model": "default:strong", "prompt": prompts[28], "temperature": 0, "max_tokens": 64}
    mine, its = (server.post("/v1/completions", body).json() for server in (adapted, plain))
    assert mine["choices"][0]["text"] == its["choices"][0]["text"]
    alone = plain.post("/v1/completions", body | {"model": "default"}).json()
    assert mine["choices"][0]["text"] != alone["choices"][0]["text"]


@each_worker
def test_draws(adapted: Server, plain: Server, prompts: list[str]) -> None:
    """What is made of logits sees the adapter of the head: log-probabilities, penalties, grammars, beside greedy."""
    wanted = [
        {"frequency_penalty": 0.5},
        {"regex": "[0-9]{1,3}( [a-z]{2,9}){3}"},
        {"logit_bias": {"5": 2.0}},
        {},
    ]

    def answers(server: Server) -> list[dict]:
        def one(index: int) -> dict:
            sampling = {"max_new_tokens": 40} | wanted[index % len(wanted)]
            body = generate_body(prompts[30 + index // 4], **sampling)
            body |= {"lora_path": (BASE, "all")[index // 4 % 2], "return_logprob": index >= 8}
            return server.post("/generate", body).json()

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(one, range(16)))

    for mine, its in zip(answers(adapted), answers(plain), strict=True):
        assert mine["output_ids"] == its["output_ids"]
        logprobs = [
            [value for value, *_ in each["meta_info"].get("output_token_logprobs", ())]
            for each in (mine, its)
        ]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)


@each_worker
def test_load_and_unload(
    adapted: Server, plain: Server, prompts: list[str], tmp_path: Path
) -> None:
    """At run time, while others decode; another adapter of the same name is another."""
    paths = [write_adapter(tmp_path / str(seed), seed, scale=0.07) for seed in (11, 12)]
    asked = [(prompt, "later") for prompt in prompts[40:43]]
    told = []
    for path in paths:
        answers = []
        for server in (adapted, plain):
            meanwhile = threading.Thread(target=ask, args=(server, (prompts[44], "layers")))
            meanwhile.start()
            loaded = server.post(
                "/load_lora_adapter", {"lora_name": "later", "lora_path": str(path)}
            )
            assert loaded.status_code == 200, loaded.text
            answers.append(ask_all(server, asked, 3))
            meanwhile.join()
            unloaded = server.post("/unload_lora_adapter", {"lora_name": "later"})
            assert unloaded.status_code == 200 and "later" not in unloaded.json()["loaded_adapters"]
        for mine, its in zip(*answers, strict=True):
            assert mine["meta_info"]["cached_tokens"] < 10  # how all prompts begin
            assert_same(mine, its)
            assert mine["meta_info"]["spec_verify_ct"] > 0
        told.append([each["output_ids"] for each in answers[0]])
    assert told[0] != told[1]


@each_worker
def test_unload_when_unused(adapted: Server, prompts: list[str], tmp_path: Path) -> None:
    """Neither a request that was refused nor the copies of one keep an adapter for ever; one that runs does."""
    path = write_adapter(tmp_path / "used", 13)
    adapted.post("/load_lora_adapter", {"lora_name": "used", "lora_path": str(path)})
    too_long = generate_body([5] * 30_000) | {"lora_path": "used"}
    assert adapted.post("/generate", too_long).status_code == 400
    body = generate_body(prompts[0], n=3, max_new_tokens=8) | {"lora_path": "used"}
    assert len(adapted.post("/generate", body).json()) == 3
    with ThreadPoolExecutor(2) as pool:
        long = {"max_new_tokens": 200, "ignore_eos": True}
        stream = pool.submit(ask, adapted, (prompts[1], "used"), **long)
        while not adapted.load()["num_reqs"]:
            assert not stream.done()
        unloaded = adapted.post("/unload_lora_adapter", {"lora_name": "used"})
        assert unloaded.status_code == 200, unloaded.text
        assert stream.result(30)["meta_info"]["completion_tokens"] == 200


@each_worker
def test_adapters_of_a_batch(adapted: Server, plain: Server, prompts: list[str]) -> None:
    """A fourth adapter waits, also while the third's prompt runs in chunks and is in no decode batch yet."""
    long = {"max_new_tokens": 250, "ignore_eos": True}
    asked = [(prompts[50], "layers"), (prompts[51], "attention")]
    asked.append(("".join(prompts[52:65]), "strong"))
    asked += [(prompts[66], "all"), (prompts[67], BASE)]
    with ThreadPoolExecutor(5) as pool:
        decoding = [pool.submit(ask, adapted, each, **long) for each in asked[:2]]
        while adapted.load()["num_reqs"] < 2:
            assert not any(each.done() for each in decoding)
        rest = [pool.submit(ask, adapted, each) for each in asked[2:]]
        answers = [each.result() for each in (*decoding, *rest)]
    expected = ask_all(plain, asked[:2], 2, **long) + ask_all(plain, asked[2:], 2)
    for each, answer, its in zip(asked, answers, expected, strict=True):
        assert_same(answer, its, plain, each[0], adapter=each[1])


@one_worker
def test_seldom_accepted(adapted: Server, prompts: list[str]) -> None:
    """The log says it once of the adapter of which it is true."""
    long = {"max_new_tokens": 128, "ignore_eos": True}
    ask_all(adapted, [(prompt, BASE) for prompt in prompts[70:90]], 12, **long)
    ask_all(adapted, [(prompt, "strong") for prompt in prompts[70:82]], 12, **long)
    said = [
        line for line in adapted.log.read_text().splitlines() if "drafts of a verify step" in line
    ]
    assert len([line for line in said if "adapter strong" in line]) == 1, said


@one_worker
def test_refused_at_run_time(
    adapted: Server, plain: Server, prompts: list[str], tmp_path: Path
) -> None:
    """One sentence each, and the server goes on."""
    good = write_adapter(tmp_path / "good", 14)
    wrong = {
        "rank 32": write_adapter(tmp_path / "rank", 15, rank=32),
        "conv1d, which": write_adapter(tmp_path / "module", 16, target_modules=["conv1d"]),
        "use_dora True": write_adapter(tmp_path / "dora", 17, use_dora=True),
        "/nowhere is not a folder": "/nowhere",
        "adapter_config.json": tmp_path,
    }
    for words, path in wrong.items():
        answer = adapted.post("/load_lora_adapter", {"lora_name": "new", "lora_path": str(path)})
        assert answer.status_code == 400
        sentence = answer.json()["error_message"]
        assert words in sentence and sentence.endswith(".") and "\n" not in sentence, sentence
    assert good.is_dir()
    session = adapted.post("/open_session", {"capacity_of_str_len": 1000}).json()
    bodies: dict[str, dict] = {
        "lora_path 'nobody' is not the name of a loaded adapter": {"lora_path": "nobody"},
        "lora_path 'all' is not supported in a session": {
            "lora_path": "all",
            "session_params": {"id": session},
        },
    }
    for words, fields in bodies.items():
        answer = adapted.post("/generate", generate_body(prompts[0]) | fields)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"].startswith(words)
    adapted.post("/close_session", {"session_id": session})
    each = (prompts[0], "all")
    assert_same(ask(adapted, each), ask(plain, each))


def test_refused_at_start(tmp_path: Path, adapters: dict[str, Path]) -> None:
    """One sentence, no traceback, and no process that is left behind, before anything is loaded."""
    halved = write_adapter(tmp_path / "halved", 18, target=_narrow_target(tmp_path))
    refused = {
        ("--lora-paths", f"a={halved}"): f"error: LoRA adapter a ({halved}) has base_model",
        ("--lora-paths", "a=/nowhere"): "error: LoRA adapter a /nowhere is not a folder",
        ("--enable-lora",): "error: --enable-lora needs --lora-paths",
        (
            *("--lora-paths", f"a={adapters['layers']}"),
            *("--max-lora-rank", "4"),
        ): f"error: LoRA adapter a ({adapters['layers']}) has rank 8",
    }
    for number, (flags, words) in enumerate(refused.items()):
        log = tmp_path / f"{number}.log"
        status, output = fails_to_start(log, *DFLASH, *flags)
        last = output.strip().splitlines()[-1]
        assert status != 0 and last.startswith(words) and last.endswith("."), tail(log)
        assert "Traceback" not in output


def _narrow_target(folder: Path) -> Path:
    """Weights of a target with half the columns."""
    import torch
    from safetensors.torch import save_file

    made = folder / "narrow"
    made.mkdir()
    names = [f"model.layers.{i}.self_attn.{name}" for i in range(4) for name in ATTENTION]
    weights = {f"{name}.weight": torch.zeros(512, 128) for name in (*names, "model.embed_tokens")}
    weights |= {f"model.layers.0.mlp.{name}.weight": torch.zeros(128, 128) for name in MLP}
    save_file(weights, made / "model.safetensors")
    return made


@pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu/test_lora.py does this")
def test_beside_graphs(
    logs: Path, flags: tuple[str, ...], plain: Server, asked: list[Asked], expected: list[dict]
) -> None:
    """Where graphs are, those of the target alone are replayed, with prompts in them and with some rows of blocks; and
    likewise those of the target with its LoRA layers, where a request has an adapter."""
    given = ("--enable-metrics", "--piecewise-cuda-graph-max-tokens", "320")
    ragged = {"SGLANG_DFLASH_RANDOM_ROWS": "1"}
    launcher, worker = ("tests.server.eager_passes",), CHOSEN_WORKERS[-1]
    log = logs / "lora-passes.log"
    with running(log, *flags, *given, worker=worker, launcher=launcher, **ragged) as server:
        alone = [(each, its) for each, its in zip(asked, expected, strict=True) if each[1] is BASE]
        asked_alone = [each for each, _ in alone] * 3
        answers = ask_all(server, asked_alone, 5)
        assert [each["output_ids"] for each in answers] == [
            its["output_ids"] for _, its in alone
        ] * 3
        seen = counted(server)
        assert seen["planned_rounds_total", "ragged"] > 0
        assert seen["prompt_rows_total", "in_rounds"] > 0
        assert not seen["fallbacks_total", "adapters"]
        answers = ask_all(server, asked, 12)
        for each, answer, its in zip(asked, answers, expected, strict=True):
            assert_same(answer, its, plain, each[0], adapter=each[1])
        after = counted(server)
        for plan in ("whole", "ragged", "narrow", "plain"):
            assert after["planned_rounds_total", plan] > seen["planned_rounds_total", plan], plan
        assert after["prompt_rows_total", "in_rounds"] > seen["prompt_rows_total", "in_rounds"]
        assert not after["fallbacks_total", "adapters"] and not after["fallbacks_total", "no_graph"]
        server.check_idle()
