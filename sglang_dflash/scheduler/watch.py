"""What a test wants to know of every round of a running server; off unless asked for."""

from __future__ import annotations

import logging
import os

import torch
from sglang.srt.distributed import get_tp_group

from sglang_dflash.round.accept import Accepted

logger = logging.getLogger(__name__)

# Tests set this to a number: after every so many rounds a line of the log says what was seen.
WATCH = "SGLANG_DFLASH_WATCH"


def watch_of(device: torch.device) -> RoundWatch | None:
    """A watch, if the environment asks for one."""
    every = int(os.environ.get(WATCH, "0"))
    return RoundWatch(every, device) if every else None


class RoundWatch:
    """Counts rounds, and those in which the ranks of a tensor-parallel group disagree.

    Compares tokens, lengths and bonus tokens of each round on the device; only the line in the log
    makes the host wait.
    """

    def __init__(self, every: int, device: torch.device):
        self.every, self.rounds = every, 0
        self.disagreements = torch.zeros((), dtype=torch.int64, device=device)

    def note(self, accepted: Accepted) -> None:
        group = get_tp_group()
        if group.world_size > 1:
            fields = (accepted.tokens.flatten(), accepted.lengths, accepted.bonus_tokens)
            ranks = group.all_gather(torch.cat(fields)[None], dim=0)
            self.disagreements += (ranks != ranks[:1]).any()
        self.rounds += 1
        if self.rounds % self.every == 0:
            self.log()

    def log(self) -> None:
        stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
        logger.info(
            "DFLASH watch: rounds=%d disagreements=%d allocations=%d segments=%d reserved=%d allocated=%d",
            self.rounds,
            int(self.disagreements),
            stats.get("allocation.all.allocated", 0),
            stats.get("segment.all.allocated", 0),
            stats.get("reserved_bytes.all.current", 0),
            stats.get("allocated_bytes.all.current", 0),
        )
