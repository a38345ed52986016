"""A server with a fault: `python -m sglang_dflash.losslessness.faulty_server accept|sampler …`.

What follows the name of the fault are the arguments of `sglang.launch_server`.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from sglang_dflash.losslessness.faults import FAULTS, inject


def run_scheduler(fault: str, server_args: Any, *rest: Any, **more: Any) -> Any:
    """Stands for SGLang's `run_scheduler_process`, in the process that it runs in."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.utils import configure_logger

    configure_logger(server_args)  # else the warning would be dropped
    inject(fault)
    return run_scheduler_process(server_args, *rest, **more)


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in FAULTS:
        print(
            f"error: {arguments[0] if arguments else 'nothing'} is not the name of a fault: give "
            f"{' or '.join(FAULTS)}, then server arguments.",
            file=sys.stderr,
        )
        return 2
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    server_args = prepare_server_args(arguments[1:])
    try:
        launch_server(
            server_args,
            run_scheduler_process_func=functools.partial(run_scheduler, arguments[0]),
        )
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
