"""Which tiling each small product runs with: known ones, and for other shapes the fastest of a few.

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

from sglang_dflash.gpu.kernels.skinny_matmul import Tiling

logger = logging.getLogger(__name__)


class Kind(StrEnum):
    """What becomes of a product: the kernel after it adds its parts, or takes it whole, or it is SwiGLU's."""

    SUMMED = "summed"
    WHOLE = "whole"
    SWIGLU = "swiglu"


class Key(NamedTuple):
    """A product: `size` outputs a row (with SwiGLU, after it) of `depth` inputs, and up to `rows` rows."""

    size: int
    depth: int
    kind: Kind
    rows: int

    def __str__(self) -> str:
        return f"{self.size}x{self.depth} {self.kind} {self.rows}"


# None: cuBLAS.
Found = dict[Key, Tiling | None]
# Key, weights of that shape, tilings, seconds → microseconds of each that was timed; None is cuBLAS.
Time = Callable[[Key, Sequence[torch.Tensor], Sequence[Tiling], float], dict[Tiling | None, float]]

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
_FILE = TypeAdapter(dict[str, dict[str, Tiling | None]])


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

    def get(self, key: Key) -> Tiling | None:
        """The tiling of a product; None where cuBLAS is as fast, or nobody looked."""
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
            seconds = (self._seconds - (self._clock() - begin)) / (len(missing) - place)
            if seconds <= 0:
                skipped.append(key)
                continue
            tilings = candidates(key, self.multiprocessors)
            measured[key] = fastest(self._time(key, weights[key], tilings, seconds))
        spent = self._clock() - begin
        self._seconds -= spent
        self._write(measured)
        logger.info(
            "DFLASH found tilings for %d products in %.1f s: %s%s",
            len(measured),
            spent,
            ", ".join(f"{key} {_named(tiling)}" for key, tiling in measured.items()),
            f"; no time for {len(skipped)}, which the next start looks at" if skipped else "",
        )
        return chosen | measured | self._default(skipped)

    @property
    def _machine(self) -> str:
        """What a choice holds for."""
        return f"{self.gpu}, bfloat16, triton {triton.__version__}, CUDA {torch.version.cuda}"

    def _read(self) -> Found:
        names = _read_file(self.file).get(self._machine, {})
        found = {_key(name): tiling for name, tiling in names.items()}
        return {
            key: tiling
            for key, tiling in found.items()
            if key is not None and (tiling is None or tiling.fits(key.size, key.depth))
        }

    def _write(self, measured: Found) -> None:
        if self.file is None or not measured:
            return
        content = _read_file(self.file)
        content.setdefault(self._machine, {}).update(
            {str(key): tiling for key, tiling in measured.items()}
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


def candidates(key: Key, multiprocessors: int) -> list[Tiling]:
    """Tilings worth a look, the likeliest first: those whose programs fill the GPU best."""
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


def fastest(times: Mapping[Tiling | None, float]) -> Tiling | None:
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


def _named(tiling: Tiling | None) -> str:
    return "cuBLAS" if tiling is None else "×".join(map(str, tiling))


def _read_file(file: Path | None) -> dict[str, dict[str, Tiling | None]]:
    """Choices by machine and product; none where there is no file that says so."""
    try:
        return {} if file is None else _FILE.validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return {}
