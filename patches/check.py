"""What the series must fulfil on the pinned release, and a trial on another one."""

import tempfile
from contextlib import contextmanager
from pathlib import Path

from patches.checkout import Places, checked_tip, commit_patch, load, try_patch
from patches.git import Repo
from patches.patch import Patch, export, file_name, header
from patches.pin import Pin, QueueError
from patches.upstream import check_upstream, download, fetch, unpack


@contextmanager
def scratch(places: Places, pin: Pin):
    """A repository with the tag `upstream` that may be written to, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="dflash-check-") as folder:
        if (places.checkout / ".git").is_dir():
            source = Repo(places.checkout)
            check_upstream(source, pin)
            repo = Repo(Path(folder))
            repo.git("init", "--quiet", "--bare", "--template=")
            objects = source.path / ".git" / "objects"
            alternates = repo.path / "objects" / "info" / "alternates"
            alternates.parent.mkdir(parents=True, exist_ok=True)
            alternates.write_text(f"{objects}\n")
            repo.git("update-ref", "refs/tags/upstream", source.resolve("upstream^{commit}"))
        else:
            repo = unpack(fetch(pin, places.build), pin.version, Path(folder) / "sglang")
            check_upstream(repo, pin)
        yield repo


def changes(repo: Repo, commit: str) -> list[tuple[str, int, int]]:
    """Path, added and deleted lines of every file that a commit touches."""
    rows = []
    for line in repo.git("diff", "--no-renames", "--numstat", f"{commit}^", commit).splitlines():
        added, deleted, path = line.split("\t", 2)
        rows.append((path, int(added), int(deleted)))
    return rows


def check_compiles(repo: Repo, commit: str, path: str, name: str) -> None:
    done = repo.run("cat-file", "blob", f"{commit}:{path}")
    if done.returncode or not path.endswith(".py"):
        return  # deleted, or not Python
    try:
        compile(done.stdout, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise QueueError(
            f"{name} leaves {path} with a syntax error at line {error.lineno} ({error.msg}): "
            "every patch must leave a tree that compiles."
        ) from None


def check_patch(repo: Repo, patch: Patch, commit: str, number: int, pin: Pin) -> tuple[int, int]:
    """Check one applied patch; returns its added and deleted lines."""
    again = export(repo, commit, number)
    if again.render() != patch.render():
        raise QueueError(f"{patch.name} is not in the form that `make refresh` writes: run it.")
    touched = changes(repo, commit)
    for path, _, _ in touched:
        if path not in pin.files:
            raise QueueError(
                f"{patch.name} touches {path}, which pin.toml does not list: move the change to "
                "sglang_dflash/, or list the file."
            )
        check_compiles(repo, commit, path, patch.name)
    return sum(row[1] for row in touched), sum(row[2] for row in touched)


def check(places: Places) -> str:
    """Check files, headers, application, intermediate trees and size of the whole series."""
    pin, patches = load(places)
    for number, patch in enumerate(patches, start=1):
        name = file_name(number, header(patch.message, patch.name)["Subject"])
        if name != patch.name:
            raise QueueError(f"{patch.name} should be named {name}: run `make refresh`.")
    lines, total = [], 0
    with scratch(places, pin) as repo, tempfile.TemporaryDirectory() as folder:
        tip = repo.resolve("upstream^{commit}")
        for number, patch in enumerate(patches, start=1):
            tip = commit_patch(repo, patch, tip, Path(folder) / "index")
            added, deleted = check_patch(repo, patch, tip, number, pin)
            total += added + deleted
            lines.append(f"{patch.name:60} +{added:<4} -{deleted}")
        checked_tip(repo, pin, patches)
    if total > pin.max_changed_lines:
        raise QueueError(
            f"the series changes {total} lines, more than the {pin.max_changed_lines} that "
            "pin.toml allows: move logic to sglang_dflash/."
        )
    lines.append(f"{len(patches)} patches, {total} changed lines of {pin.max_changed_lines}: good")
    return "\n".join(lines)


def rebase(places: Places, version: str) -> tuple[str, bool]:
    """Try each patch on another release; returns the report and whether all applied."""
    _, patches = load(places)
    lines, good = [], True
    with tempfile.TemporaryDirectory(prefix="dflash-rebase-") as name:
        folder = Path(name)
        wheel = download(f"sglang=={version}", folder)
        repo = unpack(wheel, version, folder / "sglang")
        tip = repo.resolve("upstream^{commit}")
        for patch in patches:
            try:
                tip, moved = try_patch(repo, patch, tip, folder / "index")
                where = f" (hunks at other lines: {len(moved)})" if moved else ""
                lines.append(f"applies         {patch.name}{where}")
            except QueueError as error:
                # The next patches are tried without it, so that one report shows all the work.
                lines.append(f"does not apply  {str(error).replace(' does not apply', '', 1)}")
                good = False
    return "\n".join(lines), good
