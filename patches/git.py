"""Run git so that its result depends on its arguments only."""

import os
import shutil
import subprocess
from pathlib import Path

from patches.pin import QueueError

# Author, committer and date are fixed so that the same series gives the same commit hashes.
IDENTITY = {
    f"GIT_{role}_{key}": value
    for role in ("AUTHOR", "COMMITTER")
    for key, value in {
        "NAME": "sglang-dflash",
        "EMAIL": "sglang-dflash@users.noreply.example",
        "DATE": "2026-01-01T00:00:00+0000",
    }.items()
}


def environment() -> dict[str, str]:
    """The caller's environment without what would make git read or write elsewhere."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    no_config = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    return env | no_config | {"GIT_ATTR_NOSYSTEM": "1", "LC_ALL": "C"} | IDENTITY


class Repo:
    """One git repository; every method raises QueueError when git refuses."""

    def __init__(self, path: Path):
        self.path = Path(path).resolve()

    def run(
        self, *arguments: str, stdin: bytes | None = None, index: Path | None = None
    ) -> subprocess.CompletedProcess:
        """Run `git <arguments>` and return the finished process, whatever its exit status.

        index: an index file to use instead of the repository's own, so that trees and commits
        can be made without touching its working tree.
        """
        if shutil.which("git") is None:
            raise QueueError("git is not installed: install it and run the command again.")
        env = environment() | ({"GIT_INDEX_FILE": str(index)} if index else {})
        # With the user's configuration ignored, a checkout owned by someone else (a bind mount)
        # would be refused.
        options = [f"safe.directory={self.path}", f"core.attributesFile={os.devnull}"]
        command = ["git", "-C", str(self.path)]
        command += [part for option in options for part in ("-c", option)]
        return subprocess.run([*command, *arguments], input=stdin, capture_output=True, env=env)

    def git(self, *arguments: str, **keywords) -> str:
        """Standard output of `git <arguments>`, undecodable bytes kept as surrogates."""
        done = self.run(*arguments, **keywords)
        if done.returncode:
            reason = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            raise QueueError(f"git {arguments[0]} failed in {self.path}: {reason[-1]}")
        return done.stdout.decode(errors="surrogateescape")

    def resolve(self, name: str) -> str | None:
        """The hash of a revision, None where there is none."""
        done = self.run("rev-parse", "--verify", "--quiet", name)
        return done.stdout.decode().strip() if done.returncode == 0 else None
