"""Download the pinned release and unpack it as a git repository."""

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from patches.git import Repo
from patches.pin import Pin, QueueError

BRANCH = "dflash"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(requirement: str, folder: Path) -> Path:
    """Let pip, with the user's own configuration, download one wheel; returns its path."""
    if importlib.util.find_spec("pip") is None:
        raise QueueError(f"{sys.executable} has no pip to download with: install python3-pip.")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write(requirement + "\n")
        requirements.flush()
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", str(folder), "-r", requirements.name]
        done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line]
        reason = errors[-1].removeprefix("ERROR: ") if errors else done.stderr.strip()[-300:]
        raise QueueError(f"pip could not download {requirement.split(' --hash')[0]}: {reason}")
    return wheels[0]


def fetch(pin: Pin, build: Path) -> Path:
    """The pinned wheel in build/download/, its sha256 checked; downloads it when needed."""
    wheel = build / "download" / pin.wheel
    if wheel.is_file() and sha256(wheel) == pin.sha256:
        return wheel
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=wheel.parent) as folder:
        got = download(f"{pin.requirement} --hash=sha256:{pin.sha256}", Path(folder))
        if got.name != pin.wheel or sha256(got) != pin.sha256:
            raise QueueError(
                f"the download is {got.name} with sha256 {sha256(got)}, but the pin says "
                f"{pin.wheel} with {pin.sha256}: check the package index that pip uses."
            )
        got.replace(wheel)  # complete or not there: an interrupted download leaves nothing
    return wheel


def unpack(wheel: Path, version: str, target: Path) -> Repo:
    """Make `target` a repository whose tag `upstream` is the wheel's folder `sglang/`."""
    target.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.startswith("sglang/")]
        archive.extractall(target, members)
    repo = Repo(target)
    repo.git("init", "--quiet", "--template=", f"--initial-branch={BRANCH}")
    for key, value in {
        # zipfile writes no permission bits and no line ends of its own: neither may git.
        "core.fileMode": "false",
        "core.autocrlf": "false",
        "user.name": "sglang-dflash",
        "user.email": "sglang-dflash@users.noreply.example",
    }.items():
        repo.git("config", key, value)
    repo.git("add", "--force", "--all")
    repo.git("commit", "--quiet", "--no-verify", "-m", f"sglang {version}")
    repo.git("tag", "upstream")
    return repo


def check_upstream(repo: Repo, pin: Pin) -> None:
    tree = repo.resolve("upstream:sglang")
    if tree != pin.upstream_tree:
        raise QueueError(
            f"{repo.path}: tag upstream has tree {tree}, but the pin of sglang {pin.version} says "
            f"{pin.upstream_tree}: check version, sha256 and upstream_tree in pin.toml."
        )
