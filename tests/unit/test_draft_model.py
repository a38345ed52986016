"""The draft model under SGLang against the trainer's own drafter in plain PyTorch."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
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
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from torch import nn

from checkpoints.trainer.drafter import Drafter, DraftShape
from checkpoints.trainer.modules import Shape
from checkpoints.trainer.target import Target
from checkpoints.trainer.tokenizer import MASK_ID
from sglang_dflash.context_kv import write_context
from sglang_dflash.draft_model import DFlashDraftModel
from sglang_dflash.errors import DFlashError
from sglang_dflash.propose import block_tokens
from sglang_dflash.spec_input import DFlashVerifyInput

BLOCK, TAPS, CONTEXT = 8, (0, 2, 3), 200
SHAPE = Shape(
    num_layers=3,
    hidden_size=96,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=128,
    vocab_size=320,
)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """The process group that SGLang's tensor-parallel layers ask for."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    args = ServerArgs(model_path="dummy", device="cpu", attention_backend="torch_native")
    set_global_server_args_for_scheduler(args)
    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
    initialize_model_parallel()
    config = SimpleNamespace(hidden_size=SHAPE.hidden_size, dtype=torch.float32)
    initialize_dp_attention(args, config)
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


def reference() -> tuple[Target, Drafter]:
    """Random weights, large enough that norms, attention and MLP all matter."""
    torch.manual_seed(0)
    target, drafter = Target(SHAPE), Drafter(DraftShape(SHAPE, BLOCK, TAPS))
    for model in (target, drafter):
        for parameter in model.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.2)
            else:
                nn.init.uniform_(parameter, 0.5, 1.5)
    return target.eval(), drafter.eval()


def config() -> SimpleNamespace:
    return SimpleNamespace(
        hidden_size=SHAPE.hidden_size,
        num_hidden_layers=SHAPE.num_layers,
        num_attention_heads=SHAPE.num_heads,
        num_key_value_heads=SHAPE.num_kv_heads,
        head_dim=SHAPE.head_dim,
        intermediate_size=SHAPE.intermediate_size,
        max_position_embeddings=64,
        dflash_context_len=CONTEXT,
        rms_norm_eps=SHAPE.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": SHAPE.rope_theta},
        rope_theta=SHAPE.rope_theta,
        rope_scaling=None,
        dflash_config={"mask_token_id": MASK_ID, "target_layer_ids": list(TAPS)},
    )


class TargetStub(nn.Module):
    """SGLang's embedding and head with the reference's weights: all that a drafter borrows."""

    def __init__(self, target: Target):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = VocabParallelEmbedding(SHAPE.vocab_size, SHAPE.hidden_size)
        self.lm_head = ParallelLMHead(SHAPE.vocab_size, SHAPE.hidden_size)
        with torch.no_grad():
            for module in (self.model.embed_tokens, self.lm_head):
                module.weight[: SHAPE.vocab_size] = target.embed_tokens.weight


def loaded(target: Target, drafter: Drafter) -> DFlashDraftModel:
    model = DFlashDraftModel(config())
    model.load_weights(drafter.state_dict().items())
    model.finish_loading(TargetStub(target))
    return model.eval()


def runner(model: DFlashDraftModel, requests: int) -> SimpleNamespace:
    """What the stages need of a model runner: the release's pools and attention backend."""
    pool = MHATokenToKVPool(
        size=requests * CONTEXT,
        page_size=1,
        dtype=torch.float32,
        head_num=SHAPE.num_kv_heads,
        head_dim=SHAPE.head_dim,
        layer_num=SHAPE.num_layers,
        device="cpu",
        enable_memory_saver=False,
    )
    slots = 1 + torch.randperm(requests * CONTEXT, generator=torch.Generator().manual_seed(1))
    table = SimpleNamespace(req_to_token=slots.view(requests, CONTEXT).to(torch.int32))
    backend = TorchNativeAttnBackend(SimpleNamespace(device="cpu"))
    return SimpleNamespace(
        model=model, token_to_kv_pool=pool, req_to_token_pool=table, attn_backend=backend
    )


def block_batch(draft: SimpleNamespace, starts: torch.Tensor, positions: torch.Tensor):
    """A forward batch of blocks at `starts`; the fields that model and backend read."""
    table = draft.req_to_token_pool.req_to_token
    rows = torch.arange(len(starts))
    slots = table[rows.repeat_interleave(BLOCK), positions].to(torch.int64)
    spec_info = DFlashVerifyInput(BLOCK, positions, CaptureHiddenMode.NULL)
    return SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        req_pool_indices=rows,
        seq_lens=starts,
        out_cache_loc=slots,
        positions=positions,
        spec_info=spec_info,
        attn_backend=draft.attn_backend,
        token_to_kv_pool=draft.token_to_kv_pool,
        req_to_token_pool=draft.req_to_token_pool,
        encoder_lens=None,
    )


@torch.no_grad()
def test_drafts_of_the_plain_drafter() -> None:
    """Same draft tokens from contexts of different lengths, written in pieces as rounds do."""
    target, drafter = reference()
    draft = runner(loaded(target, drafter), requests=4)
    starts = torch.tensor([1, 17, 90, CONTEXT - BLOCK])
    taps = torch.randn(4, CONTEXT, len(TAPS) * SHAPE.hidden_size)
    bonus = torch.tensor([5, 77, 200, 319])
    table = draft.req_to_token_pool.req_to_token
    for row, start in enumerate(starts.tolist()):
        for begin, end in ((0, start // 3), (start // 3, start)):
            positions = torch.arange(begin, end)
            write_context(draft, taps[row, begin:end], positions, table[row, begin:end].long())

    positions = (starts[:, None] + torch.arange(BLOCK)).flatten()
    tokens = block_tokens(bonus, draft.model.mask_token_id, BLOCK)
    drafted = draft.model(tokens, positions, block_batch(draft, starts, positions))

    for row, start in enumerate(starts.tolist()):
        logits = drafter(
            target, bonus[row].view(1, 1), torch.tensor([[start]]), taps[row : row + 1, :start]
        )
        assert drafted[row].tolist() == logits[0, 0].argmax(-1).tolist()
    assert len(set(drafted.flatten().tolist())) > 10  # not one token for everything


def test_weights_that_do_not_fit() -> None:
    _, drafter = reference()
    weights = drafter.state_dict()
    with pytest.raises(DFlashError, match="has a weight lm_head.weight"):
        DFlashDraftModel(config()).load_weights(
            (weights | {"lm_head.weight": weights["norm.weight"]}).items()
        )
    del weights["layers.1.self_attn.k_proj.weight"]
    with pytest.raises(DFlashError, match="misses 1 weights, among them layers.1.self_attn.k_proj"):
        DFlashDraftModel(config()).load_weights(weights.items())


def test_a_target_without_a_head() -> None:
    target, drafter = reference()
    stub = TargetStub(target)
    del stub.lm_head
    with pytest.raises(DFlashError, match="has no LM head"):
        DFlashDraftModel(config()).finish_loading(stub)
