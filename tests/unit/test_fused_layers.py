"""Fused layers against the release's own forward pass, on small targets; kernels in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sglang.srt.distributed import get_tp_group

from sglang_dflash.gpu.kernels.sum_add_norm import Shared
from sglang_dflash.gpu.rank_sums import RankSums
from sglang_dflash.gpu.targets import can_fuse_target, fused_body
from sglang_dflash.gpu.tilings import Tilings
from sglang_dflash.round.fused_check import Way, first_right
from tests.server.ports import free_port
from tests.unit.targets import TARGETS, Blocks, difference, make_target, rank_of

ROOT = Path(__file__).parents[2]
ROWS, ROW_SIZE = 12, 128  # at least those of the blocks
ROUNDING = 1e-5  # float32, whose roundings are 1e-7 each
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu/test_fused.py does this on a GPU"
)


def no_tilings() -> Tilings:
    """For products of float32, which have none."""

    def time(*_):
        raise AssertionError("nothing is to be timed")

    return Tilings("CPU", 1, time)


def fused_difference(name: str, ranks: RankSums | None) -> float:
    """How far fused layers are from the release's, in this rank."""
    model = make_target(name)
    blocks = Blocks(model)
    body = fused_body(model, no_tilings(), ranks)
    assert body is not None
    expected = blocks.plain()
    return difference(blocks.fused(body), expected)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", TARGETS)
def test_as_the_release_computes(name: str) -> None:
    assert fused_difference(name, None) < ROUNDING


@pytest.mark.long  # what ranks sum up is tested in test_rank_sums.py, too
def test_on_two_ranks() -> None:
    """Each product's parts summed up once, in each way: residuals, taps and K/V are those of the release."""
    command = [sys.executable, "-m", "tests.unit.test_fused_layers", str(free_port())]
    env = os.environ | {"TORCH_COMPILE_DISABLE": "1"}  # which takes longer than all of the rest
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env, timeout=240, check=True
    )
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(ranks) == 2
    for found, chosen in ranks:
        assert chosen == ["release", "fused"]
        assert len(found) == 2 * len(TARGETS) and max(found.values()) < ROUNDING


@pytest.mark.usefixtures("one_rank")
class TestWhatIsNotUnderstood:
    """Left to the release, whatever its class is called."""

    def test_a_layer_with_other_code(self) -> None:
        model = make_target("llama")
        layer = model.model.layers[1]

        class Scaled(type(layer)):
            def forward(self, *arguments, **more):
                x, residual = super().forward(*arguments, **more)
                return x * 0.5, residual

        assert can_fuse_target(model)
        layer.__class__ = Scaled
        assert not can_fuse_target(model)

    def test_a_class_that_only_has_another_name(self) -> None:
        model = make_target("qwen3")
        for module in (model, model.model, model.model.layers[0]):
            module.__class__ = type("Other", (type(module),), {})
        assert fused_body(model, no_tilings(), None) is not None

    @pytest.mark.parametrize(
        ("part", "name", "value"),
        [
            ("self_attn.rotary_emb", "rotary_dim", 16),
            ("self_attn.rotary_emb", "is_neox_style", False),
            ("self_attn.q_norm", "variance_epsilon", 0.5),
            ("self_attn.k_norm", "cast_x_before_out_mul", True),
            ("self_attn.qkv_proj", "gather_output", True),
            ("mlp.down_proj", "skip_bias_add", True),
            ("input_layernorm", "fp32_residual", True),
        ],
    )
    def test_a_part_that_computes_otherwise(
        self, part: str, name: str, value: object, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = make_target("qwen3")
        module = model.model.layers[1].get_submodule(part)
        monkeypatch.setattr(module, name, value)
        assert fused_body(model, no_tilings(), None) is None


def chosen_ways(rank: int) -> list[str]:
    """Where the second rank finds the fused way wrong, and where no rank does."""

    def fails() -> None:
        assert rank == 0, "wrong on this rank"

    release = Way("release", lambda: None, None)
    return [
        first_right("target", [Way("fused", use, None), release], [], get_tp_group()).name
        for use in (fails, lambda: None)
    ]


def run_two_ranks(port: int) -> None:
    """Each prints how far its fused layers are from the release's, and which ways it chose."""
    rows = torch.zeros(2, 2, ROWS, 2, ROW_SIZE).share_memory_()
    arrivals = torch.zeros(2, 2, ROWS, dtype=torch.int32).share_memory_()
    tables = [
        torch.tensor([[part[rank, turn].data_ptr() for rank in range(2)] for turn in range(2)])
        for part in (rows, arrivals)
    ]
    rank = 0 if os.fork() else 1  # the modules take longer than all the rest
    with rank_of(2, rank, port):
        group, shared = get_tp_group(), Shared(*tables, rank, ROW_SIZE)
        ways = {"all-reduce": RankSums(group, None, 0), "shared": RankSums(group, shared, ROWS)}
        found = {
            f"{name}, {way}": fused_difference(name, sums)
            for name in TARGETS
            for way, sums in ways.items()
        }
        chosen = chosen_ways(rank)
    if rank == 0:
        assert os.wait()[1] == 0  # and so its line is whole
    print(json.dumps([found, chosen]), flush=True)


if __name__ == "__main__":
    run_two_ranks(int(sys.argv[1]))
