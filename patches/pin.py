"""What `pin.toml` says: which SGLang release, and what its tree is before and after the series."""

import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path


class QueueError(Exception):
    """A mistake that the user can mend; the message is one sentence that says how."""


@dataclass(frozen=True)
class Pin:
    version: str
    requirement: str
    wheel: str
    sha256: str
    local_version: str
    upstream_tree: str
    series_tree: str
    max_changed_lines: int
    files: list[str]


def load_pin(path: Path) -> Pin:
    """Read pin.toml; raises QueueError for a missing file, key or wrong type."""
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise QueueError(f"{path} is missing: restore it with git.") from None
    except tomllib.TOMLDecodeError as error:
        raise QueueError(f"{path} is not valid TOML ({error}): mend that line.") from None
    expected = {field.name: field.type for field in fields(Pin)}
    for name, kind in expected.items():
        if name not in values:
            raise QueueError(f"{path} has no `{name}`: add it.")
        kind = list if kind == list[str] else kind
        if not isinstance(values[name], kind):
            raise QueueError(f"{path}: `{name}` must be a {kind.__name__}, not {values[name]!r}.")
    unknown = sorted(set(values) - set(expected))
    if unknown:
        raise QueueError(f"{path} has an unknown key `{unknown[0]}`: remove it.")
    return Pin(**values)


def write_series_tree(path: Path, tree: str) -> None:
    """Replace the value of `series_tree` and nothing else."""
    old = path.read_text()
    new = re.sub(r'(?m)^series_tree = ".*"$', f'series_tree = "{tree}"', old)
    if new != old:
        path.write_text(new)
