"""Rows of the target's passes over prompts, and over prompts beside blocks, that are captured."""

from __future__ import annotations

MOST_ROWS = 2048  # of prompts alone
PROMPT_ROWS = 512  # beside the most blocks that a round has
SHORT_TABLE = (
    8192  # keys of a page table that is made in no time; longer contexts have passes of their own
)


def row_sizes(block_rows: int, most: int | None) -> list[int]:
    """Rows for which a pass is captured: a part of a tile of a matrix product more costs next to nothing.

    Args:
        block_rows: the most that a round has.
        most: what the user allows; None or less than 0 for no limit.
    """
    end = max(MOST_ROWS, block_rows + PROMPT_ROWS)
    sizes = [
        *range(64, 192, 32),  # where a prompt or two join few requests
        *range(192, 1024, 64),
        *range(1024, 2048, 128),
        *range(2048, end + 1, 256),
    ]
    return [size for size in sizes if most is None or most < 0 or size <= most]
