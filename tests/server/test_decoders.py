"""Targets of many architectures: the answers of plain decoding, or a sentence; and the table that says so."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.server.checks import accept_length
from tests.server.harness import (
    CHOSEN_WORKERS,
    DEVICE,
    DFLASH,
    LAUNCHER,
    ROOT,
    Server,
    fails_to_start,
    in_long,
    running,
)
from tests.server.riders import decoding, ran
from tests.unit.decoders import ARCHITECTURES, SIZES, write_drafter, write_target
from tests.unit.kimi import ARGUMENTS, KIMI, PICTURE, write_kimi
from tests.unit.wrappers import VOCABULARY, WRAPPERS, clip, data_url, picture, write_wrapper

TABLE, HEAD = ROOT / "docs" / "targets.md", "| target | "
TOKENS = {"max_new_tokens": 40, "ignore_eos": True}
LONG = {"max_new_tokens": 250, "ignore_eos": True}  # while others arrive
PROMPTS = [[(7 * n + 31 * i) % 300 + 5 for i in range(n)] for n in (1, 2, 3, 5, 8, 13, 21, 34)]
# And the passes over prompts and blocks that a GPU captures.
PASSES = (
    *("tests.server.eager_passes", "--piecewise-cuda-graph-max-tokens", "128"),
    *("--speculative-dflash-verify", "all", "--enable-metrics"),
)
WAYS = [(worker, *LAUNCHER) for worker in CHOSEN_WORKERS] + [(CHOSEN_WORKERS[-1], *PASSES)] * (
    DEVICE == "cpu"
)
FIRST = ("Gemma 3 (text)", "Granite")
CAPTURED = (*FIRST, "DeepSeek-V3", "Qwen3-Next")
OTHERS = in_long(*(name for name in ARCHITECTURES if name not in FIRST))
# Config and model class of transformers.
REFUSED = {
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel"),
    "Phi": ("PhiConfig", "PhiForCausalLM"),
    "Helium": ("HeliumConfig", "HeliumForCausalLM"),
    "Llama 3.2 (with pictures)": ("MllamaConfig", "MllamaForConditionalGeneration"),
}
WRAPPED = REFUSED.keys() - {"GPT-2", "Phi", "Helium"}
# How small videos may be.
FEW_PIXELS = ("--mm-process-config", '{"video": {"min_pixels": 784, "max_pixels": 50000}}')
# What asks for pictures, with the drafter's eyes on the last tokens, in chunks that end inside pictures.
PICTURED = ("--speculative-dflash-draft-window-size", "8", "--chunked-prefill-size", "16")
FIRST_PICTURED = "Qwen2.5-VL"
# Of targets with linear attention: states as precise as all else, and what v2's prefix cache has of them.
LINEAR = ("Qwen3-Next", "Qwen3.5", "Qwen3.5-MoE")
STATES = ("--max-mamba-cache-size", "64")
BUFFERED = ("--mamba-scheduler-strategy", "extra_buffer", "--mamba-track-interval", "16")
UNCHECKED = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "0"}  # see test_hybrid.py
ENVIRONMENT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"} | UNCHECKED
TWO_POOLS = "Llama 4 (with pictures)"

OUTCOMES: dict[str, dict[str, str]] = {}


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("drafter"))


def own_flags(name: str, worker: str | None = None) -> tuple[tuple[str, ...], dict[str, str]]:
    """Arguments and environment of a server, if its target has linear attention or two pools."""
    if name not in LINEAR:
        return (), UNCHECKED if name == TWO_POOLS else {}
    return STATES + BUFFERED * (worker == "v2"), ENVIRONMENT


@pytest.mark.parametrize("name", [*FIRST, *OTHERS])
def test_equal(name: str, drafter: Path, tmp_path: Path, logs: Path) -> None:
    """Alone and all at once, with a drafter that is often right, whatever way a server runs."""
    write_target(tmp_path, name, embedding=0.5 if name in LINEAR else 0.4)
    arguments = ("--model-path", str(tmp_path), "--skip-tokenizer-init")
    log = name.replace(" ", "-")
    more, variables = own_flags(name)
    with running(logs / f"{log}-plain.log", *arguments, *more, **variables) as plain:
        expected = [plain.generate(ids, **TOKENS)["output_ids"] for ids in PROMPTS]
    assert sum(len(set(ids)) > 1 for ids in expected) >= 3
    arguments += ("--speculative-draft-model-path", str(drafter))
    for worker, launcher, *more in WAYS if name in CAPTURED else WAYS[: len(CHOSEN_WORKERS)]:
        file = logs / f"{log}-{worker}-{launcher}.log"
        states, variables = own_flags(name, worker)
        given = (*arguments, *more, *states)
        with running(file, *given, worker=worker, launcher=(launcher,), **variables) as server:
            for concurrency in (1, len(PROMPTS)):
                answers = server.generate_all(PROMPTS, concurrency, **TOKENS)
                assert [answer["output_ids"] for answer in answers] == expected
                assert accept_length(answers) > 1.2
            if launcher not in LAUNCHER:
                check_prompts_in_rounds(server, expected)
            server.check_idle()
        OUTCOMES.setdefault(name, {})[worker] = "equal"


def check_prompts_in_rounds(server: Server, expected: list[list[int]]) -> None:
    """Prompts that arrive while another request decodes run beside its rounds, and are answered as alone."""

    def ask_all() -> None:
        with ThreadPoolExecutor(1) as pool, decoding(server, pool, PROMPTS[-1:], **LONG) as riders:
            answers = server.generate_all(PROMPTS, len(PROMPTS), **TOKENS)
        assert [answer["output_ids"] for answer in answers] == expected
        assert riders[0]["output_ids"][: len(expected[-1])] == expected[-1]

    until_prompts_ride(server, ask_all)


def until_prompts_ride(server: Server, ask_all: Callable[[], None]) -> None:
    """They may all arrive at once, or when the request that decodes has ended."""
    for _ in range(8):
        ask_all()
        if ran(server)["in_rounds"]:
            return
    pytest.fail("no prompt ran beside a round")


def requests_with_pictures(mark: str) -> list[tuple[str, dict]]:
    """Path and body: texts, one picture or two, the same ones behind other texts and others behind the same.

    Args:
        mark: what stands for a picture in a prompt.
    """
    generate = {"sampling_params": TOKENS | {"temperature": 0}}
    asked = []
    for i in range(8):
        seen = [picture(i // 2, 28 * (2 + i // 2), 84), picture(7, 56, 56)][: (1, 1, 2, 0)[i % 4]]
        text = (
            "Ben has " * (i % 2) + f"{mark} many marbles and " * len(seen) + "how many" * (i // 4)
        )
        pictures = {"image_data": [data_url(image) for image in seen]} if seen else {}
        asked.append(("/generate", generate | pictures | {"text": text or "Carla"}))
    for i in range(2):
        url = {"type": "image_url", "image_url": {"url": data_url(picture(i, 84, 56))}}
        content = [{"type": "text", "text": "What is this?"}, url]
        chat = {"messages": [{"role": "user", "content": content}], "max_tokens": 40}
        body = chat | {"model": "default", "temperature": 0, "ignore_eos": True}
        asked.append(("/v1/chat/completions", body))
    return asked


def requests_with_videos(mark: str, video: str) -> list[tuple[str, dict]]:
    """The same of one video or two, and, unless a video has the tokens of pictures, with pictures before and behind.

    Args:
        video: what stands for one in a prompt.
    """
    generate = {"sampling_params": TOKENS | {"temperature": 0}}
    clips = [data_url(clip(i, 8 - 2 * i, 84, 56)) for i in range(2)]
    given: list[tuple[str, list[str], list[str]]] = [
        (f"Ben has{video} many", clips[:1], []),
        (f"Ben has{video} many", clips[1:], []),
        (f"Carla{video} has {video} many", clips, []),
    ]
    if "|video|" not in video:
        shown = [data_url(picture(9, 56, 84))]
        given += [
            (f"{mark} has {video}", clips[:1], shown),
            (f"{video} has {mark}", clips[1:], shown),
        ]
    asked = []
    for text, videos, pictures in given:
        asked.append(("/generate", generate | {"text": text, "video_data": videos}))
        asked[-1][1].update({"image_data": pictures} if pictures else {})
    url = {"type": "video_url", "video_url": {"url": clips[0]}}
    chat = {"messages": [{"role": "user", "content": [url]}], "max_tokens": 40}
    body = chat | {"model": "default", "temperature": 0, "ignore_eos": True}
    return [*asked, ("/v1/chat/completions", body)]


def ask(server: Server, path: str, body: dict) -> tuple[Any, dict]:
    """What was answered, and what is told of it."""
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    answer = response.json()
    if path == "/generate":
        return answer["output_ids"], answer["meta_info"]
    return answer["choices"][0]["message"]["content"], {}


def check_refused_media(server: Server, body: dict, video: str) -> None:
    """Each with a sentence, and as often as they are asked: nothing of them is kept."""
    alone = {"image_data": None, "text": f"Ben has{video}"}
    of_videos = [
        (alone | {"video_data": ["a.mp4"]}, "video_data ['a.mp4'] cannot be read ("),
        (alone | {"video_data": ["data:,AAAA"]}, "video_data ['data:,AAAA'] cannot be read ("),
        (alone | {"video_data": ["a.mp4"] * 2}, "video_data has 2 entries, and the prompt"),
        (alone | {"video_data": [["0.png"]]}, "video_data ['0.png'] is not a video"),
    ]
    if "|video|" not in video:  # one frame is too few
        still = {"video_data": [data_url(clip(0, 1, 84, 56))]}
        of_videos.append((alone | still, "video_data ['data:video/gif;base64,"))
    else:
        of_videos.append(({"video_data": ["a.mp4"]}, "video_data ['a.mp4'] is not supported"))
    if not video:
        of_videos = [({"video_data": ["a.mp4"]}, "video_data ['a.mp4'] is not supported")]
    for changes, named in (
        ({"image_data": "no picture"}, "image_data ['no picture'] cannot be read ("),
        ({"text": 2 * body["text"]}, "image_data ["),  # one picture for two places
        ({"image_data": 2 * body["image_data"]}, "image_data has 2 entries, and the prompt"),
        ({"sampling_params": body["sampling_params"] | {"n": 2}}, "n 2 is not supported"),
        *of_videos,
    ):
        for _ in range(2):
            response = server.post("/generate", body | {"rid": "again"} | changes)
            assert response.status_code == 400, response.text
            assert response.json()["error"]["message"].startswith(named), response.text


@pytest.mark.parametrize(
    "name", [FIRST_PICTURED, *in_long(*(name for name in WRAPPERS if name != FIRST_PICTURED))]
)
def test_pictures(name: str, tmp_path: Path, logs: Path) -> None:
    write_wrapper(tmp_path / "target", name, embedding=0.5)
    wrapper = WRAPPERS[name]
    arguments = (*wrapper.arguments, *FEW_PIXELS)
    check_media(name, tmp_path, logs, wrapper.picture, wrapper.video, arguments)


@pytest.mark.long
def test_pictures_of_kimi(tmp_path: Path, logs: Path) -> None:
    write_kimi(tmp_path / "target", embedding=0.25)
    check_media(KIMI, tmp_path, logs, PICTURE, "", ARGUMENTS)


def check_media(
    name: str, folder: Path, logs: Path, mark: str, video: str, arguments: tuple[str, ...]
) -> None:
    """Texts, pictures and videos, alone and all at once, twice, so that the prefix cache has whole ones.

    Args:
        folder: with the target in a folder of that name.
        mark, video: what stands for a picture and a video in a prompt; without the latter, it takes none.
        arguments: of a server that is to take pictures.
    """
    drafter = folder / "drafter"
    drafter.mkdir()
    write_drafter(drafter, vocab_size=VOCABULARY)
    arguments = ("--model-path", str(folder / "target"), *arguments)
    asked, log = requests_with_pictures(mark), name.replace(" ", "-")
    asked += requests_with_videos(mark, video) if video else []
    more, variables = own_flags(name)
    with running(logs / f"{log}-plain.log", *arguments, *more, **variables) as plain:
        expected = [ask(plain, *request)[0] for request in asked]
    assert len(set(map(str, expected))) == len(asked), "what changes nothing tells nothing"
    given = (*arguments, "--speculative-draft-model-path", str(drafter), *PICTURED)
    for worker, launcher, *more in WAYS:
        file, (states, variables) = (
            logs / f"{log}-{worker}-{launcher}.log",
            own_flags(name, worker),
        )
        more = (*more, *states)
        with running(
            file, *given, *more, worker=worker, launcher=(launcher,), **variables
        ) as server:
            for concurrency in (1, 3, len(asked)):
                with ThreadPoolExecutor(concurrency) as pool:
                    answers = list(pool.map(lambda request: ask(server, *request), asked))
                assert [answer for answer, _ in answers] == expected
                told = [meta for _, meta in answers if meta]
                assert sum(meta["spec_accept_length"] > 1 for meta in told) >= 2
            # Of states, the prefix cache has those where prompts end, or buffered ones after 64 tokens.
            cached = [meta["cached_tokens"] for meta in told]
            assert (max if name in LINEAR else min)(cached) > 0 or BUFFERED[0] in states
            if launcher not in LAUNCHER:
                check_media_in_rounds(server, asked, expected)
            check_refused_media(server, asked[0][1], video)
            server.check_idle()
        OUTCOMES.setdefault(name, {})[worker] = "equal"


def check_media_in_rounds(
    server: Server, asked: list[tuple[str, dict]], expected: list[Any]
) -> None:
    """Prompts with pictures that arrive while another request decodes."""

    def ask_all() -> None:
        with ThreadPoolExecutor(len(asked) + 1) as pool, decoding(server, pool, ["Carla"], **LONG):
            answers = list(pool.map(lambda request: ask(server, *request)[0], asked))
        assert answers == expected

    until_prompts_ride(server, ask_all)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, drafter: Path, tmp_path: Path) -> None:
    """In the last line, before any weight is looked for: there are none."""
    target, log = tmp_path / "target", tmp_path / "log"
    config_class, model_class = REFUSED[name]
    sizes = {"text_config": SIZES} if name in WRAPPED else SIZES
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


def table(outcomes: dict[str, dict[str, str]], on_gpus: dict[str, str]) -> Iterator[str]:
    yield HEAD + " | ".join(f"{worker}, CPU" for worker in CHOSEN_WORKERS) + " | GPU |"
    yield "|---|" + "---|" * len(CHOSEN_WORKERS) + "---|"
    for name, by_worker in outcomes.items():
        cells = " | ".join(by_worker[worker] for worker in CHOSEN_WORKERS)
        yield f"| {name} | {cells} | {on_gpus.get(name, 'not tried')} |"


def test_table() -> None:
    """The table that ends the docs says what was just seen; DFLASH_WRITE_DOCS=1 writes it.

    What GPUs gave (tests/gpu/test_decoders.py) it keeps.
    """
    if not OUTCOMES or len(CHOSEN_WORKERS) < 2:
        pytest.skip("no target was run by both workers")
    foreword, _, told = TABLE.read_text().partition(HEAD)
    rows = [line[2:-2].split(" | ") for line in told.splitlines() if line[:2] == "| "]
    known = {name: dict(zip(CHOSEN_WORKERS, cells, strict=False)) for name, *cells in rows}
    unknown = dict.fromkeys(CHOSEN_WORKERS, "not tried")
    names = (*ARCHITECTURES, *WRAPPERS, KIMI, *REFUSED)
    seen = {name: OUTCOMES.get(name) or known.get(name, unknown) for name in names}
    on_gpus = {name: cells[-1] for name, *cells in rows}
    text = foreword + "\n".join(table(seen, on_gpus)) + "\n"
    if os.environ.get("DFLASH_WRITE_DOCS"):
        TABLE.write_text(text)
    assert TABLE.read_text() == text, "run this file with DFLASH_WRITE_DOCS=1"
