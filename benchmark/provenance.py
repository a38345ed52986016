"""Where a figure comes from: machine, versions, commit, flags."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmark.servers import System
from benchmark.shapes import ROOT

_PACKAGES = (
    "torch",
    "sglang",
    "sglang-kernel",
    "sgl-kernel",
    "flashinfer-python",
    "triton",
    "vllm",
    "transformers",
)
_GPU_FIELDS = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)
_PREFIXES = ("SGLANG_", "CUDA_", "NCCL_", "FLASHINFER_", "OMP_", "TORCH", "TRITON_", "HF_")
_PATHS = ("/", "./", "../", "~")  # how they begin
_VERSIONS = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {"python": sys.version.split()[0]}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit() -> dict[str, object]:
    """The project's commit, and whether files that it tracks are changed."""
    head = _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    changed = _output(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"])
    return {"commit": head or "unknown", "changed_files": len(changed.splitlines())}


def gpu() -> dict[str, str]:
    """What nvidia-smi says at this moment about the first GPU in use; empty without one."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    query = f"--query-gpu={','.join(_GPU_FIELDS)}"
    line = _output(["nvidia-smi", "-i", first, query, "--format=csv,noheader,nounits"])
    values = [value.strip() for value in line.split(",")]
    return dict(zip(_GPU_FIELDS, values, strict=True)) if len(values) == len(_GPU_FIELDS) else {}


def machine(gpu_count: int) -> dict[str, object]:
    system = f"{platform.system()} {platform.machine()}"
    return {"platform": system, "cpus": os.cpu_count(), "gpus_used": gpu_count}


def versions(system: System, device: str) -> dict[str, str]:
    """Versions of the packages that a system's interpreter finds."""
    command = [system.python, "-c", _VERSIONS, *_PACKAGES]
    text = _output(command, env=system.full_environment(device), cwd=ROOT.anchor)
    return json.loads(text) if text else {}


def environment(system: System, device: str) -> dict[str, str]:
    """Variables that matter to SGLang, without this machine's paths."""
    return {
        name: "(a path)" if "/" in value else value
        for name, value in sorted(system.full_environment(device).items())
        if name.startswith(_PREFIXES)
    }


def without_paths(arguments: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """Arguments in which folders are replaced by the names given for them, and others by a word.

    NAME=PATH, as a peer is given, keeps its name; so does each of several words in one argument.
    """
    return [_without_paths(argument, names) for argument in arguments]


def _without_paths(argument: str, names: Mapping[str, str]) -> str:
    if argument in names:
        return names[argument]
    if argument.startswith(_PATHS):  # with all that a folder's name may have
        return "(a path)"
    return " ".join(map(_without_path, argument.split(" ")))


def _without_path(word: str) -> str:
    head, _, value = word.rpartition("=")
    if not value.startswith(_PATHS):
        return word
    return f"{head}=(a path)" if head else "(a path)"


def command_line() -> list[str]:
    """How the benchmark was called."""
    return ["python", f"benchmark/{Path(sys.argv[0]).name}", *without_paths(sys.argv[1:], {})]


def _output(command: list[str], **keywords) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, **keywords)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
