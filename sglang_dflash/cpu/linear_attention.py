"""Linear attention of gated delta nets in plain PyTorch, for the CPU: of prompts, steps and blocks.

The release's own is Triton's, or needs a CPU build of sgl_kernel that the registry does not have. Here a row is
computed like any other, whatever it is part of, one after the other: slow, and the same in steps and in blocks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

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

    from sglang_dflash.block_rows import BlockRows


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

    A block leaves the states of its requests as they are, and what its rows read in `block_rows`.

    Attributes:
        block_rows: of the server's rounds, if it has any.
    """

    block_rows: BlockRows | None = None

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
        output = mixed_qkv.new_zeros(1, len(mixed_qkv), layer.num_v_heads, layer.head_v_dim)
        for request, slot in enumerate(self.forward_metadata.mamba_cache_indices.tolist()):
            rows = slice(*bounds[request : request + 2])
            if slot == 0 or rows.start == rows.stop:  # those of nobody only pad the pass
                continue
            made = delta_net(layer, mixed_qkv[rows], a[rows], b[rows], conv[slot], ssm[slot])
            output[0, rows] = made.output
            if forward_batch.forward_mode.is_target_verify():
                at = self.req_to_token_pool.mamba_map[layer.layer_id]
                self.block_rows.kept[at, rows] = mixed_qkv[rows]
                self.block_rows.convolved[at, rows] = made.convolved
                self.block_rows.gates[at, rows] = made.gates
                continue
            conv[slot], ssm[slot] = made.windows[-1], made.states[-1]
            if (kept := _kept_row(forward_batch, request)) is not None:
                to = forward_batch.mamba_track_indices[request]
                conv[to], ssm[to] = made.windows[kept], made.states[kept]
        return output


def _kept_row(batch: ForwardBatch, request: int) -> int | None:
    """After which row of a prompt the prefix cache keeps states: at the end of its last whole chunk."""
    if batch.mamba_track_mask is None or not batch.mamba_track_mask[request]:
        return None
    rows = int(batch.mamba_track_seqlens[request] - batch.extend_prefix_lens[request])
    return rows // CHUNK_SIZE * CHUNK_SIZE - 1


class Rows(NamedTuple):
    """Rows of one request behind a layer.

    Attributes:
        output: [rows, v_heads, v_dim].
        windows: [rows, q + k + v, kernel - 1], the last inputs of the convolution after each row.
        states: [rows, v_heads, v_dim, k_dim], after each row.
        convolved: [rows, q + k + v].
        gates: [rows, 2, v_heads] float32, what is left of a state at each row, and how much of a value goes in.
    """

    output: torch.Tensor
    windows: torch.Tensor
    states: torch.Tensor
    convolved: torch.Tensor
    gates: torch.Tensor


def delta_net(
    layer: RadixLinearAttention,
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    window: torch.Tensor,
    state: torch.Tensor,
) -> Rows:
    """Rows of one request through a layer.

    Args:
        mixed: [rows, q + k + v], before the convolution.
        a, b: [rows, v_heads], of decay and of what is written.
        window: [q + k + v, kernel - 1], the last inputs of the convolution before these rows.
        state: [v_heads, v_dim, k_dim] before these rows.
    """
    kernel = layer.conv_weights.shape[1]
    inputs = torch.cat([window.to(mixed.dtype).T, mixed])  # [kernel - 1 + rows, channels]
    spans = inputs.unfold(0, kernel, 1)  # [rows, channels, kernel]
    convolved = (spans * layer.conv_weights).sum(-1)
    convolved = silu(convolved if layer.bias is None else convolved + layer.bias).float()
    decay = (-layer.A_log.float().exp() * softplus(a.float() + layer.dt_bias.float())).exp()
    gates = torch.stack([decay, b.float().sigmoid()], 1)
    q, k, v = _heads(convolved, *state.shape)
    q = q * layer.head_k_dim**-0.5
    outputs, states, current = [], [], state
    for row in range(len(mixed)):
        changed = _change(current.float(), k[row], v[row], gates[row])
        outputs.append((changed * q[row, :, None]).sum(-1))
        # What the next row reads has the precision of the pool, inside a block and across steps.
        current = changed.to(state.dtype)
        states.append(current)
    output = torch.stack(outputs).to(mixed.dtype)
    return Rows(output, spans[..., 1:], torch.stack(states), convolved, gates)


def bring(
    states: torch.Tensor,
    windows: torch.Tensor,
    kept: torch.Tensor,
    convolved: torch.Tensor,
    gates: torch.Tensor,
    slots: torch.Tensor,
    begins: torch.Tensor,
    counts: torch.Tensor,
    tracked: torch.Tensor | None,
    on_the_way: torch.Tensor | None,
) -> None:
    """Makes states of all layers those after the rows that count; see `round/linear_states.py`."""
    if tracked is None:
        tracked, on_the_way = slots, torch.zeros_like(counts)
    given = (slots, begins, counts, tracked, on_the_way)
    for slot, begin, count, to, kept_row in zip(*(x.tolist() for x in given), strict=True):
        rows = slice(begin, begin + count)
        inputs = torch.cat([windows[:, slot].to(kept.dtype).mT, kept[:, rows]], 1)
        _, k, v = _heads(convolved[:, rows].float(), *states.shape[2:])
        current = states[:, slot]
        for row in range(count):
            changed = _change(current.float(), k[:, row], v[:, row], gates[:, begin + row])
            current = changed.to(states.dtype)
            if row + 1 == kept_row:
                states[:, to], windows[:, to] = current, _window(inputs, row + 1, windows)
        states[:, slot], windows[:, slot] = current, _window(inputs, count, windows)


def _window(inputs: torch.Tensor, rows: int, windows: torch.Tensor) -> torch.Tensor:
    """The last inputs of convolutions after so many rows, of all layers."""
    return inputs[:, rows : rows + windows.shape[-1]].mT


def _change(
    state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    """[..., v_heads, v_dim, k_dim] before a row → after it."""
    decay, written = gates.unbind(-2)
    state = state * decay[..., None, None]
    change = (v - (state * k[..., None, :]).sum(-1)) * written[..., None]
    return state + change[..., None] * k[..., None, :]


def _heads(
    convolved: torch.Tensor, v_heads: int, v_dim: int, k_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[..., q + k + v] → unit queries and keys, once for each head of values, and values: [..., v_heads, dim] each."""
    values = v_heads * v_dim
    keys = (convolved.shape[-1] - values) // 2
    q, k, v = convolved.split([keys, keys, values], -1)
    group = v_heads * k_dim // keys
    q, k = (_unit(x.unflatten(-1, (-1, k_dim))).repeat_interleave(group, -2) for x in (q, k))
    return q, k, v.unflatten(-1, (v_heads, v_dim))


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
