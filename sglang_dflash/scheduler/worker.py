"""DFlashWorker (v1): a round at a time, requests updated on the spot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_dflash.scheduler.base import DFlashWorkerBase
from sglang_dflash.scheduler.draft_input import DFlashDraftInput
from sglang_dflash.scheduler.reserve import reserve
from sglang_dflash.scheduler.results import rows_run

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


class DFlashWorker(DFlashWorkerBase):
    """Runs target and draft model for a scheduler that waits for every result.

    All of a round is in one call: reserve → round → commit.
    """

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Runs a prefill, or one round over a decode batch."""
        if batch.forward_mode.is_extend():
            result = self.prefill(batch.get_model_worker_batch())
            batch.spec_info = DFlashDraftInput(self.width)
            return result

        reserve(batch, self.width)
        states = self.states_of(batch)
        result = self.launch_round(batch, ahead=0)()
        self.metrics.stepped(1)
        accepted = result.accepted
        tokens, lengths = accepted.tokens.cpu(), accepted.lengths.cpu()
        taken = self.commit(batch.reqs, tokens, lengths, result.output, result.expected)
        if states is not None:
            ran = [
                rows_run(req, len(tokens)) for req, tokens in zip(batch.reqs, taken, strict=True)
            ]
            rows, counted = torch.tensor([ran, [len(tokens) for tokens in taken]])
            rows, counted = rows.to(batch.device), counted.to(batch.device)
            states.keep(rows, tokens.shape[1], counted, result.begins)
        self._advance(batch, accepted.lengths, lengths)
        committed = [token for tokens in taken for token in tokens]
        return GenerationBatchResult(
            next_token_ids=torch.tensor(committed, device=batch.device),
            num_accepted_tokens=len(committed) - len(taken),
            accept_length_per_req_cpu=[len(tokens) - 1 for tokens in taken],
            can_run_cuda_graph=self.replayed(result),
        )

    @staticmethod
    def _advance(batch: ScheduleBatch, lengths: torch.Tensor, on_host: torch.Tensor) -> None:
        """Moves the batch's lengths on; a request that finished inside the block leaves it anyway."""
        batch.seq_lens = batch.seq_lens + lengths
        batch.seq_lens_cpu = batch.seq_lens_cpu + on_host
        batch.orig_seq_lens = batch.orig_seq_lens + lengths.to(batch.orig_seq_lens.dtype)
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
