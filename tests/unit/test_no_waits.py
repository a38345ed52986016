"""What is written for every round or prompt makes the host wait for no device.

`x[i] = 0` with index tensors does: PyTorch copies the number to the device first, and waits for everything before it.
That is seen on a CPU, too, where the number arrives as a tensor without dimensions.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dflash.round.state import ENDS, RequestState
from sglang_dflash.round.survival import Kinds
from sglang_dflash.scheduler.reserve import reserve
from tests.unit.test_reserve import WIDTH, admit, world


class NoWaits(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ):
        if func.overloadpacket in (torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_):
            assert args[2].dim() > 0, "a number is written by index tensors"
        assert func.overloadpacket is not torch.ops.aten._local_scalar_dense, "a number is read"
        return func(*args, **(kwargs or {}))


def test_it_sees_what_waits() -> None:
    x, at = torch.zeros(4), torch.tensor([1, 2])
    for wait in (lambda: x.__setitem__(at, 0), lambda: x[1].item()):
        with pytest.raises(AssertionError, match="a number is"), NoWaits():
            wait()


def test_state() -> None:
    state, rows = RequestState(4, "cpu"), torch.tensor([2, 0])
    ends = torch.full((2, ENDS + 1), 7)
    with NoWaits():
        state.start(rows, torch.tensor([3, 4]), torch.tensor([5, 6]), ends)
        state.advance(rows, torch.ones(2, 3), torch.tensor([1, 2]), torch.tensor([8, 9]))
    assert state.lengths.tolist() == [8, 0, 6, 0, 0]


@pytest.mark.parametrize("who", [[0, 1, 2], [0, 2], [1]])
def test_kinds(who: list[int]) -> None:
    kinds = Kinds(4, "cpu")
    with NoWaits():
        kinds.tell(3, who, [None, "a", None])
    assert kinds.values.tolist() == [int(i in who) + 2 * (i == 1) for i in range(4)]


def test_reservations_up_to_the_limit() -> None:
    batch = world(1)
    admit(batch, prompt=9, limit=4)
    with NoWaits():
        reserve(batch, WIDTH)
    assert batch.req_to_token_pool.req_to_token[0, 9 + WIDTH - 1] == 0


def test_requests_that_leave_a_batch() -> None:
    """What is on a device of this name cannot be read."""

    def on_device() -> torch.Tensor:
        return torch.zeros(3, dtype=torch.int64, device="meta")

    gone = [False, True, False]
    reqs = [
        SimpleNamespace(
            finished=lambda gone=gone: gone, return_logprob=False, stream=False, grammar=None
        )
        for gone in gone
    ]
    batch = ScheduleBatch(reqs=reqs, batch_is_full=True)
    batch.device, batch.spec_algorithm = "meta", SpeculativeAlgorithm.from_string("DFLASH")
    batch.model_config = SimpleNamespace(is_encoder_decoder=False)
    batch.req_pool_indices, batch.seq_lens, batch.orig_seq_lens = (on_device() for _ in range(3))
    batch.seq_lens_cpu = torch.tensor([5, 7, 9])
    batch.sampling_info = SimpleNamespace(filter_batch=lambda *of: None)
    batch.spec_info = SimpleNamespace(verify_done=None, filter_batch=lambda **of: None)
    batch.filter_batch()
    assert batch.reqs == [reqs[0], reqs[2]] and batch.seq_lens_sum == 14
