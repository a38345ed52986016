"""Masks of a block under grammars: each row allows what the grammar allows after the drafts before it."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
    from sglang.srt.constrained.grammar_manager import GrammarManager

# Seconds for a row from which on threads pay: they take turns at all but the backend's own filling.
SLOW_ROW = 15e-6


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


def looked_enough(manager: GrammarManager, ready: Collection[int]) -> bool:
    """Whether the scheduler looks no longer for grammars that are compiled: it has all, or others wait for it.

    The release looks for 5 ms each time, while a compiled schema is there after one to four of them.

    Args:
        ready: which of the requests in the queue have theirs.
    """
    return (
        len(ready) == len(manager.grammar_queue) or not manager.scheduler.running_batch.is_empty()
    )


def vocabulary_mask(
    grammars: list[BaseGrammarObject | None],
    drafts: list[list[int]],
    vocab_size: int,
    device: torch.device,
    width: int | None = None,
) -> tuple[torch.Tensor, Callable]:
    """The mask of every row, and the function of the grammar backend that applies it.

    Args:
        grammars: of bs requests; at least one is not None.
        drafts: bs lists of token ids.
        width: rows of each request in the mask, those behind its drafts open; None for one more than it has drafts.

    Returns:
        The mask, rows of requests side by side.
    """
    ends = list(accumulate(width or len(tokens) + 1 for tokens in drafts))
    first = next(grammar for grammar in grammars if grammar)
    mask = _open_mask(first, vocab_size, ends[-1], device)
    walks = [
        partial(_fill_rows, grammar, tokens, mask, begin)
        for grammar, tokens, begin in zip(grammars, drafts, [0, *ends[:-1]], strict=True)
        if grammar and not grammar.finished and not grammar.is_terminated()
    ]
    _walk(walks)
    moved = first.move_vocab_mask(mask, device).to(device, non_blocking=True)
    return moved, first.apply_vocab_mask


def _open_mask(
    grammar: BaseGrammarObject, vocab_size: int, rows: int, device: torch.device
) -> torch.Tensor:
    """A mask on the host that allows everything, of the width and type that the backend asks for.

    From pinned memory the copy to a GPU does not wait for the pass that runs there. Torch keeps such memory, and
    hands it out again when the copy is done.
    """
    row = grammar.allocate_vocab_mask(vocab_size, 1, "cpu")
    return torch.full(
        (rows, row.shape[1]),
        _ALL_ALLOWED[row.dtype],
        dtype=row.dtype,
        pin_memory=torch.device(device).type == "cuda",
    )


def _walk(walks: list[Callable[[], int]]) -> None:
    """Takes walks, each of which says how many rows it filled: here, or in threads once rows are slow."""
    begun, rows = time.perf_counter(), 0
    for done, walk in enumerate(walks, start=1):
        rows += walk()
        if time.perf_counter() - begun > rows * SLOW_ROW:
            list(_threads().map(lambda walk: walk(), walks[done:]))
            return


@cache
def _threads() -> ThreadPoolExecutor:
    """Half of the cores: the processes beside this one need some, too."""
    cores = len(os.sched_getaffinity(0))
    return ThreadPoolExecutor(min(8, max(1, cores // 2)), thread_name_prefix="grammar")


def _fill_rows(
    grammar: BaseGrammarObject, tokens: list[int], mask: torch.Tensor, first_row: int
) -> int:
    """Walks along the drafts as far as the grammar goes with them, and leaves it where it was.

    Rows after a draft that is not allowed stay open: the draw before them cannot be that draft, so
    they are never committed. Rows after the grammar's end stay open as in plain decoding.

    Returns:
        How many rows it filled.
    """
    walker = grammar if _can_roll_back(grammar) else _copy(grammar)
    rows = mask.numpy()
    filled = rows if _takes_arrays(grammar) else mask
    steps = 0
    walker.fill_vocab_mask(filled, first_row)
    for row, token in enumerate(tokens, start=first_row):
        if not is_allowed(rows[row], token):
            break
        walker.accept_token(token)
        steps += 1
        if walker.is_terminated():
            break
        walker.fill_vocab_mask(filled, row + 1)
    if walker is grammar and steps:
        grammar.rollback(steps)
    return steps + 1


# Bit masks set a bit for what is allowed, boolean masks are true where nothing is.
_ALL_ALLOWED = {torch.int32: -1, torch.bool: False}


def is_allowed(row: np.ndarray, token: int) -> bool:
    """Whether a row of a mask allows a token: [vocab / 32] int32 bits, or [vocab] bool, true if not."""
    if row.dtype == bool:
        return not row[token]
    return bool((int(row[token // 32]) >> (token % 32)) & 1)


def allowed(grammar: BaseGrammarObject, tokens: Sequence[int]) -> int:
    """How many tokens a grammar takes, one after the other; it is left where it was.

    Args:
        grammar: one that `refuses_what_it_masks`. After its end it takes what comes, as plain decoding does.
    """
    steps = 0
    for token in tokens:
        if grammar.is_terminated():
            break
        try:
            grammar.accept_token(token)
        except ValueError:
            break
        steps += 1
    over = grammar.is_terminated()
    if steps:
        grammar.rollback(steps)
    return len(tokens) if over else steps


def refuses_what_it_masks(grammar: BaseGrammarObject) -> bool:
    """Whether a grammar says of a token without filling a mask that it is not allowed; xgrammar does."""
    return _takes_arrays(grammar)


def _takes_arrays(grammar: BaseGrammarObject) -> bool:
    """Whether a backend also fills arrays: xgrammar opens one in less than half the time of a tensor."""
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

    return isinstance(_innermost(grammar), XGrammarGrammar)


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
