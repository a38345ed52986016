"""Adapters that fit a target and adapters that do not; whose weights a round holds; the rows of a head."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.utils import LoRABatchInfo
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import nn
from transformers import AutoConfig

from sglang_dflash.checkpoint.adapter import check_adapter, check_limits, read_adapter
from sglang_dflash.cpu.lora import CpuLoRABackend, batch_info
from sglang_dflash.errors import DFlashError
from sglang_dflash.round.adapted_head import AdaptedHead
from sglang_dflash.serving.adapters import check_lora_arguments, named_paths, until_unused
from sglang_dflash.serving.lora_manager import CheckingLoRAManager
from tests.server.adapters import ATTENTION, ENDS, MLP, write_adapter
from tests.server.harness import TARGET
from tests.unit.adapter_sums import RANKS, SCALINGS, expected
from tests.unit.decoders import write_target

EVERYTHING = (*ATTENTION, *MLP, *ENDS)
Weights = dict[str, torch.Tensor]


def check(folder: Path) -> None:
    check_adapter(read_adapter("a", str(folder)), AutoConfig.from_pretrained(TARGET), "the target")


@pytest.mark.parametrize("modules", [EVERYTHING, ATTENTION, ("lm_head",), ("q_proj", "v_proj")])
def test_fits(tmp_path: Path, modules: tuple[str, ...]) -> None:
    check(write_adapter(tmp_path, 0, rank=3, modules=modules))


def _arguments(target: Path, adapter: Path, device: str) -> SimpleNamespace:
    flags = {"max_loras_per_batch": 8, "enable_lora_overlap_loading": False}
    unset = ("max_loaded_loras", "max_lora_rank", "lora_target_modules", "enable_lora")
    config = SimpleNamespace(hf_text_config=AutoConfig.from_pretrained(target))
    config.is_multimodal, config.hf_config = False, config.hf_text_config
    return SimpleNamespace(
        device=device,
        model_path=str(target),
        lora_backend="csgmv",
        lora_paths=[f"a={adapter}"],
        get_model_config=lambda: config,
        **flags | dict.fromkeys(unset),
    )


def test_experts_need_a_gpu(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    write_target(target, "Qwen3-MoE", embedding=0.4)
    of_attention = write_adapter(tmp_path / "a", 0, target, modules=ATTENTION)
    of_all = write_adapter(tmp_path / "b", 0, target, modules=(*ATTENTION, *MLP))
    check_lora_arguments(_arguments(target, of_attention, "cpu"))
    check_lora_arguments(_arguments(target, of_all, "cuda"))
    with pytest.raises(DFlashError, match="^LoRA on down_proj of experts needs a GPU"):
        check_lora_arguments(_arguments(target, of_all, "cpu"))


def _without(part: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: value for name, value in weights.items() if part not in name}


def _renamed(old: str, new: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name.replace(old, new): value for name, value in weights.items()}


WRONG: dict[str, tuple[Callable[[Weights], Weights] | dict[str, Any], str]] = {
    "narrow": (
        lambda weights: {
            name: value[:, :64].contiguous()
            if "layers.2.self_attn.o_proj.lora_A" in name
            else value
            for name, value in weights.items()
        },
        r"o_proj.lora_A.weight of 3 x 64, where the target and rank 3 take 3 x 512: give an",
    ),
    "deep": (_renamed("layers.3", "layers.4"), "layers.4.*, but the target has 4 layers: give"),
    "half": (_without("layers.1.mlp.down_proj.lora_B"), "only lora_A of layers.1 down_proj: down"),
    "v missing": (
        _without("layers.0.self_attn.v_proj"),
        "without v_proj, and SGLang's LoRA adapts",
    ),
    "gate missing": (_without("gate_proj"), "up_proj without gate_proj, and SGLang's LoRA adapts"),
    "bias": (
        lambda weights: weights | {"base_model.model.model.layers.0.bias": torch.zeros(2)},
        "layers.0.bias, which SGLang's LoRA does not apply: give",
    ),
    "rank": ({"r": 4}, "where the target and rank 4 take"),
    "no rank": ({"r": 0}, "r 0 and lora_alpha 6: give an adapter of type LORA"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha None: give"),
    "type": ({"peft_type": "IA3"}, "peft_type 'IA3'"),
    "module": ({"target_modules": ["q_proj", "conv1d"]}, "adapts conv1d, which SGLang's LoRA does"),
    "pattern": ({"target_modules": ".*_proj"}, r"adapts \.\*_proj, which SGLang's LoRA does"),
    "no modules": ({"target_modules": None}, "adapts nothing, which"),
    "dora": ({"use_dora": True}, "use_dora True, which SGLang's LoRA does not apply: train it"),
    "ranks": ({"rank_pattern": {"q_proj": 2}}, "rank_pattern {'q_proj': 2}, which"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_does_not_fit(tmp_path: Path, kind: str) -> None:
    change, words = WRONG[kind]
    write_adapter(
        tmp_path, 0, rank=3, modules=EVERYTHING, **(change if isinstance(change, dict) else {})
    )
    file = tmp_path / "adapter_model.safetensors"
    if not isinstance(change, dict):
        save_file(change(load_file(file)), file)
    with pytest.raises(DFlashError, match=words) as caught:
        check(tmp_path)
    text = str(caught.value)
    assert text.startswith(f"LoRA adapter a ({tmp_path}) ") and text.endswith(".")
    assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("adapter_config.json", None, "cannot be read .*No such file"),
        ("adapter_config.json", "{", "cannot be read .*line 1"),
        ("adapter_config.json", "[]", "cannot be read .not an object"),
        ("adapter_model.safetensors", None, "cannot be read .it has no"),
        ("adapter_model.safetensors", "short", "cannot be read .adapter_model.safetensors: "),
    ],
)
def test_cannot_be_read(tmp_path: Path, name: str, content: str | None, words: str) -> None:
    file = write_adapter(tmp_path, 0) / name
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises(DFlashError, match=words):
        check(tmp_path)


def test_limits(tmp_path: Path) -> None:
    adapter = read_adapter("a", str(write_adapter(tmp_path, 0, rank=8)))
    check_limits(adapter, 8, {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"})
    check_limits(adapter, None, None)
    with pytest.raises(DFlashError, match="has rank 8, and this server takes up to 4: start it"):
        check_limits(adapter, 4, None)
    with pytest.raises(DFlashError, match="adapts down_proj, and this server only qkv_proj: start"):
        check_limits(adapter, 8, {"qkv_proj"})


def test_named_paths() -> None:
    """In every form that --lora-paths takes."""
    given = ["a=/x", "/y", {"lora_name": "b", "lora_path": "/z", "pinned": True}]
    assert list(named_paths(given)) == [("a", "/x"), ("/y", "/y"), ("b", "/z")]
    assert list(named_paths({"a": "/x"})) == [("a", "/x")]
    assert list(named_paths(None)) == []


async def _unload(manager: Any, states: dict[str, Any]) -> int:
    """How many requests were left each time that one went."""
    import asyncio

    waiting = asyncio.create_task(until_unused(manager, "id"))
    for rid in list(states):
        await asyncio.sleep(0.12)
        assert not waiting.done()
        del states[rid]
    await asyncio.wait_for(waiting, 5)
    return len(manager.lora_registry._counters)


def test_until_unused() -> None:
    """Requests alone and in a batch; others' do not count, nor does what the release has counted."""
    import asyncio

    def state(lora_id: Any) -> Any:
        return SimpleNamespace(obj=SimpleNamespace(lora_id=lora_id))

    using = {"a": state("id"), "b": state([None, "id"])}
    others = {"c": state("other"), "d": state(None), "e": state(["other"])}

    class States(dict):
        def values(self) -> list:
            return [*using.values(), *others.values()]

    registry = SimpleNamespace(_counters={"id": 3, "other": 1})
    manager = SimpleNamespace(rid_to_state=States(), lora_registry=registry)
    assert asyncio.run(_unload(manager, using)) == 1


def test_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a round still reads is not replaced by what prompts beside it need."""
    fetched = []
    monkeypatch.setattr(LoRAManager, "fetch_new_loras", lambda self, *of: fetched.append(of))
    manager = CheckingLoRAManager.__new__(CheckingLoRAManager)
    manager.fetch_new_loras({"a"})
    manager.held = frozenset(["b", None])
    manager.fetch_new_loras({"c"})
    assert fetched == [({"a"}, set()), ({"c"}, {"b", None})]


@pytest.fixture
def backend() -> CpuLoRABackend:
    return CpuLoRABackend(max_loras_per_batch=3, device=torch.device("cpu"))


def prepare(backend: CpuLoRABackend, lengths: list[int], owners: list[int], **fields: Any) -> None:
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(lengths),
        extend_seq_lens=torch.tensor(lengths),
        extend_seq_lens_cpu=lengths,
        return_logprob=False,
    )
    batch.__dict__.update(fields)
    backend.prepare_lora_batch(batch, owners, RANKS.tolist(), SCALINGS.tolist(), False)


def test_products_on_a_cpu(backend: CpuLoRABackend) -> None:
    x, a, b = torch.randn(6, 8), torch.randn(3, 3, 8), torch.randn(3, 5, 3)
    prepare(backend, [1, 3, 2], [1, 0, 2])
    base = torch.randn(6, 5)
    got = backend.run_lora_b_sgemm(backend.run_lora_a_sgemm(x, a), b, base.clone())
    torch.testing.assert_close(got - base, expected(x, a, b, [1, 0, 0, 0, 2, 2]))


def test_embedding_on_a_cpu(backend: CpuLoRABackend) -> None:
    ids, a, b = torch.tensor([4, 0, 9, 4]), torch.randn(3, 3, 10), torch.randn(3, 5, 3)
    prepare(backend, [2, 2], [2, 1])
    a_output = backend.run_lora_a_embedding(ids, a, vocab_size=10)
    got = backend.run_lora_b_sgemm(a_output, b)
    one_hot = nn.functional.one_hot(ids, 10).float()
    torch.testing.assert_close(got, expected(one_hot, a, b, [2, 2, 1, 1]))


def test_rows_of_nobody_on_a_cpu(backend: CpuLoRABackend) -> None:
    """What fills a pass up has a place behind those of adapters."""
    nobody, ids = len(RANKS), torch.tensor([4, 0, 9])
    x, a, b = torch.randn(3, 10), torch.randn(3, 3, 10), torch.randn(3, 5, 3)
    ranks, scalings = (torch.cat([each, each.new_zeros(1)]) for each in (RANKS, SCALINGS))
    backend.batch_info = batch_info([1, 2], [2, nobody], ranks, scalings)
    by_token = backend.run_lora_b_sgemm(backend.run_lora_a_embedding(ids, a, vocab_size=10), b)
    by_row = backend.run_lora_b_sgemm(backend.run_lora_a_sgemm(x, a), b)
    assert by_token[0].any() and by_row[0].any()
    assert not by_token[1:].any() and not by_row[1:].any()


def test_head_after_prompts_on_a_cpu(backend: CpuLoRABackend) -> None:
    """The last row of each prompt; or the rows whose log-probabilities are asked for."""
    x, a, b = torch.randn(4, 8), torch.randn(3, 3, 8), torch.randn(3, 5, 3)

    def got(rows: torch.Tensor) -> torch.Tensor:
        info = backend.lm_head_batch_info
        assert info.expected_tokens == len(rows)
        a_output = backend.run_lora_a_sgemm(rows, a, pruned_batch_info=info)
        return backend.run_lora_b_sgemm(a_output, b, pruned_batch_info=info)

    prepare(backend, [5, 3], [2, 1])
    torch.testing.assert_close(got(x[:2]), expected(x[:2], a, b, [2, 1]))
    prepare(backend, [5, 3], [2, 1], return_logprob=True, extend_logprob_start_lens_cpu=[4, 0])
    torch.testing.assert_close(got(x), expected(x, a, b, [2, 1, 1, 1]))


@pytest.mark.parametrize("rows", [slice(1, 5), torch.tensor([5, 0, 3])], ids=["slice", "rows"])
def test_head_over_rows(backend: CpuLoRABackend, rows: slice | torch.Tensor) -> None:
    """Of any rows, however their requests lie; afterwards the backend is as it was."""
    x, a, b = torch.randn(6, 8), torch.randn(3, 3, 8), torch.randn(3, 5, 3)
    owners = torch.tensor([1, 1, 0, 2, 2, 1], dtype=torch.int32)
    before = backend.lm_head_batch_info = batch_info([2], [1], RANKS, SCALINGS)
    info = batch_info([2, 1, 2, 1], [1, 0, 2, 1], RANKS, SCALINGS)
    adapted = AdaptedHead(SimpleNamespace(lora_backend=backend), info, owners)
    for head, at in ((adapted, rows), (adapted.at(torch.arange(6)[rows]), slice(None))):
        with head.over(at):
            info = backend.lm_head_batch_info
            a_output = backend.run_lora_a_sgemm(x[rows], a, pruned_batch_info=info)
            got = backend.run_lora_b_sgemm(a_output, b, pruned_batch_info=info)
        assert backend.lm_head_batch_info is before
        torch.testing.assert_close(got, expected(x[rows], a, b, owners[rows].tolist()))


@pytest.mark.parametrize("order", [None, torch.arange(6)], ids=["triton", "csgmv"])
def test_segments_of_a_gpu(order: torch.Tensor | None) -> None:
    """What the kernels read: segments of one row, in order; csgmv's chunks keep their size."""
    info = LoRABatchInfo(
        use_cuda_graph=False,
        bs=2,
        num_segments=2,
        seg_indptr=torch.tensor([0, 3, 6]),
        weight_indices=torch.tensor([1, 2]),
        lora_ranks=RANKS,
        scalings=SCALINGS,
        max_len=16 if order is not None else 3,
        seg_lens=None if order is not None else torch.tensor([3, 3]),
        permutation=order,
    )
    backend = SimpleNamespace(lm_head_batch_info=None)
    owners = torch.tensor([1, 1, 1, 2, 2, 2], dtype=torch.int32)
    with AdaptedHead(SimpleNamespace(lora_backend=backend), info, owners).over(slice(2, 5)):
        made = backend.lm_head_batch_info
    assert made.weight_indices.tolist() == [1, 2, 2] and made.seg_lens.tolist() == [1, 1, 1]
    assert made.seg_indptr.tolist() == [0, 1, 2, 3]
    assert made.bs == made.num_segments == made.expected_tokens == 3
    assert made.max_len == (1 if order is None else 16)
    assert order is None or made.permutation.tolist() == [0, 1, 2]
    assert made.lora_ranks is RANKS and made.scalings is SCALINGS


def test_config_is_what_peft_writes(tmp_path: Path) -> None:
    """Fields that PEFT writes and that ask for nothing."""
    neutral = {"use_dora": False, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
    neutral |= {"modules_to_save": None, "bias": "none", "task_type": "CAUSAL_LM"}
    folder = write_adapter(tmp_path, 0, **neutral)
    assert json.loads((folder / "adapter_config.json").read_text())["bias"] == "none"
    check(folder)
