"""Rounds without masks, in the order in which an overlapping scheduler launches and resolves them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from transformers import AutoTokenizer

from sglang_dflash.drawing.grammar import allowed, is_allowed, refuses_what_it_masks
from sglang_dflash.drawing.not_finite import NOT_FINITE
from sglang_dflash.round.state import RequestState
from sglang_dflash.scheduler.choices import Plan
from sglang_dflash.scheduler.draft_input import DFlashDraftInput
from sglang_dflash.scheduler.ending import ends_in_flight
from sglang_dflash.scheduler.flight import Flight
from sglang_dflash.scheduler.order import Order
from sglang_dflash.scheduler.pace import Pace
from sglang_dflash.scheduler.results import commit_round, count_last_token
from sglang_dflash.scheduler.trust import begin_anew, choose_masks, go_back, may_stray
from sglang_dflash.scheduler.worker_v2 import HISTORY, DFlashWorkerV2
from tests.server.harness import TARGET

WIDTH, PROMPT = 4, [5, 6, 7]
PATTERNS = ("[a-z ,]+", "(the|many) [0-9]{1,30}", '\\{"a": ("[a-z]{20,}"|[0-9]{9,})\\}')
DECODES = SimpleNamespace(is_extend=lambda: False)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def compiled(tokenizer) -> Callable:
    """Grammars of patterns, each at its beginning."""
    backend = XGrammarGrammarBackend(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    make = cache(backend.dispatch_regex)
    return lambda pattern: make(pattern).copy()


def masked(grammar, vocabulary: int) -> set[int]:
    """Tokens that a mask leaves; all of them after the grammar's end."""
    if grammar.is_terminated():
        return set(range(vocabulary))
    mask = grammar.allocate_vocab_mask(vocabulary, 1, "cpu").fill_(-1)
    grammar.fill_vocab_mask(mask, 0)
    return {token for token in range(vocabulary) if is_allowed(mask[0].numpy(), token)}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_refused_is_what_is_masked(pattern: str, compiled, tokenizer) -> None:
    """Every token of the vocabulary, special ones, too, at every place of a walk."""
    grammar, rng, vocabulary = compiled(pattern), random.Random(1), len(tokenizer)
    assert refuses_what_it_masks(grammar)
    for _ in range(12):
        left = masked(grammar, vocabulary)
        taken = {token for token in range(vocabulary) if allowed(grammar, [token])}
        assert taken == left == masked(grammar, vocabulary)  # and it is where it was
        if grammar.is_terminated():
            break
        grammar.accept_token(rng.choice(sorted(left)))


def test_how_many_are_allowed(compiled, tokenizer) -> None:
    grammar, end = compiled(PATTERNS[1]), tokenizer.eos_token_id
    ids = tokenizer.encode("the 12", add_special_tokens=False)
    assert allowed(grammar, []) == 0 == allowed(grammar, [end, *ids])
    assert allowed(grammar, [*ids, 3, *ids]) == len(ids)
    assert allowed(grammar, [*ids, end, *ids]) == 2 * len(ids) + 1  # the grammar has ended
    reasons = ReasonerGrammarObject(grammar, think_end_id=end)
    reasons.maybe_init_reasoning(True)
    assert allowed(reasons, [9, 9, end, *ids, 3]) == 3 + len(ids)
    assert reasons.tokens_after_think_end == -1


class Target:
    """A target that prefers some token or other after each text, and what it has written to KV slots."""

    def __init__(self, seed: int, vocabulary: int, state: RequestState):
        self.seed, self.vocabulary, self.state = seed, vocabulary, state
        self.slots: dict[int, int] = {}
        self.rng = random.Random(seed)

    def prefers(self, text: list[int], among: set[int]) -> int:
        order = random.Random(f"{self.seed} {text}")
        ranks = [order.random() for _ in range(self.vocabulary)]
        return max(among, key=ranks.__getitem__)

    def round(self, req: Req) -> Callable:
        """Opens a round from what the device knows, and gives what launches the rest."""
        start, bonus = int(self.state.lengths[0]), int(self.state.bonus_tokens[0])
        text = [*(self.slots[i] for i in range(start)), bonus]
        length, masks = self.rng.randint(1, WIDTH), not req.unmasked

        def finish():
            tokens, left = [], set(range(self.vocabulary))
            for _ in range(length):
                grammar = req.grammar.copy()
                for token in [*req.output_ids, *tokens] if masks else []:
                    try:
                        grammar.accept_token(token)
                    except ValueError:  # behind a token that was not allowed: nobody will take it
                        break
                among = masked(grammar, self.vocabulary) if masks else left
                tokens.append(self.prefers(text + tokens, among))
            written = [bonus, *tokens[:-1], *[0] * (WIDTH - length)]  # rejected drafts, too
            self.slots.update(enumerate(written, start=start))
            rows = torch.tensor([tokens + [0] * (WIDTH - length)]), torch.tensor([length])
            self.state.advance(torch.tensor([0]), *rows, torch.tensor(tokens[-1:]))
            accepted = SimpleNamespace(tokens=rows[0], lengths=rows[1])
            return SimpleNamespace(output=None, accepted=accepted, expected=None, fell_back=None)

        return finish


class World:
    """One request, a scheduler's loop around the real worker, and what it counts."""

    def __init__(self, seed: int, pattern: str, compiled, tokenizer, limit: int = 40):
        params = SamplingParams(temperature=0, max_new_tokens=limit)
        params.normalize(None)
        ends = {tokenizer.eos_token_id}
        self.req = Req("id", "", PROMPT, params, eos_token_ids=ends, vocab_size=len(tokenizer))
        self.req.grammar, self.req.req_pool_idx = compiled(pattern), 0
        self.req.kv_committed_len, self.req.kv_allocated_len = len(PROMPT), 200
        state = RequestState(1, "cpu")
        self.target = Target(seed, len(tokenizer), state)
        self.target.slots.update(enumerate(PROMPT))
        self.fell_back: list[str] = []
        self.strayed = self.launched = 0
        self.left = False
        self.worker = self._worker(state)
        first = self.target.prefers(PROMPT, masked(self.req.grammar, len(tokenizer)))
        begin_anew([self.req])
        self._take_first(first)
        state.start(torch.tensor([0]), torch.tensor([first]), torch.tensor([len(PROMPT)]))

    def _take_first(self, token: int) -> None:
        self.req.output_ids.append(token)
        self.req.check_finished()
        self.req.grammar.accept_token(token)

    def _worker(self, state: RequestState) -> DFlashWorkerV2:
        made = object.__new__(DFlashWorkerV2)
        made.width, made.linear_states = WIDTH, None
        made.pace, made.flight = Pace(SimpleNamespace(world_size=1)), Flight()
        made.order = Order("cpu", made.pace)
        made.rounds = SimpleNamespace(graphs=object())
        made.metrics = SimpleNamespace(fell_back=self.fell_back.append, stepped=lambda rounds: None)
        made.parts = SimpleNamespace(state=state)
        made._server_args = SimpleNamespace(
            enable_hierarchical_cache=False, enable_nan_detection=False
        )

        def launch_round(batch, ahead: int):
            made.launched = SimpleNamespace(plan=Plan(WIDTH))
            made.note_round(made.launched.plan, 0, 0, None)
            return self.target.round(batch.reqs[0])

        made.launch_round = launch_round

        def commit(reqs, tokens, lengths, output, expected):
            committed = commit_round(reqs, tokens, lengths, output)
            self.strayed += committed.strayed
            return committed.taken

        made.commit = commit
        return made

    def step(self, pending):
        """One turn of the release's loop: launch, look at the result before, launch the draws."""
        launched = None
        self.left |= self.req.finished() or bool(pending and ends_in_flight(self.req))
        if not self.left:  # who leaves the batch does not come back
            batch = SimpleNamespace(
                reqs=[self.req],
                seq_lens=None,
                forward_mode=DECODES,
                spec_info=DFlashDraftInput(WIDTH, WIDTH),
            )
            launched, self.launched = self.worker.forward_batch_generation(batch), self.launched + 1
        if pending is not None:
            batch = SimpleNamespace(reqs=[self.req])
            taken = self.worker.resolve(pending, batch)
            assert len(taken) == len(batch.reqs) and all(taken) or self.req.finished()
        if launched is not None and launched.delay_sample_func is not None:
            launched.delay_sample_func()
        return launched

    def run(self, abort_after: int | None = None) -> None:
        pending, steps = None, 0
        while not self.req.finished() or pending is not None:
            if steps == abort_after and not self.req.finished():
                self.req.to_finish = FINISH_ABORT()
            pending, steps = self.step(pending), steps + 1
            if self.req.finished() and not hasattr(self, "committed"):
                count_last_token(self.req)  # as the release lets go of its slots
                self.committed = self.req.kv_committed_len
            assert steps < 200, "the request was lost"

    def check_slots(self) -> None:
        """What counts as committed holds the K/V of the request's own tokens."""
        text = [*PROMPT, *self.req.output_ids]
        assert [self.target.slots[i] for i in range(self.committed)] == text[: self.committed]


def plain(world: World, pattern: str, compiled) -> list[int]:
    """What decoding with a mask for every token gives."""
    params, vocabulary = world.req.sampling_params, world.target.vocabulary
    req = Req(
        "id", "", PROMPT, params, eos_token_ids=world.req.eos_token_ids, vocab_size=vocabulary
    )
    req.grammar = compiled(pattern)
    while not req.finished():
        text = [*PROMPT, *req.output_ids]
        token = world.target.prefers(text, masked(req.grammar, vocabulary))
        req.output_ids.append(token)
        req.check_finished()
        req.grammar.accept_token(token)
    return req.output_ids


@pytest.mark.parametrize("pattern", PATTERNS)
def test_answers_are_those_with_masks(pattern: str, compiled, tokenizer) -> None:
    """However often a request strays, and wherever in a round."""
    strayed = unmasked = 0
    for seed in range(30):
        world = World(seed, pattern, compiled, tokenizer, limit=11 + seed)
        world.run()
        assert world.req.output_ids == plain(world, pattern, compiled)
        world.check_slots()
        strayed += world.strayed
        unmasked += world.launched - world.fell_back.count(HISTORY)
        assert sum(world.req.spec_acceptance_histogram) == world.req.spec_verify_ct
        tokens = 1 + world.req.spec_verify_ct + world.req.spec_accepted_tokens
        assert tokens == len(world.req.output_ids)
    assert strayed >= 20 and unmasked > strayed


@pytest.mark.parametrize("after", range(8))
def test_aborts_end_it(after: int, compiled, tokenizer) -> None:
    """Whatever of its is in flight."""
    for seed in range(20):
        world = World(seed, PATTERNS[0], compiled, tokenizer, limit=60)
        world.run(abort_after=after)
        assert world.req.finished() and may_stray(world.req)
        world.check_slots()


def test_who_does_not_stray_is_never_masked(compiled, tokenizer) -> None:
    world = World(3, r"(.|\n)*", compiled, tokenizer)
    left = set(tokenizer.encode("the many letters of this day", add_special_tokens=False))
    world.target.prefers = lambda text, among: min(left, key=lambda token: (token * len(text)) % 7)
    world.run()
    assert len(world.req.output_ids) == 40 and not world.strayed and not world.fell_back


def test_masks_last_longer_each_time(compiled) -> None:
    params = SamplingParams(temperature=0)
    params.normalize(None)
    req = Req("id", "", PROMPT, params, vocab_size=9)
    req.grammar = compiled(PATTERNS[0])
    lasted = []
    for _ in range(7):
        choose_masks([req], False)
        assert req.unmasked
        req.trust.stray(in_flight=1)
        rounds = 0
        choose_masks([req], False)
        while not req.unmasked:
            choose_masks([req], False)
            rounds += 1
        lasted.append(rounds)
    assert lasted == [4, 8, 16, 32, 64, 64, 64]


def test_who_has_masks_always(compiled) -> None:
    """Whoever asks for more than a likeliest token, whose backend cannot say no, and who shares a round with such."""

    def unmasked(all_of_them: bool = False, grammar=None, **sampling) -> bool:
        params = SamplingParams(**{"temperature": 0} | sampling)
        params.normalize(None)
        req = Req("id", "", PROMPT, params, vocab_size=9)
        req.grammar = grammar or compiled(PATTERNS[0])
        choose_masks([req], all_of_them)
        assert may_stray(req) == req.unmasked
        return req.unmasked

    assert unmasked()
    assert not unmasked(all_of_them=True)
    assert not unmasked(temperature=0.7)
    assert not unmasked(logit_bias={"3": 5.0})
    assert not unmasked(frequency_penalty=0.5)
    assert not unmasked(min_new_tokens=5)
    assert not unmasked(grammar=object())


def test_nan_ends_it_whatever_the_grammar_says(compiled, tokenizer) -> None:
    world = World(1, PATTERNS[0], compiled, tokenizer)
    choose_masks([world.req], False)
    world.req.results_in_flight = 0
    taken = commit_round(
        [world.req], torch.tensor([[NOT_FINITE, 0, 0, 0]]), torch.tensor([1]), None
    )
    assert taken.failed == 1 and world.req.finished() and not taken.strayed


def test_kv_of_a_draft_before_the_stray_token(compiled, tokenizer) -> None:
    """It counts, if the request ends with that draft: the target ran it."""
    the, *_ = tokenizer.encode("the", add_special_tokens=False)
    for block, counted in (([the, the, 3, 3], True), ([the, the], False)):
        world = World(1, PATTERNS[0], compiled, tokenizer, limit=3)
        choose_masks([world.req], False)
        world.req.results_in_flight = 0
        rows = torch.tensor([block + [0] * (WIDTH - len(block))]), torch.tensor([len(block)])
        committed = commit_round([world.req], *rows, None)
        assert committed.taken == [[the, the]] and committed.strayed == counted
        assert world.req.finished()
        count_last_token(world.req)
        assert world.req.kv_committed_len == len(PROMPT) + 2 + counted


def test_a_prefill_forgets_where_it_was_to_go_on(compiled, tokenizer) -> None:
    """A request that was retracted after it had strayed."""
    world = World(1, PATTERNS[0], compiled, tokenizer)
    choose_masks([world.req], False)
    world.req.trust.stray(in_flight=1)
    begin_anew([world.req])
    before = int(world.target.state.lengths[0])
    world.target.state.lengths[0] = 77
    go_back([world.req], world.target.state)
    assert int(world.target.state.lengths[0]) == 77 != before
    choose_masks([world.req], False)
    assert not world.req.unmasked  # it has strayed before
