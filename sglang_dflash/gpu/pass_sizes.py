"""What is captured: batches of rounds, widths of blocks, rows of passes over prompts and over prompts beside blocks."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

MOST_ROWS = 2048  # of prompts alone
PROMPT_ROWS = 512  # beside the most blocks that a round has
LINEAR_ROWS = 256  # of prompts, for targets with linear attention, which runs row after row
SHORT_TABLE = (
    8192  # keys of a page table that is made in no time; longer contexts have passes of their own
)
PROMPTS = 64  # beside the most blocks that a round has
# Requests that FA3 is through with sooner: it looks at 31 at a time, one of them what fills a pass up, in every layer,
# and at all that a graph has room for. They have more rows than these only with long prompts.
FEW, ROWS_OF_FEW = (30, 92), 512
NARROW = 4  # rows of a block whose attention may have a kernel of its own, if four query heads share a KV head
CHEAP_ROWS = 64  # that a target runs in about the time in which it reads its weights


def sizes_to_capture(capture_sizes: Iterable[int], max_requests: int) -> list[int]:
    """Batches that rounds are captured for: SGLang's own sizes, as far as the server runs so many requests."""
    return sorted({min(size, max_requests) for size in capture_sizes} or {max_requests})


def narrower(width: int) -> list[int]:
    """Widths that blocks may have beside their own where whole ones are dear, the widest first."""
    return [width // part for part in (2, 4, 8) if width // part > 1]


def dear_sizes(sizes: Iterable[int], width: int) -> list[int]:
    """Batches of which rounds of such blocks are faster than those of twice the width."""
    return [size for size in sizes if size * 2 * width > CHEAP_ROWS]


def row_sizes(block_rows: int, most: int | None, linear: bool = False) -> list[int]:
    """Rows for which a pass is captured: a part of a tile of a matrix product more costs next to nothing.

    Args:
        block_rows: the most that a round has.
        most: what the user allows; None or less than 0 for no limit.
        linear: whether layers of the target have linear attention.
    """
    end = block_rows + LINEAR_ROWS if linear else max(MOST_ROWS, block_rows + PROMPT_ROWS)
    sizes = [
        *range(64, 192, 32),  # where a prompt or two join few requests
        *range(192, 1024, 64),
        *range(1024, 2048, 128),
        *range(2048, end + 1, 256),
    ]
    return [size for size in sizes if size <= end and (most is None or most < 0 or size <= most)]


def narrow_sizes(sizes: list[int], requests: int, width: int) -> list[int]:
    """Of passes those that hold nothing but blocks of so many requests, none of which has more rows than this.

    Args:
        sizes: rows of all passes, rising.
    """
    return sizes[: bisect.bisect_left(sizes, requests * width) + 1]


def rooms(rows: int, requests: int) -> list[int]:
    """Requests that passes over so many rows are captured for, fewest first.

    Args:
        requests: the most that any pass is over.
    """
    few = FEW if rows <= ROWS_OF_FEW else ()
    return [*(room for room in few if room < requests), requests]
