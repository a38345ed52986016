"""Requests that come, are answered and leave, served in steps whose times were measured on an H200.

What a planner gives users can be seen here without a GPU: no model runs, but drafts are as likely to be right as they
say, passes take what the table of costs has for them, and the host takes as long as a scheduler's thread did there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from pydantic import TypeAdapter

from sglang_dflash.round.costs import Costs, Staircase, Told
from sglang_dflash.round.prompt_graphs import PromptGraphs
from sglang_dflash.scheduler.choices import NARROW, Load, Plan
from sglang_dflash.scheduler.order import Order
from sglang_dflash.scheduler.pace import Pace
from sglang_dflash.scheduler.plan import BestRows
from sglang_dflash.scheduler.riding import Riding

WIDTH = 16
PROMPT, CONTEXT = 50, 120  # tokens: of a prompt, and of a request in the middle of its answer
_HTTP = (
    3.0  # milliseconds until a client has its last tokens and its next prompt is with the scheduler
)
_CHOSEN = 1.5  # before a step ends, the next one is chosen
_DRAFTS = 1.2  # log-odds by which drafts of one text differ
_SLOWDOWN = 0.5  # as `--speculative-dflash-prompt-slowdown` has it
_STEPS = 32  # of which the planner knows the host's times, as in `Pace`


@cache
def h200() -> Costs:
    """Of Qwen3-8B's shape with a drafter of five layers in FP8, as `/server_info` of `9bbf683` tells them."""
    told = (Path(__file__).parent / "h200_costs.json").read_bytes()
    return Costs.from_dict(TypeAdapter(Told).validate_json(told))


def _graphs() -> PromptGraphs:
    """What prompts and blocks run in there, as far as it has to be known for how many rows of prompts there is time."""
    graphs = object.__new__(PromptGraphs)
    graphs.sizes, graphs.passes = h200().ragged.sizes, h200().ragged
    graphs.inputs = SimpleNamespace(most=1 << 10)
    return graphs


@dataclass(frozen=True)
class Drafter:
    """Of which drafts are right as often as they say, some texts easier than others.

    Attributes:
        ease: log-odds that the first draft is right, of a text as most are.
        falls: by how much they are less for each draft that follows.
        texts: by how much texts differ.
    """

    ease: float
    falls: float
    texts: float

    def drafts(self, random: np.random.Generator, requests: int) -> tuple[np.ndarray, np.ndarray]:
        """Chances that a draft is accepted and all before it, and whether that is so: [bs, drafts] each."""
        text = random.normal(self.ease, self.texts, (requests, 1))
        odds = text + random.normal(0.0, _DRAFTS, (requests, WIDTH - 1))
        odds -= self.falls * np.arange(WIDTH - 1)
        right = 1 / (1 + np.exp(-odds))
        accepted = random.random(right.shape) < right
        return right.cumprod(axis=1), accepted.cumprod(axis=1)


# By the tokens that a step accepts of whole blocks; of narrower ones they accept what was measured, too.
BUNDLED = Drafter(3.1, 0.121, 0.617)
DRAFTERS = {
    6.5: Drafter(2.655, 0.121, 0.617),
    4.0: Drafter(1.912, 0.322, 1.269),
    2.5: Drafter(0.414, 0.005, 0.262),
}


@dataclass(frozen=True)
class Host:
    """Milliseconds of a step: always, for each request, for prompts at all, and for each of them; of each further round
    in a step, always and for each request."""

    step: float = 1.5
    request: float = 0.04
    prompts: float = 2.5
    prompt: float = 1.0
    further: float = 0.5
    further_request: float = 0.015

    def takes(self, random: np.random.Generator, requests: int, prompts: int) -> float:
        took = self.step + self.request * requests + bool(prompts) * self.prompts
        return (took + self.prompt * prompts) * random.lognormal(0.0, 0.25)

    def takes_further(self, requests: int) -> float:
        return self.further + self.further_request * requests


class AllRows(BestRows):
    """A server whose blocks have one width, and all of whose rows are verified."""

    def __init__(self, width: int, costs: Costs):
        draft = costs.draft
        made = {w: stairs.at(256) for w, stairs in {**costs.narrow, WIDTH: draft}.items()}
        known = sorted(made)
        part = float(np.interp(width, known, [made[w] for w in known])) / made[WIDTH]
        # Of few requests blocks of all widths are drafted in the same time.
        times = [max(draft.times[0], time * part) for time in draft.times]
        super().__init__(WIDTH, replace(costs, narrow={width: Staircase(draft.sizes, times)}))
        self._all = width

    def plan(self, load: Load) -> Plan:
        if self._all == WIDTH:
            return Plan(WIDTH)
        return Plan(self._all, load.requests * self._all, NARROW)

    def next(self, load: Load) -> Plan:
        return self.plan(load)


@dataclass
class Served:
    """What clients got."""

    tokens: int = 0
    milliseconds: float = 0.0
    steps: int = 0
    requests: int = 0  # in all steps together
    queued: int = 0  # prompts that were left behind, likewise
    accepted: int = 0
    rounds: int = 0
    waited: list[float] = field(default_factory=list)  # for the first token

    @property
    def tokens_s(self) -> float:
        return 1e3 * self.tokens / self.milliseconds

    @property
    def accept_length(self) -> float:
        return self.accepted / self.requests


class Traffic:
    """A closed loop: clients that ask again as soon as they have their answer."""

    def __init__(self, clients: int, drafter: Drafter, answer: int, host: Host, seed: int = 0):
        """
        Args:
            answer: tokens of an answer, in the mean.
        """
        self._random = np.random.default_rng(seed)
        self._drafter, self._answer, self._host = drafter, answer, host
        # When those that wait have asked, and rows of their prompts that are left.
        self._asked = [(0.0, PROMPT)] * clients
        self._left = np.zeros(0, dtype=np.int64)  # tokens of those that run
        self._now = 0.0

    def serve(
        self, planner: Callable[[Pace], BestRows], steps: int, several: bool = False
    ) -> Served:
        """So many steps, of which the first fifth is not counted.

        Args:
            several: whether a step may have several rounds.
        """
        pace = Pace(SimpleNamespace(world_size=1))
        took: tuple[deque[float], deque[float]] = (deque(maxlen=_STEPS), deque(maxlen=_STEPS))
        plans, warm = planner(pace), steps // 5
        self._order = Order("cuda", pace) if several else None
        runner = SimpleNamespace(prompt_graphs=_graphs())
        self._riding = Riding(_SLOWDOWN, runner, plans, pace)
        self._step(plans, pace, took, Served())
        for _ in range(warm):
            self._step(plans, pace, took, Served())
        served, begin = Served(steps=steps - warm), self._now
        for _ in range(served.steps):
            self._step(plans, pace, took, served)
        served.milliseconds = self._now - begin
        return served

    def _step(
        self, plans: BestRows, pace: Pace, took: tuple[deque[float], ...], served: Served
    ) -> None:
        new, rows = self._board(max(self._now - _CHOSEN, 0.0), served)
        requests, device = len(self._left), 0.0
        load, made = Load(requests, CONTEXT * requests, rows), []
        if requests:
            if self._order is not None and not rows:
                rounds = self._order.rounds(lambda n: plans.promise(load._replace(rounds=n)))
                load = load._replace(rounds=rounds)
            made = load.rounds * [plans.next(load)]
            device = load.rounds * plans.milliseconds(made[0], load)
        elif rows:
            device = h200().passes(len(new)).at(rows)
        host = self._host.takes(self._random, requests, len(new))
        took[rows > 0].append(host)
        pace.alone, pace.with_prompts = np.array(took[0]), np.array(took[1])
        further = self._host.takes_further(requests)
        if load.rounds > 1:
            pace.further = np.array([further])
        self._now += max(host + (load.rounds - 1) * further, device)
        served.rounds += load.rounds
        for plan in made:
            self._accept(plans, plan, served)
        self._leave()
        lengths = self._random.gamma(4, self._answer / 4, len(new)).astype(np.int64)
        self._left = np.concatenate([self._left, np.maximum(lengths, 8) - 1])
        served.tokens += len(new)
        served.waited += [self._now - asked for asked in new]

    def _board(self, chosen: float, served: Served) -> tuple[list[float], int]:
        """When those had asked whose prompts are through with this step, and rows of prompts that it has."""
        here = sorted(each for each in self._asked if each[0] <= chosen)
        come = [each for each in self._asked if each[0] > chosen]
        running = SimpleNamespace(finished=lambda: False, lora_id=None)
        scheduler = SimpleNamespace(
            running_batch=SimpleNamespace(reqs=[running] * len(self._left)),
            waiting_queue=[
                SimpleNamespace(origin_input_ids=range(rows), output_ids=()) for _, rows in here
            ],
            chunked_req=None,
            page_size=1,
            truncation_align_size=None,
        )
        room = free = self._riding.chunk_size(scheduler, h200().ragged.sizes[-1])
        new: list[float] = []
        while here and here[0][1] <= free:
            asked, rows = here.pop(0)
            new.append(asked)
            free -= rows
        if here:
            here[0] = (here[0][0], here[0][1] - free)
            free = 0
        self._asked = here + come
        served.queued += len(here)
        return new, room - free

    def _accept(self, plans: BestRows, plan: Plan, served: Served) -> None:
        """Of requests that have ended meanwhile a round is in vain."""
        chances, right = self._drafter.drafts(self._random, len(self._left))
        drafts = plan.width - 1
        verified = np.ones((len(self._left), drafts), dtype=bool)
        if drafts and plan.total is not None:
            share = plan.total - len(self._left)
            order = (-chances[:, :drafts]).argsort(axis=None, kind="stable")
            verified.flat[order[share:]] = False
        lengths = 1 + (right[:, :drafts] * verified).sum(axis=1).astype(np.int64)
        if drafts:
            plans.note(chances[:, :drafts].astype(np.float32))
        runs = self._left > 0
        served.requests += int(runs.sum())
        served.accepted += int(lengths[runs].sum())
        served.tokens += int(np.minimum(lengths, self._left)[runs].sum())
        self._left = self._left - lengths

    def _leave(self) -> None:
        """Those whose answers are whole, who ask again."""
        stays = self._left > 0
        ended = int((~stays).sum())
        if self._order is not None:
            for _ in range(ended):
                self._order.ended(1, self._answer)
        waits = self._random.exponential(1.0, ended)
        self._asked += [(self._now + _HTTP + wait, PROMPT) for wait in waits]
        self._left = self._left[stays]
