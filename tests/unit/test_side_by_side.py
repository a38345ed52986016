"""Blocks and prompts side by side: what a pass reads of each row is that row's own request, and no further."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.gpu import at_once
from sglang_dflash.round.opened import Round
from sglang_dflash.round.ragged import Ragged
from sglang_dflash.round.side_by_side import Drafted, SideBySide
from sglang_dflash.round.state import RequestState

CONTEXT, OWNERS, MOST, ROWS, WIDTH = 96, 6, 5, 64, 4
# Requests by row of the table: committed tokens of those that decode; prefix and rows of prompts.
DECODING = {4: 30, 0: 17}
PROMPTS = {2: (0, 9), 5: (16, 1), 1: (32, 20)}
PICTURED = {4: -7, 0: 0}  # by how much those that decode are rotated otherwise
CUT = (4, 32)  # row of the table, and the length beyond which it has no slots


class World:
    """A table in which every request has slots, and buffers to fill."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        pages = 1 + torch.randperm(OWNERS * CONTEXT // page_size)  # the first is for padding
        slots = pages[:, None] * page_size + torch.arange(page_size)
        self.table = slots.view(OWNERS, CONTEXT).to(torch.int32)
        row, length = CUT
        self.table[row, length:] = 0
        self.inputs = SideBySide(self.table, page_size, ROWS, MOST, mrope=True)

    def blocks(self) -> Drafted:
        rows, lengths = torch.tensor(list(DECODING)), torch.tensor(list(DECODING.values()))
        state = RequestState(OWNERS, rows.device, mrope=True)
        state.start(rows, 100 + rows, lengths, rope_deltas=torch.tensor([*PICTURED.values()]))
        round = Round.open(state, rows, (lengths + WIDTH).cpu(), WIDTH, self.table, CONTEXT)
        # Both lie among others, as where graphs leave them.
        tokens = torch.full((len(rows), 2 * WIDTH), 77)
        tokens[:, 0] = round.bonus_tokens
        tokens[:, 1:WIDTH] = 200 + torch.arange(len(rows) * (WIDTH - 1)).view(-1, WIDTH - 1)
        return Drafted(replace(round, bonus_tokens=tokens[:, 0]), tokens[:, 1:WIDTH])

    def prompts(self) -> SimpleNamespace:
        """The fields of a forward batch that are read."""
        rows, spans = list(PROMPTS), [range(a, a + n) for a, n in PROMPTS.values()]
        at = [(row, i) for row, span in zip(rows, spans, strict=True) for i in span]
        return SimpleNamespace(
            batch_size=len(rows),
            input_ids=torch.arange(300, 300 + len(at)),
            positions=torch.tensor([i for _, i in at]),
            mrope_positions=torch.tensor([i for _, i in at]).expand(3, -1),
            out_cache_loc=torch.tensor([int(self.table[row, i]) for row, i in at]),
            req_pool_indices=torch.tensor(rows),
            seq_lens=torch.tensor([a + n for a, n in PROMPTS.values()]),
            extend_seq_lens_cpu=[n for _, n in PROMPTS.values()],
            extend_start_loc=torch.tensor([0, 9, 10], dtype=torch.int32),
        )

    def seen(self, most: int = MOST) -> list[tuple[int, int, list[int]]]:
        """Of each row of requests: token, position, and slots of the keys that a causal reader gives it.

        Args:
            most: requests that the pass was captured for.
        """
        inputs = self.inputs
        lengths, ends = inputs.first(most)
        table = inputs.table_of(inputs.page_table.shape[1] * self.page_size, most)
        inputs.look_up(table)
        found = []
        for request, length in enumerate(lengths.tolist()):
            begin, end = ends[request : request + 2].tolist()
            for row in range(begin, end):
                key = torch.arange(length - (end - 1 - row))
                pages = table[request, key // self.page_size]
                slots = pages * self.page_size + key % self.page_size
                found.append((int(inputs.tokens[row]), int(inputs.positions[row]), slots.tolist()))
        return found


def own_keys(world: World, row: int, position: int) -> list[int]:
    """Slots of a request's tokens up to a position, as the table has them; those of pages are whole."""
    slots = world.table[row, : position + 1].clone()
    if world.page_size > 1 and row == CUT[0]:
        first = slots[:: world.page_size, None] + torch.arange(world.page_size)
        slots = first.flatten()[: position + 1]
    return slots.tolist()


@pytest.fixture(params=[(1, False), (16, False), (1, True), (16, True)], ids=str)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Pages of each size, filled by steps and by the kernel, which runs on a GPU if there is one."""
    torch.manual_seed(0)
    page_size, kernels = request.param
    at_once.use(kernels)
    with torch.device("cuda" if kernels and torch.cuda.is_available() else "cpu"):
        yield World(page_size)
    at_once.use(False)


def expected_blocks(world: World) -> list[tuple[int, int, list[int]]]:
    rows = []
    for number, (row, start) in enumerate(DECODING.items()):
        drafts = [200 + number * (WIDTH - 1) + i for i in range(WIDTH - 1)]
        for i, token in enumerate([100 + row, *drafts]):
            rows.append((token, start + i, own_keys(world, row, start + i)))
    return rows


def expected_prompts(world: World) -> list[tuple[int, int, list[int]]]:
    spans = [(row, a + i) for row, (a, n) in PROMPTS.items() for i in range(n)]
    return [(300 + k, at, own_keys(world, row, at)) for k, (row, at) in enumerate(spans)]


def test_blocks_and_prompts(world: World) -> None:
    """Twice, the second time after others; a row sees its own request's tokens up to itself."""
    blocks, prompts, inputs = world.blocks(), world.prompts(), world.inputs
    rows = blocks.rows + len(prompts.input_ids)
    size = 48
    assert (blocks.rows, rows, blocks.longest) == (8, 38, 30 + 2 * WIDTH)
    for buffer in (inputs.tokens, inputs.positions, inputs.slots, inputs.page_table):
        buffer.fill_(77)  # what an earlier pass left
    inputs.fill(size, blocks, prompts)
    seen = world.seen()
    assert seen[:rows] == expected_blocks(world) + expected_prompts(world)
    deltas = [delta for delta in PICTURED.values() for _ in range(WIDTH)]
    deltas += [0] * (rows - len(deltas))
    assert inputs.rope[:rows].tolist() == [
        row[1] + delta for row, delta in zip(seen, deltas, strict=False)
    ]
    # Each row's K/V go where it is looked for; rows that are cut off have no slot.
    cut = [row[1] >= CUT[1] and row[0] in (201, 202) for row in seen[:rows]]
    assert sum(cut) == 2
    for slot, gone, row in zip(inputs.slots.tolist(), cut, seen, strict=False):
        assert slot == (0 if gone else row[2][-1])
    # Rows that fill the pass up are a request's of their own, which reads and writes slot 0 alone.
    assert len(seen) == size and inputs.ends[-1] == size
    assert not inputs.slots[rows:size].any() and not inputs.positions[rows:size].any()
    last = len(DECODING) + len(PROMPTS)
    assert inputs.cache_lengths[last] == size - rows and not inputs.page_table[last:].any()
    assert inputs.requests[last:].tolist() == [OWNERS] * (MOST + 1 - last)


def test_prompts_alone_after_blocks(world: World) -> None:
    """Nothing of the pass before is left; a pass that is full has no rows to fill it up."""
    world.inputs.fill(48, world.blocks(), world.prompts())
    world.inputs.fill(30, None, world.prompts())
    assert world.seen() == expected_prompts(world)
    assert world.inputs.requests.tolist() == [*PROMPTS, *[OWNERS] * 3]
    assert world.inputs.cache_lengths.tolist() == [9, 17, 52, 0, 0, 0]
    assert world.inputs.ends.tolist() == [0, 9, 10, 30, 30, 30, 30]


def test_clear(world: World) -> None:
    inputs = world.inputs
    inputs.fill(48, world.blocks(), world.prompts())
    inputs.clear(32)
    inputs.look_up(inputs.page_table)
    assert inputs.ends.tolist() == [0] + [32] * (MOST + 1)
    assert inputs.cache_lengths.tolist() == [32] + [0] * MOST
    assert not inputs.page_table.any() and not inputs.slots[:32].any()


def test_what_a_pass_of_few_requests_reads(world: World) -> None:
    """All of them, and the rows that fill it up, of as much as it was captured with."""
    inputs, count = world.inputs, len(DECODING) + 1
    inputs.fill(48, world.blocks(), world.prompts())
    inputs.page_table.fill_(77)
    inputs.fill(32, world.blocks(), None)
    seen = world.seen(count)
    assert len(seen) == 32 and seen[: 2 * WIDTH] == expected_blocks(world)
    lengths, ends = inputs.first(count)
    assert lengths.tolist() == [30 + WIDTH, 17 + WIDTH, 32 - 2 * WIDTH, 0]
    assert ends.tolist() == [0, WIDTH, 2 * WIDTH, 32, 32]
    assert (inputs.page_table[count + 1 :] == 77).all()


def test_a_table_for_short_contexts(world: World) -> None:
    """A part of the page table, filled as far as it goes; its address is that of the whole."""
    inputs = world.inputs
    inputs.fill(48, world.blocks(), world.prompts())
    inputs.page_table.fill_(77)
    table = inputs.table_of(33, MOST)
    assert table.shape == (MOST + 1, -(-33 // world.page_size))
    assert table.data_ptr() == inputs.page_table.data_ptr()
    inputs.look_up(table)
    first = world.table[list(DECODING)[0], :: world.page_size][: table.shape[1]]
    assert table[0].tolist() == (first // world.page_size).tolist()
    assert (inputs.page_table[:, table.shape[1] :] == 77).all()


def test_batch(world: World) -> None:
    """What the model reads of a pass: views of the buffers, and clean writes for rows without a slot."""
    inputs, pool = world.inputs, object()
    runner = SimpleNamespace(
        model=torch.nn.Module(),
        req_to_token_pool=None,
        token_to_kv_pool=pool,
        attn_backend=None,
        spec_algorithm=None,
    )
    batch = inputs.forward_batch(runner, 48, MOST)
    assert batch.batch_size == len(batch.req_pool_indices) == len(batch.seq_lens) == MOST + 1
    assert len(batch.input_ids) == len(batch.positions) == len(batch.out_cache_loc) == 48
    assert batch.input_ids.data_ptr() == inputs.tokens.data_ptr()
    assert batch.out_cache_loc.data_ptr() == inputs.slots.data_ptr()
    assert batch.token_to_kv_pool._pool is pool
    assert torch.equal(batch.mrope_positions, inputs.rope[:48].expand(3, -1))


@pytest.mark.parametrize("counts", [(1, 1), (WIDTH, 1), (2, 3), (WIDTH, WIDTH)])
def test_blocks_of_which_some_rows_are_verified(world: World, counts: tuple[int, int]) -> None:
    """With prompts beside them and without, each request has its first rows, and they see what they did."""
    whole, inputs, kept = world.blocks(), world.inputs, []
    for number, count in enumerate(counts):
        kept += expected_blocks(world)[number * WIDTH :][:count]
    ragged = Ragged.of(torch.tensor(counts), sum(counts), WIDTH)
    blocks = Drafted(whole.round, whole.draft_tokens, ragged)
    assert blocks.rows == sum(counts)
    inputs.fill(48, world.blocks(), world.prompts())
    inputs.fill(48, blocks, world.prompts())
    rows = blocks.rows + len(world.prompts().input_ids)
    assert world.seen()[:rows] == kept + expected_prompts(world)
    assert not inputs.slots[rows:48].any()
    inputs.fill(32, blocks, None)
    assert world.seen()[: blocks.rows] == kept
    assert inputs.requests.tolist() == [*DECODING, *[OWNERS] * (MOST + 1 - len(DECODING))]
    assert inputs.cache_lengths[len(DECODING)] == 32 - blocks.rows


@pytest.mark.parametrize("page_size", [1, 4])
def test_more_rows_than_a_context(page_size: int) -> None:
    """Passes are captured, and timed, over rows that fill them up: their request reads no further than its table."""
    world, rows = World(page_size), 5 * CONTEXT // 2
    inputs = world.inputs = SideBySide(world.table, page_size, rows, MOST)
    inputs.page_table.fill_(-1)
    inputs.page_table[:, -(-CONTEXT // page_size) :] = 0
    inputs.clear(rows)
    seen = world.seen()
    assert len(seen) == rows and len(seen[-1][2]) == rows
    assert {slot for _, _, slots in seen for slot in slots} <= set(range(page_size))
