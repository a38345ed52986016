"""Masks along a drafted block against a grammar that is fed one token after the other."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend
from sglang.srt.constrained.llguidance_backend import GuidanceBackend
from sglang.srt.constrained.outlines_backend import OutlinesGrammarBackend
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from transformers import AutoTokenizer

from sglang_dflash.drawing import grammar as masks
from sglang_dflash.drawing.grammar import is_allowed, vocabulary_mask
from tests.server.harness import TARGET

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PATTERN = "(the|many) [0-9]{1,3}"
PATTERNS = (PATTERN, "[a-z ,]+", '(\\{"a": ("[a-z]*"|[0-9]+)\\}|(a|b)?)', r"(.|\n)*")
BACKENDS = ("xgrammar", "llguidance", "outlines")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def vocab_size(tokenizer) -> int:
    return len(tokenizer)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest, tokenizer, vocab_size: int) -> BaseGrammarBackend:
    eos = [tokenizer.eos_token_id]
    if request.param == "xgrammar":
        return XGrammarGrammarBackend(tokenizer, vocab_size, eos)
    if request.param == "llguidance":
        return GuidanceBackend(tokenizer)
    return OutlinesGrammarBackend(tokenizer, whitespace_pattern=None)


def allowed(grammar, vocab_size: int) -> list[bool] | None:
    """Tokens that a grammar allows next; None if it has ended and allows what it likes."""
    if grammar.is_terminated():
        return None
    mask = grammar.allocate_vocab_mask(vocab_size, 1, "cpu")
    mask.fill_(-1 if mask.dtype == torch.int32 else 0)
    grammar.fill_vocab_mask(mask, 0)
    return [is_allowed(mask[0].numpy(), token) for token in range(vocab_size)]


def rows_of(mask: torch.Tensor, vocab_size: int) -> list[list[bool]]:
    return [[is_allowed(row, token) for token in range(vocab_size)] for row in mask.numpy()]


def check(make, before: list[int], drafts: list[int], accepted: int, vocab_size: int) -> None:
    """Rows up to the first draft that is not allowed are right, and the grammar stays in place."""
    grammar, stepped = make(), make()
    for token in before:
        grammar.accept_token(token)
        stepped.accept_token(token)
    mask, _ = vocabulary_mask([None, grammar], [[0] * len(drafts), drafts], vocab_size, "cpu")
    rows, width = rows_of(mask, vocab_size), len(drafts) + 1
    assert all(map(all, rows[:width])), "a request without a grammar is masked"
    for row, token in zip(rows[width:], [*drafts, None], strict=True):
        expected = allowed(stepped, vocab_size)
        assert row == (expected or [True] * vocab_size)
        if not accepted:
            break
        accepted -= 1
        stepped.accept_token(token)
    fresh = make()
    for token in before:
        fresh.accept_token(token)
    assert allowed(grammar, vocab_size) == allowed(fresh, vocab_size)


def test_drafts_inside(backend: BaseGrammarBackend, tokenizer, vocab_size: int) -> None:
    drafts = tokenizer.encode("the 12", add_special_tokens=False)
    check(lambda: regex(backend), [], drafts, len(drafts), vocab_size)


def test_after_some_output(backend: BaseGrammarBackend, tokenizer, vocab_size: int) -> None:
    ids = tokenizer.encode("many 345", add_special_tokens=False)
    check(lambda: regex(backend), ids[:2], ids[2:], len(ids) - 2, vocab_size)


def test_draft_that_is_not_allowed(backend: BaseGrammarBackend, tokenizer, vocab_size: int) -> None:
    good = tokenizer.encode("the", add_special_tokens=False)
    bad = tokenizer.encode("+ 12 12", add_special_tokens=False)
    check(lambda: regex(backend), [], good + bad, len(good), vocab_size)


def test_draft_past_the_end(backend: BaseGrammarBackend, tokenizer, vocab_size: int) -> None:
    ids = tokenizer.encode("the 123", add_special_tokens=False)
    eos = tokenizer.eos_token_id
    grammar = regex(backend)
    for token in [*ids, eos]:
        grammar.accept_token(token)
    steps = len(ids) + 1 if grammar.is_terminated() else len(ids)
    check(lambda: regex(backend), [], [*ids, eos, ids[0], ids[0]], steps, vocab_size)


def test_while_it_reasons(backend: BaseGrammarBackend, tokenizer, vocab_size: int) -> None:
    """Free until the end of reasoning, which may lie inside the block."""
    end = tokenizer.encode("day", add_special_tokens=False)[0]

    def make() -> ReasonerGrammarObject:
        grammar = ReasonerGrammarObject(regex(backend), end)
        grammar.maybe_init_reasoning(True)
        return grammar

    ids = tokenizer.encode("the 12", add_special_tokens=False)
    drafts = [ids[0], end, *ids]
    grammar = make()
    mask, _ = vocabulary_mask([grammar], [drafts], vocab_size, "cpu")
    rows = rows_of(mask, vocab_size)
    assert all(rows[0]) and all(rows[1])
    stepped = regex(backend)
    for row, token in zip(rows[2:], [*ids, None], strict=True):
        assert row == allowed(stepped, vocab_size)
        if token is not None:
            stepped.accept_token(token)
    assert grammar.tokens_after_think_end == -1


def written_out(
    make: Callable, before: list[int], drafts: list[int], vocab_size: int
) -> list[list[bool]]:
    """Rows by a grammar that takes one token after the other, and never one back."""
    everything = [True] * vocab_size
    stepped = fed(make, before)
    rows = []
    for token in [*drafts, None]:
        row = allowed(stepped, vocab_size)
        rows.append(row or everything)
        if row is None or token is None or not row[token]:
            break
        stepped.accept_token(token)
    return rows + [everything] * (len(drafts) + 1 - len(rows))


def fed(make: Callable, tokens: list[int]):
    grammar = make()
    for token in tokens:
        grammar.accept_token(token)
    return grammar


def wander(draw: random.Random, make: Callable, steps: int, vocab_size: int) -> list[int]:
    """Tokens that a grammar allows, one after the other; fewer where it ends."""
    grammar, tokens = make(), []
    while len(tokens) < steps and (row := allowed(grammar, vocab_size)):
        tokens.append(draw.choice([token for token, good in enumerate(row) if good]))
        grammar.accept_token(tokens[-1])
    return tokens


@pytest.mark.parametrize("threads", [True, False], ids=["threads", "one"])
def test_batches(
    backend: BaseGrammarBackend, vocab_size: int, threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several grammars, some of them over, beside requests without; each is where it was afterwards."""
    monkeypatch.setattr(masks, "SLOW_ROW", 0.0 if threads else float("inf"))
    pool = ThreadPoolExecutor(3)
    monkeypatch.setattr(masks, "_threads", lambda: pool)
    draw, width = random.Random(7), 6
    compiled = [backend.dispatch_regex(pattern) for pattern in PATTERNS]
    for _ in range(4):
        walks = []
        for make in [None, *(grammar.copy for grammar in compiled), compiled[0].copy, None]:
            tokens = wander(draw, make, 12, vocab_size) if make else [9] * 12
            begin = draw.randrange(len(tokens))
            drafts = [*tokens[begin:], *[9] * width][: width - 1]
            if draw.random() < 0.3:
                drafts[draw.randrange(width - 1)] = draw.randrange(vocab_size)
            walks.append((make, tokens[:begin], drafts))
        grammars = [make and fed(make, before) for make, before, _ in walks]
        mask, _ = vocabulary_mask(grammars, [drafts for *_, drafts in walks], vocab_size, DEVICE)
        assert mask.device.type == DEVICE
        found = rows_of(mask.cpu(), vocab_size)
        for number, (make, before, drafts) in enumerate(walks):
            expected = [[True] * vocab_size] * width
            if make:
                expected = written_out(make, before, drafts, vocab_size)
                left = allowed(grammars[number], vocab_size)
                assert left == allowed(fed(make, before), vocab_size)
            assert found[number * width : (number + 1) * width] == expected
    pool.shutdown()


def test_some_drafts_each(backend: BaseGrammarBackend, tokenizer, vocab_size: int) -> None:
    """Rows side by side, or in blocks as wide as they would be with all drafts; those behind the drafts stay open."""
    ids = tokenizer.encode("the 123", add_special_tokens=False)[:3]
    drafts, everything = [ids[:2], [], [], ids], [True] * vocab_size
    grammars = [regex(backend), None, regex(backend), regex(backend)]
    expected = [written_out(lambda: regex(backend), [], each, vocab_size) for each in drafts]
    expected[1] = [everything]
    mask, _ = vocabulary_mask(grammars, drafts, vocab_size, DEVICE)
    assert rows_of(mask.cpu(), vocab_size) == [row for rows in expected for row in rows]
    mask, _ = vocabulary_mask(grammars, drafts, vocab_size, DEVICE, 4)
    wide = [[*rows, *[everything] * (4 - len(rows))] for rows in expected]
    assert rows_of(mask.cpu(), vocab_size) == [row for rows in wide for row in rows]


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow rows are shared by threads, quick ones are not, and an error of any walk comes out."""
    here = threading.current_thread()
    seen = []

    def walk() -> int:
        seen.append(threading.current_thread() is here)
        return 16

    monkeypatch.setattr(masks, "SLOW_ROW", float("inf"))
    masks._walk([walk] * 5)
    monkeypatch.setattr(masks, "SLOW_ROW", 0.0)
    masks._walk([walk] * 5)
    assert seen == [True] * 6 + [False] * 4
    with pytest.raises(ZeroDivisionError):
        masks._walk([walk, walk, lambda: 1 // 0])


def regex(backend: BaseGrammarBackend):
    return backend.dispatch_regex(PATTERN).copy()
