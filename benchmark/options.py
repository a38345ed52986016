"""What options of benchmarks look like, and what is refused before anything is measured."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path

from benchmark.errors import CannotMeasure


def at_least(smallest: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if int(text) < smallest:
            raise argparse.ArgumentTypeError(f"{text} is less than {smallest}")
        return int(text)

    return integer


def number(least: float, most: float, above: bool = False) -> Callable[[str], float]:
    """A number from `least` (or above it) to `most`."""

    def real(text: str) -> float:
        value = float(text)
        if not least <= value <= most or math.isinf(value) or (above and value == least):
            limit = "" if math.isinf(most) else f" and at most {most:g}"
            raise argparse.ArgumentTypeError(
                f"{text} is not {'above' if above else 'at least'} {least:g}{limit}"
            )
        return value

    return real


def numbers(text: str) -> list[int]:
    """Positive numbers, each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text} is not a list of positive numbers such as 1,8")
    return list(dict.fromkeys(int(part) for part in parts))


def names(text: str) -> list[str]:
    found = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise argparse.ArgumentTypeError("the list is empty")
    return found


def check_plot(folder: Path) -> None:
    """Before hours of measuring rather than after them.

    Raises:
        CannotMeasure: matplotlib is missing, or the folder is a file.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise CannotMeasure(
            f"--plot {folder} needs matplotlib, which is not installed: install the extra `plot`, or "
            "leave --plot out."
        )
    if folder.exists() and not folder.is_dir():
        raise CannotMeasure(f"--plot {folder} is a file: name a folder.")


def check_output(path: Path, again: bool, dry: bool = False) -> None:
    """Before anything is measured; the file's folder is made if it is missing.

    Args:
        again: results that are there already are added to.
        dry: nothing will be written.

    Raises:
        CannotMeasure: the folder cannot be made, or the file has results.
    """
    if dry:
        return
    make_folder("--output-file", path.absolute().parent)
    if not again and path.exists() and path.stat().st_size:
        raise CannotMeasure(
            f"--output-file {path} has results already: go on with --resume, or name another file."
        )


def make_folder(flag: str, folder: Path) -> None:
    """
    Raises:
        CannotMeasure: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotMeasure(
            f"{flag}: the folder {folder} cannot be made ({error.strerror}): name another one."
        ) from None
