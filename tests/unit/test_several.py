"""Steps of several rounds: who may have them, slots for them, and what their tokens are once they are all there."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.round.accept import Accepted
from sglang_dflash.round.run import RoundResult
from sglang_dflash.scheduler.choices import PROBE, WHOLE, Plan
from sglang_dflash.scheduler.draft_input import DFlashDraftInput
from sglang_dflash.scheduler.flight import Flight
from sglang_dflash.scheduler.order import Order
from sglang_dflash.scheduler.pace import Pace
from sglang_dflash.scheduler.results import commit_round
from sglang_dflash.scheduler.several import may_be_several, with_slots
from sglang_dflash.scheduler.worker_v2 import DFlashWorkerV2
from tests.unit.test_reserve import admit, world

WIDTH, END = 4, 1
DECODES = SimpleNamespace(is_extend=lambda: False)


def asking(**wants: object) -> SimpleNamespace:
    nothing = dict.fromkeys(("grammar", "custom_logit_processor"))
    nothing |= dict.fromkeys(("return_logprob", "return_hidden_states"), False)
    return SimpleNamespace(**nothing | wants)


@pytest.mark.parametrize(
    "wants",
    [
        {"grammar": "one"},
        {"custom_logit_processor": "one"},
        {"return_logprob": True},
        {"return_hidden_states": True},
    ],
    ids=lambda wants: next(iter(wants)),
)
def test_who_is_to_be_looked_at(wants: dict) -> None:
    assert may_be_several([asking(), asking()])
    assert not may_be_several([asking(), asking(**wants)])


@pytest.mark.parametrize("page", [1, 16])
def test_as_many_as_there_are_slots_for(page: int) -> None:
    """A request of 16 tokens with 8 in flight takes 16 more for a block of 8, and 4 for each further one of 4.

    Those are a quarter of what is left at most.
    """
    batch = world(page, size=160)
    batch.spec_info = DFlashDraftInput(8, in_flight=8)
    admit(batch, prompt=16, limit=90)
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    found = []
    while (free := allocator.available_size()) >= 16:
        found.append((free, with_slots(batch, 4, 4)))
        allocator.alloc(16)
    needs = {1: (0, 4, 8, 12), 16: (0, 16, 16, 16)}[page]
    assert len(found) == 9
    for free, rounds in found:
        left = (free - 16) / 4
        assert rounds == max(i + 1 for i, need in enumerate(needs) if need <= left or not i)


def test_prefixes_make_room() -> None:
    batch = world(1, size=160)
    batch.spec_info = DFlashDraftInput(8, in_flight=8)
    admit(batch, prompt=16, limit=90)
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    allocator.alloc(allocator.available_size())
    assert with_slots(batch, 4, 4) == 1
    batch.tree_cache.evictable_size = lambda: 64
    assert with_slots(batch, 4, 4) == 4


def test_the_step_asks_how_many_rounds_it_has() -> None:
    batch = world(1, size=160)
    req = admit(batch, prompt=16, limit=90)
    batch.spec_info = DFlashDraftInput(8, in_flight=8, choose_rounds=lambda batch: (3, 10))
    assert batch.spec_info.lookahead == 16
    batch.spec_info.prepare_for_decode(batch)
    assert batch.spec_info.rounds == 3 and req.kv_allocated_len == 16 + 8 + 8 + 10


class Device:
    """Has a token for each place, and accepts some drafts of each round."""

    def __init__(self, tokens: list[int], lengths: list[int]):
        self.tokens, self.lengths = tokens, lengths
        self.at = self.rounds = 0
        self.bounds: list[int] = []

    def round(self, bound: int) -> RoundResult:
        assert bound >= self.at
        self.bounds.append(bound)
        length = self.lengths[self.rounds]
        row = (self.tokens[self.at : self.at + length] + [99] * WIDTH)[:WIDTH]
        self.at, self.rounds = self.at + length, self.rounds + 1
        bonus = torch.tensor([row[length - 1]])
        return RoundResult(Accepted(torch.tensor([row]), torch.tensor([length]), bonus))


def served(
    device: Device, rounds: int, reason: str = WHOLE, limit: int = 100
) -> tuple[Req, list[int], DFlashWorkerV2]:
    """A request that is served in steps of so many rounds, launched ahead; what each step gave."""
    params = SamplingParams(max_new_tokens=limit, stop_token_ids=[END])
    params.normalize(None)
    req = Req("id", "", [5, 6, 7], params, vocab_size=200)
    req.req_pool_idx, req.kv_committed_len, req.kv_allocated_len = 0, 3, 200
    worker = object.__new__(DFlashWorkerV2)
    worker.steps = []
    worker.width = worker._width = WIDTH
    worker.linear_states = None
    worker.pace, worker.flight = Pace(SimpleNamespace(world_size=1)), Flight()
    worker.order, worker.rounds = Order("cpu", worker.pace), SimpleNamespace(graphs=object())
    worker._server_args = SimpleNamespace(enable_hierarchical_cache=False)
    worker.metrics = SimpleNamespace(stepped=worker.steps.append)

    def launch(ahead: int):
        return partial(device.round, req.kv_committed_len - 3 + ahead)

    def launch_first(batch: SimpleNamespace, ahead: int):
        plan = Plan(WIDTH, reason=reason)
        worker.launched = SimpleNamespace(plan=plan)
        worker.note_round(plan, 0, 0, None)
        return launch(ahead)

    def commit(reqs, tokens, lengths, output, expected) -> list[list[int]]:
        return commit_round(reqs, tokens, lengths, output).taken

    worker.launch_round, worker.launch_again, worker.commit = launch_first, launch, commit
    given, pending = [], None
    in_flight = 0
    while not req.finished() or pending is not None:
        launched = None
        if not req.finished():
            further = (rounds - 1) * WIDTH
            spec = DFlashDraftInput(WIDTH, in_flight, rounds=rounds, further=further)
            batch = SimpleNamespace(reqs=[req], seq_lens=None, forward_mode=DECODES, spec_info=spec)
            launched = worker.forward_batch_generation(batch)
            in_flight = launched.next_draft_input.in_flight
        if pending is not None:
            batch = SimpleNamespace(reqs=[req])
            before = req.spec_verify_ct
            taken = worker.resolve(pending, batch)
            assert pending.num_rounds == req.spec_verify_ct - before
            assert pending.num_accepted_tokens == sum(map(len, taken)) - pending.num_rounds
            given.append(sum(map(len, taken)))
        pending = launched
    assert req.results_in_flight == 0
    return req, given, worker


def test_tokens_of_a_step() -> None:
    """Those of its rounds, one behind the other; where blocks begin at most the host knows from the widths."""
    tokens = [*range(10, 30), END, *range(40, 80)]
    device = Device(tokens, [1, 4, 2, 3, 4, 1, 4, 4, 4, 4, 4, 4, 4, 4])
    req, given, worker = served(device, rounds=3)
    assert list(req.output_ids) == tokens[: tokens.index(END) + 1]
    assert given == [7, 8, 6, 0]
    assert req.spec_verify_ct == 8 and req.kv_committed_len == 3 + 21
    assert device.bounds[:9] == [0, 4, 8, 12, 16, 20, 7 + 12, 7 + 16, 7 + 20]
    assert len(worker.pace._measured[2]) == 4 and worker.steps == [3] * 4


def test_an_end_before_the_last_round() -> None:
    """With the token behind all drafts, which the next round of the step has run: the prefix cache has its K/V."""
    for ends_at, rounds in ((2, 1), (2, 2), (5, 2)):
        tokens = [10 + i for i in range(40)]
        tokens[ends_at] = END
        device = Device(tokens, [3] * 12)
        req, _, _ = served(device, rounds)
        assert len(req.output_ids) == ends_at + 1
        # That of a round whose step has none behind it nobody has run; others find rounds in flight.
        assert req.last_was_draft == (ends_at == 2 and rounds == 2)


def test_a_probe_is_one_round() -> None:
    tokens = [*range(10, 16), END, *range(40, 80)]
    req, given, _ = served(Device(tokens, [2] * 9), rounds=4, reason=PROBE)
    assert given == [2, 2, 2, 1, 0] and req.spec_verify_ct == 4
