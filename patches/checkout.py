"""build/sglang: the pinned release as tag `upstream`, one commit a patch on branch `dflash`."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from patches.git import Repo
from patches.patch import Patch, export, parse, read_series, write_series
from patches.pin import Pin, QueueError, load_pin, write_series_tree
from patches.upstream import BRANCH, check_upstream, fetch, unpack

# The last commit that came from, or went to, the patch files: below it nothing can be lost.
EXPORTED = "refs/dflash/exported"


@dataclass(frozen=True)
class Places:
    patches: Path
    build: Path

    @property
    def pin(self) -> Path:
        return self.patches / "pin.toml"

    @property
    def checkout(self) -> Path:
        return self.build / "sglang"


def try_patch(repo: Repo, patch: Patch, parent: str, index: Path) -> tuple[str, list[str]]:
    """Commit one patch on `parent` without touching the working tree; index: a scratch file.

    Returns the commit and what git says of each hunk that applied at another line than its own
    (git apply knows offsets, but no fuzz).
    """
    repo.git("read-tree", parent, index=index)
    options = ("apply", "--cached", "--verbose", "--whitespace=nowarn")
    done = repo.run(*options, stdin=patch.diff.encode(errors="surrogateescape"), index=index)
    report = [line.strip() for line in done.stderr.decode(errors="replace").splitlines()]
    if done.returncode:
        errors = [line.removeprefix("error: ") for line in report if line.startswith("error: ")]
        # "while searching for:" only introduces lines that git prints after it.
        reason = next((line for line in errors if not line.endswith(":")), "git gives no reason")
        raise QueueError(f"{patch.name} does not apply: {reason}")
    tree = repo.git("write-tree", index=index).strip()
    message = patch.message.encode(errors="surrogateescape") + b"\n"
    commit = repo.git("commit-tree", tree, "-p", parent, "-F", "-", stdin=message).strip()
    return commit, [line for line in report if "offset" in line]


def commit_patch(repo: Repo, patch: Patch, parent: str, index: Path) -> str:
    """Like try_patch, but refuses an offset."""
    commit, moved = try_patch(repo, patch, parent, index)
    if moved:
        raise QueueError(f"{patch.name} applies only with an offset: {moved[0]}")
    return commit


def commit_series(repo: Repo, patches: list[Patch]) -> str:
    """The tip of the series on `upstream`, as commits that no branch holds yet."""
    tip = repo.git("rev-parse", "upstream^{commit}").strip()
    with tempfile.TemporaryDirectory() as folder:
        for patch in patches:
            tip = commit_patch(repo, patch, tip, Path(folder) / "index")
    return tip


def require_idle(repo: Repo) -> None:
    """Refuse uncommitted changes and a rebase that is under way."""
    state = repo.path / ".git"
    if any((state / name).exists() for name in ("rebase-merge", "rebase-apply", "MERGE_HEAD")):
        raise QueueError(f"{repo.path} is in the middle of a rebase or merge: finish it first.")
    # Running from the checkout leaves __pycache__ behind; that is no change.
    changes = repo.git("status", "--porcelain", "--", ".", ":(exclude,glob)**/__pycache__/**")
    if changes:
        raise QueueError(
            f"{repo.path} has uncommitted changes ({changes.splitlines()[0].strip()}): "
            "commit them, or drop them with `git checkout`."
        )


def move(repo: Repo, commit: str) -> None:
    """Put branch and working tree on `commit`; an interrupted move is finished by `open_repo`."""
    marker = repo.path / ".git" / "dflash-moving-to"
    marker.write_text(commit)
    (repo.path / ".git" / "index.lock").unlink(missing_ok=True)
    repo.git("checkout", "--quiet", "--force", "-B", BRANCH, commit)
    repo.git("update-ref", EXPORTED, commit)
    marker.unlink()


def open_repo(places: Places, pin: Pin) -> Repo:
    repo = Repo(places.checkout)
    if not (repo.path / ".git").is_dir() or repo.resolve("upstream") is None:
        raise QueueError(f"{repo.path} is not a checkout with a tag `upstream`: move it away.")
    marker = repo.path / ".git" / "dflash-moving-to"
    if marker.exists():
        move(repo, marker.read_text())
    return repo


def create(places: Places, pin: Pin, patches: list[Patch]) -> Repo:
    """Unpack and apply beside the final place, then rename: it is complete or not there."""
    wheel = fetch(pin, places.build)
    for stale in places.build.glob(".unpack-*"):
        shutil.rmtree(stale)
    folder = Path(tempfile.mkdtemp(prefix=".unpack-", dir=places.build))
    try:
        repo = unpack(wheel, pin.version, folder / "sglang")
        check_upstream(repo, pin)
        move(repo, checked_tip(repo, pin, patches))
        repo.path.rename(places.checkout)
    finally:
        shutil.rmtree(folder)
    return Repo(places.checkout)


def checked_tip(repo: Repo, pin: Pin, patches: list[Patch]) -> str:
    tip = commit_series(repo, patches)
    tree = repo.resolve(f"{tip}:sglang")
    if tree != pin.series_tree:
        raise QueueError(
            f"the series gives tree {tree}, but pin.toml says series_tree = {pin.series_tree}: "
            "restore patches/ with git, or run `make refresh` in the checkout it came from."
        )
    return tip


def require_exported(repo: Repo) -> None:
    """Refuse to leave commits that exist in no patch file."""
    head = repo.git("rev-parse", "HEAD").strip()
    if head not in (repo.resolve("upstream^{commit}"), repo.resolve(EXPORTED)):
        raise QueueError(
            f"{repo.path} has commits that patches/ does not have: `make refresh` keeps them, "
            f"`git -C {repo.path} reset --hard upstream` drops them."
        )


def apply(places: Places) -> str:
    """Make build/sglang the patched release; does nothing where it is already."""
    pin, patches = load(places)
    if not places.checkout.exists():
        create(places, pin, patches)
        return f"applied {len(patches)} patches to sglang {pin.version} in {places.checkout}"
    repo = open_repo(places, pin)
    require_idle(repo)
    if repo.resolve("upstream:sglang") != pin.upstream_tree:
        require_exported(repo)  # the checkout is of another release, which the pin has left
        shutil.rmtree(repo.path)
        return apply(places)
    if repo.resolve("HEAD:sglang") == pin.series_tree:
        return f"already applied: {places.checkout} has tree {pin.series_tree}"
    tip = checked_tip(repo, pin, patches)
    require_exported(repo)
    move(repo, tip)
    return f"applied {len(patches)} patches to sglang {pin.version} in {places.checkout}"


def unapply(places: Places) -> str:
    """Put build/sglang back on the release as published."""
    pin, _ = load(places)
    if not places.checkout.exists():
        return f"nothing to do: {places.checkout} does not exist"
    repo = open_repo(places, pin)
    require_idle(repo)
    if repo.resolve("HEAD:sglang") != pin.series_tree:
        require_exported(repo)
    move(repo, repo.git("rev-parse", "upstream^{commit}").strip())
    return f"{places.checkout} is sglang {pin.version} as published"


def refresh(places: Places) -> str:
    """Write the commits upstream..HEAD to the patch files, and their tree to the pin."""
    pin, _ = load(places, series=False)
    if not places.checkout.exists():
        raise QueueError(f"{places.checkout} does not exist: run `make apply` and commit there.")
    repo = open_repo(places, pin)
    require_idle(repo)
    check_upstream(repo, pin)
    if repo.git("rev-parse", "--abbrev-ref", "HEAD").strip() != BRANCH:
        raise QueueError(f"{repo.path} is not on branch {BRANCH}: check it out first.")
    if repo.run("merge-base", "--is-ancestor", "upstream", "HEAD").returncode:
        raise QueueError(f"{repo.path}: {BRANCH} does not contain upstream: rebase it onto it.")
    if repo.git("rev-list", "--merges", "upstream..HEAD"):
        raise QueueError(f"{repo.path} has a merge commit: rebase it to single commits.")
    commits = repo.git("rev-list", "--reverse", "upstream..HEAD").split()
    patches = [export(repo, commit, number) for number, commit in enumerate(commits, start=1)]
    # Through the files' own form, so that the commits are those which `apply` makes elsewhere.
    tip = commit_series(repo, [parse(patch.name, patch.render()) for patch in patches])
    write_series(places.patches, patches)
    write_series_tree(places.pin, repo.git("rev-parse", f"{tip}:sglang").strip())
    move(repo, tip)
    return f"wrote {len(patches)} patches to {places.patches}"


def load(places: Places, series: bool = True) -> tuple[Pin, list[Patch]]:
    return load_pin(places.pin), read_series(places.patches) if series else []
