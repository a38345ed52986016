"""A server whose log tells where its scheduler waits for the device unasked: `python -m tests.gpu.waits_told …`.

PyTorch sees copies and questions that wait for all of a stream. Events that are waited for on purpose do not count.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from functools import partial
from typing import Any

TOLD = "waits for the device:"
_FRAMES = 4  # of those who wait, the innermost ones

logger = logging.getLogger(__name__)


def run_scheduler(*arguments: Any, **more: Any) -> Any:
    """Stands for SGLang's `run_scheduler_process`, in the process that it runs in."""
    from sglang.srt.managers import scheduler

    run = scheduler.Scheduler.run_event_loop
    scheduler.Scheduler.run_event_loop = lambda self: _told(partial(run, self))
    return scheduler.run_scheduler_process(*arguments, **more)


def _told(run: Any) -> None:
    import torch

    # Only now: while it starts, everybody waits.
    warnings.filterwarnings("always", message="called a synchronizing CUDA operation")
    warnings.showwarning = _tell
    torch.cuda.set_sync_debug_mode("warn")
    run()


def _tell(message: Warning | str, *where: Any, **more: Any) -> None:
    if "synchronizing" in str(message):
        frames = traceback.extract_stack()[:-1]
        others = "/torch/", "/warnings.py"
        mine = [each for each in frames if not any(part in each.filename for part in others)]
        at = (
            f"{each.filename.split('/site/')[-1]}:{each.lineno} {each.name}"
            for each in mine[: -_FRAMES - 1 : -1]
        )
        logger.info("%s %s", TOLD, " < ".join(at))


if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        launch_server(prepare_server_args(sys.argv[1:]), run_scheduler_process_func=run_scheduler)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
