"""Which attention blocks get: by GPU, dtypes, what decodes, and the flag."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_dflash.gpu import choose_attention
from sglang_dflash.gpu.choose_attention import (
    SIDE_BY_SIDE,
    block_attention_of,
    choose,
    narrowed,
    prompts_in_graphs,
    why_not_fa3,
)
from sglang_dflash.gpu.fa3_attention import Fa3BlockAttention
from sglang_dflash.gpu.fa3_latents import Fa3LatentAttention
from sglang_dflash.gpu.kernels.launch import Device
from sglang_dflash.gpu.narrow_attention import NarrowBlockAttention
from sglang_dflash.gpu.triton_attention import TritonBlockAttention
from tests.unit.test_arguments import arguments

AMPERE, ADA, HOPPER, BLACKWELL = (8, 0), (8, 9), (9, 0), (10, 0)
BF16, FP32 = torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("backend", ["fa3", "flashinfer", "triton", "trtllm_mha"])
@pytest.mark.parametrize("capability", [AMPERE, ADA, HOPPER, BLACKWELL])
def test_by_gpu(capability: tuple[int, int], backend: str) -> None:
    """Not by the backend's name."""
    expected = Fa3BlockAttention if capability == HOPPER else TritonBlockAttention
    assert choose("auto", capability, BF16, BF16, backend) is expected


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "backend", "expected"),
    [
        (BF16, E4M3, "fa3", Fa3BlockAttention),
        (BF16, E4M3, "flashinfer", TritonBlockAttention),
        (BF16, E4M3, "triton", TritonBlockAttention),
        (BF16, E5M2, "triton", TritonBlockAttention),
        (BF16, E5M2, "fa3", TritonBlockAttention),
        (FP32, FP32, "flashinfer", TritonBlockAttention),
        (torch.float16, BF16, "fa3", TritonBlockAttention),
    ],
)
def test_by_dtype(dtype: torch.dtype, kv_dtype: torch.dtype, backend: str, expected: type) -> None:
    assert choose("auto", HOPPER, dtype, kv_dtype, backend) is expected


def test_as_asked() -> None:
    assert choose("triton", HOPPER, BF16, BF16, "fa3") is TritonBlockAttention
    assert choose("fa3", HOPPER, BF16, E4M3, "flashinfer") is Fa3BlockAttention


@pytest.mark.parametrize("chunk", [None, 8192])
def test_chunks(chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """FA3 knows none."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: HOPPER)
    pool = MHATokenToKVPool(4, 1, BF16, 2, 64, 1, "cpu", enable_memory_saver=False)
    runner = SimpleNamespace(
        server_args=arguments(),
        model_config=SimpleNamespace(dtype=BF16),
        use_mla_backend=False,
        token_to_kv_pool=pool,
        kv_cache_dtype=BF16,
        attention_chunk_size=chunk,
    )
    assert block_attention_of(runner) is (TritonBlockAttention if chunk else Fa3BlockAttention)


@pytest.mark.parametrize("asked", ["fa3", "triton"])
def test_side_by_side(asked: str) -> None:
    """Prompts ride with whatever computes attention of blocks, and are computed by the same."""
    chosen = choose(asked, HOPPER, BF16, BF16, "fa3")
    assert issubclass(SIDE_BY_SIDE[chosen], chosen)
    lengths, table = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 8, dtype=torch.int32)
    ends, runner = torch.zeros(4, dtype=torch.int32), shape()
    attention = SIDE_BY_SIDE[chosen](runner, lengths, table, ends, 16)
    assert attention.ends is ends  # as LoRA layers read it, too


def shape(heads: int = 32, kv_heads: int = 8, **changes: object) -> SimpleNamespace:
    """A runner of a model of such a shape."""
    config = dict(num_attention_heads=heads, head_dim=128, v_head_dim=128, dtype=BF16)
    config |= dict(get_num_kv_heads=lambda tp_size: kv_heads // tp_size)
    made = dict(
        model_config=SimpleNamespace(**config),
        token_to_kv_pool=None,
        kv_cache_dtype=BF16,
        tp_size=1,
        server_args=SimpleNamespace(speculative_dflash_attention="auto"),
    )
    return SimpleNamespace(**made | changes)


def test_tile_of_rows_side_by_side() -> None:
    """FA3 takes its small one where most requests have few rows; where they end it reads on the device."""
    lengths, table = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 8, dtype=torch.int32)
    ends = torch.zeros(4, dtype=torch.int32)
    for runner, rows, longest in (
        (shape(), 192, 16),
        (shape(tp_size=2), 1024, 16),
        (shape(heads=64), 192, 8),
        (shape(), 2048, 2048),
    ):
        attention = SIDE_BY_SIDE[Fa3BlockAttention](runner, lengths, table, ends, rows)
        assert (attention.longest, attention.width) == (longest, rows)


def test_narrow_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many requests, if their rows fill a tile; never where someone asked for one kernel."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(choose_attention, "device_of", lambda device: Device((9, 0), 132, 0))
    own = Fa3BlockAttention

    def chosen(width: int, requests: int, runner: SimpleNamespace | None = None) -> bool:
        found = narrowed(own, runner or shape(), width, requests)
        assert found in (own, NarrowBlockAttention)
        return found is NarrowBlockAttention

    assert [chosen(width, 32) for width in (1, 2, 4, 5, 8, 16)] == [True] * 3 + [False] * 3
    assert [chosen(4, requests) for requests in (1, 24, 25, 256)] == [False, False, True, True]
    assert [chosen(4, n, shape(tp_size=2)) for n in (32, 64)] == [False, True]
    assert [chosen(width, 32, shape(heads=64)) for width in (2, 4)] == [True, False]
    assert not chosen(4, 32, shape(kv_cache_dtype=E4M3))
    asked = SimpleNamespace(speculative_dflash_attention="fa3")
    assert not chosen(4, 32, shape(server_args=asked))
    wide = shape()
    wide.model_config.head_dim = 256
    assert not chosen(4, 32, wide)
    monkeypatch.setattr(choose_attention, "is_batch_invariant_mode_enabled", lambda: True)
    assert not chosen(4, 32)
    for other in (TritonBlockAttention, Fa3LatentAttention):
        assert narrowed(other, shape(), 1, 256) is other


def test_latents_side_by_side() -> None:
    """All that rows side by side want, over what MLA keeps."""
    made = SIDE_BY_SIDE[Fa3LatentAttention]
    assert made.forward is Fa3LatentAttention.forward
    assert made.prepare is Fa3LatentAttention.prepare
    lengths, table = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 8, dtype=torch.int32)
    ends = torch.zeros(4, dtype=torch.int32)
    attention = made(shape(), lengths, table, ends, 16)
    assert attention.ends is ends and attention.cu_seqlens_q is ends
    assert (attention.width, attention.num_splits, attention.causal) == (16, 1, True)


@pytest.mark.parametrize("backend", ["fa3", "flashinfer", "triton"])
@pytest.mark.parametrize("attention", [Fa3BlockAttention, TritonBlockAttention])
def test_prompts_in_graphs(attention: type, backend: str) -> None:
    """With deterministic inference only if prompts that no graph holds are computed alike."""
    assert prompts_in_graphs(attention, backend, deterministic=False)
    alike = (attention, backend) == (Fa3BlockAttention, "fa3")
    assert prompts_in_graphs(attention, backend, deterministic=True) == alike


@pytest.mark.parametrize(
    ("capability", "dtype", "kv_dtype", "named"),
    [
        (AMPERE, BF16, BF16, "this GPU is not a Hopper"),
        (BLACKWELL, BF16, BF16, "this GPU is not a Hopper"),
        (HOPPER, FP32, FP32, "it does not compute in float32"),
        (HOPPER, BF16, E5M2, "it does not read K/V in float8_e5m2"),
        (HOPPER, BF16, E4M3, ""),
        (HOPPER, BF16, BF16, ""),
    ],
)
def test_why_not_fa3(
    capability: tuple[int, int], dtype: torch.dtype, kv_dtype: torch.dtype, named: str
) -> None:
    assert why_not_fa3(capability, dtype, kv_dtype) == named
