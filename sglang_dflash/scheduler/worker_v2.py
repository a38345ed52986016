"""DFlashWorkerV2: rounds launched ahead of their results, for a scheduler that overlaps.

While a round runs, the scheduler prepares and launches the next and only then looks at the result.
What the host needs it knows as upper bounds; what it does not know stays on the device
(`RequestState`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_dflash.round.commit import commit_round
from sglang_dflash.scheduler.spec_input import DFlashDraftInput
from sglang_dflash.scheduler.worker import DFlashWorkerBase

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ModelWorkerBatch, ScheduleBatch


class DFlashWorkerV2(DFlashWorkerBase):
    """Runs target and draft model for a scheduler that overlaps."""

    @property
    def draft_worker(self) -> DFlashWorkerV2:
        """SGLang looks for the draft model runner at `draft_worker.draft_runner`."""
        return self

    @property
    def draft_runner(self):
        return self.model_runner

    def forward_batch_generation(self, batch: ModelWorkerBatch) -> GenerationBatchResult:
        """Launches a prefill, or one round over a decode batch; waits for neither."""
        next_input = DFlashDraftInput(lookahead=2 * self.width, new_seq_lens=batch.seq_lens)
        if batch.forward_mode.is_extend():
            result = self.pair.prefill(batch)
            result.next_draft_input = next_input
            return result

        # The round before this one may still be running: it commits at most a block more.
        bounds = torch.tensor([req.kv_committed_len + self.width for req in batch.reqs])
        accepted, output = self.pair.round(
            batch.req_pool_indices, bounds, self.next_width(), self.sampling(batch)
        )
        return GenerationBatchResult(
            logits_output=output or LogitsProcessorOutput(next_token_logits=None),
            next_token_ids=accepted.tokens.flatten(),
            accept_lens=accepted.lengths,
            next_draft_input=next_input,
        )


def resolve_round(result: GenerationBatchResult, batch: ScheduleBatch) -> list[list[int]]:
    """Commits a round to its requests, now that its result is on the host; see `commit_round`."""
    lengths = result.accept_lens
    tokens = result.next_token_ids.view(len(lengths), -1)
    taken = commit_round(batch.reqs, tokens, lengths, result.logits_output)
    result.num_rounds = sum(map(bool, taken))
    result.num_accepted_tokens = sum(map(len, taken)) - result.num_rounds
    result.accept_length_per_req_cpu = [len(tokens) - 1 for tokens in taken]
    return taken
