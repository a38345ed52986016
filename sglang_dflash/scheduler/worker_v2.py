"""DFlashWorkerV2: rounds launched ahead of their results, for a scheduler that overlaps.

While a round runs, the scheduler prepares and launches the next and only then looks at the result.
What the host needs it knows as upper bounds; what it does not know stays on the device
(`RequestState`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_dflash.device_waits import Awaited
from sglang_dflash.round.linear_states import RoundStates
from sglang_dflash.round.run import Finish
from sglang_dflash.scheduler.base import DFlashWorkerBase
from sglang_dflash.scheduler.draft_input import DFlashDraftInput
from sglang_dflash.scheduler.ending import leave_out_ending, waits_for_history
from sglang_dflash.scheduler.flight import Flight
from sglang_dflash.scheduler.order import Order
from sglang_dflash.scheduler.trust import begin_anew, choose_masks, go_back

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ModelWorkerBatch, Req, ScheduleBatch

# Why an overlapped round, or its draws, waited for the result of the one before.
SLOTS, HISTORY = "slots", "history"


@dataclass
class RoundInFlight(GenerationBatchResult):
    """What the scheduler looks at when the next round is launched.

    Attributes:
        batch: whose tensors are read until the result is there.
    """

    batch: ModelWorkerBatch | None = None

    def copy_to_cpu(self, return_logprob: bool) -> None:
        super().copy_to_cpu(return_logprob)
        self.copy_done = Awaited(self.copy_done)


class DFlashWorkerV2(DFlashWorkerBase):
    """Runs target and draft model for a scheduler that overlaps.

    A round is four calls of the scheduler, in this order: must_wait → reserve (`DFlashDraftInput`) →
    round (`forward_batch_generation`) → commit (`resolve`), the last one when the next is launched.
    """

    def __init__(self, *args, **ranks):
        super().__init__(*args, **ranks)
        self.flight, self._late = Flight(), False
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

    def note_round(self, boarded: int, prompt_rows: int, takes: float | None) -> None:
        apart = boarded < prompt_rows
        self.pace.launch(None if apart else boarded > 0)
        self.flight.launch(None if apart or self._late else takes)
        self.order.launched(None if apart else takes, boarded > 0)

    def note_prompts(self) -> None:
        self.order.launched(None)

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
        """Launches a prefill, or one round over a decode batch; waits for neither.

        Where draws need all earlier tokens on the host, the scheduler looks at the pending result before it has
        the rest of the round launched (`delay_sample_func`), while the target runs.
        """
        if batch.forward_mode.is_extend():
            begin_anew(batch.reqs)
        else:
            self._trust(batch.reqs)
        self._late = late = waits_for_history(batch.reqs)
        for req in batch.reqs:
            req.results_in_flight = getattr(req, "results_in_flight", 0) + 1
            req.host_waits = late and self._server_args.enable_hierarchical_cache
        if batch.forward_mode.is_extend():
            result = self.prefill(batch)
            result.next_draft_input = self._next_input(batch, 1)
            self.note_launched()
            return result

        # The round before this one may still be running.
        states = self.states_of(batch)
        finish = self.launch_round(batch, ahead=batch.spec_info.in_flight)
        next_input = self._next_input(batch, self.launched_width)
        launched = RoundInFlight(next_draft_input=next_input, batch=batch)
        rest = partial(self._launch_rest, launched, finish, states)
        if late:
            self.metrics.fell_back(HISTORY)
            launched.delay_sample_func = rest
            return launched
        return rest()

    def _next_input(self, batch: ModelWorkerBatch, in_flight: int) -> DFlashDraftInput:
        """Of the round after what was just launched, which commits at most so many tokens."""
        return DFlashDraftInput(self.width, in_flight, new_seq_lens=batch.seq_lens)

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
        """Commits a round to its requests, now that its result is on the host; the tokens of each.

        Those that took none and go on leave `batch`, a copy that the scheduler made for its result: there is nothing
        for it to do about them. Those that have ended come first, so that their clients can ask again soonest.
        """
        _landed(batch.reqs)
        self.pace.landed()
        self.flight.landed()
        lengths = result.accept_lens
        tokens = result.next_token_ids.view(len(lengths), -1)
        taken = self.commit(batch.reqs, tokens, lengths, result.logits_output, result.expected)
        result.num_rounds = sum(map(bool, taken))
        result.num_accepted_tokens = sum(map(len, taken)) - result.num_rounds
        seen = [
            (req, tokens)
            for req, tokens in zip(batch.reqs, taken, strict=True)
            if tokens or req.finished() or req.is_retracted
        ]
        seen.sort(key=lambda each: not each[0].finished())
        for req, tokens in takewhile(lambda each: each[0].finished(), seen):
            if tokens:
                self.order.ended(req.spec_verify_ct)
        batch.reqs, taken = [req for req, _ in seen], [tokens for _, tokens in seen]
        result.accept_length_per_req_cpu = [len(tokens) - 1 for tokens in taken]
        return taken

    def first_tokens(self, reqs: Sequence[Req], tokens: list[int]) -> list[int]:
        _landed(reqs)
        return super().first_tokens(reqs, tokens)


def _landed(reqs: Iterable[Req]) -> None:
    """A result of these requests is on the host."""
    for req in reqs:
        req.results_in_flight -= 1
