"""Small targets of the release's own classes with random weights, and blocks that run through them."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.distributed import get_tensor_model_parallel_rank, parallel_state
from sglang.srt.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen2_moe import Qwen2MoeForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from torch import nn
from transformers import LlamaConfig, Qwen2Config, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig

from sglang_dflash.round.verify_input import DFlashVerifyInput

WIDTH, CONTEXT, TAPS = 4, 40, (0, 2)
SMALL = dict(
    vocab_size=320,
    hidden_size=96,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
ROPE = {"rope_type": "default", "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Fields of a forward batch that mixtures of experts look at, as they are in rounds.
NOTHING = dict(
    can_run_tbo=False, nsa_cp_metadata=None, attn_cp_metadata=None, num_token_non_padded=None
)
# All experts are taken, so that no rounding decides which.
EXPERTS = dict(num_experts=4, num_experts_per_tok=4, moe_intermediate_size=64, norm_topk_prob=True)
SHARED = dict(shared_expert_intermediate_size=64, decoder_sparse_step=1, mlp_only_layers=[])
TARGETS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama with biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "qwen2-moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig, EXPERTS | SHARED | {"head_dim": 16}),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, EXPERTS),
}


@contextmanager
def rank_of(ranks: int, rank: int, port: int, device: str = "cpu") -> Iterator[None]:
    """This process as one rank of a tensor-parallel group."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    args = ServerArgs(
        model_path="dummy", device=device, attention_backend="torch_native", tp_size=ranks
    )
    set_global_server_args_for_scheduler(args)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, backend)
    make_group = parallel_state.init_model_parallel_group
    if device == "cpu":  # where the release would look for NCCL, too
        parallel_state.init_model_parallel_group = partial(
            make_group, use_pynccl=False, use_custom_allreduce=False
        )
    try:
        initialize_model_parallel(ranks)
    finally:
        parallel_state.init_model_parallel_group = make_group
    initialize_dp_attention(args, SimpleNamespace(hidden_size=64, dtype=torch.float32))
    initialize_moe_config(args)
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


def make_target(
    name: str, device: str = "cpu", dtype: torch.dtype = torch.float32, **sizes: int
) -> nn.Module:
    """A target whose layers are tapped; what all ranks hold is the same on all."""
    model_class, config_class, own = TARGETS[name]
    fields = SMALL | {"rope_parameters": ROPE} | own | sizes
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = model_class(config_class(**fields)).eval()
    finally:
        torch.set_default_dtype(before)
    for parameter_name, parameter in model.named_parameters():
        _fill(parameter_name, parameter)
    if hasattr(model, "set_eagle3_layers_to_capture"):
        model.set_eagle3_layers_to_capture(list(TAPS))
    return model


@torch.no_grad()
def _fill(name: str, parameter: nn.Parameter) -> None:
    """Large enough that norms, biases, attention and MLP all matter."""
    replicated = "norm" in name or name.endswith(
        ("mlp.gate.weight", "expert_gate.weight", "o_proj.bias")
    )
    rank = 0 if replicated else get_tensor_model_parallel_rank()
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {rank}".encode()))
    made = torch.empty(parameter.shape)
    if "norm" in name:
        made.uniform_(0.5, 1.5, generator=generator)
    elif name.endswith(".bias"):
        made.normal_(std=0.5, generator=generator)
    else:
        made.normal_(std=2 / parameter.shape[-1] ** 0.5, generator=generator)
    parameter.copy_(made)


class Blocks:
    """Blocks of several requests with contexts of different lengths, on KV pools with random content."""

    def __init__(self, model: nn.Module, device: str = "cpu", requests: int = 3):
        self.model, self.device, self.requests = model, device, requests
        attention = model.model.layers[0].self_attn.attn
        dtype = model.model.norm.weight.dtype
        generator = torch.Generator().manual_seed(0)
        table = 1 + torch.randperm(requests * CONTEXT, generator=generator).view(requests, CONTEXT)
        self.table = table.to(device, torch.int32)
        self.starts = torch.tensor([1, 17, CONTEXT - WIDTH] * requests)[:requests].to(device)
        self.ids = torch.randint(0, 320, (requests * WIDTH,), generator=generator).to(device)
        self.positions = (self.starts[:, None] + torch.arange(WIDTH, device=device)).flatten()
        self.pools = [
            MHATokenToKVPool(
                size=requests * CONTEXT,
                page_size=1,
                dtype=dtype,
                head_num=attention.tp_k_head_num,
                head_dim=attention.head_dim,
                layer_num=len(model.model.layers),
                device=device,
                enable_memory_saver=False,
            )
            for _ in range(2)
        ]
        for buffers in ("k_buffer", "v_buffer"):
            first, second = (getattr(pool, buffers) for pool in self.pools)
            for one, other in zip(first, second, strict=True):
                one.copy_(torch.randn(one.shape, generator=generator))
                other.copy_(one)

    def batch(self, pool: int) -> SimpleNamespace:
        """The fields of a forward batch that models and backend read."""
        rows = torch.arange(self.requests, device=self.device)
        slots = self.table[rows.repeat_interleave(WIDTH), self.positions].to(torch.int64)
        return SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY,
            input_ids=self.ids,
            req_pool_indices=rows,
            seq_lens=self.starts,
            out_cache_loc=slots,
            positions=self.positions,
            spec_info=DFlashVerifyInput(WIDTH, self.positions, CaptureHiddenMode.FULL),
            attn_backend=TorchNativeAttnBackend(
                SimpleNamespace(device=self.device, attention_chunk_size=None)
            ),
            token_to_kv_pool=self.pools[pool],
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            **NOTHING,
        )

    @torch.no_grad()
    def plain(self) -> list[torch.Tensor]:
        """Hidden states, taps, and K/V as the release's own forward pass leaves them."""
        states, taps = self.model.model(self.ids, self.positions, self.batch(0))
        return [states, *taps, *self._cache(0)]

    @torch.no_grad()
    def fused(self, body) -> list[torch.Tensor]:
        """The same by fused layers."""
        states, taps = body(self.ids, self.positions, self.batch(1))
        return [states, *taps, *self._cache(1)]

    def _cache(self, pool: int) -> list[torch.Tensor]:
        return [*self.pools[pool].k_buffer, *self.pools[pool].v_buffer]


def difference(made: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest of the tensors' differences, each relative to what is expected."""
    assert len(made) == len(expected) == 1 + len(TAPS) + 2 * SMALL["num_hidden_layers"]
    return max(
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(made, expected, strict=True)
    )
