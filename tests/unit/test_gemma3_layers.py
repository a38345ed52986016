"""Gemma 3's layers in few launches against the release's own; kernels in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.models.gemma3_causal import Gemma3ForCausalLM
from torch import nn
from transformers import Gemma3TextConfig

from sglang_dflash.gpu import gemma3
from sglang_dflash.gpu.in_place import fuse_in_place, restore
from tests.unit import targets
from tests.unit.targets import Blocks, make_target

OWN = dict(
    query_pre_attn_scalar=16,
    sliding_window=8,
    layer_types=["sliding_attention", "full_attention"] * 2,
    hidden_activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    },
)

# To compile takes longer than all else here.
pytestmark = pytest.mark.usefixtures("eager")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[nn.Module]:
    known = {"gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, OWN)}
    monkeypatch.setattr(targets, "TARGETS", known)
    # What computes attention here stands for what does on a GPU.
    monkeypatch.setattr(gemma3, "BlockAttention", TorchNativeAttnBackend)
    return make_target("gemma3")


@torch.no_grad()
def run(model: nn.Module, blocks: Blocks, pool: int) -> list[torch.Tensor]:
    """Hidden states, and K/V that are left."""
    states = model.model(blocks.ids, blocks.positions, blocks.batch(pool))
    return [states, *blocks.pools[pool].k_buffer, *blocks.pools[pool].v_buffer]


@pytest.mark.usefixtures("one_rank")
def test_as_the_release_computes(model: nn.Module) -> None:
    blocks = Blocks(model)
    expected = run(model, blocks, 0)
    # Four layers with their attention, and both kinds of angles.
    assert fuse_in_place(model) == 4 + 4 + 2
    torch.testing.assert_close(run(model, blocks, 1), expected, atol=1e-4, rtol=1e-4)
    restore(model)
    assert not any(type(module) in gemma3.FUSED.values() for module in model.modules())
    assert torch.equal(run(model, blocks, 0)[0], expected[0])


@pytest.mark.usefixtures("one_rank")
def test_where_attention_is_the_releases(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass whose attention is not ours goes the release's way, to the last bit."""
    blocks = Blocks(model)
    expected = run(model, blocks, 0)
    monkeypatch.setattr(gemma3, "BlockAttention", type(None))
    fuse_in_place(model)
    for made, its in zip(run(model, blocks, 1), expected, strict=True):
        assert torch.equal(made, its)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("input_layernorm", "eps", 0.5),
        ("self_attn.q_norm", "eps", 0.5),
        ("self_attn", "rotary_dim", 16),
    ],
)
def test_what_computes_otherwise(model: nn.Module, part: str, name: str, value: object) -> None:
    setattr(model.model.layers[1].get_submodule(part), name, value)
    assert fuse_in_place(model) == 0
