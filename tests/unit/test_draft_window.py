"""The draft model's window over long contexts: its table, lengths, and what its layers become."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from sglang_dflash.checkpoint.formats.config import Sight
from sglang_dflash.round.draft_window import DraftWindow
from sglang_dflash.round.opened import Round

WIDTH, COLUMNS, REQUESTS = 4, 96, 3


def world(size: int, page: int) -> tuple[DraftWindow, torch.Tensor]:
    """A window over a table in which pages of slots follow in any order."""
    whole = ReqToTokenPool(REQUESTS, COLUMNS, "cpu", enable_memory_saver=False)
    pages = torch.randperm(REQUESTS * COLUMNS // page) + 1
    slots = pages[:, None] * page + torch.arange(page)
    whole.req_to_token[:] = slots.view(REQUESTS, COLUMNS).to(torch.int32)
    return DraftWindow(size, WIDTH, page, whole), whole.req_to_token


def round_at(starts: list[int], rows: list[int]) -> Round:
    start, bs = torch.tensor(starts), len(starts)
    return Round(
        rows=torch.tensor(rows),
        width=WIDTH,
        start=start,
        start_bounds=start + WIDTH,
        bonus_tokens=torch.zeros(bs, dtype=torch.int64),
        positions=(start[:, None] + torch.arange(WIDTH)).flatten(),
        slots=torch.zeros(bs * WIDTH, dtype=torch.int64),
    )


@pytest.mark.parametrize(("size", "page"), [(8, 1), (5, 1), (8, 4), (6, 4), (40, 16), (200, 1)])
def test_window(size: int, page: int) -> None:
    """The last `size` tokens before the block at least, a page less one more at most, and the block."""
    window, table = world(size, page)
    for start in range(COLUMNS - WIDTH + 1):
        round = round_at([start, 3], [2, 0])
        seen = window.look(round)
        for i, row in enumerate([2, 0]):
            begin, shown = int(round.start[i]), int(seen.start[i])
            assert min(begin, size) <= shown <= min(begin, size + page - 1)
            assert (begin - shown) % page == 0
            mine = window.pool.req_to_token[row, : shown + WIDTH]
            assert mine.tolist() == table[row, begin - shown : begin + WIDTH].tolist()
        assert (seen.start <= seen.start_bounds).all() and seen.start_bounds.max() <= size + page
        assert seen.positions is round.positions and seen.slots is round.slots


def test_pages() -> None:
    """What paged attention reads leads to the same slots."""
    window, table = world(8, 4)
    starts = [0, 7, 50, 92]
    rows = [0, 1, 2, 0]
    for start, row in zip(starts, rows, strict=True):
        seen = window.look(round_at([start], [row]))
        lengths = torch.zeros(1, dtype=torch.int32)
        pages = torch.zeros(1, window.pages, dtype=torch.int32)
        window.page(seen, lengths, pages)
        slots = (pages[0, :, None] * 4 + torch.arange(4)).flatten()[: int(lengths)]
        first = start + WIDTH - int(lengths)
        assert slots.tolist() == table[row, first : start + WIDTH].tolist()


def test_padding_request() -> None:
    """It sees slot 0 only, and writes into no real request's row."""
    window, table = world(8, 1)
    before = window.pool.req_to_token[:REQUESTS].clone()
    seen = window.look(round_at([0], [REQUESTS]))
    assert window.pool.req_to_token[REQUESTS].eq(0).all() and seen.start.tolist() == [0]
    assert torch.equal(window.pool.req_to_token[:REQUESTS], before)


def test_layers_with_a_window() -> None:
    """A shorter one stays; a longer one becomes that of all layers."""
    window, _ = world(8, 1)
    sights = [Sight(), Sight(causal=True, window=4), Sight(causal=True, window=9), Sight(window=8)]
    layers = [SimpleNamespace(self_attn=SimpleNamespace(sight=sight)) for sight in sights]
    window.narrow(SimpleNamespace(layers=layers))
    after = [layer.self_attn.sight for layer in layers]
    assert after == [Sight(), sights[1], Sight(causal=True), Sight()]
