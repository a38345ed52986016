"""DFlashWorkerV2: rounds launched ahead of their results, for a scheduler that overlaps.

While a round runs, the scheduler prepares and launches the next and only then looks at the result.
What the host needs it knows as upper bounds; what it does not know stays on the device
(`RequestState`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, takewhile
from typing import TYPE_CHECKING

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_dflash.device_waits import Awaited
from sglang_dflash.round.adapter_buffers import has_adapters
from sglang_dflash.round.linear_states import RoundStates
from sglang_dflash.round.run import Finish, RoundResult
from sglang_dflash.scheduler.base import DFlashWorkerBase
from sglang_dflash.scheduler.choices import PROBE, Load, Plan, Promise
from sglang_dflash.scheduler.draft_input import DFlashDraftInput
from sglang_dflash.scheduler.ending import leave_out_ending, waits_for_history
from sglang_dflash.scheduler.flight import Flight
from sglang_dflash.scheduler.order import Order
from sglang_dflash.scheduler.several import may_be_several, with_slots
from sglang_dflash.scheduler.trust import begin_anew, choose_masks, go_back

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import ModelWorkerBatch, Req, ScheduleBatch

# Why an overlapped round, or its draws, waited for the result of the one before.
SLOTS, HISTORY = "slots", "history"


@dataclass(frozen=True)
class Copied:
    """Of a round that is not the last one of its step, on the host once the step's result is.

    Attributes:
        tokens, lengths: as in `Accepted`.
        expected: as in `RoundResult`.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    expected: torch.Tensor | None

    @classmethod
    def of(cls, result: RoundResult) -> Copied:
        """On its way, before another round writes to the same memory."""
        tokens, lengths = result.accepted.tokens, result.accepted.lengths
        tokens, lengths = (each.to("cpu", non_blocking=True) for each in (tokens, lengths))
        return cls(tokens, lengths, result.expected)


@dataclass
class RoundInFlight(GenerationBatchResult):
    """What the scheduler looks at when the next round is launched.

    Attributes:
        batch: whose tensors are read until the result is there.
        earlier: rounds of the same step before this one.
        launching: seconds in which the host launched all but the first of them.
    """

    batch: ModelWorkerBatch | None = None
    earlier: list[Copied] = field(default_factory=list)
    launching: float = 0.0

    def copy_to_cpu(self, return_logprob: bool) -> None:
        super().copy_to_cpu(return_logprob)
        self.copy_done = Awaited(self.copy_done)


class DFlashWorkerV2(DFlashWorkerBase):
    """Runs target and draft model for a scheduler that overlaps.

    A round is four calls of the scheduler, in this order: must_wait → reserve (`DFlashDraftInput`) →
    round (`forward_batch_generation`) → commit (`resolve`), the last one when the next is launched.
    Where the host is the slower one, each of them is for several rounds.
    """

    def __init__(self, *args, **ranks):
        super().__init__(*args, **ranks)
        self.flight, self._late = Flight(), False
        # Tokens that rounds of the present step behind its first may run; width of the last blocks.
        self._further, self._width = 0, self.width
        self.order = Order(self._server_args.device, self.pace)
        if self.linear_states is not None:
            self.linear_states.hand_on_in_order()

    @property
    def draft_worker(self) -> DFlashWorkerV2:
        """SGLang looks for the draft model runner at `draft_worker.draft_runner`."""
        return self

    @property
    def draft_runner(self):
        return self.model_runner

    def note_launched(self) -> None:
        """All of a prefill or a round is launched."""
        if self.linear_states is not None:
            self.linear_states.launched()

    def note_round(self, plan: Plan, boarded: int, prompt_rows: int, takes: float | None) -> None:
        apart = boarded < prompt_rows
        self.step_rounds = min(self.step_rounds, (self.width + self._further) // plan.width)
        if prompt_rows or self._late or plan.reason == PROBE:
            self.step_rounds = 1
        self.pace.launch(None if apart else boarded > 0)
        unknown = apart or self._late or takes is None
        self.flight.launch(None if unknown else takes * self.step_rounds)
        self.order.launched(None if apart else takes, boarded > 0, self.step_rounds)

    def note_prompts(self, batch: ModelWorkerBatch) -> None:
        self.order.launched(self.rounds.milliseconds_of(batch))

    def choose_rounds(self, batch: ScheduleBatch) -> tuple[int, int]:
        """How many the next step has, over a decode batch for which slots are about to be reserved.

        Returns:
            It, and tokens that those behind the first may run.
        """
        if self.riding.boards or self.linear_states is not None:
            return 1, 0
        rounds = self.order.rounds(partial(self._promise, batch.reqs))
        if rounds == 1 or not may_be_several(batch.reqs):
            return 1, 0
        rounds = with_slots(batch, rounds, self._width)
        return rounds, (rounds - 1) * self._width

    def _promise(self, reqs: Sequence[Req], rounds: int) -> Promise | None:
        keys = sum(req.kv_committed_len for req in reqs)
        adapted = has_adapters([req.lora_id for req in reqs])
        return self.planner.promise(Load(len(reqs), keys, adapted=adapted, rounds=rounds))

    def must_wait(self, batch: ScheduleBatch) -> bool:
        """Whether the pending result must be seen before the next round is reserved and launched.

        So it is where the pool lacks slots for two rounds: its requests get slots for one round once that result
        is known, and none is retracted that this would have served.

        Args:
            batch: the next decode batch. Requests for which a round would be in vain leave it; nothing is in flight
                for it if the answer is yes.
        """
        leave_out_ending(batch)
        if not batch.reqs or batch.check_decode_mem():
            return False
        batch.spec_info = replace(batch.spec_info, in_flight=0)
        self.metrics.fell_back(SLOTS)
        return True

    def forward_batch_generation(self, batch: ModelWorkerBatch) -> GenerationBatchResult:
        """Launches a prefill, or a step's rounds over a decode batch; waits for neither.

        Where draws need all earlier tokens on the host, the scheduler looks at the pending result before it has
        the rest of the round launched (`delay_sample_func`), while the target runs.
        """
        if batch.forward_mode.is_extend():
            begin_anew(batch.reqs)
        else:
            self._trust(batch.reqs)
        self._late = late = waits_for_history(batch.reqs)
        for req in batch.reqs:
            req.host_waits = late and self._server_args.enable_hierarchical_cache
        if batch.forward_mode.is_extend():
            _launched(batch.reqs)
            result = self.prefill(batch)
            result.next_draft_input = self._next_input(batch, 1)
            self.note_launched()
            return result

        # The round before this one may still be running.
        states, spec = self.states_of(batch), batch.spec_info
        self.step_rounds, self._further = spec.rounds, spec.further
        finish = self.launch_round(batch, spec.in_flight)
        launched = RoundInFlight(batch=batch)
        finish, tokens = self._launch_further(launched, finish, spec.in_flight)
        self.metrics.stepped(self.step_rounds)
        _launched(batch.reqs, self.step_rounds)
        launched.next_draft_input = self._next_input(batch, tokens)
        rest = partial(self._launch_rest, launched, finish, states)
        if late:
            self.metrics.fell_back(HISTORY)
            launched.delay_sample_func = rest
            return launched
        return rest()

    def _launch_further(
        self, launched: RoundInFlight, finish: Finish, ahead: int
    ) -> tuple[Finish, int]:
        """All rounds of a step but the last one's rest, which is given.

        Args:
            finish: launches the rest of the first one.
            ahead: as of `launch_round`.

        Returns:
            It, and how many tokens the rounds may commit.
        """
        tokens = self._width = self.launched.plan.width
        if self.step_rounds > 1:
            begin = time.perf_counter()
            for _ in range(1, self.step_rounds):
                launched.earlier.append(Copied.of(finish()))
                finish = self.launch_again(ahead + tokens)
                tokens += self._width
            launched.launching = time.perf_counter() - begin
            self.pace.more(launched.launching)
        return finish, tokens

    def _next_input(self, batch: ModelWorkerBatch, in_flight: int) -> DFlashDraftInput:
        """Of the round after what was just launched, which commits at most so many tokens."""
        return DFlashDraftInput(
            self.width,
            in_flight,
            new_seq_lens=batch.seq_lens,
            choose_rounds=self.choose_rounds,
        )

    def _trust(self, reqs: Sequence[Req]) -> None:
        """Before a round: which requests have masks in it, and where those that have strayed go on."""
        constrained = [req for req in reqs if req.grammar is not None]
        if constrained:
            # Where all rows are drawn they are all masked, and recurrent states do not go back to a token.
            asked = any(req.return_logprob or req.return_hidden_states for req in reqs)
            asked |= self._server_args.enable_nan_detection
            choose_masks(constrained, asked or self.linear_states is not None)
            go_back(constrained, self.parts.state)

    def _launch_rest(
        self, launched: RoundInFlight, finish: Finish, states: RoundStates | None
    ) -> RoundInFlight:
        """What a round gives, filled in."""
        result = finish()
        if states is not None:
            accepted = result.accepted
            states.keep(accepted.lengths, accepted.tokens.shape[1], begins=result.begins)
        self.note_launched()
        launched.logits_output = result.output or LogitsProcessorOutput(next_token_logits=None)
        launched.next_token_ids = result.accepted.tokens.flatten()
        launched.accept_lens = result.accepted.lengths
        launched.expected = result.expected
        launched.can_run_cuda_graph = self.replayed(result)
        return launched

    def resolve(self, result: GenerationBatchResult, batch: ScheduleBatch) -> list[list[int]]:
        """Commits a step's rounds to their requests, now that their result is on the host; the tokens of each.

        Those that took none and go on leave `batch`, a copy that the scheduler made for its result: there is nothing
        for it to do about them. Those that have ended come first, so that their clients can ask again soonest.
        """
        self.pace.landed()
        self.flight.landed()
        earlier = self._commit_earlier(result, batch.reqs) if result.earlier else ()
        _landed(batch.reqs)
        lengths = result.accept_lens
        tokens = result.next_token_ids.view(len(lengths), -1)
        taken = self.commit(batch.reqs, tokens, lengths, result.logits_output, result.expected)
        rounds = [*earlier, taken]
        result.num_rounds = sum(bool(tokens) for taken in rounds for tokens in taken)
        taken = [list(chain(*tokens)) for tokens in zip(*rounds, strict=True)] if earlier else taken
        result.num_accepted_tokens = sum(map(len, taken)) - result.num_rounds
        seen = [
            (req, tokens)
            for req, tokens in zip(batch.reqs, taken, strict=True)
            if tokens or req.finished() or req.is_retracted
        ]
        seen.sort(key=lambda each: not each[0].finished())
        for req, tokens in takewhile(lambda each: each[0].finished(), seen):
            if tokens:
                self.order.ended(req.spec_verify_ct, len(req.output_ids))
        batch.reqs, taken = [req for req, _ in seen], [tokens for _, tokens in seen]
        result.accept_length_per_req_cpu = [len(tokens) - 1 for tokens in taken]
        return taken

    def _commit_earlier(self, result: RoundInFlight, reqs: Sequence[Req]) -> list[list[list[int]]]:
        """What each request took of each round of a step before the last one."""
        begin, taken = time.perf_counter(), []
        for each in result.earlier:
            _landed(reqs)
            running = [req for req in reqs if not req.finished()]
            taken.append(self.commit(reqs, each.tokens, each.lengths, None, each.expected))
            for req in running:
                if req.finished():
                    req.last_was_draft = True  # a round behind has run its last token
        took = time.perf_counter() - begin
        self.pace.more(took)
        self.pace.took_further((took + result.launching) / len(result.earlier))
        return taken

    def first_tokens(self, reqs: Sequence[Req], tokens: list[int]) -> list[int]:
        _landed(reqs)
        return super().first_tokens(reqs, tokens)


def _launched(reqs: Iterable[Req], results: int = 1) -> None:
    """So many results of these requests are on their way."""
    for req in reqs:
        req.results_in_flight = getattr(req, "results_in_flight", 0) + results


def _landed(reqs: Iterable[Req]) -> None:
    """A result of these requests is on the host."""
    for req in reqs:
        req.results_in_flight -= 1
