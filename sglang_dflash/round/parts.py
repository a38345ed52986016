"""What rounds are made of: both models over one set of KV slots, and what they know between two rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.tp_worker import TpModelWorker

from sglang_dflash.checkpoint.target_class import language_model
from sglang_dflash.drafter.load import load_draft_model
from sglang_dflash.drafter.vocabulary import BorrowedVocabulary
from sglang_dflash.drawing.penalties import Penalties
from sglang_dflash.round.adapters import Adapters
from sglang_dflash.round.block_model import BlockModel
from sglang_dflash.round.draft_window import DraftWindow, WindowedModel
from sglang_dflash.round.linear_states import LinearStates
from sglang_dflash.round.startup_check import check_draft_model
from sglang_dflash.round.state import RequestState
from sglang_dflash.serving.linear_attention import rows_of_linear_attention

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True)
class Parts:
    """
    Attributes:
        draft, target: run blocks kernel by kernel.
        state: bonus tokens and lengths, by the requests' rows.
        penalties: what was counted of penalised requests, by the same rows.
        vocabulary: the target's, for its likeliest tokens.
        window: what the draft model sees of long contexts; None for all.
        req_to_token: [rows, columns] int32, the slots of each request.
        adapters: LoRA adapters of the target; None if the server has none.
        linear_states: of the target's layers that keep states instead of K/V; None if it has none.
        max_requests: how many run at once.
        context_len: how many positions a request can have.
    """

    draft: BlockModel
    target: BlockModel
    state: RequestState
    penalties: Penalties
    vocabulary: BorrowedVocabulary
    window: DraftWindow | None
    req_to_token: torch.Tensor
    adapters: Adapters | None
    linear_states: LinearStates | None
    max_requests: int
    context_len: int


def load_parts(server_args: ServerArgs, target_worker: TpModelWorker, ranks: dict) -> Parts:
    """Loads the drafter beside the target, and looks whether it drafts.

    Args:
        ranks: this process's, by SGLang's names.
    """
    pool, width = (
        target_worker.model_runner.req_to_token_pool,
        server_args.speculative_num_draft_tokens,
    )
    size, window = server_args.speculative_dflash_draft_window_size, None
    if size is not None:
        window = DraftWindow(size, width, server_args.page_size, pool)
    runner = load_draft_model(server_args, target_worker, ranks, window.pool if window else pool)
    if window is not None:
        window.narrow(runner.model)
    target = BlockModel(target_worker.model_runner)
    model = language_model(target.runner.model)
    vocabulary = BorrowedVocabulary(
        model,
        fp32=server_args.enable_fp32_lm_head,
        scale=model.logits_processor.processor.logit_scale,
    )
    check_draft_model(runner, vocabulary, width)
    state = RequestState(pool.size, pool.req_to_token.device, target.runner.model_is_mrope)
    linear_states, requests = None, target_worker.max_running_requests
    if target.runner.mambaish_config is not None:
        rows = rows_of_linear_attention(server_args, requests)
        linear_states = LinearStates(target.runner, state, server_args.mamba_track_interval, rows)
    return Parts(
        draft=WindowedModel(runner, window) if window else BlockModel(runner),
        target=target,
        state=state,
        penalties=Penalties(
            pool.size, target_worker.model_config.vocab_size, pool.req_to_token.device
        ),
        vocabulary=vocabulary,
        window=window,
        req_to_token=pool.req_to_token,
        adapters=Adapters(target.runner) if server_args.enable_lora else None,
        linear_states=linear_states,
        max_requests=requests,
        context_len=target_worker.model_config.context_len,
    )
