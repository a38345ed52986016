"""What a GPU verifies with, the release's kernels, beside what a CPU does: the same rows, and the states after each."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.fla.fused_sigmoid_gating_recurrent import (
    fused_sigmoid_gating_delta_rule_update,
)
from sglang.srt.layers.attention.mamba.causal_conv1d_triton import causal_conv1d_update
from sglang.srt.layers.attention.mamba.mamba_state_scatter_triton import (
    _fused_mamba_state_scatter_with_mask_kernel as scatter,
)

from sglang_dflash.cpu.linear_attention import delta_net
from sglang_dflash.round.linear_states import as_kernels_write

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there in Triton's interpreter
WIDTH, REQUESTS, SLOTS, KERNEL = 5, 3, 6, 4
K_HEADS, V_HEADS, K_DIM, V_DIM = 2, 4, 4, 8
CHANNELS = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM


@pytest.mark.parametrize("widest", [WIDTH, 2 * WIDTH])
def test_blocks(widest: int) -> None:
    """Also of blocks that are narrower than the server's."""
    torch.manual_seed(0)
    layer = SimpleNamespace(
        conv_weights=torch.randn(CHANNELS, KERNEL, device=DEVICE),
        bias=None,
        A_log=torch.randn(V_HEADS, device=DEVICE),
        dt_bias=torch.randn(V_HEADS, device=DEVICE),
        num_k_heads=K_HEADS,
        num_v_heads=V_HEADS,
        head_k_dim=K_DIM,
        q_dim=K_HEADS * K_DIM,
        k_dim=K_HEADS * K_DIM,
        v_dim=V_HEADS * V_DIM,
    )
    slots = torch.tensor([4, 1, 3], dtype=torch.int32, device=DEVICE)
    conv = torch.randn(SLOTS, CHANNELS, KERNEL - 1, device=DEVICE)
    ssm = torch.randn(SLOTS, V_HEADS, V_DIM, K_DIM, device=DEVICE)
    mixed = torch.randn(REQUESTS * WIDTH, CHANNELS, device=DEVICE)
    a, b = (torch.randn(REQUESTS * WIDTH, V_HEADS, device=DEVICE) for _ in range(2))
    places = torch.arange(REQUESTS, dtype=torch.int32, device=DEVICE)
    # As the release allocates them: one more request than can run.
    windows = torch.zeros(REQUESTS + 1, widest, CHANNELS, KERNEL - 1, device=DEVICE)
    states = torch.zeros(REQUESTS + 1, widest, V_HEADS, V_DIM, K_DIM, device=DEVICE)

    convolved = causal_conv1d_update(
        mixed.view(REQUESTS, WIDTH, -1).transpose(1, 2),
        conv.clone(),
        layer.conv_weights,
        None,
        "silu",
        conv_state_indices=slots,
        intermediate_conv_window=windows,
        intermediate_state_indices=places,
    )
    rows = convolved.transpose(1, 2).reshape(1, REQUESTS * WIDTH, -1)
    q, k, v = rows.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
    before = ssm.clone()
    made = fused_sigmoid_gating_delta_rule_update(
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        q=q.view(1, -1, K_HEADS, K_DIM),
        k=k.view(1, -1, K_HEADS, K_DIM),
        v=v.view(1, -1, V_HEADS, V_DIM),
        a=a,
        b=b,
        initial_state_source=ssm,
        initial_state_indices=slots,
        cu_seqlens=torch.arange(0, (REQUESTS + 1) * WIDTH, WIDTH, dtype=torch.int32, device=DEVICE),
        use_qk_l2norm_in_kernel=True,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        disable_state_update=True,
        intermediate_states_buffer=states,
        intermediate_state_indices=places,
        cache_steps=WIDTH,
    )
    assert torch.equal(ssm, before)
    states = as_kernels_write(states[None], WIDTH)[0]
    for request, slot in enumerate(slots.tolist()):
        own = slice(request * WIDTH, (request + 1) * WIDTH)
        expected = delta_net(layer, mixed[own], a[own], b[own], conv[slot], ssm[slot])
        found = (made.view(-1, V_HEADS, V_DIM)[own], windows[request, :WIDTH], states[request])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_bringing_states_to_the_accepted_row() -> None:
    """Nothing is written where no row counts."""
    layers, size = 2, 24
    after_rows = torch.randn(layers, REQUESTS + 1, WIDTH, size, device=DEVICE)
    states = torch.randn(layers, SLOTS, size, device=DEVICE)
    slots = torch.tensor([4, 1, 3], dtype=torch.int32, device=DEVICE)
    steps = torch.tensor([2, -1, 4], dtype=torch.int32, device=DEVICE)
    expected = states.clone()
    expected[:, 4], expected[:, 3] = after_rows[:, 0, 2], after_rows[:, 2, 4]
    sizes = (*after_rows.stride()[:3], *states.stride()[:2], REQUESTS + 1, WIDTH, SLOTS)
    scatter[REQUESTS, layers, 1](
        after_rows, states, slots, steps, REQUESTS, size, *sizes, BLOCK_SIZE=32
    )
    assert torch.equal(states, expected)
