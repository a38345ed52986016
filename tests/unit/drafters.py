"""Small draft checkpoints on disk, and the real draft model run from them on the CPU."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from sglang.srt.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_loader.weight_utils import safetensors_weights_iterator
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from torch import nn

from benchmark.shapes import Shape, drafter_config
from sglang_dflash.checkpoint.formats.config import DraftConfig
from sglang_dflash.checkpoint.formats.weights import Shapes, expected_weights
from sglang_dflash.checkpoint.load import load_config
from sglang_dflash.drafter.context_kv import write_context
from sglang_dflash.drafter.model import DFlashDraftModel
from sglang_dflash.round.propose import block_tokens
from sglang_dflash.round.verify_input import DFlashVerifyInput

CONTEXT = 320  # positions of a sequence
TARGET = {
    "hidden_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 320,
}


def zlab_config(**changes: Any) -> dict[str, Any]:
    """config.json of a small drafter in z-lab's format."""
    own = {
        "num_hidden_layers": 3,
        "block_size": 8,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2, 3]},
    }
    rope = {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    raw = drafter_config(Shape(TARGET, own)) | {"max_position_embeddings": 64} | rope | changes
    if len(raw.get("layer_types") or []) != raw["num_hidden_layers"]:
        raw["layer_types"] = ["full_attention"] * raw["num_hidden_layers"]
    return raw


def random_weights(shapes: Shapes, seed: int = 0) -> dict[str, torch.Tensor]:
    """Large enough that norms, biases, attention and MLP all matter."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        weight = torch.empty(shape)
        if len(shape) == 2:
            weight.normal_(std=0.2, generator=generator)
        elif name.endswith(".bias"):
            weight.normal_(std=0.5, generator=generator)
        else:
            weight.uniform_(0.5, 1.5, generator=generator)
        weights[name] = weight
    return weights


def save(
    folder: Path, config: dict[str, Any] | str | None, **files: dict[str, torch.Tensor]
) -> Path:
    """Writes a checkpoint; each keyword is a safetensors file."""
    folder.mkdir(exist_ok=True, parents=True)
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / "config.json").write_text(text)
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return folder


def save_random(folder: Path, raw: dict[str, Any], seed: int = 0) -> Path:
    """Writes a z-lab checkpoint with random weights of the shapes that its config asks for."""
    save(folder, raw)
    return save(
        folder, None, model=random_weights(expected_weights(load_config(str(folder))), seed)
    )


@contextmanager
def one_rank() -> Iterator[None]:
    """The process group that SGLang's tensor-parallel layers ask for."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    args = ServerArgs(model_path="dummy", device="cpu", attention_backend="torch_native")
    # As a model runner does; MLA asks for them.
    args.prefill_attention_backend, args.decode_attention_backend = args.get_attention_backends()
    set_global_server_args_for_scheduler(args)
    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
    initialize_model_parallel()
    initialize_dp_attention(args, SimpleNamespace(hidden_size=64, dtype=torch.float32))
    try:
        yield
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()


class TargetStub(nn.Module):
    """SGLang's embedding and head: all that a drafter borrows."""

    def __init__(self, embedding: torch.Tensor, head: torch.Tensor | None = None):
        """
        Args:
            embedding, head: [vocabulary, hidden]; without a head, the embedding is tied to it.
        """
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = VocabParallelEmbedding(*embedding.shape)
        self.lm_head = ParallelLMHead(*embedding.shape)
        head = embedding if head is None else head
        with torch.no_grad():
            for module, weight in ((self.model.embed_tokens, embedding), (self.lm_head, head)):
                module.weight[: len(weight)] = weight


class DraftRunner:
    """The draft model of a checkpoint with the release's pools and attention backend."""

    def __init__(
        self,
        folder: Path,
        target: nn.Module,
        requests: int = 1,
        context: int = CONTEXT,
        kv_dtype: torch.dtype = torch.float32,
    ):
        hf_config = SimpleNamespace(dflash_checkpoint=str(folder), dflash_context_len=context)
        self.model = DFlashDraftModel(hf_config).eval()
        files = [str(file) for file in folder.glob("*.safetensors")]
        self.model.load_weights(safetensors_weights_iterator(files, disable_mmap=True))
        self.model.finish_loading(target)
        config = self.config
        self.token_to_kv_pool = MHATokenToKVPool(
            size=requests * context,
            page_size=1,
            dtype=kv_dtype,
            head_num=config.num_key_value_heads,
            head_dim=config.head_dim,
            layer_num=config.num_hidden_layers,
            device="cpu",
            enable_memory_saver=False,
        )
        slots = 1 + torch.randperm(requests * context, generator=torch.Generator().manual_seed(1))
        table = slots.view(requests, context).to(torch.int32)
        self.req_to_token_pool = SimpleNamespace(req_to_token=table)
        self.attn_backend = TorchNativeAttnBackend(
            SimpleNamespace(device="cpu", attention_chunk_size=None)
        )

    @property
    def config(self) -> DraftConfig:
        return self.model.draft

    def write_context(self, row: int, hidden_states: torch.Tensor) -> None:
        """Context of one request, [n, taps * target_hidden], in two pieces as rounds write it."""
        table, n = self.req_to_token_pool.req_to_token, len(hidden_states)
        for begin, end in ((0, n // 3), (n // 3, n)):
            slots = table[row, begin:end].long()
            write_context(self, hidden_states[begin:end], torch.arange(begin, end), slots)

    def draft_states(self, bonus: torch.Tensor, starts: torch.Tensor, width: int) -> torch.Tensor:
        """[bs * (width - 1), hidden] of the blocks of requests 0 to bs - 1."""
        return self.model.draft_states(*self._block(bonus, starts, width))

    def draft_tokens(self, bonus: torch.Tensor, starts: torch.Tensor, width: int) -> torch.Tensor:
        """[bs, width - 1] int64."""
        return self.model(*self._block(bonus, starts, width))

    def _block(self, bonus: torch.Tensor, starts: torch.Tensor, width: int) -> tuple:
        positions = (starts[:, None] + torch.arange(width)).flatten()
        tokens = block_tokens(bonus, self.model.mask_token_id, width)
        return tokens, positions, self._batch(starts, positions, width)

    def _batch(self, starts: torch.Tensor, positions: torch.Tensor, width: int) -> SimpleNamespace:
        """The fields of a forward batch that model and backend read."""
        rows = torch.arange(len(starts))
        table = self.req_to_token_pool.req_to_token
        return SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY,
            req_pool_indices=rows,
            seq_lens=starts,
            seq_lens_cpu=starts,
            out_cache_loc=table[rows.repeat_interleave(width), positions].to(torch.int64),
            positions=positions,
            spec_info=DFlashVerifyInput(width, positions, CaptureHiddenMode.NULL),
            attn_backend=self.attn_backend,
            token_to_kv_pool=self.token_to_kv_pool,
            req_to_token_pool=self.req_to_token_pool,
            encoder_lens=None,
        )


def speculators_config(raw: dict[str, Any], verifier: str, **changes: Any) -> dict[str, Any]:
    """A z-lab config.json in the format of speculators 0.9.0."""
    own = ("architectures", "block_size", "dflash_config", "num_target_layers")
    dflash = raw["dflash_config"]
    methods = [{"proposal_type": "greedy", "speculative_tokens": raw["block_size"] - 1}]
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"": "config.DFlashSpeculatorConfig"},
        "aux_hidden_state_layer_ids": [layer + 1 for layer in dflash["target_layer_ids"]],
        "block_size": raw["block_size"],
        "draft_vocab_size": raw["vocab_size"],
        "mask_token_id": dflash["mask_token_id"],
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": methods,
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": verifier},
        },
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {key: raw[key] for key in raw if key not in own},
    } | changes


def reduced_vocabulary(head: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Weights of a vocabulary reduced to `ids` (ascending): LM head, d2t and t2d.

    Args:
        head: [vocabulary, hidden], of the target.
    """
    listed = torch.zeros(len(head), dtype=torch.bool)
    listed[ids] = True
    return {
        "lm_head.weight": head[ids].clone(),
        "d2t": ids - torch.arange(len(ids)),
        "t2d": listed,
    }
