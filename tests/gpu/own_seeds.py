"""A server whose ranks draw with random numbers of their own: `python -m tests.gpu.own_seeds --model-path …`.

Ranks are seeded alike, and draw alike until something makes one of them draw once more than the others.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def run_scheduler(*arguments: Any, **more: Any) -> Any:
    """Stands for SGLang's `run_scheduler_process`, in the process that it runs in."""
    import torch.distributed as dist
    from sglang.srt.managers import scheduler

    seed = scheduler.set_random_seed  # the last that a scheduler calls
    scheduler.set_random_seed = lambda number: seed(number + dist.get_rank())
    return scheduler.run_scheduler_process(*arguments, **more)


if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        launch_server(prepare_server_args(sys.argv[1:]), run_scheduler_process_func=run_scheduler)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
