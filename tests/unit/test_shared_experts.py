"""Gates of shared experts in one kernel, against the release's own; kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.models.qwen2_moe import Qwen2MoeSparseMoeBlock
from torch import nn

from sglang_dflash.gpu import shared_experts
from sglang_dflash.gpu.in_place import fuse_in_place, restore
from sglang_dflash.gpu.shared_experts import FusedGateBlock
from tests.unit.targets import Blocks, make_target

# To compile takes longer than all else here.
pytestmark = [pytest.mark.usefixtures("eager"), pytest.mark.usefixtures("one_rank")]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, Qwen2MoeSparseMoeBlock)]


@torch.no_grad()
def run(model: nn.Module, blocks: Blocks) -> torch.Tensor:
    states, _ = model.model(blocks.ids, blocks.positions, blocks.batch(0))
    return states


def test_as_the_release_computes() -> None:
    model = make_target("qwen2-moe")
    blocks = Blocks(model)
    expected = run(model, blocks)
    assert fuse_in_place(model) == len(blocks_of(model)) == 4
    assert all(type(block) is FusedGateBlock for block in blocks_of(model))
    torch.testing.assert_close(run(model, blocks), expected, atol=1e-4, rtol=1e-4)
    # The gate counts: without it the rows are others.
    for block in blocks_of(model):
        block.shared_expert_gate.weight.data.zero_()
    assert not torch.allclose(run(model, blocks), expected, atol=1e-2)
    restore(model)
    assert all(type(block) is Qwen2MoeSparseMoeBlock for block in blocks_of(model))


def test_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks without shared experts, and deterministic inference, where plain decoding has other sums."""
    assert fuse_in_place(make_target("qwen3-moe")) == 0
    model = make_target("qwen2-moe")
    monkeypatch.setattr(shared_experts, "is_batch_invariant_mode_enabled", lambda: True)
    assert fuse_in_place(model) == 0
    monkeypatch.undo()
    blocks_of(model)[0].shared_expert = None
    assert fuse_in_place(model) == 3
