"""What a GPU's passes read of adapters, and what the release's kernels and ours make of it, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.lora.backend.base_backend import BaseLoRABackend
from sglang.srt.lora.backend.chunked_backend import ChunkedSgmvLoRABackend
from sglang.srt.lora.backend.triton_backend import TritonLoRABackend

from sglang_dflash.gpu.kernels.adapter_products import Adapted, add_expanded, shrink
from sglang_dflash.gpu.kernels.adapter_sums import Wide, add_second_halves
from sglang_dflash.round.adapter_buffers import AdaptedRows, AdapterBuffers
from tests.unit.adapter_sums import RANKS, SCALINGS, expected


class Manager:
    """The pool of adapters has a at place 2, b at 1 and none at 0."""

    max_loras_per_batch, lm_head_module, embed_tokens_module = 3, None, None
    loras = {
        name: SimpleNamespace(config=SimpleNamespace(r=int(RANKS[place])), scaling=SCALINGS[place])
        for name, place in (("a", 2), ("b", 1))
    }

    def __init__(self, backend: BaseLoRABackend):
        self.lora_backend, self.fetched = backend, []

    def fetch_new_loras(self, names: set[str | None]) -> None:
        self.fetched.append(names)

    def places_of(self, names: Iterable[str | None]) -> list[int]:
        return [{"a": 2, "b": 1, None: 0}[name] for name in names]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_lora.py does this")
@pytest.mark.parametrize("name", ["triton", "csgmv"])
@pytest.mark.parametrize("width", [2, 5, 20])
def test_what_captured_rounds_read(name: str, width: int) -> None:
    """The release's kernels over blocks, in Triton's interpreter: what was filled in counts, not what was captured."""
    backend = gpu_backend(name)
    buffers = AdapterBuffers(Manager(backend), 4, "cpu", {})
    info = buffers.blocks(4, width)
    for ids in (["a", None, "b"], ["b", "b", "a", None], ["a"]):
        buffers.fill(ids)
        check_products(buffers, info, 4 * width, [(each, width) for each in ids])
    assert buffers._manager.fetched[1] == {"a", "b", None}


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_lora.py does this")
@pytest.mark.parametrize("name", ["triton", "csgmv"])
@pytest.mark.parametrize(("rows", "tile"), [(96, 16), (160, 32)])
def test_what_captured_passes_read(name: str, rows: int, tile: int) -> None:
    """Requests with any number of rows, some with none, and rows that fill the pass up."""
    backend, requests = gpu_backend(name), 7
    buffers, ends = AdapterBuffers(Manager(backend), requests, "cpu", {}), torch.zeros(8).int()
    for counts in ([16, 16, 3], [1, 0, 40, 5, 17], [90], [33, 1, 1, 1, 1, 20]):
        ids = [("a", "b", None)[n % 3] for n in range(len(counts))]
        ends[:] = rows
        ends[: len(counts) + 1] = torch.tensor([0, *counts]).cumsum(0)
        buffers.fill(ids)
        info = buffers.tiles(ends, rows)
        assert len(info.weight_indices) == rows // 16 + requests  # whatever the requests have
        assert len(info.grouped.places) == rows // tile + 4
        assert info.grouped.most == tile
        check_products(buffers, info, rows, list(zip(ids, counts, strict=True)))


def gpu_backend(name: str) -> BaseLoRABackend:
    given = dict(max_loras_per_batch=3, device="cpu", server_args=None)
    if name == "csgmv":
        given["server_args"] = SimpleNamespace(max_lora_chunk_size=16)
    return {"triton": TritonLoRABackend, "csgmv": ChunkedSgmvLoRABackend}[name](**given)


def check_products(
    buffers: AdapterBuffers, info: AdaptedRows, rows: int, requests: list[tuple[str | None, int]]
) -> None:
    """What the release's kernels and ours add to the rows of requests, each with an adapter and so many rows."""
    backend = buffers._manager.lora_backend
    a, b, ends = torch.randn(3, 16, 32), torch.randn(3, 64, 16), torch.tensor([0, 64])
    x, base = torch.randn(rows, 32), torch.randn(rows, 64)
    with buffers.over(info):
        inner = backend.run_lora_a_sgemm(x, a)
        made = backend.run_lora_b_sgemm(inner, b, output_offset=ends, base_output=base.clone())
    fused = base.clone()
    its = Adapted(a, b, ends.int(), 64), info.grouped
    add_expanded(fused, shrink(x, *its), *its)
    with_first = torch.cat([base, x @ a.flatten(0, 1).T], dim=1)
    wide = Wide(torch.empty(0), b, (0,), 64)
    in_order = add_second_halves(with_first, wide, info.owners, swiglu=False)
    ids, counts = zip(*requests, strict=True)
    places = zip(buffers._manager.places_of(ids), counts, strict=True)
    owners = [place for place, count in places for _ in range(count)]
    ours = slice(len(owners))
    added = expected(x[ours], a, b, owners)
    for each in (made, fused, in_order):
        torch.testing.assert_close(each[ours] - base[ours], added, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("requests", [1, 7, 80])
def test_rows_by_adapters(requests: int) -> None:
    """Each row is in one segment, of its adapter; those without one, and those of nobody, are the last."""
    torch.manual_seed(0)
    buffers = AdapterBuffers(Manager(SimpleNamespace(name="triton")), requests, "cpu", {})
    buffers.fill([("a", "b", None)[n % 3] for n in range(requests)])
    for rows in (64, 320):
        counts = torch.randint(0, 2 * rows // requests, (requests,))
        ends = torch.cat([torch.zeros(1), counts.cumsum(0)]).clamp(max=rows).int()
        info = buffers.tiles(ends, rows, fused=True)
        assert info.seg_indptr is None  # for whom nobody asks, in a graph
        grouped = info.grouped
        request = torch.searchsorted(ends[1:].long(), torch.arange(rows), right=True)
        place = torch.cat([buffers.places, torch.zeros(1).int()])[request]
        assert torch.equal(info.owners.places.masked_fill(request == requests, 0), place)
        assert (info.owners.places[request == requests] == 3).all()
        there = grouped.rows >= 0
        assert grouped.rows[there].sort().values.tolist() == list(range(rows))
        owner = grouped.places[:, None].expand_as(there)[there]
        rank = grouped.ranks[:, None].expand_as(there)[there]
        found = owner.masked_fill(rank == 0, 0)
        assert torch.equal(found, place[grouped.rows[there].long()])
        assert (found == 0).int().diff().ge(0).all()
        buffers.sorts_rows = False
        assert buffers.tiles(ends, rows, fused=True).grouped is None
        buffers.sorts_rows = True
        of_rank = buffers.ranks[grouped.places], buffers.scalings[grouped.places]
        assert torch.equal(grouped.ranks, of_rank[0]) and torch.equal(grouped.scalings, of_rank[1])
