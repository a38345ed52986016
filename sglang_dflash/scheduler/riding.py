"""Prompts that ride in rounds: a decode batch and prompts in one step of the scheduler.

The scheduler chooses prompts as it always does. Requests that decode then do not wait until those are through: their
round is prepared beside them (`board`), and both are run and resolved one after the other, as two batches. Whether the
target runs them in one pass is a matter of the graphs that there are.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.utils import ceil_align

from sglang_dflash.round.adapter_buffers import has_adapters
from sglang_dflash.round.run import RoundRunner
from sglang_dflash.scheduler.choices import Load, Plan
from sglang_dflash.scheduler.ending import leave_out_ending
from sglang_dflash.scheduler.fixed_plans import WholeBlocks

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ModelWorkerBatch, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_dflash.scheduler.pace import Pace

_LEAST_ROWS = 64  # of prompts, or a page, which a round takes along however short it is


class Riding:
    """Prompts of the present step of the scheduler, and what a round made of them.

    Attributes:
        slowdown: how much longer a round may take because of prompts, as a part of what it takes without; 0 if
            prompts run alone.
        boards: whether slots are reserved at present for a round beside prompts.
    """

    def __init__(self, slowdown: float, rounds: RoundRunner, planner: WholeBlocks, pace: Pace):
        self.slowdown, self._rounds, self._planner = slowdown, rounds, planner
        self._pace = pace
        self.boards = False
        self._prompts: ScheduleBatch | None = None
        self._done: GenerationBatchResult | None = None

    def board(self, scheduler: Scheduler, prompts: ScheduleBatch) -> ScheduleBatch | None:
        """The decode batch that runs beside prompts that were just chosen, prepared for its round.

        None if there is none, or if there is no room for both: it then decodes in the next step.
        """
        batch = scheduler.running_batch
        pending = batch.is_spec_v2 and scheduler.result_queue
        if not self.slowdown or batch.is_prefill_only:
            return None
        if pending:
            leave_out_ending(batch)
        living = [i for i, req in enumerate(batch.reqs) if not req.finished()]
        if not living:
            return None
        rows = prompts.extend_num_tokens
        adapted = has_adapters([batch.reqs[i].lora_id for i in living])
        plan = self._planner.plan(Load(len(living), prompt_rows=rows, adapted=adapted))
        blocks = plan.rows(len(living))
        graphs = self._rounds.prompt_graphs
        if graphs and not graphs.holds(blocks + rows, len(living) + len(prompts.reqs)):
            return None
        if not _leaves_enough(scheduler, batch.new_tokens_required_next_decode(living)):
            return None
        self.boards = True
        try:
            scheduler.running_batch = scheduler.update_running_batch(batch)
        finally:
            self.boards = False
        return scheduler.running_batch

    def chunk_size(self, scheduler: Scheduler, size: int | None) -> int | None:
        """Rows of prompts that the next step takes; `size` is what the release would take."""
        reqs = [req for req in scheduler.running_batch.reqs if not req.finished()]
        load = Load(len(reqs), adapted=has_adapters([req.lora_id for req in reqs]))
        whole = size is None or scheduler.truncation_align_size is not None
        if not self.slowdown or not reqs or whole:
            return size
        plan, graphs = self._planner.plan(load), self._rounds.prompt_graphs
        blocks = plan.rows(len(reqs))
        least = max(_LEAST_ROWS, scheduler.page_size)
        waiting = _waiting(scheduler)
        # Who waits for another round loses all of it, who decodes beside prompts a part.
        slowdown = self.slowdown * (1 + len(waiting) / len(reqs))
        if graphs is None:
            return min(size, max(least, int(blocks * slowdown)))
        if not graphs.holds(blocks + least, len(reqs) + 1):
            return size
        besides, host = self._planner.besides(plan, load), self._pace.of(prompts=True)
        rows = graphs.prompt_rows(blocks, slowdown, sum(waiting), besides, host)
        return min(size, max(least, rows))

    def run(
        self, scheduler: Scheduler, riders: ScheduleBatch, prompts: ScheduleBatch
    ) -> GenerationBatchResult:
        """Runs both; the prompts' result, which carries the riders'."""
        self._prompts = prompts
        try:
            ridden = scheduler.run_batch(riders)
        finally:
            self._prompts = None
        result = scheduler.run_batch(prompts)
        result.riders = (riders.copy(), ridden)
        if ridden.delay_sample_func is not None:
            result.delay_sample_func = partial(_launch_rest, result, ridden, riders.return_logprob)
        return result

    @property
    def prompt_rows(self) -> int:
        """Of the prompts that are to run beside a round."""
        return 0 if self._prompts is None else self._prompts.extend_num_tokens

    def prompts_for(
        self, start_bounds: torch.Tensor, plan: Plan, adapted: bool
    ) -> ModelWorkerBatch | None:
        """Prompts that the target runs in the same pass as a round's blocks, if it can.

        Args:
            adapted: whether requests of the round have LoRA adapters.
        """
        prompts = self._prompts
        if prompts is None or self._rounds.prompt_graphs is None:
            return None
        batch = prompts.get_model_worker_batch()
        rows = plan.rows(len(start_bounds))
        if not self._rounds.holds_prompts(start_bounds, plan.width, rows, batch, adapted):
            return None
        if prompts.enable_overlap:
            # The scheduler does the same: what is drawn with may change before it is used.
            batch.sampling_info = batch.sampling_info.copy_for_forward()
        return batch

    def done(self, result: GenerationBatchResult) -> None:
        """What a round made of the prompts that it took along."""
        self._done = result

    def take(self) -> GenerationBatchResult | None:
        """The result of the prompts that are asked for, if a round took them along."""
        done, self._done = self._done, None
        return done


def _launch_rest(
    result: GenerationBatchResult, ridden: GenerationBatchResult, logprobs: bool
) -> GenerationBatchResult:
    """The rest of a round that waited for a result, as the scheduler has it launched for a batch alone.

    Args:
        result: of the prompts beside it, which have their first tokens.
        logprobs: whether a request of the round asks for log-probabilities.
    """
    ridden.delay_sample_func()
    ridden.copy_to_cpu(logprobs)
    ridden.delay_sample_func = None
    return result


def _leaves_enough(scheduler: Scheduler, slots: int) -> bool:
    """Whether the pool has so many slots beside those that the rest of a prompt will take.

    The release never waits with that rest: it takes for granted that nobody takes slots between two chunks.
    """
    if (req := scheduler.chunked_req) is not None:
        rest = len(req.origin_input_ids) + len(req.output_ids) - len(req.fill_ids)
        slots += ceil_align(rest, scheduler.page_size)
    evict_from_tree_cache(scheduler.tree_cache, slots)
    return scheduler.token_to_kv_pool_allocator.available_size() >= slots


def _waiting(scheduler: Scheduler) -> list[int]:
    """Rows of each prompt that waits; those that the prefix cache has are among them."""
    rows = [len(req.origin_input_ids) + len(req.output_ids) for req in scheduler.waiting_queue]
    if (req := scheduler.chunked_req) is not None:
        rows.append(len(req.origin_input_ids) + len(req.output_ids) - len(req.fill_ids))
    return rows
