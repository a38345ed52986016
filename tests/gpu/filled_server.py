"""A server whose dummy weights are those of `filled.py`: `python -m tests.gpu.filled_server …`.

Variables: DFLASH_TEST_REPEAT is `fill`'s repeat; DFLASH_TEST_FAULT names a fault of sglang_dflash.losslessness, with
which the test must fail.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

from tests.gpu.filled import REPEAT, fill


def run_scheduler(*arguments: Any, **more: Any) -> Any:
    """Stands for SGLang's `run_scheduler_process`, in the process that it runs in."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.model_loader import loader

    repeat = float(os.environ.get("DFLASH_TEST_REPEAT", REPEAT))
    loader.initialize_dummy_weights = partial(fill, repeat=repeat)
    if fault := os.environ.get("DFLASH_TEST_FAULT"):
        from sglang_dflash.losslessness.faults import inject

        inject(fault)
    return run_scheduler_process(*arguments, **more)


if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        launch_server(prepare_server_args(sys.argv[1:]), run_scheduler_process_func=run_scheduler)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
