"""A server whose ranks are replicas or run on several nodes: it ends as one, and says why.

The release's first process watches the processes that it started itself. Replicas are started by a controller, which
nobody tells when one dies, so what it was sent is never answered. On a further node the first process waits for its
ranks one after the other, and then goes on as if it were the first node.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from multiprocessing import Process, connection
from threading import Thread
from typing import TYPE_CHECKING

from sglang.srt.utils import kill_process_tree
from torch.distributed import DistError

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# What gloo raises in a rank that waits for another whose process has ended.
_LOST = ("Connection closed by peer", "Connection reset by peer")


def watch_replica(ranks: Sequence[Process], dp_rank: int) -> None:
    """Lets the controller of replicas end, and so the server, as soon as a rank of this one does."""
    end = (ranks, f"replica {dp_rank}")
    Thread(target=end_with_any, args=end, daemon=True, name=f"watch-replica-{dp_rank}").start()


def end_with_any(ranks: Sequence[Process], whose: str) -> None:
    """Waits until one of the processes ends, then ends this one with all that it started."""
    ended = connection.wait([rank.sentinel for rank in ranks])
    for number, rank in enumerate(ranks):
        if rank.sentinel in ended:
            rank.join(1)  # the sentinel may be a little ahead of the exit code
            logger.error(
                "Rank %d of %s (process %d) ended with exit code %s, so the server ends.",
                number,
                whose,
                rank.pid,
                rank.exitcode,
            )
    kill_process_tree(os.getpid(), include_parent=False)
    os._exit(1)  # of which SIGKILL would make nothing in a container whose first process this is


def tell_of_nodes(error: BaseException, server_args: ServerArgs) -> None:
    """Logs a sentence if a rank ends because of another node."""
    if server_args.nnodes == 1:
        return
    here = f"Node {server_args.node_rank} of {server_args.nnodes} ends"
    if isinstance(error, DistError):
        logger.error(
            "%s, because not all nodes met at --dist-init-addr %s in time: start one with each --node-rank, with this "
            "address and otherwise the same arguments, or give them more seconds with --dist-timeout.",
            here,
            server_args.dist_init_addr,
        )
    elif any(lost in str(error) for lost in _LOST):
        logger.error("%s, because another one did: its log says why.", here)
