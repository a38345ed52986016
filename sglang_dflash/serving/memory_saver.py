"""--enable-memory-saver: whether its library can be loaded by the processes that are to be started."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_dflash.errors import DFlashError

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_PATH = "LD_LIBRARY_PATH"


def check_memory_saver(args: ServerArgs) -> None:
    """Lets processes of a GPU server find the CUDA runtime that the library needs, and tries to load it.

    The release has the library loaded before all others (LD_PRELOAD), when nobody has looked into Python's packages
    yet, where the runtime is. A process that cannot load it ends before its first line.

    Raises:
        DFlashError: it cannot be loaded, or another tier copies what it takes away.
    """
    if not args.enable_memory_saver:
        return
    if args.enable_hierarchical_cache:
        raise DFlashError(
            "--enable-memory-saver is not supported with --enable-hierarchical-cache, which copies K/V at times of its "
            "own: leave one of them out."
        )
    if args.device != "cuda":
        return
    folders = [*runtime_folders(), *filter(None, os.environ.get(_PATH, "").split(":"))]
    os.environ[_PATH] = ":".join(dict.fromkeys(folders))
    if why := why_not_loaded():
        raise DFlashError(
            f"--enable-memory-saver cannot run here, because its library cannot be loaded ({why}): install "
            "torch_memory_saver for the CUDA version that torch was built for, or leave it out."
        )


def runtime_folders() -> list[str]:
    """Where the CUDA runtime lies that torch has loaded."""
    found = re.findall(r"\S*/libcudart\S*\.so\S*", Path("/proc/self/maps").read_text())
    return sorted({os.path.dirname(path) for path in found})


def why_not_loaded() -> str:
    """What the system says of a process that is started with the library; empty if nothing."""
    from sglang.srt.utils.torch_memory_saver_adapter import _TorchMemorySaverAdapterReal

    try:
        with _TorchMemorySaverAdapterReal().configure_subprocess():
            tried = subprocess.run(["/bin/sh", "-c", ":"], capture_output=True, text=True)
    except (AssertionError, RuntimeError) as error:  # no library for this CUDA version
        return str(error)
    return (tried.stderr or str(tried.returncode or "")).strip()
