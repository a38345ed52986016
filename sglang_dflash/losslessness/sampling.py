"""Sampling: are the runs of both servers draws from one distribution?

Two arms are compared: speculative with plain runs, and, as the null arm, one half of the plain runs
with the other. A first look at fresh runs discovers with false-discovery rate q; what it discovers
must be discovered again, at q, in runs drawn anew, or it counts as chance.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sglang_dflash.losslessness.client import Client, ask_all, verify_steps
from sglang_dflash.losslessness.permutation import (
    END,
    KINDS,
    combine,
    compare_runs,
    discoveries,
    enough_permutations,
)
from sglang_dflash.losslessness.progress import Progress

DRAWING = "sampling, both servers"  # what progress calls it
COPIES = 8  # runs a request asks for; requests are shuffled, so batches mix prompts and settings

Cell = tuple[int, int]  # prompt, setting
Runs = dict[Cell, np.ndarray]  # [runs, positions] int64
# Prompt, setting, kind, position. Without position: over all of them; without cell: over all of them.
Key = tuple[int | None, int | None, str, int | None]


@dataclass(frozen=True)
class Plan:
    """What is drawn and tested.

    Attributes:
        settings: sampling parameters of each setting.
        runs: of the speculative server in each cell; the plain one gives twice as many.
        positions: tokens of a run at most.
        q: false-discovery rate.
    """

    prompts: list[list[int]]
    settings: list[dict[str, Any]]
    runs: int = 256
    positions: int = 32
    q: float = 0.05
    concurrency: int = 8
    seed: int = 0

    @property
    def cells(self) -> list[Cell]:
        return [(p, s) for p in range(len(self.prompts)) for s in range(len(self.settings))]


@dataclass(frozen=True)
class Discovery:
    """Where the arms differ; see `Key` and `Hypothesis`.

    Attributes:
        adjusted: p after Benjamini and Hochberg.
        token, first, second: the token whose share differs most there, its share in either arm;
            None for all cells together.
        again: adjusted p in fresh runs.
    """

    prompt: int | None
    setting: int | None
    kind: str
    position: int | None
    p: float
    adjusted: float
    token: int | None = None
    first: float | None = None
    second: float | None = None
    again: float | None = None

    @property
    def key(self) -> Key:
        return self.prompt, self.setting, self.kind, self.position


@dataclass(frozen=True)
class Arm:
    """The test of one arm.

    Attributes:
        hypotheses: how many were tested: positions at which no two runs differ have none.
        permutations: the most that were drawn for a hypothesis.
        smallest: the smallest adjusted p.
    """

    name: str
    hypotheses: int
    permutations: int
    smallest: float | None
    q: float
    discoveries: list[Discovery]

    @property
    def confirmed(self) -> list[Discovery]:
        return [d for d in self.discoveries if d.again is not None and d.again <= self.q]

    @property
    def accepted(self) -> bool:
        return not self.confirmed


@dataclass
class Sampling:
    """The outcome of both arms.

    Attributes:
        accept_lengths: tokens a verify step, by setting; None without speculation.
        rounds: verify steps, over all settings.
    """

    plan: Plan
    null: Arm
    test: Arm
    accept_lengths: list[float | None] = field(default_factory=list)
    rounds: int = 0

    @property
    def conclusive(self) -> bool:
        return self.null.accepted and self.test.hypotheses > 0

    @property
    def passed(self) -> bool:
        return self.conclusive and self.test.accepted


Source = Callable[[list[Cell]], tuple[Runs, Runs]]  # fresh runs of both sides of an arm


class Draws:
    """Runs of one server, and the verify steps that they took."""

    def __init__(self, client: Client, plan: Plan):
        self.client, self.plan = client, plan
        self.steps = np.zeros((len(plan.settings), 2), dtype=np.int64)  # rounds, tokens

    def ask(self, request: tuple[Cell, int]) -> list[dict]:
        """So many runs of a cell."""
        (prompt, setting), count = request
        sampling = self.plan.settings[setting] | {"max_new_tokens": self.plan.positions, "n": count}
        answer = self.client.generate(self.plan.prompts[prompt], sampling)
        return [answer] if count == 1 else answer

    def runs(self, requests: list[tuple[Cell, int]], answers: list[list[dict]]) -> Runs:
        """The answers to requests as the runs of their cells."""
        drawn: dict[Cell, list[list[int]]] = {}
        for (cell, _), batch in zip(requests, answers, strict=True):
            drawn.setdefault(cell, []).extend(answer["output_ids"] for answer in batch)
            self.steps[cell[1]] += verify_steps(batch)
        return {cell: padded(ids, self.plan.positions) for cell, ids in drawn.items()}


def draw(
    sides: Sequence[tuple[Draws, int]],
    cells: list[Cell],
    rng: np.random.Generator,
    progress: Progress,
) -> list[Runs]:
    """Independent runs of each cell, so many of each server; the servers draw at the same time."""
    plan = sides[0][0].plan
    asked = []
    for side, runs in sides:
        counts = [COPIES] * (runs // COPIES) + [runs % COPIES] * (runs % COPIES > 0)
        requests = [(cell, count) for cell in cells for count in counts]
        rng.shuffle(requests)
        asked.append((side.ask, requests))
    tokens = plan.positions * len(cells) * sum(runs for _, runs in sides)
    unit = tokens / sum(len(requests) for _, requests in asked)
    answers = ask_all(DRAWING, asked, plan.concurrency, progress, unit)
    made = [
        side.runs(requests, each)
        for (side, _), (_, requests), each in zip(sides, asked, answers, strict=True)
    ]
    return [{cell: runs[cell] for cell in cells} for runs in made]


def padded(answers: list[list[int]], positions: int) -> np.ndarray:
    """[runs, positions] int64, `END` after an answer's last token."""
    runs = np.full((len(answers), positions), END, dtype=np.int64)
    for row, ids in zip(runs, answers, strict=True):
        row[: len(ids)] = ids[:positions]
    return runs


def compare_sampling(
    speculative: Client, plain: Client, plan: Plan, progress: Progress
) -> Sampling:
    """Draws runs of both servers and tests both arms."""
    rng = np.random.default_rng(plan.seed)
    ours, theirs = Draws(speculative, plan), Draws(plain, plan)

    def fresh_null(cells: list[Cell]) -> tuple[Runs, Runs]:
        return halves(*draw([(theirs, 2 * plan.runs)], cells, rng, progress))

    def fresh_test(cells: list[Cell]) -> tuple[Runs, Runs]:
        first, both = draw([(ours, plan.runs), (theirs, 2 * plan.runs)], cells, rng, progress)
        return first, both

    first, both = fresh_test(plan.cells)
    return Sampling(
        plan,
        null=judge_arm("null", *halves(both), fresh_null, plan.q, rng, progress),
        test=judge_arm("test", first, both, fresh_test, plan.q, rng, progress),
        accept_lengths=[float(n / rounds) if rounds else None for rounds, n in ours.steps],
        rounds=int(ours.steps[:, 0].sum()),
    )


def halves(runs: Runs) -> tuple[Runs, Runs]:
    middle = {cell: len(values) // 2 for cell, values in runs.items()}
    return (
        {cell: values[: middle[cell]] for cell, values in runs.items()},
        {cell: values[middle[cell] :] for cell, values in runs.items()},
    )


def judge_arm(
    name: str,
    first: Runs,
    second: Runs,
    fresh: Source,
    q: float,
    rng: np.random.Generator,
    progress: Progress | None = None,
) -> Arm:
    """Tests one arm, and tests discoveries again on fresh runs."""
    progress = progress or Progress(stream=io.StringIO())
    positions = next(iter(first.values())).shape[1]
    permutations = enough_permutations(len(first) * (2 * positions + 2) + len(KINDS), q)
    p = p_values(name, first, second, permutations, rng, progress)
    adjusted, found = discoveries(list(p.values()), q)
    made = [
        discovery(key, p[key], float(value), first, second)
        for key, value, is_found in zip(p, adjusted, found, strict=True)
        if is_found
    ]
    made.sort(key=lambda d: d.p)
    smallest = float(adjusted.min()) if len(adjusted) else None
    if made:
        made = confirm(name, made, list(first), fresh, q, rng, progress)
    return Arm(name, len(p), permutations, smallest, q, made)


def p_values(
    name: str,
    first: Runs,
    second: Runs,
    permutations: int,
    rng: np.random.Generator,
    progress: Progress,
) -> dict[Key, float]:
    """Of every hypothesis of every cell, and of all cells together."""
    p: dict[Key, float] = {}
    with progress.phase(f"permutations, {name}", len(first)) as done:
        for cell in first:
            for hypothesis in compare_runs(first[cell], second[cell], permutations, rng):
                p[(*cell, hypothesis.kind, hypothesis.position)] = hypothesis.p
            done()
    for kind in KINDS:
        whole = [value for key, value in p.items() if key[2:] == (kind, None)]
        if whole:
            p[None, None, kind, None] = combine(whole)
    return p


def confirm(
    name: str,
    made: list[Discovery],
    cells: list[Cell],
    fresh: Source,
    q: float,
    rng: np.random.Generator,
    progress: Progress,
) -> list[Discovery]:
    """Tests what was discovered again, that alone, on runs that know nothing of the first."""
    found = {d.key for d in made}
    if not any(key[0] is None for key in found):  # all cells together need all of them
        cells = list(dict.fromkeys(key[:2] for key in found))
    permutations = enough_permutations(len(found), q)
    p = p_values(f"{name}, again", *fresh(cells), permutations, rng, progress)
    # A hypothesis without a p: nothing differs there any more.
    adjusted, _ = discoveries([p.get(d.key, 1.0) for d in made], q)
    return [replace(d, again=float(again)) for d, again in zip(made, adjusted, strict=True)]


def discovery(key: Key, p: float, adjusted: float, first: Runs, second: Runs) -> Discovery:
    """The discovery, with the token that shows it best."""
    made = Discovery(*key, p, adjusted)
    prompt, setting, _, position = key
    if prompt is None:
        return made
    cell = (prompt, setting)
    where = slice(None) if position is None else slice(position, position + 1)
    sides = [Counter(runs[cell][:, where].ravel().tolist()) for runs in (first, second)]
    totals = [side.total() for side in sides]
    share = {
        token: tuple(side[token] / total for side, total in zip(sides, totals, strict=True))
        for token in sides[0] | sides[1]
    }
    token = max(share, key=lambda t: abs(share[t][0] - share[t][1]))
    return replace(made, token=token, first=share[token][0], second=share[token][1])
