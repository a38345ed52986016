"""Products of a drafter in FP8: near those of its own weights, and only where they are wanted."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.distributed import get_tp_group

from sglang_dflash.gpu import fp8
from sglang_dflash.gpu.fp8 import (
    Fp8Rows,
    Fp8Weight,
    head_bytes,
    least_elements,
    quantize_rows,
)
from sglang_dflash.gpu.kernels.add_norm import add_norm
from sglang_dflash.gpu.kernels.swiglu import swiglu, swiglu_fp8
from sglang_dflash.gpu.tilings import Tilings
from sglang_dflash.round import fused
from sglang_dflash.round.fused import LAYERS, draft_ways
from sglang_dflash.round.fused_check import difference, first_right
from sglang_dflash.serving.memory import model_bytes
from tests.unit.drafters import DraftRunner, TargetStub, random_weights, save_random, zlab_config
from tests.unit.test_fused_check import trials_of, whole_keys  # noqa: F401

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there in Triton's interpreter
pytestmark = pytest.mark.usefixtures("one_rank")


def test_rows() -> None:
    """Each by its own largest number, to the three binary digits that FP8 has."""
    x = torch.randn(5, 64) * torch.tensor([1e-6, 1e-2, 1.0, 1e3, 0.0])[:, None]
    rows = quantize_rows(x)
    values, scales = rows.values, rows.scales
    assert values.dtype == torch.float8_e4m3fn and scales.shape == (5, 1)
    assert torch.equal(values.float().abs().amax(1), torch.tensor([448.0] * 4 + [0.0]))
    off = (values.float() * scales - x).abs()
    assert (off <= x.abs() / 16 + scales / 512).all()


@pytest.mark.parametrize("bias", [False, True])
def test_product(bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(96, 64, dtype=torch.bfloat16), torch.randn(7, 64, dtype=torch.bfloat16)
    more = torch.randn(96, dtype=torch.bfloat16) if bias else None
    made = Fp8Weight(weight).product(x, more)
    assert made.dtype == torch.bfloat16
    middle, worst = difference(
        [made.float()], [torch.nn.functional.linear(x, weight, more).float()]
    )
    assert 0.01 < middle < 0.06 and worst < 0.08


def test_other_numbers_go_to_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_CHUNK", 10)
    made = Fp8Weight(torch.randn(32, 16))
    at = made.values.data_ptr(), made.scales.data_ptr()
    other = torch.randn(32, 16)
    made.fill(other)
    assert at == (made.values.data_ptr(), made.scales.data_ptr())
    assert torch.equal(made.values.float(), Fp8Weight(other).values.float())


@pytest.fixture
def draft(tmp_path: Path) -> DraftRunner:
    raw = zlab_config(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    embedding = random_weights({"embedding": (raw["vocab_size"], raw["hidden_size"])})["embedding"]
    return DraftRunner(save_random(tmp_path, raw), TargetStub(embedding))


def ways_of(draft: DraftRunner) -> list:
    draft.model.fuse(Tilings("CPU", 1, lambda *_: pytest.fail("nothing is to be timed")), None)
    return draft_ways(draft.model)


@torch.no_grad()
@pytest.mark.parametrize("near", [True, False])
def test_a_drafter(
    near: bool,
    draft: DraftRunner,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It runs in FP8 where its states stay near its own, and what is not used is freed."""
    caplog.set_level(logging.INFO)
    model, own = draft.model, model_bytes(draft.model)
    if not near:
        monkeypatch.setattr(fused, "MIDDLE_FP8", 0.0)
    model.run_in_fp8(0)
    assert model.fp8.in_use
    trials = trials_of(model, draft.token_to_kv_pool, causal=False)
    chosen = first_right("drafter", ways_of(draft), trials, get_tp_group())
    assert chosen.name == (f"{LAYERS} in FP8" if near else LAYERS)
    assert ("instead of" in caplog.text) == (not near)
    model.settle()
    weight = model.layers[0].mlp.gate_up_proj.weight
    assert (weight.dtype == torch.float8_e4m3fn) == near
    assert (model.vocabulary.fp8_head is not None) == near == model.fp8.in_use
    if near:
        assert model_bytes(model) < own
        assert {"head_values", "head_scales"} <= {name for name, _ in model.named_buffers()}
    else:
        assert model_bytes(model) == own


@torch.no_grad()
def test_drafts(draft: DraftRunner) -> None:
    """Most tokens are those of its own weights, also of a head that the target takes in later."""
    vocabulary = draft.model.vocabulary
    hidden = torch.randn(200, vocabulary.head.weight.shape[1])
    draft.model.run_in_fp8(0)
    for _ in range(2):
        draft.model.fp8.use(False)
        own = vocabulary.argmax(hidden)
        draft.model.fp8.use(True)
        made = vocabulary.argmax(hidden)
        assert 0.8 < (made == own).float().mean() < 1
        vocabulary.head.weight.copy_(torch.randn_like(vocabulary.head.weight))
        assert torch.equal(vocabulary.argmax(hidden), made)
        draft.model.take_head_again()


def test_small_weights_stay(draft: DraftRunner) -> None:
    layer = draft.model.layers[0]
    sizes = [layer.mlp.gate_up_proj.weight.numel(), layer.self_attn.o_proj.weight.numel()]
    assert max(sizes) > min(sizes)
    draft.model.run_in_fp8(max(sizes))
    assert layer.mlp.gate_up_proj.weight.dtype == torch.float8_e4m3fn
    assert layer.self_attn.o_proj.weight.dtype != torch.float8_e4m3fn
    draft.model.fp8.use(False)
    draft.model.fp8 = None
    draft.model.run_in_fp8(1 << 40)
    assert draft.model.fp8 is None


@pytest.mark.parametrize(
    ("arguments", "gpu", "least"),
    [
        ({}, (9, 0), fp8.LEAST_ELEMENTS),
        ({}, (8, 9), None),
        ({"device": "cpu"}, None, None),
        ({"enable_deterministic_inference": True}, (9, 0), None),
        ({"speculative_draft_model_quantization": "unquant"}, (9, 0), None),
        ({"speculative_draft_model_quantization": "fp8"}, (8, 9), 0),
        ({"speculative_draft_model_quantization": "fp8", "device": "cpu"}, None, 0),
        # What the release makes of a target that is quantized.
        (
            {"speculative_draft_model_quantization": "fp8", "quantization": "fp8"},
            (9, 0),
            fp8.LEAST_ELEMENTS,
        ),
    ],
)
def test_which(
    arguments: dict, gpu: tuple[int, int] | None, least: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu)
    given = dict(
        speculative_draft_model_quantization=None,
        quantization=None,
        device="cuda",
        enable_deterministic_inference=False,
        tp_size=2,
    )
    args = SimpleNamespace(**given | arguments)
    assert least_elements(args) == least
    taken = head_bytes(args, 4096, 151936)
    assert taken == (0 if least is None else 151936 // 2 * (4096 + 4))


@pytest.mark.parametrize("parts", [1, 3])
def test_norm(parts: int) -> None:
    """As that of bfloat16, quantized."""
    torch.manual_seed(0)
    x, residual = torch.randn(parts, 6, 96, device=DEVICE), torch.randn(6, 96, device=DEVICE)
    x, residual = x if parts > 1 else x[0].bfloat16(), residual.bfloat16()
    weight = torch.rand(96, device=DEVICE).bfloat16()
    expected, total = add_norm(x, residual, weight, 1e-6)
    made, same = add_norm(x, residual, weight, 1e-6, in_fp8=True)
    assert torch.equal(same, total) and made.dtype == torch.bfloat16 and len(made) == 6
    assert made.values.dtype == torch.float8_e4m3fn
    assert_near(made, expected)


def test_swiglu() -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(5, 2 * 80, device=DEVICE).bfloat16()
    gate_up[2] = 0
    made = swiglu_fp8(gate_up)
    assert made.dtype == torch.bfloat16
    assert_near(made, swiglu(gate_up))


def assert_near(made: Fp8Rows, expected: torch.Tensor) -> None:
    """Every number to the digits that FP8 has, each row by its own largest number."""
    off = (made.values.float() * made.scales - expected.float()).abs()
    near = off <= expected.float().abs() / 12 + made.scales / 256
    # The interpreter loses a carry where a number is rounded up to a power of two.
    assert near.all() if DEVICE == "cuda" else near.float().mean() > 0.9
    scales = expected.float().abs().amax(1, keepdim=True) / 448
    torch.testing.assert_close(made.scales, scales.clamp_min(1e-12), rtol=0.01, atol=0)
