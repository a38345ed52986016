"""Draft checkpoints in both formats on real servers, against the packages that define the formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.server.harness import (
    DFLASH,
    DRAFTER,
    TARGET,
    Server,
    fails_to_start,
    prompts_of,
    running,
)
from tests.server.references import (
    accept_lengths,
    convert,
    hugging_face_target,
    served,
    zlab_generation,
)

PROBLEMS = prompts_of(20, most=50)
LONG_PROBLEMS = prompts_of(5, most=12)
BLOCK, MASK, TAPS = 16, 3, [1, 2, 3]  # of the bundled drafter, in speculators' terms
WINDOW = 48
Answers = list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def target() -> torch.nn.Module:
    return hugging_face_target()


@pytest.fixture(scope="module")
def questions(tokenizer, prompts: list[str]) -> list[list[int]]:
    return [tokenizer.encode(prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def reference(target: torch.nn.Module, questions: list[list[int]]) -> Answers:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return zlab_generation(target, questions[:PROBLEMS], monkeypatch)


def test_reference_implementation(
    dflash: Server, questions: list[list[int]], reference: Answers
) -> None:
    """Round for round, the accept lengths of the PyPI package `dflash`, and its answers."""
    for prompt, expected in zip(questions, reference, strict=False):
        assert served(dflash, prompt) == expected
    lengths = [length for _, answer in reference for length in answer]
    assert len(lengths) > 8 * PROBLEMS and sum(lengths) / len(lengths) > 6


def test_converted(
    logs: Path, tmp_path: Path, questions: list[list[int]], reference: Answers
) -> None:
    """In speculators format, and alone as the model, it drafts the same."""
    converted = convert(tmp_path / "drafter")
    with running(logs / "converted.log", "--model-path", str(converted)) as server:
        info = server.get("/server_info").json()
        assert (info["model_path"], info["speculative_algorithm"]) == (str(TARGET), "DFLASH")
        for prompt, expected in zip(questions, reference, strict=False):
            assert served(server, prompt) == expected
        server.check_idle()


@pytest.fixture(scope="module")
def long_questions(
    tokenizer, prompts: list[str], problems: list[dict[str, str]]
) -> list[list[int]]:
    """Questions after three solved problems: more than four windows of context."""
    texts = []
    for i in range(LONG_PROBLEMS):
        solved = range(100 + 3 * i, 103 + 3 * i)
        texts.append("".join(f"{prompts[j]}{problems[j]['answer']}<|im_end|>\n" for j in solved))
    return [tokenizer.encode(text + prompts[i]) for i, text in enumerate(texts)]


def test_window_and_reduced_vocabulary(
    logs: Path,
    tmp_path: Path,
    _servers: Callable,
    target: torch.nn.Module,
    long_questions: list[list[int]],
) -> None:
    """A sliding and a full layer, and half of the vocabulary: what the package `speculators` drafts."""
    from tests.unit import speculators_writer as writer

    whole = _servers("v1", "page1")
    plain = [served(whole, question) for question in long_questions]
    spoken = torch.tensor([token for answer, _ in plain for token in answer]).unique()
    raw = json.loads((DRAFTER / "config.json").read_text())
    names = ("architectures", "block_size", "dflash_config", "num_target_layers")
    transformer = {name: value for name, value in raw.items() if name not in names} | {
        "layer_types": ["full_attention", "sliding_attention"],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
    }
    model = writer.build(
        transformer,
        TARGET,
        layer_ids=TAPS,
        mask_token_id=MASK,
        block_size=BLOCK,
        draft_ids=torch.cat([spoken, torch.arange(400, 600)]).unique(),
        sliding_window_non_causal=True,
    )
    weights = load_file(DRAFTER / "model.safetensors")
    loaded = model.load_state_dict({k: w.float() for k, w in weights.items()}, strict=False)
    assert not loaded.unexpected_keys
    model.save_pretrained(tmp_path)

    lengths: list[int] = []
    with running(
        logs / "window.log", "--speculative-draft-model-path", str(tmp_path), worker="v2"
    ) as server:
        for question, (answer, _) in zip(long_questions, plain, strict=True):
            assert len(question) > 4 * WINDOW
            expected = package_lengths(writer, model, target, question, answer)
            assert served(server, question) == (answer, expected)
            lengths += expected
        server.check_idle()
    # It keeps what the drafter without a window accepts.
    before = [length for _, answer in plain for length in answer]
    assert sum(lengths) / len(lengths) > 0.8 * sum(before) / len(before)


@torch.no_grad()
def package_lengths(
    writer, model, target: torch.nn.Module, question: list[int], answer: list[int]
) -> list[int]:
    """Accept lengths that follow from what the package drafts at every position of an answer."""
    tokens = question + answer
    states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    taps = torch.cat([states[i][0] for i in TAPS], dim=-1)
    # The package wants room for a block after the last anchor.
    padded = torch.tensor(tokens + [0] * (BLOCK + 1))
    taps = torch.cat([taps, taps.new_zeros(BLOCK + 1, taps.shape[1])])
    anchors = list(range(len(question), len(tokens)))
    _, drafts = writer.drafts(model, padded, taps, anchors)
    return accept_lengths(tokens, len(question), drafts, BLOCK)


def drafter_with(folder: Path, config: dict, **weights: torch.Tensor) -> Path:
    """The bundled drafter with changes."""
    folder.mkdir()
    raw = json.loads((DRAFTER / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | config))
    tensors = load_file(DRAFTER / "model.safetensors")
    save_file(tensors | weights, folder / "model.safetensors")
    return folder


def test_not_finite(tmp_path: Path) -> None:
    """Weights that load and cannot work: the server does not start, and says why."""
    norm = torch.full((256,), float("nan"), dtype=torch.bfloat16)
    folder = drafter_with(tmp_path / "drafter", {}, **{"norm.weight": norm})
    path = ("--speculative-draft-model-path", str(folder))
    status, output = fails_to_start(tmp_path / "log", *DFLASH, *path)
    assert status != 0
    assert f"The drafter {folder} gives logits that are not finite in float32" in output


@pytest.fixture(scope="module")
def useless(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With a drafter whose head always gives token 0, and that brings code."""
    head = torch.zeros(768, 256, dtype=torch.bfloat16)
    code = {"auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    folder = tmp_path_factory.mktemp("useless") / "drafter"
    drafter_with(folder, code, **{"lm_head.weight": head})
    (folder / "code.py").write_text("open(__file__ + '.ran', 'w')\n")
    arguments = ("--speculative-draft-model-path", str(folder), "--trust-remote-code")
    with running(logs / "useless.log", *arguments, worker="v1") as server:
        server.folder = folder
        yield server


def test_nothing_accepted(useless: Server, plain: Server, questions: list[list[int]]) -> None:
    """The answers are right; the log says once that the drafter never is."""
    sentence = "none of the first 300 verify steps accepted a drafted token"
    answers = useless.generate_all(questions[:8], concurrency=4)
    assert sum(answer["meta_info"]["spec_verify_ct"] for answer in answers) > 400
    for question, answer in zip(questions, answers, strict=False):
        assert answer["output_ids"] == plain.reference(question)["output_ids"]
        assert answer["meta_info"]["spec_accept_token_num"] == 0
    assert useless.log.read_text().count(sentence) == 1


def test_code_of_a_drafter_does_not_run(useless: Server) -> None:
    """Not even with --trust-remote-code."""
    assert sorted(file.name for file in useless.folder.iterdir()) == [
        "code.py",
        "config.json",
        "model.safetensors",
    ]
