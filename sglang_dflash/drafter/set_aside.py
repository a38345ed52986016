"""Around memory that is released: the drafter's weights are kept on the host, and pools are clean afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import chain

import torch
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.two_pools import single_pools


class SetAside:
    """Weights and buffers of a drafter on the host, until they are put back where they were.

    All of them are kept whichever memory is released: PyTorch puts small tensors of one kind where there is room among
    those of another, so that the memory saver would lose some with K/V.
    """

    def __init__(self, draft: ModelRunner):
        self._tensors = [*chain(draft.model.parameters(), draft.model.buffers())]
        self._kept = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._kept)

    @torch.no_grad()
    def put_back(self) -> None:
        for tensor, kept in zip(self._tensors, self._kept, strict=True):
            tensor.copy_(kept)


def clean_pools(*runners: ModelRunner) -> None:
    """Zeros in models' tables of slots, states and K/V, as when they were made.

    What resumed memory holds is undefined. Rounds read slots of requests that only pad a batch, and K/V behind
    attention masks, where NaN would count.
    """
    for runner in runners:
        rows = runner.req_to_token_pool
        rows.req_to_token.zero_()
        if (states := getattr(rows, "mamba_pool", None)) is not None:
            cache = states.mamba_cache
            _clear(getattr(cache, each.name) for each in fields(cache))
        for pool in single_pools(runner.token_to_kv_pool):
            _clear(getattr(pool, name, ()) for name in ("k_buffer", "v_buffer", "kv_buffer"))


def _clear(found: Iterable[torch.Tensor | Sequence[torch.Tensor]]) -> None:
    for each in found:
        for tensor in [each] if isinstance(each, torch.Tensor) else each:
            tensor.zero_()
