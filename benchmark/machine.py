"""What the machine has, and which models it is asked to serve."""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmark.shapes import ROOT

# Bytes, hashed in 3 s: drafters of one shape differ in nothing else. Of larger files only name and size are hashed.
_WHOLE_FILE = 4 << 30


@dataclass(frozen=True)
class Machine:
    """The devices of this machine.

    Attributes:
        gpus: that servers may use; 0 means that they run on the CPU.
        capability: CUDA compute capability, such as (9, 0).
    """

    gpus: int = 0
    capability: tuple[int, int] = (0, 0)

    @classmethod
    def here(cls) -> Machine:
        command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):
            return cls()
        found = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        count = len(found)
        if visible is not None:
            count = min(count, len([part for part in visible.split(",") if part not in ("", "-1")]))
        if not count:
            return cls()
        major, _, minor = found[0].partition(".")
        return cls(count, (int(major), int(minor or 0)))

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    def attention_backends(self) -> list[str]:
        """What is swept unless --attention-backends says otherwise."""
        if not self.gpus:
            return ["torch_native"]
        # FlashAttention 3 is built for Ampere, Ada and Hopper.
        return ["flashinfer", "fa3"] if self.capability[0] in (8, 9) else ["flashinfer"]


def location(model: str) -> str:
    """A model as a server that runs in another folder must be told it."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def label(model: str) -> str:
    """A model without this machine's folders."""
    path = Path(model)
    if not path.is_dir():
        return model
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def revision(model: str) -> str:
    """Commit of a model that came from the hub, or a hash of a folder's files."""
    if not Path(model).is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json")
        return Path(found).parent.name if isinstance(found, str) else "unknown"
    digest = hashlib.sha256()
    for path in sorted(Path(model).iterdir()):
        if path.is_file():
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            if size <= _WHOLE_FILE:
                with path.open("rb") as file:
                    hashlib.file_digest(file, lambda: digest)  # goes on with it
    return f"sha256:{digest.hexdigest()}"
