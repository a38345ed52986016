"""Server arguments: what DFLASH fills in and what it refuses, through the release's ServerArgs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.model_loader import loader
from sglang.srt.server_args import ServerArgs
from transformers import Qwen3NextConfig

from sglang_dflash.errors import DFlashError
from sglang_dflash.serving.arguments import _check_attention, _check_quantization
from tests.unit.decoders import DELTA_NETS, SIZES, write_drafter
from tests.unit.drafters import save, speculators_config

PAIR = Path(__file__).parents[2] / "checkpoints" / "tiny"


ADAPTABLE = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj"]}


def arguments(**changes: Any) -> ServerArgs:
    given: dict[str, Any] = {
        "model_path": str(PAIR / "target"),
        "device": "cpu",
        "attention_backend": "torch_native",
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(PAIR / "drafter"),
    }
    return ServerArgs(**(given | changes))


def refusal(**changes: Any) -> str:
    with pytest.raises(DFlashError) as caught:
        arguments(**changes)
    text = str(caught.value)
    assert text.endswith(".") and "\n" not in text and re.search(r": \w", text), text
    return text


def test_adapters() -> None:
    """The default backend, which needs a GPU, gives way on a CPU; without LoRA nothing is looked at."""
    assert arguments(**ADAPTABLE).lora_backend == "torch_native"
    off = arguments(enable_lora=False, lora_paths=["a=/nowhere"])
    assert off.lora_backend == arguments().lora_backend == "csgmv"


def test_defaults() -> None:
    args = arguments()
    assert args.speculative_num_draft_tokens == 16
    assert args.speculative_num_steps == 15
    assert args.speculative_eagle_topk == 1
    assert args.disable_overlap_schedule
    assert arguments(speculative_dflash_attention="backend").speculative_dflash_attention


@pytest.mark.parametrize(
    "changes",
    [
        {"speculative_dflash_block_size": 8},
        {"speculative_num_draft_tokens": 8},
        {"speculative_num_draft_tokens": 8, "speculative_dflash_block_size": 8},
        {"speculative_dflash_block_size": 8, "speculative_num_steps": 7},
    ],
)
def test_smaller_block(changes: dict[str, int]) -> None:
    args = arguments(**changes)
    assert (args.speculative_num_draft_tokens, args.speculative_num_steps) == (8, 7)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"speculative_dflash_block_size": 17},
            "--speculative-dflash-block-size 17 is not between 2 and 16",
        ),
        (
            {"speculative_num_draft_tokens": 1},
            "--speculative-num-draft-tokens 1 is not between 2 and 16",
        ),
        ({"speculative_dflash_block_size": 0}, "--speculative-dflash-block-size 0 is not between"),
        (
            {"speculative_dflash_block_size": -3},
            "--speculative-dflash-block-size -3 is not between",
        ),
        (
            {"speculative_dflash_block_size": 8, "speculative_num_draft_tokens": 4},
            "--speculative-dflash-block-size 8 and --speculative-num-draft-tokens 4",
        ),
        ({"speculative_num_steps": 3}, "--speculative-num-steps 3 does not apply"),
        ({"speculative_eagle_topk": 4}, "--speculative-eagle-topk 4 is not supported"),
    ],
)
def test_block_size(changes: dict[str, int], named: str) -> None:
    assert named in refusal(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speculative_draft_model_path": None}, "needs --speculative-draft-model-path"),
        ({"speculative_draft_model_path": "/nowhere"}, "--speculative-draft-model-path /nowhere"),
        ({"speculative_draft_model_path": str(PAIR / "target")}, "is not a DFlash checkpoint"),
        ({"speculative_draft_model_path": str(PAIR)}, "has no config.json"),
    ],
)
def test_draft_path(changes: dict[str, Any], named: str) -> None:
    assert named in refusal(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pp_size": 2}, "--pp-size 2"),
        ({"enable_dp_attention": True, "dp_size": 2, "tp_size": 2}, "--enable-dp-attention"),
        ({"enable_lora": True}, "--enable-lora needs --lora-paths, or --max-lora-rank"),
        ({"lora_paths": ["a=/b"]}, "LoRA adapter a /b is not a folder"),
        (
            ADAPTABLE | {"enable_lora_overlap_loading": True},
            "--enable-lora-overlap-loading is not supported with DFLASH",
        ),
        (ADAPTABLE | {"lora_backend": "triton"}, "--lora-backend triton needs a GPU"),
        (ADAPTABLE | {"max_loaded_loras": 2}, "--max-loaded-loras 2 is less than --max-loras-per"),
        (ADAPTABLE | {"max_loras_per_batch": 0}, "--max-loras-per-batch 0 is below 1"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill"),
        ({"hicache_storage_backend": "file"}, "--hicache-storage-backend file is not supported"),
        ({"enable_mixed_chunk": True}, "--enable-mixed-chunk"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"moe_a2a_backend": "deepep"}, "--moe-a2a-backend deepep is not supported with DFLASH"),
        ({"enable_double_sparsity": True}, "--enable-double-sparsity"),
        ({"speculative_token_map": "x"}, "--speculative-token-map x"),
        ({"speculative_accept_threshold_single": 0.5}, "--speculative-accept-threshold-single 0.5"),
        (
            {"speculative_draft_model_quantization": "awq"},
            "--speculative-draft-model-quantization awq is not supported with DFLASH: choose fp8",
        ),
        ({"tp_size": 3}, "--tp-size 3 does not divide"),
        (
            {"attention_backend": "wave"},
            "--attention-backend wave cannot run the drafter",
        ),
        (
            {"speculative_draft_attention_backend": "trtllm_mha"},
            "--speculative-draft-attention-backend trtllm_mha cannot run the drafter",
        ),
        ({"is_embedding": True}, "--is-embedding"),
        (
            {"speculative_dflash_attention": "triton"},
            "--speculative-dflash-attention triton needs a GPU",
        ),
        ({"speculative_dflash_attention": "fa3"}, "--speculative-dflash-attention fa3 needs a GPU"),
        ({"speculative_dflash_attention": "fa2"}, "--speculative-dflash-attention fa2 does not"),
        ({"speculative_dflash_verify": "some"}, "--speculative-dflash-verify some does not exist"),
    ],
)
def test_unsupported(changes: dict[str, Any], named: str) -> None:
    assert named in refusal(**changes)


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Arguments of a target with linear attention, whose weights nobody asks for yet."""
    target, drafter = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    config = Qwen3NextConfig(**SIZES | DELTA_NETS, architectures=["Qwen3NextForCausalLM"])
    config.save_pretrained(target)
    pair = {"model_path": str(target), "speculative_draft_model_path": str(write_drafter(drafter))}
    return pair | {"max_mamba_cache_size": 8}


BUFFERED, UNBUFFERED = ({"mamba_scheduler_strategy": f"{n}_buffer"} for n in ("extra", "no"))


def overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_SPEC_V2", "1")
    monkeypatch.setenv("SGLANG_ENABLE_DFLASH_SPEC_V2", "1")


def test_linear_attention(linear: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the release would refuse with DFLASH as with any speculation, or run wrongly."""
    for changes in ({}, {"disable_radix_cache": True}, BUFFERED):
        assert arguments(**linear | changes).disable_overlap_schedule
    overlap(monkeypatch)
    for changes in ({"disable_radix_cache": True}, BUFFERED | {"mamba_track_interval": 16}):
        assert not arguments(**linear | changes).disable_overlap_schedule


@pytest.mark.parametrize(
    ("overlaps", "changes", "strategy"),
    [
        (False, {}, "no_buffer"),
        (True, {}, "extra_buffer"),
        (False, {"page_size": 16}, "extra_buffer"),
        (True, {"disable_radix_cache": True}, "no_buffer"),
        (False, BUFFERED, "extra_buffer"),
    ],
)
def test_strategy(
    linear: dict,
    monkeypatch: pytest.MonkeyPatch,
    overlaps: bool,
    changes: dict[str, Any],
    strategy: str,
) -> None:
    """What keeps states for the prefix cache, unless the user says."""
    if overlaps:
        overlap(monkeypatch)
    assert arguments(**linear | changes).mamba_scheduler_strategy == strategy


@pytest.mark.parametrize(
    ("overlaps", "changes", "named"),
    [
        (True, UNBUFFERED, "--mamba-scheduler-strategy no_buffer has no states"),
        (
            False,
            UNBUFFERED | {"page_size": 16},
            "--page-size 16 is not supported with --mamba-scheduler",
        ),
        (
            False,
            BUFFERED | {"disable_radix_cache": True},
            "--mamba-scheduler-strategy extra_buffer keeps states for a prefix cache",
        ),
        (False, BUFFERED | {"mamba_track_interval": 7}, "--mamba-track-interval 7 does not go"),
        (True, BUFFERED | {"mamba_track_interval": 15}, "--mamba-track-interval 15 does not go"),
        (
            True,
            BUFFERED | {"mamba_track_interval": 40, "page_size": 16},
            "--mamba-track-interval 40 does not go with blocks of 8 tokens and pages of 16",
        ),
        (
            True,
            BUFFERED | {"mamba_track_interval": 480, "page_size": 48},
            "--page-size 48 does not go with --mamba-scheduler-strategy extra_buffer",
        ),
        (False, {"enable_streaming_session": True}, "--enable-streaming-session is not supported"),
        (
            False,
            {"linear_attn_backend": "flashinfer"},
            "--linear-attn-backend flashinfer is not supported with DFLASH",
        ),
    ],
)
def test_linear_attention_refused(
    linear: dict,
    monkeypatch: pytest.MonkeyPatch,
    overlaps: bool,
    changes: dict[str, Any],
    named: str,
) -> None:
    if overlaps:
        overlap(monkeypatch)
    assert named in refusal(**linear | changes)


def test_help_names_the_flags() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    text = " ".join(parser.format_help().split())
    assert "DFLASH" in text
    assert "--speculative-dflash-block-size" in text
    assert "tokens in a block" in text


def speculators(folder: Path, verifier: str | None = str(PAIR / "target")) -> Path:
    """The bundled drafter in speculators format."""
    raw = json.loads((PAIR / "drafter" / "config.json").read_text())
    weights = load_file(PAIR / "drafter" / "model.safetensors")
    raw = speculators_config(raw, "")
    raw["speculators_config"]["verifier"]["name_or_path"] = verifier
    raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 7
    return save(folder, raw, model=weights)


def from_drafter(folder: Path, **changes: Any) -> ServerArgs:
    given = {"speculative_algorithm": None, "speculative_draft_model_path": None}
    return arguments(**(given | {"model_path": str(folder)} | changes))


def test_a_drafter_as_the_model(tmp_path: Path) -> None:
    """Its verifier is served, with as many drafts as it asks for."""
    args = from_drafter(speculators(tmp_path))
    assert args.model_path == args.tokenizer_path == str(PAIR / "target")
    assert args.speculative_algorithm == "DFLASH"
    assert args.speculative_draft_model_path == str(tmp_path)
    assert args.speculative_num_draft_tokens == 8


def test_flags_win_over_the_drafters_config(tmp_path: Path) -> None:
    drafter = str(PAIR / "drafter")
    args = from_drafter(
        speculators(tmp_path),
        speculative_draft_model_path=drafter,
        speculative_dflash_block_size=12,
        tokenizer_path="elsewhere",
    )
    assert args.speculative_draft_model_path == drafter
    assert (args.speculative_num_draft_tokens, args.tokenizer_path) == (12, "elsewhere")


@pytest.mark.parametrize(
    ("verifier", "named"),
    [(None, "names no verifier"), ("/nowhere/target", "whose verifier /nowhere/target is not")],
)
def test_no_verifier(tmp_path: Path, verifier: str | None, named: str) -> None:
    with pytest.raises(DFlashError, match=named) as caught:
        from_drafter(speculators(tmp_path, verifier))
    assert "give --model-path TARGET --speculative-draft-model-path" in str(caught.value)


def test_another_kind_of_drafter_as_the_model(tmp_path: Path) -> None:
    raw = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
    with pytest.raises(DFlashError, match="of type eagle3"):
        from_drafter(save(tmp_path, raw))


@pytest.mark.parametrize("asked", [None, "unquant", "fp8"])
def test_a_drafter_as_it_is_stored_can_be_asked_for(asked: str | None) -> None:
    """Elsewhere the release takes that for nothing asked."""
    args = arguments(speculative_draft_model_quantization=asked)
    assert args.speculative_draft_model_quantization == asked


@pytest.mark.parametrize(
    ("runs", "do"), [("float16", "add --dtype float16."), (None, "another checkpoint, or another")]
)
def test_a_quantized_target_in_another_dtype(
    runs: str | None, do: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release has GPTQ's other layouts in float16 alone."""

    def load(target: Any, _: Any) -> None:
        if str(target.dtype) != f"torch.{runs}":
            raise ValueError("torch.bfloat16 is not supported for quantization method gptq.")

    monkeypatch.setattr(loader, "_get_quantization_config", load)
    target = SimpleNamespace(quantization="gptq", dtype=torch.bfloat16)
    args = SimpleNamespace(model_path="own", get_model_config=lambda: target)
    with pytest.raises(
        DFlashError, match="own is quantized as gptq, which SGLang does not run"
    ) as said:
        _check_quantization(args)
    assert do in str(said.value) and target.dtype == torch.bfloat16


def test_fa3_knows_no_chunks() -> None:
    config = SimpleNamespace(attention_chunk_size=8192)
    args = SimpleNamespace(speculative_dflash_attention="fa3", device="cuda", model_path="llama-4")
    args.get_model_config = lambda: config
    with pytest.raises(DFlashError, match="attention fa3 does not know chunks of the context"):
        _check_attention(args)
