"""The project's own series, locks and make targets."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from patches.pin import load_pin
from tests.patches.fake_release import ROOT, Queue, git

BUILD = ROOT / (os.environ.get("BUILD") or "build")
PIN = load_pin(ROOT / "patches" / "pin.toml")
GPU_ONLY = ("sglang-kernel", "flashinfer-python", "flash-attn-4", "quack-kernels", "cuda-python")


@pytest.fixture
def real(tmp_path, capsys, request) -> Queue:
    """The real patches and the real wheel in a build folder of their own."""
    wheel = BUILD / "download" / PIN.wheel
    if not wheel.exists():
        python = request.getfixturevalue("tool_python")
        command = [python, "-m", "patches", "--build", str(BUILD), "fetch"]
        subprocess.run(command, cwd=ROOT, check=True)
    download = tmp_path / "build" / "download"
    download.mkdir(parents=True)
    shutil.copy(wheel, download)
    shutil.copytree(ROOT / "patches", tmp_path / "patches")
    return Queue(tmp_path, capsys)


def test_the_series_on_the_pinned_release(real):
    assert "good" in real.good("check")
    real.good("apply")
    assert real.head_tree() == PIN.series_tree
    assert git(real.checkout, "rev-parse", "upstream:sglang").strip() == PIN.upstream_tree
    before = real.files()
    real.good("refresh")
    assert real.files() == before


def requirements(name: str) -> dict[str, str]:
    """Project to the whole entry, hashes included."""
    text = (ROOT / "requirements" / name).read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    return {re.match(r"[A-Za-z0-9._-]+", entry)[0].lower(): entry for entry in entries}


LOCKED = ["bootstrap.lock", "cpu.lock", "cuda.lock", "references.lock"]


@pytest.mark.parametrize("name", LOCKED)
def test_locks_are_exact_and_name_no_index(name):
    for project, entry in requirements(name).items():
        assert re.match(rf"{re.escape(project)}==\S+ \\\n +--hash=sha256:[0-9a-f]{{64}}", entry)
        assert "://" not in entry and not entry.startswith("-")


def test_the_locks_hold_the_stack():
    for lock in ("cpu.lock", "cuda.lock"):
        locked = requirements(lock)
        assert "sglang" not in locked
        for line in (ROOT / "requirements/overrides.txt").read_text().splitlines():
            if line and not line.startswith("#"):
                assert locked[line.split("==")[0]].startswith(f"{line} ")
    for project in GPU_ONLY:
        assert project in requirements("cuda.lock")
        assert project not in requirements("cpu.lock")


def make(*arguments: str) -> subprocess.CompletedProcess:
    # Variables of an outer `make test` must not reach this one.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "ARGS"))}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("accel", ["cpu", "cuda"])
def test_serve_puts_the_users_arguments_last(accel):
    values = ["PORT=1234", "MODEL=m", "DRAFT=d", "ARGS=--dtype float32 --port 5", f"ACCEL={accel}"]
    output = make("-n", "serve", *values).stdout
    command = output.strip().splitlines()[-1]
    assert "--model-path m --port 1234" in command
    assert "--speculative-algorithm DFLASH --speculative-draft-model-path d" in command
    assert ("--device cpu" in command) == (accel == "cpu")
    assert command.endswith("--dtype float32 --port 5")
    plain = make("-n", "serve-plain", *values).stdout.strip().splitlines()[-1]
    assert "speculative" not in plain and plain.endswith("--dtype float32 --port 5")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("setup", "PYTHON="), "no Python 3.11 or 3.12"),
        (("setup", "ACCEL=tpu"), "ACCEL is tpu, but must be cpu or cuda"),
        (("rebase",), "name the release: make rebase TO=<version>"),
    ],
)
def test_make_explains_what_it_refuses(arguments, message):
    done = make(*arguments)
    assert done.returncode != 0
    assert message in done.stderr


def test_help_lists_every_target():
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"\.PHONY:((?:.*\\\n)*.*)", makefile)[1].replace("\\\n", " ").split()
    listed = make("help").stdout
    for target in set(phony) - {"python"}:
        assert re.search(rf"^  {target} ", listed, re.M), target


def options_of_targets() -> dict[str, set[str]]:
    """Variables that a user may set (`NAME ?=`) and that the target's recipe comes to read."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    definitions = dict(re.findall(r"^(\w+) *[?:]?=(.*)$", makefile, re.M))
    settable = set(re.findall(r"^(\w+) *\?=", makefile, re.M))

    def read(text: str) -> set[str]:
        # $(ENV_$(ACCEL)) and its like: one for each machine.
        names = set(re.findall(r"\$\((\w+)", text)) & definitions.keys()
        names |= {
            n for p in re.findall(r"\$\((\w+_)\$", text) for n in definitions if n.startswith(p)
        }
        deeper = [read(definitions[name]) for name in names if name not in settable]
        return names.union(*deeper) & settable

    recipes = re.findall(r"^([a-z-]+):.*\n((?:\t.*\n)+)", makefile, re.M)
    return {target: read(recipe) for target, recipe in recipes}


def test_help_names_the_options_of_a_target():
    listed, found = make("help").stdout, options_of_targets()
    assert found["serve"] >= {"MODEL", "DRAFT", "PORT", "ARGS"} and found["tiny-pair"] >= {"OUT"}
    last = listed.splitlines()[-1]  # those of all targets
    for target in found.keys() - {"help", "python"}:
        told = re.search(rf"^  {target} .*", listed, re.M)[0]
        for option in found[target]:
            assert re.search(rf"\b{option}\b", f"{told} {last}"), (target, option)


def test_losslessness_of_the_bundled_pair_takes_minutes():
    """Fewer runs than the tool's own default, unless another model or other options are given."""
    command = make("-n", "losslessness", "COMPARE=--runs 9", "ACCEL=cpu").stdout.splitlines()[-1]
    assert "--runs 96 --positions 8 --runs 9 -- --device cpu" in command
    assert "--positions" not in make("-n", "losslessness", "MODEL=m").stdout.splitlines()[-1]


def test_tiny_pair_takes_the_options_that_help_names():
    command = make("-n", "tiny-pair", "OUT=there", "TRAIN=--seed 1").stdout.splitlines()[-1]
    assert command.endswith("-m checkpoints.trainer --out there --seed 1")


def test_ci_runs_make_test_and_nothing_else():
    lines = Path(ROOT / ".ci/run").read_text().splitlines()
    assert lines[:2] == ["#!/usr/bin/env bash", "set -euo pipefail"]
    assert lines[-1] == "make test"
    assert os.access(ROOT / ".ci/run", os.X_OK)
