"""DFlashWorker (v1): a round at a time, requests updated on the spot."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.cpu.eager import compile_only_when_asked
from sglang_dflash.drawing.sampling import Sampling
from sglang_dflash.process.garbage import exempt_start_up, give_memory_back
from sglang_dflash.round.commit import commit_round
from sglang_dflash.round.pair import DraftTargetPair
from sglang_dflash.scheduler.reserve import reserve
from sglang_dflash.scheduler.spec_input import DFlashDraftInput
from sglang_dflash.scheduler.watch import watch_rounds
from sglang_dflash.scheduler.width import width_policy
from sglang_dflash.serving.admission import bound_requests
from sglang_dflash.serving.memory import pool_bytes, report_memory
from sglang_dflash.serving.metrics import metrics

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    from sglang.srt.managers.schedule_batch import ModelWorkerBatch, ScheduleBatch
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


class DFlashWorkerBase:
    """What SGLang's scheduler expects of a worker, whether it overlaps or not."""

    def __init__(
        self,
        server_args: ServerArgs,
        gpu_id: int,
        tp_rank: int,
        dp_rank: int | None,
        moe_ep_rank: int,
        attn_cp_rank: int,
        moe_dp_rank: int,
        nccl_port: int,
        target_worker: TpModelWorker,
    ):
        compile_only_when_asked(server_args)
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
        self.width = server_args.speculative_num_draft_tokens
        self.next_width = width_policy(server_args)
        self.target_worker = target_worker
        self.pair = DraftTargetPair(server_args, target_worker, ranks)
        bound_requests(target_worker)
        slots = self.model_runner.token_to_kv_pool.size + self.model_runner.page_size
        slot_bytes = pool_bytes(self.model_runner.token_to_kv_pool) // slots
        metrics.start(server_args, ranks, self.model_runner, slot_bytes)
        if tp_rank == 0:
            report_memory(target_worker.model_runner, self.model_runner)
        watch_rounds(self.pair)
        if tp_rank == 0:
            logger.info(
                "%s: drafter %s, blocks of %d, attention %s",
                type(self).__name__,
                server_args.speculative_draft_model_path,
                self.width,
                self.model_runner.server_args.attention_backend,
            )
        exempt = exempt_start_up()
        logger.info("%s objects of start-up are exempt from garbage collection", f"{exempt:,}")

    @property
    def model_runner(self) -> ModelRunner:
        """The draft model's; SGLang reads its pool and its config here."""
        return self.pair.draft.runner

    @property
    def model_config(self):
        return self.model_runner.model_config

    def sampling(self, batch: ScheduleBatch | ModelWorkerBatch) -> Sampling | None:
        """How the next round of a decode batch draws."""
        return Sampling.of(batch, self.model_runner.server_args.enable_nan_detection)

    def update_weights_from_tensor(self, request: UpdateWeightsFromTensorReqInput):
        """New weights are the target's; the drafter keeps its own, as it does from disk."""
        return self.target_worker.update_weights_from_tensor(request)

    def clear_cache_pool(self) -> None:
        """On `/flush_cache` of an idle server. Draft KV lies under the target's slots, which are free."""
        give_memory_back()


class DFlashWorker(DFlashWorkerBase):
    """Runs target and draft model for a scheduler that waits for every result."""

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Runs a prefill, or one round over a decode batch."""
        if batch.forward_mode.is_extend():
            result = self.pair.prefill(batch.get_model_worker_batch())
            batch.spec_info = DFlashDraftInput(lookahead=self.width)
            return result

        reserve(batch, self.width)
        starts = torch.tensor([req.kv_committed_len for req in batch.reqs])
        accepted, output = self.pair.round(
            batch.req_pool_indices, starts, self.next_width(), self.sampling(batch)
        )
        taken = commit_round(batch.reqs, accepted.tokens, accepted.lengths, output)
        self._advance(batch, accepted.lengths)
        committed = [token for tokens in taken for token in tokens]
        return GenerationBatchResult(
            next_token_ids=torch.tensor(committed, device=batch.device),
            num_accepted_tokens=len(committed) - len(taken),
            accept_length_per_req_cpu=[len(tokens) - 1 for tokens in taken],
        )

    @staticmethod
    def _advance(batch: ScheduleBatch, lengths: torch.Tensor) -> None:
        """Moves the batch's lengths on; a request that finished inside the block leaves it anyway."""
        batch.seq_lens = batch.seq_lens + lengths
        batch.seq_lens_cpu = batch.seq_lens_cpu + lengths.cpu()
        batch.orig_seq_lens = batch.orig_seq_lens + lengths.to(batch.orig_seq_lens.dtype)
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
