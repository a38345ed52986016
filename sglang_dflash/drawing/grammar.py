"""Masks of a block under grammars: each row allows what the grammar allows after the drafts before it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject


def compiled_or_invalid(
    compile_grammar: Callable, key: tuple[str, str], require_reasoning: bool
) -> BaseGrammarObject:
    """Compiles a grammar; one that the backend stumbles over refuses its request.

    The scheduler reads the result in its loop, where an error would end it for everybody.
    """
    from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject

    try:
        return compile_grammar(key, require_reasoning)
    except Exception as error:  # backends raise whatever their parsers do
        return InvalidGrammarObject(f"{type(error).__name__}: {error}")


def vocabulary_mask(
    grammars: list[BaseGrammarObject | None],
    drafts: list[list[int]],
    vocab_size: int,
    device: torch.device,
) -> tuple[torch.Tensor, Callable]:
    """The mask of every row, and the function of the grammar backend that applies it.

    Args:
        grammars: of bs requests; at least one is not None.
        drafts: bs lists of width - 1 token ids.
    """
    width = len(drafts[0]) + 1
    first = next(grammar for grammar in grammars if grammar)
    mask = first.allocate_vocab_mask(vocab_size, len(grammars) * width, device)
    # Backends hand out a buffer that they filled before, or one that allows everything.
    mask.fill_(_ALL_ALLOWED[mask.dtype])
    for index, (grammar, tokens) in enumerate(zip(grammars, drafts, strict=True)):
        if grammar and not grammar.finished and not grammar.is_terminated():
            _fill_rows(grammar, tokens, mask, index * width)
    return first.move_vocab_mask(mask, device), first.apply_vocab_mask


def _fill_rows(
    grammar: BaseGrammarObject, tokens: list[int], mask: torch.Tensor, first_row: int
) -> None:
    """Walks along the drafts as far as the grammar goes with them, and leaves it where it was.

    Rows after a draft that is not allowed stay open: the draw before them cannot be that draft, so
    they are never committed. Rows after the grammar's end stay open as in plain decoding.
    """
    walker = grammar if _can_roll_back(grammar) else _copy(grammar)
    steps = 0
    walker.fill_vocab_mask(mask, first_row)
    for row, token in enumerate(tokens, start=first_row):
        if not is_allowed(mask[row], token):
            break
        walker.accept_token(token)
        steps += 1
        if walker.is_terminated():
            break
        walker.fill_vocab_mask(mask, row + 1)
    if walker is grammar and steps:
        grammar.rollback(steps)


# Bit masks set a bit for what is allowed, boolean masks are true where nothing is.
_ALL_ALLOWED = {torch.int32: -1, torch.bool: False}


def is_allowed(row: torch.Tensor, token: int) -> bool:
    """Whether a row of a mask allows a token: [vocab / 32] int32 bits, or [vocab] bool, true if not."""
    if row.dtype == torch.bool:
        return not row[token]
    return bool((int(row[token // 32]) >> (token % 32)) & 1)


def _can_roll_back(grammar: BaseGrammarObject) -> bool:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject

    return type(_innermost(grammar)).rollback is not BaseGrammarObject.rollback


def _innermost(grammar: BaseGrammarObject) -> BaseGrammarObject:
    """The grammar inside one that waits for the end of reasoning."""
    return getattr(grammar, "grammar", grammar)


def _copy(grammar: BaseGrammarObject) -> BaseGrammarObject:
    """A grammar at the same place, for a backend whose place is a plain number (outlines)."""
    walker = copy.copy(grammar)
    if _innermost(grammar) is not grammar:
        walker.grammar = copy.copy(grammar.grammar)
    return walker
