"""DFlash speculative decoding for SGLang.

Drafts a block of tokens in one pass of a small block-diffusion model and verifies the block in
one pass of the target. The package holds all the logic; `patches/` makes SGLang call it.

A round goes through four stages, each a module of `round`: `propose` → `verify` → `accept` → `commit`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

__version__ = "0.1.0"


def _require_patched_sglang() -> None:
    """Stock SGLang would fail much later and strangely; say at import what is wrong.

    Reads the one file that defines the algorithms, because importing SGLang takes seconds.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            "sglang_dflash needs the patched SGLang, and none is installed: run `make setup`."
        )
    root = Path(next(iter(spec.submodule_search_locations)))
    algorithms = root / "srt" / "speculative" / "spec_info.py"
    if not algorithms.is_file() or "sglang_dflash" not in algorithms.read_text():
        raise ImportError(
            f"The SGLang in {root} is not the patched one: run `make setup`, which installs "
            "SGLang with the patches of this project, and remove the other installation."
        )


_require_patched_sglang()


def worker_class(overlap: bool) -> type:
    """The worker that SGLang's scheduler creates.

    Args:
        overlap: whether the scheduler overlaps the host's work with the forward pass.
    """
    if overlap:
        from sglang_dflash.scheduler.worker_v2 import DFlashWorkerV2

        return DFlashWorkerV2
    from sglang_dflash.scheduler.worker import DFlashWorker

    return DFlashWorker
