"""How many rows a round verifies.

The width belongs to a round, not to the server: slots are reserved for the widest, and everything
else takes the width from the round. Whoever wants to choose it by load replaces `width_policy`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

# Tests set this to a list such as 4,9,16: each round then draws its width from it.
RANDOM_WIDTHS = "SGLANG_DFLASH_RANDOM_WIDTHS"


def widths(args: ServerArgs) -> list[int]:
    """Widths that rounds may have, none above the block size."""
    block_size = args.speculative_num_draft_tokens
    named = os.environ.get(RANDOM_WIDTHS)
    return [min(int(width), block_size) for width in named.split(",")] if named else [block_size]


def width_policy(args: ServerArgs) -> Callable[[], int]:
    """Gives the width of the next round; all ranks draw the same sequence."""
    choices = widths(args)
    if len(choices) == 1:
        return lambda: choices[0]
    generator = random.Random(0)
    return lambda: generator.choice(choices)
