"""DFlashWorker (v1): the four stages one after the other, requests updated on the spot."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Optional

import torch

from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.server_args import set_global_server_args_for_scheduler

from sglang_dflash.accept import accept, greedy_tokens
from sglang_dflash.checkpoint import ARCHITECTURE
from sglang_dflash.commit import commit_context, commit_tokens
from sglang_dflash.context_kv import write_context
from sglang_dflash.draft_model import DFlashDraftModel
from sglang_dflash.propose import propose
from sglang_dflash.reserve import reserve
from sglang_dflash.round import Round
from sglang_dflash.spec_input import DFlashDraftInput
from sglang_dflash.verify import verify

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ModelWorkerBatch, ScheduleBatch
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


class DFlashWorker:
    """Runs target and draft model for a scheduler that does not overlap."""

    def __init__(
        self,
        server_args: ServerArgs,
        gpu_id: int,
        tp_rank: int,
        dp_rank: Optional[int],
        moe_ep_rank: int,
        attn_cp_rank: int,
        moe_dp_rank: int,
        nccl_port: int,
        target_worker: TpModelWorker,
    ):
        self.target_worker = target_worker
        self.target = target_worker.model_runner
        self.width = server_args.speculative_num_draft_tokens
        ranks = dict(
            gpu_id=gpu_id,
            tp_rank=tp_rank,
            dp_rank=dp_rank,
            moe_ep_rank=moe_ep_rank,
            attn_cp_rank=attn_cp_rank,
            moe_dp_rank=moe_dp_rank,
            nccl_port=nccl_port,
            pp_rank=0,
        )
        self.draft = load_draft_model(server_args, target_worker, ranks)

    @property
    def model_runner(self) -> ModelRunner:
        """The draft model's; SGLang reads its pool and its config here."""
        return self.draft

    @property
    def model_config(self):
        return self.draft.model_config

    def clear_cache_pool(self) -> None:
        """Nothing to clear on `/flush_cache`: draft KV lies under the target's slots."""

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Runs a prefill, or one round over a decode batch."""
        if batch.forward_mode.is_extend():
            return self._prefill(batch)
        return self._round(batch)

    def _prefill(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Runs the prompt (or a chunk of it) and turns its hidden states into draft context.

        Tokens that the radix cache gave are not run: their draft KV lies under the same slots as
        their target KV, from the request that computed them.
        """
        model_batch = batch.get_model_worker_batch()
        model_batch.capture_hidden_mode = CaptureHiddenMode.FULL
        result = self.target_worker.forward_batch_generation(model_batch)
        hidden_states, result.logits_output.hidden_states = result.logits_output.hidden_states, None
        write_context(self.draft, hidden_states, extend_positions(model_batch), model_batch.out_cache_loc)
        batch.spec_info = DFlashDraftInput(result.next_token_ids.to(torch.int64))
        return result

    def _round(self, batch: ScheduleBatch) -> GenerationBatchResult:
        reserve(batch, self.width)
        round = Round.open(
            batch.get_model_worker_batch(),
            batch.spec_info.bonus_tokens,
            self.width,
            batch.req_to_token_pool.req_to_token,
            self.target.model_config.context_len,
        )
        draft_tokens = propose(self.draft, round)
        verified = verify(self.target, round, draft_tokens)
        accepted = accept(greedy_tokens(verified.logits, round.width), draft_tokens)
        commit_context(self.draft, round, verified)

        lengths, tokens = accepted.lengths.tolist(), accepted.tokens.tolist()
        taken = [commit_tokens(req, row[:n]) for req, row, n in zip(batch.reqs, tokens, lengths)]
        self._advance(batch, accepted.lengths)
        batch.spec_info = DFlashDraftInput(accepted.bonus_tokens)
        committed = [token for row, n in zip(tokens, taken) for token in row[:n]]
        return GenerationBatchResult(
            next_token_ids=torch.tensor(committed, device=batch.device),
            num_accepted_tokens=len(committed) - len(taken),
            accept_length_per_req_cpu=[n - 1 for n in taken],
            can_run_cuda_graph=verified.ran_graph,
        )

    @staticmethod
    def _advance(batch: ScheduleBatch, lengths: torch.Tensor) -> None:
        """Moves the starts on; a request that finished inside the block leaves the batch anyway."""
        batch.seq_lens = batch.seq_lens + lengths
        batch.seq_lens_cpu = batch.seq_lens_cpu + lengths.cpu()
        batch.orig_seq_lens = batch.orig_seq_lens + lengths.to(batch.orig_seq_lens.dtype)
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())


def load_draft_model(server_args: ServerArgs, target_worker: TpModelWorker, ranks: dict) -> ModelRunner:
    """Loads the drafter beside the target, over the target's slots (same allocator, same table)."""
    target = target_worker.model_runner
    args = draft_server_args(server_args, target)
    ModelRegistry.models[ARCHITECTURE] = DFlashDraftModel
    req_to_token_pool, allocator = target_worker.get_memory_pool()
    try:
        draft = TpModelWorker(
            server_args=args,
            is_draft_worker=True,
            req_to_token_pool=req_to_token_pool,
            token_to_kv_pool_allocator=allocator,
            memory_pool_config=target.memory_pool_config,
            **ranks,
        ).model_runner
    finally:
        # A model runner makes its own arguments the process's; the scheduler needs the user's.
        set_global_server_args_for_scheduler(server_args)
    draft.model.finish_loading(target.model)
    return draft


def draft_server_args(server_args: ServerArgs, target: ModelRunner) -> ServerArgs:
    """The user's arguments as the drafter's model runner must see them."""
    args = copy.copy(server_args)
    context_len = target.model_config.context_len
    # The context is the target's, however long the drafter's own config says it may be.
    args.context_length = None
    args.json_model_override_args = f'{{"dflash_context_len": {context_len}, "architectures": ["{ARCHITECTURE}"]}}'
    args.dtype = str(target.model_config.dtype).removeprefix("torch.")
    args.kv_cache_dtype = "auto"
    args.speculative_draft_model_quantization = None
    args.trust_remote_code = False
    args.skip_tokenizer_init = True
    args.disable_cuda_graph = True
    args.attention_backend = server_args.speculative_draft_attention_backend or server_args.attention_backend
    args.prefill_attention_backend = args.decode_attention_backend = None
    args.speculative_draft_attention_backend = None
    return args


def extend_positions(batch: ModelWorkerBatch) -> torch.Tensor:
    """Position of every token that a prefill batch runs: [sum of extend_seq_lens] int64."""
    spans = zip(batch.extend_prefix_lens, batch.extend_seq_lens)
    positions = torch.cat([torch.arange(prefix, prefix + length) for prefix, length in spans])
    return positions.to(batch.input_ids.device, non_blocking=True)
