"""Which tiling each small product runs with, and which algorithm of cuBLAS's a larger one: known ones, and for other
shapes the fastest of a few.

What was found is kept in a file, so that a model is measured once on a kind of GPU.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from pydantic import TypeAdapter, ValidationError
from sglang.srt.distributed import get_tp_group

from sglang_dflash.gpu import cublas_lt
from sglang_dflash.gpu.cublas_lt import Algorithm
from sglang_dflash.gpu.kernels.skinny_matmul import MOST_ROWS, Tiling

logger = logging.getLogger(__name__)


class Kind(StrEnum):
    """What becomes of a product: the kernel after it adds its parts, or takes it whole, or it is SwiGLU's."""

    SUMMED = "summed"
    WHOLE = "whole"
    SWIGLU = "swiglu"


class Key(NamedTuple):
    """A product: `size` outputs a row (with SwiGLU, after it) of `depth` inputs, and up to `rows` rows.

    Of more than `MOST_ROWS`, exactly so many.
    """

    size: int
    depth: int
    kind: Kind
    rows: int

    def __str__(self) -> str:
        return f"{self.size}x{self.depth} {self.kind} {self.rows}"


Choice = Tiling | Algorithm
# None: cuBLAS, by the algorithm that it takes itself.
Found = dict[Key, Choice | None]
# Key, weights of that shape, choices, seconds → microseconds of each that was timed; None is cuBLAS.
Time = Callable[[Key, Sequence[torch.Tensor], Sequence[Choice], float], dict[Choice | None, float]]

QKV, OUT = (6144, 4096, Kind.SUMMED), (4096, 4096, Kind.SUMMED)
GATE_UP, DOWN = (12288, 4096, Kind.SWIGLU), (4096, 12288, Kind.SUMMED)
# Qwen3-8B's on an H200.
QWEN3_8B: Found = {
    Key(*QKV, 16): Tiling(64, 128, 128, 1, 5, 4),
    Key(*OUT, 16): Tiling(64, 128, 128, 2, 5, 4),
    Key(*GATE_UP, 16): Tiling(64, 64, 128, 1, 4, 4),
    Key(*DOWN, 16): Tiling(64, 128, 128, 2, 5, 4),
    Key(*QKV, 32): Tiling(64, 128, 128, 1, 8, 4),
    Key(*OUT, 32): Tiling(64, 128, 128, 2, 8, 4),
    Key(*GATE_UP, 32): None,
    Key(*DOWN, 32): Tiling(64, 128, 128, 2, 8, 4),
    Key(*QKV, 64): Tiling(64, 128, 128, 1, 5, 4),
    Key(*OUT, 64): Tiling(64, 128, 128, 2, 5, 4),
    Key(*GATE_UP, 64): Tiling(128, 64, 64, 1, 4, 8),
    Key(*DOWN, 64): Tiling(64, 128, 128, 2, 5, 4),
    Key(*QKV, 128): None,
    Key(*OUT, 128): Tiling(64, 64, 64, 2, 8, 4),
    Key(*GATE_UP, 128): None,
    Key(*DOWN, 128): Tiling(64, 64, 64, 2, 8, 4),
}
# What these GPUs were fastest with, which is not measured again.
KNOWN: dict[str, Found] = {"NVIDIA H200": QWEN3_8B}
SECONDS = 15.0  # that a start may take longer for a model that is new
_AT_MOST = 8  # one product takes the time of so many others of the same find
_CANDIDATES = 6  # each is compiled, which takes about a second
_GAIN = 0.98  # of cuBLAS's time, which a tiling must stay below: less is noise
# By rows of the product: rows and columns of a tile, tiles under way, warps.
_TILES = {
    16: ((64, 128, 5, 4), (32, 128, 8, 4), (64, 64, 8, 4)),
    32: ((64, 128, 8, 4), (128, 128, 4, 4), (64, 64, 8, 4)),
    64: ((64, 128, 5, 4), (64, 64, 8, 4), (128, 64, 8, 4)),
    128: ((64, 64, 8, 4), (128, 64, 5, 8)),
}
# The same with SwiGLU, where there are two tiles of weights for each; for 128 rows cuBLAS is faster by far.
_SWIGLU_TILES = {
    16: ((64, 64, 4, 4), (32, 128, 4, 4), (64, 128, 3, 4)),
    32: ((64, 64, 8, 4), (64, 128, 4, 4)),
    64: ((128, 64, 4, 8), (64, 64, 8, 4)),
    128: (),
}
# Rows beyond which cuBLAS's own choice was within 2% of the best for Qwen3-8B's shapes on an H200.
MOST_SEARCHED = 1024
# Tiles, clusters, options and parts that were the fastest somewhere between 160 and 1,536 rows, of shapes of Qwen3
# 4B, 8B and 32B and Llama-3.1-8B on an H200 (cuBLAS 13.1; a thousand were timed for each product, of some 400,000).
_WERE_BEST = (
    *((15, 4, 0, 1), (18, 2, 0, 1), (18, 3, 1, 1), (20, 3, 1, 1), (23, 3, 5, 1), (23, 4, 5, 1)),
    *((24, 5, 5, 1), (26, 4, 1, 1), (27, 8, 0, 1), (28, 3, 0, 1), (29, 3, 1, 1), (30, 5, 2, 1)),
    *((31, 5, 4, 1), (32, 3, 5, 1), (33, 2, 1, 1), (33, 5, 7, 2), (33, 7, 1, 1), (116, 5, 3, 1)),
    *(
        (135, 2, 4, 1),
        (136, 2, 0, 2),
        (164, 2, 4, 1),
        (165, 2, 0, 1),
        (166, 5, 0, 1),
        (183, 2, 0, 1),
    ),
    *(
        (184, 3, 0, 1),
        (193, 5, 4, 1),
        (197, 5, 0, 1),
        (201, 3, 0, 1),
        (208, 2, 0, 2),
        (209, 5, 5, 1),
    ),
    *(
        (221, 3, 4, 1),
        (222, 5, 4, 1),
        (248, 5, 4, 1),
        (326, 4, 1, 1),
        (397, 3, 5, 1),
        (400, 3, 1, 1),
    ),
    *(
        (403, 5, 7, 2),
        (409, 3, 5, 1),
        (412, 2, 5, 1),
        (458, 3, 1, 1),
        (460, 5, 3, 1),
        (465, 2, 5, 1),
    ),
    *((472, 5, 5, 1), (500, 5, 5, 1), (549, 3, 5, 1)),
)
_HOPPERS, _STAGES, _IN_FLOAT32 = 66, 35, 2  # how cuBLASLt numbers what all of these have
ALGORITHMS = tuple(
    Algorithm(_HOPPERS, tile, _STAGES, parts, _IN_FLOAT32 * (parts > 1), 0, custom, 0, cluster)
    for tile, cluster, custom, parts in _WERE_BEST
)
_FILE = TypeAdapter(dict[str, dict[str, Tiling | Algorithm | None]])


class Tilings:
    """Tilings of one process.

    Attributes:
        found: for every product that was asked about.
    """

    def __init__(
        self,
        gpu: str,
        multiprocessors: int,
        time_tilings: Time,
        file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        share: Callable[[Callable[[], Found]], Found] = lambda choose: choose(),
        defaults: Found | None = None,
    ):
        """
        Args:
            gpu: name of the device.
            file: where what is found is kept; None for nowhere.
            share: runs a choice on the first rank alone, and returns it on all.
            defaults: what runs where nothing was measured; cuBLAS where they say nothing.
        """
        self.gpu, self.multiprocessors, self.file = gpu, multiprocessors, file
        self._time, self._clock, self._share = time_tilings, clock, share
        self.found: Found = {}
        self._defaults = defaults or {}
        self._seconds = SECONDS

    def get(self, key: Key) -> Choice | None:
        """What a product runs with; None where cuBLAS is as fast, or nobody looked."""
        return self.found.get(key)

    def find(self, weights: Mapping[Key, Sequence[torch.Tensor]]) -> None:
        """Chooses for products that have no choice yet; all ranks must call it alike.

        Args:
            weights: those of each product, of different layers.
        """
        wanted = {key: some for key, some in weights.items() if key not in self.found}
        if wanted:
            self.found |= self._share(lambda: self._choose_or_default(wanted))

    def _choose_or_default(self, weights: Mapping[Key, Sequence[torch.Tensor]]) -> Found:
        try:
            return self._choose(weights)
        except Exception as reason:
            logger.warning(
                "DFLASH runs small products with cuBLAS and with tilings for Qwen3-8B, because looking for "
                "others raised %r.",
                reason,
            )
            return self._default(weights)

    def _default(self, keys: Iterable[Key]) -> Found:
        return {key: self._defaults.get(key) for key in keys}

    def _choose(self, weights: Mapping[Key, Sequence[torch.Tensor]]) -> Found:
        known = KNOWN.get(self.gpu, {}) | self._read()
        chosen = {key: known[key] for key in weights if key in known}
        missing = [key for key in weights if key not in chosen]
        if not missing:
            return chosen
        begin = self._clock()
        measured, skipped = {}, []
        for place, key in enumerate(missing):
            left = self._seconds - (self._clock() - begin)
            # The first ones load kernels that all of them look at.
            seconds = left / min(_AT_MOST, len(missing) - place)
            if seconds <= 0:
                skipped.append(key)
                continue
            tilings = candidates(key, self.multiprocessors)
            measured[key] = fastest(self._time(key, weights[key], tilings, seconds))
        spent = self._clock() - begin
        self._seconds -= spent
        self._write(measured)
        logger.info(
            "DFLASH found how to run %d products in %.1f s, %d with other algorithms than cuBLAS takes; tilings: %s%s",
            len(measured),
            spent,
            sum(isinstance(choice, Algorithm) for choice in measured.values()),
            ", ".join(
                f"{key} {_named(choice)}"
                for key, choice in measured.items()
                if key.rows <= MOST_ROWS
            )
            or "none",
            f"; no time for {len(skipped)}, which the next start looks at" if skipped else "",
        )
        return chosen | measured | self._default(skipped)

    @property
    def _machine(self) -> str:
        """What a choice holds for."""
        return (
            f"{self.gpu}, bfloat16, triton {triton.__version__}, CUDA {torch.version.cuda}, "
            f"cuBLASLt {cublas_lt.version()}"
        )

    def _read(self) -> Found:
        names = _read_file(self.file).get(self._machine, {})
        found = {_key(name): choice for name, choice in names.items()}
        return {
            key: choice
            for key, choice in found.items()
            if key is not None and (choice is None or _can_run(key, choice))
        }

    def _write(self, measured: Found) -> None:
        if self.file is None or not measured:
            return
        content = _read_file(self.file)
        content.setdefault(self._machine, {}).update(
            {str(key): choice for key, choice in measured.items()}
        )
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.file.parent, delete=False) as made:
                json.dump(content, made, indent=1)
            os.replace(made.name, self.file)
        except OSError as reason:
            logger.info("DFLASH keeps no tilings for the next start: %s", reason)


def tilings_of_process(time_tilings: Time) -> Tilings:
    """Tilings for this process's GPU, found by the first rank of its group."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    group = get_tp_group()

    def share(choose: Callable[[], Found]) -> Found:
        found = choose() if group.is_first_rank else None
        return group.broadcast_object(found, src=0)

    return Tilings(
        properties.name,
        properties.multi_processor_count,
        time_tilings,
        cache_folder() / "tilings.json",
        share=share,
        # Other GPUs have less memory for a program: these may not fit.
        defaults=QWEN3_8B if (properties.major, properties.minor) == (9, 0) else None,
    )


def cache_folder() -> Path:
    """Of this package, as desktops agreed (XDG)."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(named) if os.path.isabs(named) else Path(os.path.expanduser("~/.cache"))
    return base / "sglang_dflash"


def candidates(key: Key, multiprocessors: int) -> list[Choice]:
    """What is worth a look. Of tilings those whose programs fill the GPU best, the likeliest first."""
    if key.rows > MOST_ROWS:
        return list(ALGORITHMS)
    parts = (1, 2, 3, 4) if key.kind is Kind.SUMMED else (1,)
    tiles = (_SWIGLU_TILES if key.kind is Kind.SWIGLU else _TILES)[key.rows]
    first = 128 if key.rows <= 16 else 0  # more rows take the registers that more weights would
    found = {}
    for place, (rows, columns, stages, warps) in enumerate(tiles):
        for many in parts:
            tiling = Tiling(rows, columns, max(first, columns), many, stages, warps)
            if tiling.fits(key.size, key.depth):
                programs = key.size // rows * many
                room = -(-programs // multiprocessors) * multiprocessors
                found[tiling] = programs / room - 0.05 * many - 0.05 * place
    return sorted(found, key=found.__getitem__, reverse=True)[:_CANDIDATES]


def fastest(times: Mapping[Choice | None, float]) -> Choice | None:
    """The best of the timed ones, cuBLAS (None) unless one is clearly faster."""
    best = min(times, key=times.__getitem__)
    return best if best is not None and times[best] < _GAIN * times[None] else None


def _key(name: str) -> Key | None:
    """What `str(key)` wrote."""
    try:
        sizes, kind, rows = name.split(" ")
        size, depth = sizes.split("x")
        return Key(int(size), int(depth), Kind(kind), int(rows))
    except ValueError:
        return None


def _can_run(key: Key, choice: Choice) -> bool:
    return isinstance(choice, Algorithm) == (key.rows > MOST_ROWS) and choice.fits(
        key.size, key.depth
    )


def _named(choice: Choice | None) -> str:
    return "cuBLAS" if choice is None else "×".join(map(str, choice))


def _read_file(file: Path | None) -> dict[str, dict[str, Choice | None]]:
    """Choices by machine and product; none where there is no file that says so."""
    try:
        return {} if file is None else _FILE.validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return {}
