"""What a GPU verifies with beside what a CPU does: the same rows, and the states that are made of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.fla.fused_gdn_gating import fused_gdn_gating
from sglang.srt.layers.attention.fla.fused_sigmoid_gating_recurrent import (
    fused_sigmoid_gating_delta_rule_update as recurrence,
)
from torch.nn.functional import softplus

from sglang_dflash.block_rows import BlockRows
from sglang_dflash.cpu import linear_attention as on_cpu
from sglang_dflash.gpu import delta_nets
from sglang_dflash.gpu.kernels import delta_net_states as kernels
from sglang_dflash.gpu.kernels.delta_net_rows import recur
from sglang_dflash.gpu.kernels.delta_net_step import Shape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there in Triton's interpreter
LAYERS, SLOTS, ROWS = 2, 9, 24
K_HEADS, V_HEADS, K_DIM, V_DIM = 2, 4, 4, 8
KEYS, VALUES = K_HEADS * K_DIM, V_HEADS * V_DIM
CHANNELS = 2 * KEYS + VALUES
# Requests have their own numbers of rows, whether all alike or not; one has none.
COUNTS = {"blocks": [5, 5, 5], "ragged": [1, 0, 7, 3]}


def layer_of(seed: int, bias: bool) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(DEVICE)

    return SimpleNamespace(
        layer_id=10 + seed,
        conv_weights=random(CHANNELS, 4),
        bias=random(CHANNELS) if bias else None,
        A_log=random(V_HEADS),
        dt_bias=random(V_HEADS),
        num_q_heads=K_HEADS,
        num_k_heads=K_HEADS,
        num_v_heads=V_HEADS,
        head_q_dim=K_DIM,
        head_k_dim=K_DIM,
        head_v_dim=V_DIM,
        q_dim=KEYS,
        k_dim=KEYS,
        v_dim=VALUES,
    )


class World:
    """States of a few requests, and a backend as a server's, after a pass over rows."""

    def __init__(self, counts: list[int], bias: bool = False, dtype: torch.dtype = torch.float32):
        torch.manual_seed(0)
        self.counts, requests = counts, len(counts)
        self.conv = torch.randn(LAYERS, SLOTS, CHANNELS, 3, device=DEVICE)
        self.ssm = torch.randn(LAYERS, SLOTS, V_HEADS, V_DIM, K_DIM, device=DEVICE).to(dtype)
        self.cache = SimpleNamespace(conv=[self.conv], temporal=self.ssm)
        self.slots = torch.tensor([4, 1, 3, 6][:requests], dtype=torch.int32, device=DEVICE)
        ends = torch.tensor([0, *counts]).cumsum(0)
        self.bounds = ends.int().to(DEVICE)
        self.begins = ends[:-1].to(DEVICE)
        self.rows = BlockRows.reserve(self.cache, ROWS, torch.float32)
        self.layers = [layer_of(seed, bias) for seed in range(LAYERS)]
        self.backend = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(
                mamba2_layer_cache=lambda id: SimpleNamespace(
                    conv=[self.conv[id - 10]], temporal=self.ssm[id - 10]
                ),
                mamba_map={10: 0, 11: 1},
            ),
            forward_metadata=SimpleNamespace(
                mamba_cache_indices=self.slots, query_start_loc=self.bounds
            ),
            forward_extend=lambda **given: given["mixed_qkv"],
        )
        delta_nets.leave_rows(self.backend, self.rows)
        self.given = [
            [torch.randn(sum(counts), size, device=DEVICE) for size in (CHANNELS, V_HEADS, V_HEADS)]
            for _ in range(LAYERS)
        ]

    def run(self, verifies: bool = True) -> list[torch.Tensor]:
        mode = SimpleNamespace(is_target_verify=lambda: verifies)
        batch = SimpleNamespace(forward_mode=mode)
        return [
            self.backend.forward_extend(
                layer=layer, forward_batch=batch, mixed_qkv=mixed, a=a, b=b, q=None
            )
            for layer, (mixed, a, b) in zip(self.layers, self.given, strict=True)
        ]

    def expected(self, layer: int, request: int) -> on_cpu.Rows:
        begin, slot = int(self.bounds[request]), self.slots[request]
        own = slice(begin, begin + self.counts[request])
        given = (x[own] for x in self.given[layer])
        states = self.conv[layer, slot], self.ssm[layer, slot]
        return on_cpu.delta_net(self.layers[layer], *given, *states)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_rows(counts: list[int], bias: bool) -> None:
    """They are what a CPU makes of them, and leave states as they are."""
    world = World(counts, bias)
    before = world.conv.clone(), world.ssm.clone()
    outputs = world.run()
    assert torch.equal(world.conv, before[0])
    assert torch.equal(world.ssm, before[1])
    for layer, output in enumerate(outputs):
        for request, count in enumerate(counts):
            if not count:
                continue
            made, begin = world.expected(layer, request), int(world.bounds[request])
            own = slice(begin, begin + count)
            assert_close(output[0, own], made.output)
            assert torch.equal(world.rows.kept[layer, own], world.given[layer][0][own])
            assert_close(world.rows.convolved[layer, own], made.convolved)
            assert_close(world.rows.gates[layer, own], made.gates)
    assert not world.rows.kept[:, sum(counts) :].any()


def test_few_requests_have_narrow_programs() -> None:
    """As many as a GPU has schedulers; what they compute is the same."""
    shape = Shape(channels=8192, k_heads=16, v_heads=32, k_dim=128, v_dim=128, block=32)
    assert [shape.narrow(requests).block for requests in (1, 2, 4, 32)] == [8, 16, 32, 32]
    assert shape.narrow(1).programs == 512
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, 4, 64, 16, generator=generator).to(DEVICE)
    convolved = torch.randn(5, 2 * 2 * 16 + 4 * 64, generator=generator).to(DEVICE)
    gates = torch.rand(5, 2, 4, generator=generator).to(DEVICE)
    bounds = torch.tensor([0, 5], dtype=torch.int32, device=DEVICE)
    slots = torch.ones(1, dtype=torch.int32, device=DEVICE)
    made = {}
    for block in (8, 16, 32):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Shape, "narrow", lambda shape, requests, b=block: shape._replace(block=b))
            made[block] = recur(states, convolved, gates, slots, bounds)
    assert made[8].any()
    assert_close(made[8], made[32])
    assert_close(made[16], made[32])


def test_gates_that_lie_apart() -> None:
    """The release's kernel of prompts; Qwen3.5-27B, with three value heads to one of keys, has them in one product."""
    net, rows = layer_of(0, False), 5
    b, a = torch.randn(rows, 2 * V_HEADS, device=DEVICE).split(V_HEADS, dim=-1)
    decay, share = fused_gdn_gating(net.A_log, a, b, net.dt_bias)
    assert_close(decay[0], -net.A_log.exp() * softplus(a + net.dt_bias))
    assert_close(share[0], b.sigmoid())


def test_rows_that_only_pad() -> None:
    """They are nobody's, so they are zeros, and nothing is computed for them."""
    world = World(COUNTS["ragged"])
    world.slots[2] = 0
    before, padding = world.ssm.clone(), slice(*world.bounds[2:4].tolist())
    for layer, output in enumerate(world.run()):
        assert not output[0, padding].any()
        assert not world.rows.convolved[layer, padding].any()
        assert output[0, padding.stop :].any()
        assert_close(output[0, padding.stop :], world.expected(layer, 3).output)
    assert torch.equal(world.ssm, before)


def test_other_passes_are_the_backends_own() -> None:
    world = World(COUNTS["blocks"])
    for made, (mixed, _, _) in zip(world.run(verifies=False), world.given, strict=True):
        assert made is mixed
    assert not world.rows.kept.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tracks", [False, True])
@pytest.mark.parametrize("take", [kernels.bring, on_cpu.bring])
def test_states_of_what_counts(take, tracks: bool, dtype: torch.dtype) -> None:
    """Of all layers, after the rows that count and after those on the way; nothing else is written."""
    world = World(COUNTS["ragged"], dtype=dtype)
    world.run()
    counts, on_the_way = [1, 0, 5, 3], [0, 0, 2, 3]
    if take is on_cpu.bring:  # whose states have the pool's precision after each row
        dtype = torch.float32
    tracked = [8, 8, 7, 5]
    expected = world.conv.clone(), world.ssm.clone()
    for layer in range(LAYERS):
        for request, (count, kept) in enumerate(zip(counts, on_the_way, strict=True)):
            made = world.expected(layer, request) if count else None
            for rows, slot in (
                (kept if tracks else 0, tracked[request]),
                (count, world.slots[request]),
            ):
                if rows:
                    expected[0][layer, slot] = made.windows[rows - 1]
                    expected[1][layer, slot] = made.states[rows - 1]
    more = (None, None)
    if tracks:
        more = [torch.tensor(x, device=DEVICE) for x in (tracked, on_the_way)]
    rows, given = world.rows, torch.tensor(counts, device=DEVICE)
    left = rows.kept, rows.convolved, rows.gates
    take(world.ssm, world.conv, *left, world.slots, world.begins, given, *more)
    assert torch.equal(world.conv, expected[0])
    noise = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(world.ssm, expected[1], rtol=noise, atol=noise)


def test_states_are_those_of_steps() -> None:
    """The release's own kernel of plain decoding, which writes the state after each step."""
    world = World(COUNTS["blocks"])
    world.run()
    steps = world.ssm.clone()
    for layer in range(LAYERS):
        _, a, b = world.given[layer]
        q, k, v = world.rows.convolved[layer, : len(a)].split([KEYS, KEYS, VALUES], -1)
        net = world.layers[layer]
        for step in range(4):
            at = world.begins + step
            recurrence(
                A_log=net.A_log,
                dt_bias=net.dt_bias,
                softplus_beta=1.0,
                softplus_threshold=20.0,
                q=q[at].view(1, -1, K_HEADS, K_DIM),
                k=k[at].view(1, -1, K_HEADS, K_DIM),
                v=v[at].view(1, -1, V_HEADS, V_DIM),
                a=a[at],
                b=b[at],
                initial_state_source=steps[layer],
                initial_state_indices=world.slots,
                cu_seqlens=torch.arange(len(at) + 1, dtype=torch.int32, device=DEVICE),
                use_qk_l2norm_in_kernel=True,
            )
    counts = torch.full((3,), 4, device=DEVICE)
    left = world.rows.kept, world.rows.convolved, world.rows.gates
    kernels.bring(world.ssm, world.conv, *left, world.slots, world.begins, counts, None, None)
    assert_close(world.ssm, steps)
