"""What both workers share: how they are put together, and the steps that their rounds have in common."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.cpu.eager import compile_only_when_asked
from sglang_dflash.drafter.set_aside import SetAside, clean_pools
from sglang_dflash.drawing.sampling import Sampling
from sglang_dflash.process.garbage import exempt_start_up, give_memory_back
from sglang_dflash.process.source import source_digest
from sglang_dflash.round.adapter_buffers import has_adapters
from sglang_dflash.round.linear_states import RoundStates
from sglang_dflash.round.parts import load_parts
from sglang_dflash.round.prefill import prefill
from sglang_dflash.round.run import AUTO, Finish, RoundResult, capture
from sglang_dflash.scheduler.behind_windows import BehindWindows
from sglang_dflash.scheduler.choices import WHOLE, Load, Plan
from sglang_dflash.scheduler.fixed_plans import widths
from sglang_dflash.scheduler.pace import Pace
from sglang_dflash.scheduler.plan import planner
from sglang_dflash.scheduler.reserve import slot_limit
from sglang_dflash.scheduler.results import commit_round, end_marked
from sglang_dflash.scheduler.riding import Riding
from sglang_dflash.scheduler.watch import watch_of
from sglang_dflash.serving.acceptance_watch import AcceptanceWatch, AdapterWatch, WeightsWatch
from sglang_dflash.serving.admission import bound_requests
from sglang_dflash.serving.memory import pool_bytes, report_memory
from sglang_dflash.serving.metrics import ALONE, IN_ROUNDS, round_metrics

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    from sglang.srt.managers.schedule_batch import ModelWorkerBatch, Req, ScheduleBatch
    from sglang.srt.server_args import ServerArgs

    from sglang_dflash.round.costs import Costs

logger = logging.getLogger(__name__)

# Why a round did not count as it was launched: a token that a grammar does not allow (`trust.py`).
STRAYED = "strayed"


@dataclass(frozen=True)
class Launched:
    """What others behind a round are like.

    Attributes:
        adapters: of its requests; None if there are none in this server.
    """

    batch: ScheduleBatch | ModelWorkerBatch
    plan: Plan
    sampling: Sampling | None
    adapters: list[str | None] | None


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
        self.target_worker = target_worker
        self.parts = load_parts(server_args, target_worker, ranks)
        self.linear_states = self.parts.linear_states
        self.step_rounds = 1  # of the present step
        self.launched: Launched | None = None
        self.rounds = capture(self.parts, server_args, widths(server_args))
        self._server_args = server_args
        self.pace = Pace()
        self.planner = planner(self.width, widths(server_args), self._costs(), self.pace)
        slowdown = server_args.speculative_dflash_prompt_slowdown
        self.riding = Riding(slowdown, self.rounds, self.planner, self.pace)
        # What the scheduler's arguments hold, /server_info tells.
        server_args.dflash_attention = self.rounds.attention
        server_args.dflash_source = source_digest()
        bound_requests(target_worker)
        self.behind_windows = BehindWindows(target_worker.model_runner)
        slots = self.model_runner.token_to_kv_pool.size + self.model_runner.page_size
        slot_bytes = pool_bytes(self.model_runner.token_to_kv_pool) // slots
        self.metrics = round_metrics(server_args, ranks, self.model_runner, slot_bytes, self.pace)
        self.acceptance = AcceptanceWatch(server_args.speculative_draft_model_path, tp_rank == 0)
        self.adapter_watch = None
        if self.parts.adapters is not None and tp_rank == 0:
            self.adapter_watch = AdapterWatch(self.parts.adapters.manager.name_of)
        self.weights_watch = WeightsWatch(tp_rank == 0)
        self._aside: SetAside | None = None
        self.model_runner.model.settle()  # where no rounds are captured
        self.watch = watch_of(self.parts.req_to_token.device)
        if tp_rank == 0:
            report_memory(target_worker.model_runner, self.model_runner)
            logger.info(
                "%s: drafter %s, blocks of %d, attention of the target's %s, of the drafter's %s",
                type(self).__name__,
                server_args.speculative_draft_model_path,
                self.width,
                *self.rounds.attention.values(),
            )
        exempt = exempt_start_up()
        logger.info("%s objects of start-up are exempt from garbage collection", f"{exempt:,}")

    def _costs(self) -> Costs | None:
        """What rounds take, where the number of their rows is to be chosen; for the log and /server_info, too."""
        costs, args = self.rounds.costs(), self._server_args
        args.dflash_costs = costs and costs.as_dict()
        if costs is not None:
            logger.info("DFLASH rounds take, in ms: %s", args.dflash_costs)
        elif args.speculative_dflash_verify == AUTO:
            logger.info(
                "DFLASH verifies all rows, because no passes of the target are captured in which requests have "
                "different numbers of them: that takes CUDA graphs and --piecewise-cuda-graph-max-tokens 64 or more."
            )
        return costs

    @property
    def has_linear_attention(self) -> bool:
        """Whether layers of the target keep states instead of K/V."""
        return self.target_worker.model_runner.mambaish_config is not None

    @property
    def model_runner(self) -> ModelRunner:
        """The draft model's; SGLang reads its pool and its config here."""
        return self.parts.draft.runner

    @property
    def model_config(self):
        return self.model_runner.model_config

    def prefill(self, batch: ModelWorkerBatch) -> GenerationBatchResult:
        """Runs prompts, or a chunk of one; or gives what a round made of them that took them along."""
        if (result := self.riding.take()) is not None:
            return result
        self.note_prompts(batch)
        result = prefill(self.parts, self.target_worker, batch)
        # Written while the device is at work; a request alone would wait for it.
        self.metrics.ran_prompts(batch.extend_num_tokens, ALONE)
        return result

    def states_of(self, batch: ScheduleBatch | ModelWorkerBatch) -> RoundStates | None:
        """What the round that is to be launched over a decode batch leaves in layers of linear attention, if any."""
        if self.linear_states is None:
            return None
        return self.linear_states.of(batch.req_pool_indices, batch.reqs)

    def launch_round(self, batch: ScheduleBatch | ModelWorkerBatch, ahead: int) -> Finish:
        """Launches a round over a decode batch whose slots are reserved, as far as the target's pass.

        Args:
            ahead: tokens that a request may have beyond those that the host knows to be committed.

        Returns:
            Launches the rest; see `RoundRunner.launch`.
        """
        starts = _starts(batch, ahead)
        adapters = None if self.parts.adapters is None else [req.lora_id for req in batch.reqs]
        adapted = has_adapters(adapters)
        load = Load(len(starts), sum(starts), self.riding.prompt_rows, adapted, self.step_rounds)
        plan = self.planner.next(load)
        if adapted and plan.reason != WHOLE and not self.rounds.shares_adapted:
            plan = Plan(self.width)  # the others are for what is captured
        rows, bounds, width = batch.req_pool_indices, torch.tensor(starts), plan.width
        detect_nan = self.model_runner.server_args.enable_nan_detection
        sampling = Sampling.of(batch, self.parts.penalties, detect_nan)
        prompts = self.riding.prompts_for(bounds, plan, adapted)
        boarded = 0 if prompts is None else prompts.extend_num_tokens
        takes = self.planner.milliseconds(plan, load._replace(prompt_rows=boarded))
        self.launched = Launched(batch, plan, sampling, adapters)
        self.note_round(plan, boarded, self.riding.prompt_rows, takes)
        if prompts is None:
            return self._launch_alone(starts, bounds)
        run = partial(prefill, self.parts, self.target_worker, prompts)
        finish, done = self.rounds.launch_with_prompts(
            rows, bounds, width, sampling, run, plan.total, adapters
        )
        self.riding.done(done)
        self.metrics.ran_prompts(prompts.extend_num_tokens, IN_ROUNDS)
        self.metrics.launched(plan.reason, plan.rows(len(starts)))
        return partial(self._finish, finish)

    def launch_again(self, ahead: int) -> Finish:
        """Launches a round like the last one, without prompts; see `launch_round`."""
        starts = _starts(self.launched.batch, ahead)
        return self._launch_alone(starts, torch.tensor(starts))

    def _launch_alone(self, starts: Sequence[int], bounds: torch.Tensor) -> Finish:
        """Launches a round as `launched` says.

        Args:
            starts, bounds: where its blocks begin at most, [bs] int64.
        """
        last = self.launched
        batch, plan = last.batch, last.plan
        ends = zip(batch.reqs, starts, strict=True)
        cut = any(start + plan.width > slot_limit(req) for req, start in ends)
        finish = self.rounds.launch(
            batch.req_pool_indices,
            bounds,
            plan.width,
            last.sampling,
            cut,
            plan.total,
            last.adapters,
        )
        self.metrics.launched(plan.reason, plan.rows(len(starts)))
        return partial(self._finish, finish)

    def note_round(self, plan: Plan, boarded: int, prompt_rows: int, takes: float | None) -> None:
        """A round is about to be launched.

        Args:
            plan: of it.
            boarded: rows of prompts in the same pass.
            prompt_rows: the same in the same step of the scheduler.
            takes: milliseconds of the round and those in its pass, if they are known.
        """

    def note_prompts(self, batch: ModelWorkerBatch) -> None:
        """Prompts are about to be launched in a pass of their own."""

    def replayed(self, result: RoundResult) -> bool:
        """Whether a round came from graphs, which SGLang's log and metrics tell."""
        return self.rounds.graphs is not None and result.fell_back is None

    def _finish(self, finish: Finish) -> RoundResult:
        result = finish()
        if result.fell_back:
            self.metrics.fell_back(result.fell_back)
        if self.watch:
            self.watch.note(result.accepted)
        return result

    def commit(
        self,
        reqs: Sequence[Req],
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        output: LogitsProcessorOutput | None,
        expected: torch.Tensor | None,
    ) -> list[list[int]]:
        """Gives requests what they take of a round; see `commit_round`.

        Args:
            tokens, lengths: as in `Accepted`, on the host.
            expected: of its drafts, as in `RoundResult`.
        """
        committed = commit_round(reqs, tokens, lengths, output)
        self.behind_windows.free(reqs)
        if expected is not None:
            told, counted = expected.numpy(), np.array(list(map(bool, committed.taken)))
            self.planner.note(told[:, :-1])
            told, lengths = told[counted], lengths.numpy()[counted]
            self.metrics.expected(told[:, :-1], told[:, -1:], lengths)
        self.acceptance.note(committed.lengths)
        self.weights_watch.note(committed.lengths)
        if self.adapter_watch is not None:
            self.adapter_watch.note((req.lora_id for req in reqs), committed.taken)
        self.metrics.not_finite(committed.failed)
        for _ in range(committed.strayed):
            self.metrics.fell_back(STRAYED)
        taken = [len(each) for each in committed.taken if each]
        goes_on = not all(req.finished() for req in reqs)
        self.metrics.committed(tokens.shape[1], taken, len(reqs) - len(taken), goes_on)
        return committed.taken

    def first_tokens(self, reqs: Sequence[Req], tokens: list[int]) -> list[int]:
        """First tokens of prefilled requests; one that NaN chose ends its request."""
        tokens, failed = end_marked(reqs, tokens)
        self.metrics.not_finite(failed)
        return tokens

    def update_weights_from_tensor(self, request: UpdateWeightsFromTensorReqInput):
        """New weights are the target's; the drafter keeps its own, as it does from disk."""
        return self.target_worker.update_weights_from_tensor(request)

    def new_weights(self) -> None:
        """The target has other weights."""
        self.weights_watch.new_weights()
        self.model_runner.model.take_head_again()

    def set_aside(self) -> None:
        """Before memory is released: what is lost with it and nobody sends again."""
        if self._aside is None:
            self._aside = SetAside(self.model_runner)
            logger.info("DFLASH keeps %d bytes of the drafter on the host", self._aside.nbytes)

    def put_back(self) -> None:
        """After all memory of both models is resumed."""
        if self._aside is not None:
            self._aside.put_back()
            clean_pools(self.target_worker.model_runner, self.model_runner)
            self._aside = None

    def clear_cache_pool(self) -> None:
        """On `/flush_cache` of an idle server. Draft KV lies under the target's slots, which are free.

        What rounds take is measured anew if that was disturbed; all ranks are here then. It is not where the memory
        that they read is released.
        """
        if self.rounds.disturbed and self._aside is None:
            self.planner.take(self._costs())
        give_memory_back()


def _starts(batch: ScheduleBatch | ModelWorkerBatch, ahead: int) -> list[int]:
    """Where blocks of a decode batch begin at most; see `DFlashWorkerBase.launch_round`."""
    return [req.kv_committed_len + ahead for req in batch.reqs]
