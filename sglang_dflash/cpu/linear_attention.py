"""Linear attention of gated delta nets in plain PyTorch, for the CPU: of prompts, steps and blocks.

The release's own is Triton's, or needs a CPU build of sgl_kernel that the registry does not have. Here a row is
computed like any other, whatever it is part of, one after the other: slow, and the same in steps and in blocks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.fla.chunk_delta_h import CHUNK_SIZE
from sglang.srt.layers.attention.fla.fused_norm_gate import FusedRMSNormGated
from sglang.srt.layers.attention.fla.layernorm_gated import RMSNorm
from sglang.srt.layers.attention.hybrid_linear_attn_backend import (
    HybridLinearAttnBackend,
    MambaAttnBackendBase,
)
from torch import nn
from torch.nn.functional import silu, softplus

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


def hybrid_backend(runner: ModelRunner, full: AttentionBackend) -> HybridLinearAttnBackend:
    """Attention of a target with gated delta nets: its other layers' is `full`."""
    write_out_norms(runner.model)
    layers = runner.mambaish_config.full_attention_layer_ids
    return HybridLinearAttnBackend(full, DeltaNetBackend(runner), layers)


def write_out_norms(model: nn.Module) -> None:
    """Replaces the gated norms behind linear attention, which are Triton's, too."""
    for module in model.modules():
        if isinstance(module, FusedRMSNormGated | RMSNorm):
            module.forward = partial(_gated_norm, module)


def _gated_norm(norm: nn.Module, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    scaled = x.float() * (x.float().square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    return (scaled * norm.weight.float() * silu(gate.float())).to(x.dtype)


class DeltaNetBackend(MambaAttnBackendBase):
    """Reads and writes states as the release's kernels do, in its pools.

    A block leaves the states of its requests as they are, and writes those after each of its rows beside them.
    """

    def __init__(self, runner: ModelRunner):
        super().__init__(runner)
        self.conv_states_shape = self.req_to_token_pool.mamba_pool.mamba_cache.conv[0].shape

    # What a prompt leaves for the prefix cache is taken on the way.
    def _init_track_conv_indices(self, *_: torch.Tensor) -> None:
        return None

    def _init_track_ssm_indices(self, *_: torch.Tensor) -> tuple[None, ...]:
        return (None,) * 4

    def forward_decode(self, **given) -> torch.Tensor:
        return self._run(**given)

    def forward_extend(self, **given) -> torch.Tensor:
        return self._run(**given)

    def _run(
        self,
        layer: RadixLinearAttention,
        forward_batch: ForwardBatch,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        **_: object,
    ) -> torch.Tensor:
        """[rows, q + k + v] and gates [rows, v_heads] each → [1, rows, v_heads, v_dim]."""
        cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        conv, ssm = cache.conv[0], cache.temporal
        bounds = self.forward_metadata.query_start_loc.tolist()
        output = mixed_qkv.new_empty(1, len(mixed_qkv), layer.num_v_heads, layer.head_v_dim)
        for request, slot in enumerate(self.forward_metadata.mamba_cache_indices.tolist()):
            rows = slice(*bounds[request : request + 2])
            made = delta_net(layer, mixed_qkv[rows], a[rows], b[rows], conv[slot], ssm[slot])
            output[0, rows], windows, states = made
            if forward_batch.forward_mode.is_target_verify():
                cache.intermediate_conv_window[0][request, : len(windows)] = windows
                cache.intermediate_ssm[request, : len(states)] = states
                continue
            conv[slot], ssm[slot] = windows[-1], states[-1]
            if (kept := _kept_row(forward_batch, request)) is not None:
                to = forward_batch.mamba_track_indices[request]
                conv[to], ssm[to] = windows[kept], states[kept]
        return output


def _kept_row(batch: ForwardBatch, request: int) -> int | None:
    """After which row of a prompt the prefix cache keeps states: at the end of its last whole chunk."""
    if batch.mamba_track_mask is None or not batch.mamba_track_mask[request]:
        return None
    rows = int(batch.mamba_track_seqlens[request] - batch.extend_prefix_lens[request])
    return rows // CHUNK_SIZE * CHUNK_SIZE - 1


def delta_net(
    layer: RadixLinearAttention,
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    window: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of one request through a layer.

    Args:
        mixed: [rows, q + k + v], before the convolution.
        a, b: [rows, v_heads], of decay and of what is written.
        window: [q + k + v, kernel - 1], the last inputs of the convolution before these rows.
        state: [v_heads, v_dim, k_dim] before these rows.

    Returns:
        [rows, v_heads, v_dim], and window and state after each row.
    """
    kernel = layer.conv_weights.shape[1]
    inputs = torch.cat([window.to(mixed.dtype).T, mixed])  # [kernel - 1 + rows, channels]
    spans = inputs.unfold(0, kernel, 1)  # [rows, channels, kernel]
    convolved = (spans * layer.conv_weights).sum(-1)
    convolved = silu(convolved if layer.bias is None else convolved + layer.bias).float()
    q, k, v = convolved.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
    group = layer.num_v_heads // layer.num_k_heads
    q, k = (_unit(x.view(len(mixed), layer.num_k_heads, -1), group) for x in (q, k))
    v, q = v.view(len(mixed), layer.num_v_heads, -1), q * layer.head_k_dim**-0.5
    decay = (-layer.A_log.float().exp() * softplus(a.float() + layer.dt_bias.float())).exp()
    written = b.float().sigmoid()
    outputs, states, current = [], [], state.float()
    for row in range(len(mixed)):
        current = current * decay[row, :, None, None]
        known = (current * k[row, :, None]).sum(-1)
        change = (v[row] - known) * written[row, :, None]
        current = current + change[..., None] * k[row, :, None]
        outputs.append((current * q[row, :, None]).sum(-1))
        # What the next row reads has the precision of the pool, inside a block and across steps.
        current = current.to(state.dtype).float()
        states.append(current)
    return torch.stack(outputs).to(mixed.dtype), spans[..., 1:], torch.stack(states)


def _unit(x: torch.Tensor, group: int) -> torch.Tensor:
    """[rows, k_heads, k_dim] → unit vectors, once for each head of values: [rows, v_heads, k_dim]."""
    x = x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    return x.repeat_interleave(group, dim=1)
