"""Requests that have ended, and those that wait for their places."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_dflash.scheduler.leaving import leave_at_once

RUNNING = 4


class Batch:
    """Stands for the batch that decodes."""

    def __init__(self, ended: int):
        self.batch_is_full = True
        self.reqs = [SimpleNamespace(finished=lambda n=n: n < ended) for n in range(RUNNING)]

    def filter_batch(self, v1_spec_info_filtered: bool) -> None:
        assert v1_spec_info_filtered
        self.reqs = [req for req in self.reqs if not req.finished()]


def scheduler(ended: int, overlap: bool, rows: int) -> SimpleNamespace:
    """Whose `get_new_batch_prefill` gives how many more it may run, as the release finds out."""
    made = SimpleNamespace(
        running_batch=Batch(ended),
        enable_overlap=overlap,
        max_running_requests=RUNNING,
        req_to_token_pool=SimpleNamespace(size=rows),
    )

    def choose() -> int:
        full = made.running_batch.batch_is_full
        return 0 if full else RUNNING - len(made.running_batch.reqs)

    made.get_new_batch_prefill = choose
    leave_at_once(made)
    return made


@pytest.mark.parametrize(("overlap", "rows"), [(True, 2 * RUNNING), (False, RUNNING)])
@pytest.mark.parametrize("ended", [0, 1, RUNNING])
def test_room_in_the_same_step(overlap: bool, rows: int, ended: int) -> None:
    assert scheduler(ended, overlap, rows).get_new_batch_prefill() == ended


def test_rows_that_do_not_rest() -> None:
    """A round in vain that is in flight still reads the row of a request that has ended."""
    assert scheduler(1, True, RUNNING).get_new_batch_prefill() == 0
