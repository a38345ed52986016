"""A patch file: a DEP-3 style header, an empty line, a diff in one fixed format."""

import re
from dataclasses import dataclass
from pathlib import Path

from patches.git import Repo
from patches.pin import QueueError

FIELDS = ("Subject", "Description", "Origin", "Forwarded", "Drop-When")

# Everything that a user's or a later git's defaults could change is spelled out.
DIFF_OPTIONS = (
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--no-renames",
    "--full-index",
    "--unified=3",
    "--inter-hunk-context=0",
    "--diff-algorithm=histogram",
    "--indent-heuristic",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)


@dataclass(frozen=True)
class Patch:
    name: str
    message: str
    diff: str

    def render(self) -> bytes:
        return f"{self.message}\n\n{self.diff}".encode(errors="surrogateescape")


def parse(name: str, data: bytes) -> Patch:
    text = data.decode(errors="surrogateescape")
    start = re.search(r"^diff --git ", text, re.MULTILINE)
    if start is None:
        raise QueueError(f"{name} has no line `diff --git`: export it with `make refresh`.")
    return Patch(name, text[: start.start()].strip("\n"), text[start.start() :])


def header(message: str, where: str) -> dict[str, str]:
    """The fields of a header, continuation lines joined; raises QueueError where one is missing."""
    found: dict[str, str] = {}
    last = None
    for line in message.splitlines():
        field = re.fullmatch(r"([A-Z][A-Za-z-]*):\s*(.*)", line)
        if field:
            last = field[1]
            found[last] = field[2].strip()
        elif last and line[:1] in (" ", "\t") and line.strip():
            found[last] = f"{found[last]} {line.strip()}".strip()
        else:
            raise QueueError(
                f"{where}: the header line {line!r} is neither `Field: text` nor an indented "
                "continuation; mend the commit's message."
            )
    for name in FIELDS:
        if not found.get(name):
            raise QueueError(f"{where}: the header has no {name}; add `{name}: …` to the message.")
    return found


def file_name(number: int, subject: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")
    return f"{number:04d}-{slug[:60].rstrip('-')}.patch"


def export(repo: Repo, commit: str, number: int) -> Patch:
    """The patch that a commit stands for."""
    message = repo.git("log", "-1", "--format=%B", commit).strip("\n")
    fields = header(message, f"commit {commit[:10]} in {repo.path}")
    diff = repo.git("diff", *DIFF_OPTIONS, f"{commit}^", commit)
    if not diff:
        raise QueueError(f"commit {commit[:10]} in {repo.path} changes nothing: drop it.")
    if re.search(r"^Binary files ", diff, re.MULTILINE):
        raise QueueError(f"commit {commit[:10]} in {repo.path} changes a binary file: drop that.")
    return Patch(file_name(number, fields["Subject"]), message, diff)


def read_series(folder: Path) -> list[Patch]:
    """The patches in the order of `series`; the list and the files must agree."""
    series = folder / "series"
    if not series.is_file():
        raise QueueError(f"{series} is missing: restore it with git.")
    names = series.read_text().split()
    present = {path.name for path in folder.glob("*.patch")}
    for name in names:
        if names.count(name) > 1:
            raise QueueError(f"{series} lists {name} twice: remove one.")
        if name not in present:
            raise QueueError(f"{series} lists {name}, which does not exist: restore or unlist it.")
    for name in sorted(present - set(names)):
        raise QueueError(f"{folder / name} is not listed in series: list it or delete it.")
    return [parse(name, (folder / name).read_bytes()) for name in names]


def write_series(folder: Path, patches: list[Patch]) -> None:
    """Make the folder hold exactly these patches; a file that is already right is not touched."""
    contents = {patch.name: patch.render() for patch in patches}
    contents["series"] = "".join(f"{patch.name}\n" for patch in patches).encode()
    for name, data in contents.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != data:
            path.write_bytes(data)
    for path in folder.glob("*.patch"):
        if path.name not in contents:
            path.unlink()
