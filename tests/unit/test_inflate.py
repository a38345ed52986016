"""checkpoints/inflate: the pair that it writes computes what the small one does, in float32."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from benchmark.shapes import (
    SHAPES,
    TINY,
    Shape,
    drafter_config,
    plain_shapes,
    read_config,
    target_config,
)
from checkpoints.inflate.__main__ import main
from checkpoints.inflate.pair import inflate
from checkpoints.inflate.shards import WRITERS, write_shards
from checkpoints.inflate.sizes import Places, Size, check_fit, copies, place
from sglang_dflash.checkpoint.load import check_target, load_config
from tests.unit.drafters import DraftRunner, TargetStub, save_random, zlab_config

pytestmark = pytest.mark.usefixtures("one_rank")

DRAFTER = {"num_hidden_layers": 3, "block_size": 16}
DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1280,  # five times the small one: one copy of its dimensions, at half its values
    "num_hidden_layers": 8,
    "num_attention_heads": 15,
    "num_key_value_heads": 3,
    "head_dim": 128,
    "intermediate_size": 800,
    "vocab_size": 1024,
}
LLAMA = DENSE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 384}
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Target, and by how much of the largest logit others may differ: rounding of float32, or of weights.
CASES = {
    "dense": (DENSE, 2e-5),
    "moe": (MOE, 2e-5),
    "llama": (LLAMA, 2e-5),
    "rounded": (DENSE | {"hidden_size": 512}, 4e-3),
}


def shape(target: dict[str, Any]) -> Shape:
    taps = {"mask_token_id": 9, "target_layer_ids": [1, 3, 5, 6]}
    return Shape(target, DRAFTER | {"dflash_config": taps})


def small_llama(folder: Path) -> tuple[Path, Path]:
    """A pair with random weights, heads of 32 that become heads of 128, and a drafter like Qwen3."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
        "vocab_size": 768,
    }
    torch.manual_seed(5)
    rope = {"rope_type": "default", "rope_theta": 5e4}
    own = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 320}
    config = LlamaConfig(**sizes, **own, rope_parameters=rope, initializer_range=0.2)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder / "target")
    dflash = {"mask_token_id": 3, "target_layer_ids": [3, 1]}
    own = {"num_hidden_layers": 2, "num_target_layers": 5, "dflash_config": dflash}
    raw = zlab_config(**sizes | own)
    drafter = save_random(folder / "drafter", raw)
    weights = {name: w.bfloat16() for name, w in load_file(drafter / "model.safetensors").items()}
    save_file(weights, drafter / "model.safetensors")
    return folder / "target", drafter


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SimpleNamespace]:
    """Small and large pair of a case, written once, and the target's states for `tokens`."""
    made: dict[str, SimpleNamespace] = {}

    def pair(name: str) -> SimpleNamespace:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            target, drafter = TINY / "target", TINY / "drafter"
            if name == "llama":
                target, drafter = small_llama(folder / "small")
            inflate(shape(CASES[name][0]), name, target, [drafter], folder / "large")
            large = SimpleNamespace(
                target=folder / "large" / "target", drafter=folder / "large" / "drafter"
            )
            small = SimpleNamespace(target=target, drafter=drafter)
            for each in (small, large):
                run(each)
            made[name] = SimpleNamespace(small=small, large=large)
        return made[name]

    return pair


def tokens() -> torch.Tensor:
    """[1, n] of problems with answers, as one text."""
    lines = (TINY / "data" / "test.jsonl").read_text().splitlines()[:3]
    problems = map(json.loads, lines)
    text = "".join(f"Question: {each['question']}\nAnswer: {each['answer']}\n" for each in problems)
    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    return torch.tensor([tokenizer.encode(text).ids])


@torch.no_grad()
def run(pair: SimpleNamespace) -> None:
    """Adds transformers' logits and hidden states, and what a drafter borrows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    found = model(tokens(), output_hidden_states=True)
    pair.logits, pair.states = found.logits[0], [state[0] for state in found.hidden_states]
    pair.embedding = model.get_input_embeddings().weight.detach()
    pair.head = model.get_output_embeddings().weight.detach()


@pytest.mark.parametrize("case", CASES)
def test_target(case: str, pairs: Callable) -> None:
    """Logits, and with them greedy answers, and what sampling draws."""
    pair, tolerance = pairs(case), CASES[case][1]
    expected, logits = pair.small.logits, pair.large.logits
    known = expected.shape[1]
    assert (logits[:, :known] - expected).abs().max() <= tolerance * expected.abs().max()
    best = expected.argmax(1)
    lost = expected.max(1).values - expected.gather(1, logits.argmax(1)[:, None])[:, 0]
    assert (lost <= 2 * tolerance * expected.abs().max()).all()
    if case != "rounded":
        assert torch.equal(logits.argmax(1), best)
    assert logits.shape[1] == 1024 > known
    for temperature in (1, 5):
        assert (logits / temperature).softmax(1)[:, known:].sum(1).max() < 1e-12


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_drafter(case: str, pairs: Callable) -> None:
    """Logits of whole blocks and drafts, from what each target hands to its drafter."""
    pair, tolerance = pairs(case), 5 * CASES[case][1]
    runners = []
    for each in (pair.small, pair.large):
        runner = DraftRunner(each.drafter, TargetStub(each.embedding, each.head))
        context = torch.cat([each.states[layer + 1] for layer in runner.config.taps], dim=-1)
        runner.write_context(0, context[:300])
        runners.append(runner)
    small, large = runners
    assert small.config.block_size == large.config.block_size
    assert small.config.mask_token_id == large.config.mask_token_id
    same = 0
    for start in (1, 40, 77, 150, 299):
        bonus, starts = tokens()[0, start : start + 1], torch.tensor([start])
        logits = [
            each.model.vocabulary.logits(each.draft_states(bonus, starts, each.config.block_size))
            for each in runners
        ]
        expected, found = logits
        known = expected.shape[1]
        assert (found[:, :known] - expected).abs().max() <= tolerance * expected.abs().max()
        assert found.softmax(1)[:, known:].sum(1).max() < 1e-12
        same += int((expected.argmax(1) == found.argmax(1)).sum())
    drafted = 5 * (small.config.block_size - 1)
    assert same == drafted if case != "rounded" else same > 0.95 * drafted


@pytest.mark.parametrize("case", ["dense", "moe", "llama"])
def test_states_that_are_tapped(case: str, pairs: Callable) -> None:
    """Each of the small one's is where the large drafter reads, and the others are read by nobody."""
    pair = pairs(case)
    small, large = (load_config(str(each.drafter)) for each in (pair.small, pair.large))
    assert large.target_layer_ids == (1, 3, 5, 6)
    placed = place(len(pair.small.states) - 1, small.target_layer_ids, 8, (1, 3, 5, 6), case)
    width = small.hidden_size
    for layer, at in placed.taps.items():
        expected = pair.small.states[layer + 1]
        found = pair.large.states[at + 1][:, :width]
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_what_is_cut_off_is_random(pairs: Callable) -> None:
    """Zeros draw less power, so there are none but those that cut off."""
    folder = pairs("dense").large.target
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    weights = {n: w for file in files for n, w in load_file(folder / file).items()}
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in weights.values())
    assert set(index["weight_map"]) == set(weights)
    for layer in range(8):
        for name in ("k_proj", "v_proj", "gate_proj", "up_proj", "q_proj", "o_proj", "down_proj"):
            part = "mlp" if name.startswith(("gate", "up", "down")) else "self_attn"
            zeros = (weights[f"model.layers.{layer}.{part}.{name}.weight"] == 0).float().mean()
            if name in ("o_proj", "down_proj"):  # the small pair's layers are 0, 2, 4 and 6
                assert zeros == 1 if layer % 2 or layer > 6 else 0.5 < zeros < 1
            elif name == "q_proj" and layer in (0, 2, 4, 6):
                assert zeros == pytest.approx(8 / 15 / 2, abs=1e-3)
            else:
                assert zeros < 1e-3


def test_checkpoint(pairs: Callable, tmp_path: Path) -> None:
    """What stands beside the weights, and that the seed decides over every byte."""
    folder = pairs("dense").large.target
    raw, small = read_config(folder), read_config(TINY / "target")
    for name in ("max_position_embeddings", "eos_token_id", "pad_token_id", "rope_theta"):
        assert raw[name] == small[name]
    assert raw["rms_norm_eps"] == small["rms_norm_eps"] / 4  # 1280 dimensions hold 5/4 × 256
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() == 1024
    for name in ("tokenizer_config.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (TINY / "target" / name).read_bytes()
    config = load_config(str(folder.parent / "drafter"))
    check_target(config, SimpleNamespace(**raw), raw["vocab_size"])
    for seed in (0, 1):
        inflate(shape(DENSE), "dense", TINY / "target", [], tmp_path / str(seed), seed)
    name = "model-00009-of-00010.safetensors"  # the last layer, which is random
    again, other = (tmp_path / str(seed) / "target" / name for seed in (0, 1))
    assert (folder / name).read_bytes() == again.read_bytes() != other.read_bytes()
    assert (folder / name).stat().st_mode & 0o777 == 0o644


def test_several_drafters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The layers of the target lie so that all find what they read."""
    raw = json.loads((TINY / "drafter" / "config.json").read_text())
    dflash = {"mask_token_id": 3, "target_layer_ids": [2]}
    one = save_random(
        tmp_path / "one",
        raw | {"num_hidden_layers": 1, "layer_types": None, "dflash_config": dflash},
    )
    monkeypatch.setitem(SHAPES, "small", shape(DENSE))
    drafters = ["--drafter", str(TINY / "drafter"), "--drafter", str(one)]
    assert main(["--shape", "small", "--out", str(tmp_path / "out"), *drafters]) == 0
    written = capsys.readouterr().out.splitlines()
    assert written[0] == f"{tmp_path}/out/target: 8 layers of width 1280, no weight rounded"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["drafter", "one", "target"]
    for name, used in (("drafter", [1, 3, 5]), ("one", [5])):
        fc = next(
            weights["fc.weight"]
            for file in sorted((tmp_path / "out" / name).glob("*.safetensors"))
            if "fc.weight" in (weights := load_file(file))
        )
        by_tap = [bool(part.any()) for part in fc.split(1280, dim=1)]
        assert by_tap == [tap in used for tap in (1, 3, 5, 6)]


def test_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters that are wrong here and there, beside the one that is not; norms stay, and all else is in its place."""
    monkeypatch.setitem(SHAPES, "small", shape(DENSE))
    given = ["--noise", "0", "--noise", "0.5", "--noise", "0.1"]
    assert main(["--shape", "small", "--out", str(tmp_path / "out"), *given]) == 0
    weights = {
        folder.name: {
            name: weight
            for file in folder.glob("*.safetensors")
            for name, weight in load_file(file).items()
        }
        for folder in (tmp_path / "out").glob("drafter*")
    }
    assert weights.keys() == {"drafter", "drafter-noise-0.5", "drafter-noise-0.1"}
    right, name = weights["drafter"], "layers.0.mlp.gate_proj.weight"
    assert all(each.keys() == right.keys() for each in weights.values())
    for noise in (0.1, 0.5):
        noisy = weights[f"drafter-noise-{noise}"]
        assert torch.equal(noisy["norm.weight"][:256], right["norm.weight"][:256])
        # The small one's corner; the rest is random anyway.
        small, large = noisy[name][:768, :256].float(), right[name][:768, :256].float()
        there = large != 0
        assert torch.std(small[there] / large[there] - 1) == pytest.approx(noise, rel=0.05)
        zero = right["fc.weight"] == 0
        assert not noisy["fc.weight"][zero].any()


@pytest.mark.parametrize("name", plain_shapes())
def test_shapes(name: str) -> None:
    """The bundled pair, or a Llama of its sizes, fits each shape, and no weight is rounded."""
    tiny = read_config(TINY / "target")
    small = Size.of(tiny, qk_norm=True)
    for raw in (target_config(SHAPES[name]), drafter_config(SHAPES[name])):
        large = Size.of(raw, qk_norm=True)
        check_fit("tiny", small, name, large)
        assert len(copies(small.hidden, large.hidden)) > 1 or large.hidden == 4096
    taps = SHAPES[name].drafter["dflash_config"]["target_layer_ids"]
    layers = target_config(SHAPES[name])["num_hidden_layers"]
    assert place(4, [0, 1, 2], layers, taps, name).layers[-1] < layers


@pytest.mark.parametrize(
    ("small", "large", "expected"),
    [
        (256, 4096, (1,)),
        (256, 2048, (1, 1)),
        (256, 2560, (1, 1, 0.5, 0.5)),
        (256, 5120, (1, 0.5)),
        (256, 512, (1,)),  # two copies would leave no room for the constant
        (192, 2560, (1,)),  # 40/3 has no end with base 4
    ],
)
def test_copies(small: int, large: int, expected: tuple[float, ...]) -> None:
    assert copies(small, large) == expected


def test_places() -> None:
    assert place(4, {0, 1, 2}, 36, (1, 9, 17, 25, 33), "") == Places(
        (0, 2, 10, 18), {0: 1, 1: 9, 2: 17}
    )
    # Two layers before the first that is read leave the first tap behind.
    assert place(6, {3}, 12, (1, 4, 9), "") == Places((0, 1, 2, 3, 5, 6), {3: 4})


def test_few_files_are_in_memory(tmp_path: Path) -> None:
    alive: list[weakref.ref] = []

    def shards() -> Iterator[dict[str, torch.Tensor]]:
        for number in range(12):
            assert sum(ref() is not None for ref in alive) <= WRITERS + 1
            weight = torch.zeros(8)
            alive.append(weakref.ref(weight))
            weights = {str(number): weight}
            del weight
            yield weights
            del weights

    write_shards(tmp_path, shards(), 12)
    assert len(list(tmp_path.glob("*.safetensors"))) == 12
