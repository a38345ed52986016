"""How attention of blocks is cut into programs: tiles, and parts of the keys."""

from __future__ import annotations

import math
from typing import NamedTuple


class Tile(NamedTuple):
    """What a program has in hand: rows, keys of a step, warps, steps under way."""

    rows: int
    keys: int
    warps: int
    stages: int


# By the largest head, and by rows: the first tile that holds all rows of a KV head, or several of the last.
TILES = {
    64: (Tile(16, 128, 4, 3), Tile(64, 128, 4, 3)),
    128: (Tile(16, 64, 4, 3), Tile(32, 64, 4, 3), Tile(64, 64, 4, 3)),
    256: (Tile(16, 32, 4, 3), Tile(64, 32, 8, 2)),
}
FLOAT32 = Tile(
    16, 16, 4, 2
)  # whose products no matrix unit computes: larger ones do not fit into registers
PROGRAMS = 2  # for a multiprocessor: keys are split until there are so many
LONG = 1024  # keys: no part is longer while there can be more parts
MOST_PARTS = 64  # of a request
MOST_PROGRAMS = 1024  # of a launch, which bounds the memory that parts take


class Split(NamedTuple):
    """How keys are split: parts of a request that occupy the device, and the most, a power of two."""

    fill: int
    most: int


WHOLE = Split(1, 1)


def choose_tile(head_dim: int, rows: int, itemsize: int, most_bytes: int) -> Tile:
    """The tile for a block.

    Args:
        head_dim: of keys or values, whichever is larger; at most 256.
        rows: of a KV head, width * query heads that share it.
        itemsize: bytes of an element of the queries.
        most_bytes: shared memory that a program may use.
    """
    size = next(size for size in TILES if head_dim <= size)
    tile = next((tile for tile in TILES[size] if rows <= tile.rows), TILES[size][-1])
    tile = FLOAT32 if itemsize == 4 else tile
    step = 2 * tile.keys * size * itemsize
    others = tile.rows * size * itemsize
    return tile._replace(stages=max(1, min(tile.stages, (most_bytes - others) // step)))


def choose_split(groups: int, longest: int, multiprocessors: int) -> Split:
    """Parts for `groups` programs that would each have all keys of a request, `longest` at most."""
    fill = _power_below(PROGRAMS * multiprocessors / groups)
    most = max(fill, min(_power_below(MOST_PROGRAMS / groups), _power_below(2 * longest / LONG)))
    return Split(min(fill, MOST_PARTS), min(most, MOST_PARTS))


def _power_below(x: float) -> int:
    """The largest power of two that is no larger; 1 if there is none."""
    return 1 << max(0, math.floor(math.log2(x)))
