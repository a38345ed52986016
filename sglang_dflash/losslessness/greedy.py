"""Greedy decoding: every divergence from plain decoding, and what it costs.

A token that differs changes everything after it, so two answers cannot be compared beyond their
first difference. Plain decoding is therefore anchored anew after each one: it goes on from the
prompt and the speculated answer so far, and every speculated token is compared with what plain
decoding chooses after the *same* tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dflash.losslessness.client import Client, ask_all, verify_steps
from sglang_dflash.losslessness.progress import Progress

SPECULATIVE, PLAIN = "greedy, speculative", "greedy, plain"  # what progress calls them
FIRST_STRETCH = 16  # tokens decoded after an anchor, then twice as many, and so on


@dataclass(frozen=True)
class Divergence:
    """A speculated token that plain decoding would not have chosen.

    Attributes:
        position: in the answer, 0-based.
        speculated, chosen: token ids; what the speculative server committed, and what plain
            decoding chooses after the same tokens.
        regret: nat, log-probability of plain decoding's likeliest token less that of `speculated`.
        gap: nat, between its likeliest token and the second.
    """

    prompt: int
    position: int
    speculated: int
    chosen: int
    regret: float
    gap: float


@dataclass(frozen=True)
class WrongEnd:
    """An answer that ends where plain decoding goes on, or the other way round.

    Attributes:
        position: how many tokens precede that place.
        speculated, plain: `stop` or `goes on`.
    """

    prompt: int
    position: int
    speculated: str
    plain: str


@dataclass(frozen=True)
class Greedy:
    """The comparison of all greedy answers.

    Attributes:
        lengths: tokens of each speculated answer.
        rounds, committed: verify steps and the tokens that they committed.
    """

    max_regret: float
    lengths: list[int]
    rounds: int
    committed: int
    divergences: list[Divergence]
    wrong_ends: list[WrongEnd]

    @property
    def failures(self) -> list[Divergence]:
        return [d for d in self.divergences if not d.regret <= self.max_regret]

    @property
    def passed(self) -> bool:
        return not self.failures and not self.wrong_ends


def compare_greedy(
    speculative: Client,
    plain: Client,
    prompts: list[list[int]],
    new_tokens: int,
    concurrency: int,
    max_regret: float,
    progress: Progress,
) -> Greedy:
    """Asks both servers for greedy answers of up to `new_tokens` tokens and compares them."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens}
    [answers] = ask_all(
        SPECULATIVE,
        [(lambda ids: speculative.generate(ids, sampling), prompts)],
        concurrency,
        progress,
        new_tokens,
    )
    [followed] = ask_all(
        PLAIN,
        [(lambda i: follow(plain, i, prompts[i], answers[i]), range(len(prompts)))],
        concurrency,
        progress,
        new_tokens,
    )
    rounds, committed = verify_steps(answers)
    return Greedy(
        max_regret,
        [len(answer["output_ids"]) for answer in answers],
        rounds,
        committed,
        [divergence for divergences, _ in followed for divergence in divergences],
        [end for _, end in followed if end is not None],
    )


def follow(
    plain: Client, index: int, prompt: list[int], answer: dict
) -> tuple[list[Divergence], WrongEnd | None]:
    """Plain decoding along a speculated answer."""
    ids, end = answer["output_ids"], answer["meta_info"]["finish_reason"]["type"]
    divergences: list[Divergence] = []
    at, stretch = 0, FIRST_STRETCH
    while at < len(ids):
        rest = len(ids) - at
        # One token more than an answer that ended by itself shows whether plain decoding ends too.
        wanted = stretch if stretch < rest else rest + (end == "stop")
        reply = plain.generate(prompt + ids[:at], {"temperature": 0, "max_new_tokens": wanted})
        got = reply["output_ids"]
        stops = reply["meta_info"]["finish_reason"]["type"] == "stop"
        same = _common(ids[at:], got)
        at, stretch = at + same, stretch * 2
        if same < min(len(got), rest):
            divergences.append(_weigh(plain, index, prompt, ids, at, got[same]))
            at, stretch = at + 1, FIRST_STRETCH
        elif same < rest and stops:
            return divergences, WrongEnd(index, at, "goes on", "stop")
        elif same == rest and end == "stop" and not (stops and len(got) == rest):
            return divergences, WrongEnd(index, at, "stop", "goes on")
    return divergences, None


def _common(first: list[int], second: list[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _weigh(
    plain: Client, index: int, prompt: list[int], ids: list[int], at: int, chosen: int
) -> Divergence:
    # The speculated token as the last of a prompt: the release's `token_ids_logprob` would do, but
    # ends a server that runs other requests in the same batch.
    meta = plain.generate(
        prompt + ids[: at + 1],
        {"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        top_logprobs_num=2,
        logprob_start_len=len(prompt) + at - 1,
    )["meta_info"]
    speculated = meta["input_token_logprobs"][-1][0]
    best, second = (entry[0] for entry in meta["input_top_logprobs"][-1])
    return Divergence(index, at, ids[at], chosen, best - speculated, best - second)
