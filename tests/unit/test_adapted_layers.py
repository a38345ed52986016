"""Fused layers under LoRA adapters against the release's own forward pass; kernels in Triton's interpreter."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABatchInfo
from sglang.srt.lora.layers import BaseLayerWithLoRA, get_lora_layer
from sglang.srt.utils import replace_submodule
from torch import nn

from sglang_dflash.cpu.lora import CpuLoRABackend, batch_info
from sglang_dflash.gpu import adapted_layers, wide_products
from sglang_dflash.gpu.fused_layers import FusedLayers
from sglang_dflash.gpu.kernels.adapter_rows import group_rows_reference
from sglang_dflash.gpu.kernels.adapter_sums import Owners, Wide
from sglang_dflash.gpu.kernels.swiglu import swiglu_reference
from sglang_dflash.gpu.targets import Body, fused_body
from sglang_dflash.gpu.tilings import Kind
from sglang_dflash.gpu.wide_products import widen_products
from sglang_dflash.round import fused
from sglang_dflash.round.adapter_buffers import AdapterBuffers
from sglang_dflash.round.adapters import Adapters
from tests.unit.targets import TARGETS, WIDTH, Blocks, difference, make_target
from tests.unit.test_fused_check import Target, whole_keys  # noqa: F401
from tests.unit.test_fused_layers import ROUNDING, no_tilings

MOST, PLACES = 5, 3
RANKS, SCALINGS = torch.tensor([0, 3, 5, 0], dtype=torch.int32), torch.tensor([9.0, 2.0, 0.5, 0.0])
SLICES = {"qkv_proj": 3, "gate_up_proj": 2}
pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_lora.py does this"),
]


class Pool:
    """The release's pool of adapters, of random ones."""

    max_lora_rank = MOST

    def __init__(self):
        self.A_buffer: dict[str, list[torch.Tensor]] = {}
        self.B_buffer: dict[str, list[torch.Tensor]] = {}

    def add(self, name: str, base: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """Buffers of a layer's product."""
        out, depth = base.weight.shape
        made = (
            torch.randn(PLACES, SLICES.get(name, 1) * MOST, depth) * depth**-0.5,
            torch.randn(PLACES, out, MOST),
        )
        for half, buffer in zip((self.A_buffer, self.B_buffer), made, strict=True):
            half.setdefault(name, []).append(buffer)
        return made


def adapt(model: nn.Module, *, experts: bool) -> tuple[CpuLoRABackend, Pool]:
    """Gives a target the release's LoRA layers, as its manager does."""
    torch.manual_seed(0)
    backend, pool = CpuLoRABackend(PLACES, torch.device("cpu")), Pool()
    names = ("qkv_proj", "o_proj") if experts else ("qkv_proj", "o_proj", *SLICES, "down_proj")
    for path, module in list(model.named_modules()):
        name = path.rpartition(".")[2]
        if ".layers." not in f".{path}" or name not in names:
            continue
        layer = get_lora_layer(module, backend)
        layer.set_lora_info(*pool.add(name, module))
        replace_submodule(model, path, layer)
    return backend, pool


def info_of(
    counts: list[int], places: list[int], ranks: torch.Tensor, scalings: torch.Tensor
) -> TorchNativeLoRABatchInfo:
    """What the release's products on a CPU read, and ours."""
    info = batch_info(counts, places, ranks, scalings)
    ends, of = torch.tensor([0, *counts]).cumsum(0), torch.tensor(places, dtype=torch.int32)
    info.grouped = group_rows_reference(ends, of, ranks, scalings, sum(counts), 16)
    info.owners = Owners(of.repeat_interleave(torch.tensor(counts)), 1, ranks, scalings)
    return info


@pytest.mark.parametrize("name", TARGETS)
def test_as_the_release_computes(name: str) -> None:
    """Requests of two adapters and of none, in one batch; adapters apart from products, and in them."""
    model = make_target(name)
    blocks, body = Blocks(model), fused_body(model, no_tilings(), None)
    without = blocks.fused(body)
    backend, pool = adapt(model, experts="moe" in name)
    backend.batch_info = info_of([WIDTH] * 3, [1, 0, 2], RANKS, SCALINGS)
    expected = blocks.plain()
    assert difference(without, expected) > 0.1
    assert difference(blocks.fused(body.adapted({})), expected) < ROUNDING

    wide = widen_products(model, pool)
    adapted = body.adapted(wide)
    backend.batch_info.grouped = None if adapted.layers.all_are_wide else backend.batch_info.grouped
    assert difference(blocks.fused(adapted), expected) < ROUNDING
    assert difference(blocks.plain(), expected) == 0


def test_what_products_can_have_adapters_in_them() -> None:
    """Not those with a bias, nor of more ranks than pay; weights and adapters are read and written as before."""
    model = make_target("llama with biases")
    _, pool = adapt(model, experts=False)
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    before = {name: [each.clone() for each in layers] for name, layers in pool.A_buffer.items()}
    wide = widen_products(model, pool)
    own = {name for name, module in model.named_modules() if module in wide}
    assert own == {
        f"model.layers.{n}.mlp.{name}" for n in range(4) for name in ("gate_up_proj", "down_proj")
    }
    assert all(torch.equal(each, weights[name]) for name, each in model.state_dict().items())
    for name, layers in before.items():
        assert all(torch.equal(*pair) for pair in zip(pool.A_buffer[name], layers, strict=True))
    layer = model.model.layers[1].mlp.down_proj
    size, added = layer.base_layer.weight.shape[0], PLACES * MOST
    assert wide[layer].weight.shape[0] % 64 == 0
    layer.base_layer.weight.data[:] = 2
    pool.A_buffer["down_proj"][1][:] = 3
    assert (wide[layer].weight[:size] == 2).all()
    assert (wide[layer].weight[size : size + added] == 3).all()
    assert layer.A_buffer is pool.A_buffer["down_proj"][1]


def test_adapters_of_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_target("qwen3")
    _, pool = adapt(model, experts=False)
    monkeypatch.setattr(wide_products, "_MOST", PLACES * MOST - 1)
    assert widen_products(model, pool) == {}


@pytest.mark.parametrize("released", [False, True])
def test_weights_that_are_released_stay_where_they_are(released: bool) -> None:
    """The memory saver gives away the memory into which they were loaded."""
    model = make_target("qwen3")
    _, pool = adapt(model, experts=False)
    weight = model.model.layers[0].mlp.down_proj.base_layer.weight
    before = weight.data_ptr()
    runner = SimpleNamespace(
        lora_manager=SimpleNamespace(base_model=model, memory_pool=pool, max_loras_per_batch=3),
        server_args=SimpleNamespace(enable_memory_saver=released),
        device="cpu",
    )
    adapters = Adapters(runner)
    adapters.widen_products()
    adapters.make_buffers(4)
    assert len(adapters.buffers.wide) == (0 if released else 16)
    assert (weight.data_ptr() == before) == released


@pytest.mark.parametrize("widened", [False, True])
def test_products_in_parts(monkeypatch: pytest.MonkeyPatch, widened: bool) -> None:
    """As tilings leave them, which float32 has none of."""
    model = make_target("qwen3")
    blocks, body = Blocks(model), fused_body(model, no_tilings(), None)
    backend, pool = adapt(model, experts=False)
    backend.batch_info = info_of([WIDTH] * 3, [1, 0, 2], RANKS, SCALINGS)
    expected, whole, seen = blocks.plain(), FusedLayers._product, []
    if widened:
        adapted = body.adapted(widen_products(model, pool))
        monkeypatch.setattr(adapted_layers, "product", halves)
        assert difference(blocks.fused(adapted), expected) < ROUNDING
        return

    def in_parts(layers: FusedLayers, linear: nn.Module, x: torch.Tensor, kind: Kind):
        seen.append(kind)
        y = whole(layers, linear, x, kind)
        return torch.stack([0.25 * y, 0.75 * y]) if kind is Kind.SUMMED else y

    monkeypatch.setattr(FusedLayers, "_product", in_parts)
    assert difference(blocks.fused(body.adapted({})), expected) < ROUNDING
    assert Kind.SUMMED in seen


def halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product in two parts."""
    y = x @ weight.T
    return torch.stack([0.25 * y, 0.75 * y])


def test_layers_that_are_not_known() -> None:
    model = make_target("llama")
    body = fused_body(model, no_tilings(), None)
    adapt(model, experts=False)
    assert body.adapted({}) is not None

    class Other(BaseLayerWithLoRA):
        pass

    layer = model.model.layers[2]
    layer.mlp.down_proj = Other(layer.mlp.down_proj.base_layer, None)
    assert body.adapted({}) is None


class CpuBuffers(AdapterBuffers):
    """Whose segments the release's products on a CPU read, too."""

    def blocks(self, requests: int, width: int):
        return self._of(requests * [width])

    def tiles(self, ends: torch.Tensor, rows: int):
        return self._of(ends.diff().tolist())

    def _of(self, counts: list[int]):
        places = self.places[: len(counts)].tolist()
        return info_of(counts, places, self.ranks, self.scalings)


@contextmanager
def buffers_of(target: Target, requests: int, widened: bool) -> Iterator[AdapterBuffers]:
    backend, pool = adapt(target.model, experts=False)
    manager = SimpleNamespace(max_loras_per_batch=PLACES, lora_backend=backend, memory_pool=pool)
    before = [layer.clone() for half in (pool.A_buffer, pool.B_buffer) for layer in half["o_proj"]]
    wide = widen_products(target.model, pool) if widened else {}
    buffers = CpuBuffers(manager, requests, "cpu", wide)
    yield buffers
    after = [layer for half in (pool.A_buffer, pool.B_buffer) for layer in half["o_proj"]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not buffers.ranks.any() and getattr(backend, "batch_info", None) is None


def choose(
    target: Target, body: Body | None, requests: int = 8, widened: bool = False
) -> Body | None:
    with buffers_of(target, requests, widened) as buffers:
        return fused.fuse_adapted(buffers, body, requests, 3)


@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("requests", [1, 8])
def test_what_is_right_is_used(
    requests: int, widened: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Compared under adapters that are gone afterwards, with no more requests than the server runs."""
    caplog.set_level(logging.INFO)
    target = Target()
    assert choose(target, target.body, requests, widened) is not None
    assert "DFLASH runs the target under LoRA adapters with fused layers" in caplog.text
    products = 8 if widened else 0
    assert f"{products} products with adapters in them" in caplog.text


@pytest.mark.parametrize("widened", [False, True])
def test_what_is_wrong_is_not(
    widened: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where adapters are left out: then all that is left is the release's way."""
    monkeypatch.setattr(adapted_layers, "add_expanded", lambda *_: None)
    monkeypatch.setattr(adapted_layers, "add_second_halves", without_adapters)
    target = Target()
    assert choose(target, target.body, widened=widened) is None
    (said,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert said.startswith("DFLASH runs the target under LoRA adapters with layers as the release")


def without_adapters(y: torch.Tensor, wide: Wide, owners: Owners, *, swiglu: bool) -> torch.Tensor:
    base = y[:, : wide.b.shape[1]].contiguous()
    return swiglu_reference(base) if swiglu else base


def test_a_target_that_is_not_fused() -> None:
    assert choose(Target(), None) is None
    assert get_tp_group().world_size == 1
