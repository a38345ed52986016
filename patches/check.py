"""What the series must fulfil on the pinned release, and a trial on another one."""

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

from patches.checkout import Places, checked_tip, commit_patch, load, move, try_patch
from patches.git import Repo
from patches.patch import Patch, export, file_name, header
from patches.pin import Pin, QueueError
from patches.upstream import check_upstream, download, fetch, sha256, unpack


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
    """Try each patch on another release, in build/rebase; returns the report and whether all applied."""
    _, patches = load(places)
    folder = places.build / "rebase"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    wheel = download(f"sglang=={version}", folder)
    repo = unpack(wheel, version, folder / "sglang")
    tip, lines, missing = repo.resolve("upstream^{commit}"), [], []
    for patch in patches:
        try:
            tip, moved = try_patch(repo, patch, tip, folder / "index")
            where = f" (hunks at other lines: {len(moved)})" if moved else ""
            lines.append(f"applies         {patch.name}{where}")
        except QueueError as error:
            # The next patches are tried without it, so that one report shows all the work.
            lines.append(f"does not apply  {str(error).replace(' does not apply', '', 1)}")
            missing.append(patch)
    move(repo, tip)
    new = pin_of(wheel, version, repo.resolve("upstream:sglang"))
    lines += ["", "pin.toml of this release:", *(f'{name} = "{value}"' for name, value in new), ""]
    return "\n".join(
        [*lines, _next_step(places, repo, version, len(patches), missing)]
    ), not missing


def pin_of(wheel: Path, version: str, tree: str) -> list[tuple[str, str]]:
    """What pin.toml must say of another release; series_tree aside, which `make refresh` writes."""
    return [
        ("version", version),
        ("requirement", f"sglang=={version}"),
        ("wheel", wheel.name),
        ("sha256", sha256(wheel)),
        ("local_version", f"{version}+dflash.1"),
        ("upstream_tree", tree),
    ]


def _next_step(places: Places, repo: Repo, version: str, count: int, missing: list[Patch]) -> str:
    mend = ""
    if missing:
        mend = (
            f"commit the other {len(missing)} by hand in {repo.path}, which has those that do, each "
            "with its header as the message; "
        )
    return (
        f"{count - len(missing)} of {count} patches apply to sglang {version}. Next: {mend}put "
        f"{repo.path} in the place of {places.checkout}, write the lines above into {places.pin} and "
        "the version into requirements/common.in, and run make refresh check-patches lock test."
    )
