"""Prompt files, options, faults and reports of the losslessness tool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sglang_dflash.losslessness import __main__ as tool
from sglang_dflash.losslessness import faulty_server
from sglang_dflash.losslessness.errors import CannotCompare
from sglang_dflash.losslessness.faults import lenient, sharpened
from sglang_dflash.losslessness.greedy import Divergence, Greedy, WrongEnd
from sglang_dflash.losslessness.plot import check_plot, plot_regret, regret_figure
from sglang_dflash.losslessness.prompts import read_prompts, token_ids
from sglang_dflash.losslessness.report import FAILED, INCONCLUSIVE, PASSED, Report
from sglang_dflash.losslessness.sampling import Arm, Discovery, Plan, Sampling
from sglang_dflash.losslessness.servers import split_arguments
from sglang_dflash.round.accept import accept

TARGET = str(Path(__file__).parents[2] / "checkpoints" / "tiny" / "target")


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "prompts"
    path.write_text("\n".join(lines))
    return path


def test_prompts_of_every_form(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    path = written(
        tmp_path,
        '{"prompt": "a"}',
        '{"text": "b", "answer": "x"}',
        json.dumps({"messages": chat}),
        '{"question": "Hi", "answer": "x"}',
        '{"input_ids": [5, 6]}',
        '"a line\\nand another"',
        "",
        "plain text",
        "12",
    )
    expected = ["a", "b", chat, chat, [5, 6], "a line\nand another", "plain text", "12"]
    assert read_prompts(path) == expected
    assert read_prompts(path, 2) == expected[:2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ""}', "prompt must be a text, but is ''"),
        ('{"input_ids": [1, "2"]}', "input_ids must be a list of int"),
        ('{"messages": "Hi"}', "messages must be a list of dict"),
        ('{"question": 7}', "prompt must be a text, but is '7'"),
        ('{"query": "x"}', "has none of the fields input_ids, messages"),
        ('{"prompt": "x"', "line 1 of .* begins like a JSON object"),
        ("", "holds no prompts"),
    ],
)
def test_prompts_that_are_none(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(CannotCompare, match=message):
        read_prompts(written(tmp_path, line))


def test_no_prompt_file(tmp_path: Path) -> None:
    with pytest.raises(CannotCompare, match="cannot be read"):
        read_prompts(tmp_path / "nothing")


def test_token_ids() -> None:
    chat = [{"role": "user", "content": "Hi"}]
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = token_ids([chat, text, [5, 6]], TARGET)
    assert ids[0] == ids[1]
    assert ids[2] == [5, 6]
    assert token_ids([[5, 6]], "not/needed") == [[5, 6]]
    with pytest.raises(CannotCompare, match="tokenizer ./no/such cannot be loaded"):
        token_ids(["x"], "./no/such")


URLS = ["--speculative-url", "http://127.0.0.1:9", "--plain-url", "http://127.0.0.1:9"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the servers are not given"),
        (URLS[:2], "the servers are not given"),
        (["--model-path", "x"], "the servers are not given"),
        ([*URLS, "--model-path", "x"], "the servers are not given"),
        ([*URLS, "--", "--tp-size", "2"], "server arguments, --fault and --logs are for"),
        ([*URLS, "--fault", "accept"], "server arguments, --fault and --logs are for"),
        ([*URLS, "--mode", "sampling", "--plot", "x.png"], "--plot shows greedy regret"),
        ([*URLS, "--json", "/proc/no/x.json"], "the folder /proc/no cannot be made"),
        (URLS, "the speculative server at http://127.0.0.1:9 does not answer /model_info"),
    ],
)
def test_refusals(tmp_path: Path, capsys, arguments: list[str], message: str) -> None:
    prompts = written(tmp_path, "x")
    assert tool.main(["--prompts", str(prompts), *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--setting", "{"],
        ["--setting", '{"n": 2}'],
        ["--setting", "[]"],
        ["--q", "0"],
        ["--runs", "1"],
        ["--limit", "0"],
    ],
)
def test_values_that_cannot_be(arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        tool.main(["--prompts", "x", *arguments])
    assert arguments[0] in capsys.readouterr().err


def test_server_arguments() -> None:
    given = "--tp-size 2 --speculative-dflash-block-size 8 --dtype float32".split()
    assert split_arguments(given) == (
        ["--tp-size", "2", "--dtype", "float32"],
        ["--speculative-dflash-block-size", "8"],
    )
    with pytest.raises(CannotCompare, match="--port=1 cannot be a server argument"):
        split_arguments(["--port=1"])


def test_name_of_a_fault(capsys) -> None:
    assert faulty_server.main(["none"]) == 2
    assert "error: none is not the name of a fault" in capsys.readouterr().err


def test_lenient_forgives_the_first_wrong_draft() -> None:
    target = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    draft = torch.tensor([[1, 9, 3], [9, 2, 8], [1, 2, 3], [9, 9, 9]])
    seen = lenient(target, draft)
    assert seen.tolist() == [[1, 9, 3, 4], [9, 2, 3, 4], [1, 2, 3, 4], [9, 2, 3, 4]]
    accepted = accept(seen, draft)
    assert accepted.lengths.tolist() == [4, 3, 4, 2]
    assert accepted.bonus_tokens.tolist() == [4, 3, 4, 2]


def test_sharpened_is_a_sharper_distribution() -> None:
    probabilities = torch.tensor([[0.6, 0.4, 0.0]])
    sharper = sharpened(probabilities)
    assert sharper.sum().item() == pytest.approx(1)
    assert 0.61 < sharper[0, 0] < 0.65
    assert sharper[0, 2] == 0


def greedy(*regrets: float, ends: int = 0) -> Greedy:
    divergences = [Divergence(0, 3 + i, 7, 8, r, 0.1) for i, r in enumerate(regrets)]
    return Greedy(0.2, [30, 20], 7, 48, divergences, [WrongEnd(1, 20, "stop", "goes on")] * ends)


def sampling(null: bool = True, test: bool = True, hypotheses: int = 9) -> Sampling:
    def arm(name: str, accepted: bool) -> Arm:
        found = Discovery(0, 0, "token", 3, 1e-6, 1e-4, 7, 0.5, 0.25, again=1e-5)
        luck = Discovery(None, None, "pair", None, 1e-5, 1e-3, again=0.6)
        return Arm(name, hypotheses, 100, 1e-4, 0.05, [luck] if accepted else [found, luck])

    plan = Plan([[1]], [{"temperature": 1.0}])
    return Sampling(plan, arm("null", null), arm("test", test), [2.5], 40)


@pytest.mark.parametrize(
    ("parts", "status", "sentence"),
    [
        ({"greedy": greedy()}, PASSED, "no divergence"),
        ({"greedy": greedy(0.0, 0.2)}, PASSED, "2 divergences in 1 answers, 0 above 0.2 nat"),
        ({"greedy": greedy(0.1, 0.21)}, FAILED, "1 above 0.2 nat; largest regret 0.21 nat"),
        ({"greedy": greedy(float("nan"))}, FAILED, "1 above 0.2 nat"),
        (
            {"greedy": greedy(ends=1)},
            FAILED,
            "answer 1 after 20 tokens: speculative decoding: stop",
        ),
        ({"sampling": sampling()}, PASSED, "1 discoveries, 0 of them confirmed: accepted"),
        (
            {"sampling": sampling(test=False)},
            FAILED,
            "2 discoveries, 1 of them confirmed: REJECTED",
        ),
        ({"sampling": sampling(null=False)}, INCONCLUSIVE, "does not agree with itself"),
        ({"sampling": sampling(null=False, test=False)}, INCONCLUSIVE, "INCONCLUSIVE"),
        ({"sampling": sampling(hypotheses=0)}, INCONCLUSIVE, "nothing to test"),
        ({"greedy": greedy(1.0), "sampling": sampling(null=False)}, FAILED, "NOT lossless"),
        ({"greedy": greedy(), "sampling": sampling(test=False)}, FAILED, "NOT lossless"),
    ],
)
def test_verdicts(tmp_path: Path, parts: dict, status: int, sentence: str) -> None:
    report = Report({"options": {}}, **parts)
    assert report.status == status
    assert sentence in report.text()
    report.write_json(tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())
    assert (written["status"], written["verdict"]) == (status, report.verdict)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_folder_of_an_output(tmp_path: Path) -> None:
    """It is made before the comparison."""
    folder = tmp_path / "new" / "er"
    options = ["--prompts", str(written(tmp_path, "x")), *URLS, "--json", str(folder / "x.json")]
    assert tool.main(options) == 2  # for want of servers
    assert folder.is_dir()


def test_plot_without_a_divergence() -> None:
    above, _ = regret_figure(greedy()).axes
    (text,) = above.texts
    assert text.get_text().startswith("no divergence")
    assert not regret_figure(greedy(0.5)).axes[0].texts


@pytest.mark.parametrize("regrets", [(), (0.0, 0.01, 3.0)])
def test_plot(tmp_path: Path, regrets: tuple[float, ...]) -> None:
    path = tmp_path / "regret.png"
    check_plot(path)
    plot_regret(greedy(*regrets), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(CannotCompare, match="must end with one of"):
        check_plot(tmp_path / "regret.txt")


def test_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CannotCompare, match="needs matplotlib, which is not installed"):
        check_plot(tmp_path / "regret.png")
