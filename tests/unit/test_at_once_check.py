"""Kernels are used if they do what the steps do that they stand for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sglang_dflash.gpu import at_once
from sglang_dflash.gpu.kernels import fill_pass, share_rows, start_requests
from sglang_dflash.round import at_once_check, ragged, side_by_side, state
from sglang_dflash.round.side_by_side import SideBySide

WIDTH, DEVICE = 6, "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def steps_again() -> Iterator[None]:
    yield
    at_once.use(False)


def inputs(rows: int = 128, requests: int = 12, mrope: bool = False) -> SideBySide:
    table = torch.zeros(16, 64, dtype=torch.int32, device=DEVICE)
    return SideBySide(table, 1, rows, requests, mrope)


@pytest.mark.parametrize("mrope", [False, True])
@pytest.mark.parametrize(("rows", "requests"), [(128, 12), (32, 4)])
def test_kernels_that_are_right(rows: int, requests: int, mrope: bool) -> None:
    """However little there is room for."""
    assert not at_once.used()
    at_once_check.use_kernels(inputs(rows, requests, mrope), WIDTH)
    assert at_once.used()


def wrong_share(*arguments, **more):
    counts, begins, source = share_rows.share_rows(*arguments, **more)
    return counts, begins, source.flip(0)


def wrong_fill(buffers, *rest):
    fill_pass.fill_pass(buffers, *rest)
    buffers[1, 3] += 1


def wrong_start(rows, bonus_tokens, *rest):
    start_requests.start_requests(rows, bonus_tokens + 1, *rest)


def fails(*arguments, **more):
    raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        (ragged, "share_rows", wrong_share),
        (side_by_side, "fill_pass", wrong_fill),
        (state, "start_requests", wrong_start),
        (state, "start_requests", fails),
    ],
)
def test_a_kernel_that_is_not(
    module, name: str, wrong, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, name, wrong)
    at_once_check.use_kernels(inputs(), WIDTH)
    assert not at_once.used() and "small steps one by one" in caplog.text
