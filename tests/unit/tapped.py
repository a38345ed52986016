"""A target as a server has it, tapped, over one request's KV slots."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.update_config import (
    adjust_config_with_unaligned_cpu_tp,
    adjust_tp_num_heads_if_necessary,
)
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_loader.weight_utils import safetensors_weights_iterator
from sglang.srt.models.registry import ModelRegistry

from sglang_dflash.block_rows import BlockRows
from sglang_dflash.cpu.linear_attention import hybrid_backend
from sglang_dflash.gpu.block_attention import BlockAttention
from sglang_dflash.round.linear_states import leave_rows
from sglang_dflash.round.target import tap_target
from sglang_dflash.round.verify_input import DFlashVerifyInput
from tests.unit.decoders import SIZES


class Target:
    """A target as the release loads it, tapped, with a pool of KV slots."""

    def __init__(self, folder: Path, drafter: Path):
        model_config = ModelConfig(str(folder), enable_multimodal=True)
        given = LoadConfig(load_format="safetensors")
        config = adjust_config_with_unaligned_cpu_tp(model_config, given, 1).hf_config
        text = config.get_text_config()
        is_linear = hasattr(type(text), "mamba2_cache_params")
        if is_linear:
            adjust_tp_num_heads_if_necessary(text, tp_size=1, is_post_update=True)
        model_class, _ = ModelRegistry.resolve_model_cls(config.architectures)
        self.model = model_class(config).eval()
        files = [str(file) for file in folder.glob("*.safetensors")]
        self.model.load_weights(safetensors_weights_iterator(files, disable_mmap=True))
        args = SimpleNamespace(
            model_path=str(folder),
            speculative_draft_model_path=str(drafter),
            speculative_draft_model_revision=None,
        )
        tap_target(SimpleNamespace(server_args=args, model=self.model))
        attention = next(m for m in self.model.modules() if hasattr(m, "tp_k_head_num"))
        chunk = getattr(text, "attention_chunk_size", None)
        self.backend = TorchNativeAttnBackend(
            SimpleNamespace(device="cpu", attention_chunk_size=chunk)
        )
        shape = dict(
            size=64,
            page_size=1,
            dtype=torch.float32,
            device="cpu",
            enable_memory_saver=False,
        )
        heads = dict(head_num=attention.tp_k_head_num, head_dim=attention.head_dim)
        layers, latent = SIZES["num_hidden_layers"], attention.v_head_dim
        if is_linear:
            self.states = states_of(text)
            self.runner = SimpleNamespace(
                device="cpu",
                dtype=torch.float32,
                model=self.model,
                mambaish_config=text,
                req_to_token_pool=self.states,
            )
            self.backend = hybrid_backend(self.runner, self.backend)
            self.runner.attn_backend = self.backend
            cache = self.states.mamba_pool.mamba_cache
            rows = BlockRows.reserve(cache, shape["size"], torch.float32)
            leave_rows(self.backend.linear_attn_backend, rows)
            self.pool = HybridLinearKVPool(
                full_attention_layer_ids=text.full_attention_layer_ids,
                enable_kvcache_transpose=False,
                mamba_pool=self.states.mamba_pool,
                **shape,
                **heads,
            )
        elif latent < attention.qk_head_dim:  # values of MLA are a part of its keys
            ranks = dict(kv_lora_rank=latent, qk_rope_head_dim=attention.qk_head_dim - latent)
            self.pool = MLATokenToKVPool(layer_num=layers, **shape, **ranks)
        else:
            self.pool = MHATokenToKVPool(layer_num=layers, **shape, **heads)

    @torch.no_grad()
    def run(
        self,
        ids: torch.Tensor,
        start: int,
        mode: ForwardMode,
        attention: BlockAttention | None = None,
        **more: Any,
    ):
        """Tokens of one request from position `start` on: a prompt, a piece of one, or a block.

        Args:
            attention: of a block as graphs run it; None for the backend's.
            more: what else the batch has.
        """
        positions, end = torch.arange(start, start + len(ids)), start + len(ids)
        verifies = mode == ForwardMode.TARGET_VERIFY
        block = DFlashVerifyInput(len(ids), positions, CaptureHiddenMode.FULL)
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=1,
            input_ids=ids,
            req_pool_indices=torch.tensor([0]),
            seq_lens=torch.tensor([start if verifies else end]),
            seq_lens_sum=end,
            extend_prefix_lens=torch.tensor([start]),
            extend_prefix_lens_cpu=[start],
            extend_seq_lens=torch.tensor([len(ids)]),
            extend_start_loc=torch.tensor([0]),
            extend_seq_lens_cpu=[len(ids)],
            out_cache_loc=1 + positions,
            positions=positions,
            spec_info=block if verifies else None,
            attn_backend=self.backend,
            token_to_kv_pool=self.pool,
            req_to_token_pool=SimpleNamespace(req_to_token=torch.arange(1, 65)[None].int()),
            capture_hidden_mode=CaptureHiddenMode.NULL,
            **more,
        )
        if attention is None:
            self.backend.init_forward_metadata(batch)
        else:
            attention.prepare()
            attention.take(batch)
        return self.model(ids, positions, batch)


def states_of(config: Any) -> HybridReqToTokenPool:
    """Slots for states of a few requests; the first request has slot 1."""
    params = Mamba2CacheParams(
        shape=config.mamba2_cache_params.shape,
        layers=config.linear_layer_ids,
        dtype=Mamba2StateDType(conv=torch.float32, temporal=torch.float32),
    )
    pool = HybridReqToTokenPool(
        size=4,
        mamba_size=16,
        mamba_spec_state_size=4,
        max_context_len=64,
        device="cpu",
        enable_memory_saver=False,
        cache_params=params,
        mamba_layer_ids=config.linear_layer_ids,
        enable_mamba_extra_buffer=True,
    )
    pool.req_index_to_mamba_index_mapping[:4] = torch.arange(1, 5)
    return pool
