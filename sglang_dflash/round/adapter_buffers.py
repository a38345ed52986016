"""LoRA adapters in CUDA graphs: which one each row has, the release's LoRA layers read at fixed addresses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from sglang.srt.lora.utils import LoRABatchInfo
from sglang.srt.utils import next_power_of_2
from torch import nn
from torch.nn.functional import pad

from sglang_dflash.device_waits import to_device
from sglang_dflash.gpu.kernels.adapter_rows import (
    Segments,
    group_rows,
    group_rows_reference,
    row_places,
    row_places_reference,
)
from sglang_dflash.gpu.kernels.adapter_sums import Owners, Wide
from sglang_dflash.round.adapted_head import AdaptedHead

if TYPE_CHECKING:
    from sglang_dflash.serving.lora_manager import CheckingLoRAManager

# By request: the id of its adapter, None for the target alone.
Ids = Sequence[str | None]

_TILE = 16  # rows of a segment of a pass; kernels compute so many at once
# From so many rows on an adapter has more than a tile of them, and programs with two read its matrices half as often.
_MANY_ROWS = 128


def has_adapters(ids: Ids | None) -> bool:
    """Whether any of some requests has an adapter."""
    return any(each is not None for each in ids or ())


@dataclass
class AdaptedRows(LoRABatchInfo):
    """Which rows have which adapters.

    Attributes:
        grouped, owners: the same for our own kernels, those of rows by their adapters, which they may not need, and of
            rows in their order; the other fields are the release's.
    """

    grouped: Segments | None = None
    owners: Owners | None = None


class AdapterBuffers:
    """Which adapter each request of a replayed graph has.

    Attributes:
        places: [requests] int32, of a request's adapter in the release's pool of them.
        request_ranks, request_scalings: [requests] int32 and float32, of that adapter; a rank of 0 for none.
        ranks, scalings: [places + 1] int32 and float32, of the adapter at a place; a rank of 0 for none, as the last.
        wide: of LoRA layers whose products have adapters in them.
        sorts_rows: whether fused layers have other products, too, and ask for rows by their adapters.
    """

    def __init__(
        self,
        manager: CheckingLoRAManager,
        requests: int,
        device: torch.device | str,
        wide: Mapping[nn.Module, Wide],
    ):
        self._manager, self._none = manager, manager.max_loras_per_batch
        self.wide, self.sorts_rows = wide, True
        # One behind the other, so that two copies bring all; kernels want each to begin at a round address.
        room, places = -(-requests // _TILE) * _TILE, self._none + 1
        self._integers = torch.zeros(2 * room + places, dtype=torch.int32, device=device)
        self._floats = torch.zeros(room + places, dtype=torch.float32, device=device)
        self.places, self.request_ranks = self._integers[: 2 * room].view(2, room)[:, :requests]
        self.ranks = self._integers[2 * room :]
        self.request_scalings, self.scalings = self._floats[:requests], self._floats[room:]
        self._filled: tuple[list, ...] | None = None

    def fill(self, ids: Ids) -> None:
        """Before a graph is replayed over requests with these adapters, which are brought to the device.

        What pads the batch has none.
        """
        self._manager.fetch_new_loras(set(ids))
        places = self._manager.places_of(ids)
        ranks, scalings = [0] * len(self.ranks), [0.0] * len(self.scalings)
        for each, place in zip(ids, places, strict=True):
            if each is not None:
                adapter = self._manager.loras[each]
                ranks[place], scalings[place] = adapter.config.r, adapter.scaling
        if (given := (places, ranks, scalings)) == self._filled:
            return
        self._filled, room = given, len(self._floats) - len(scalings)
        places = places + [self._none] * (room - len(places))
        integers = [*places, *(ranks[place] for place in places), *ranks]
        floats = [*(scalings[place] for place in places), *scalings]
        for buffer, values in ((self._integers, integers), (self._floats, floats)):
            buffer.copy_(to_device(torch.tensor(values, dtype=buffer.dtype), buffer.device))

    @contextmanager
    def random_adapters(self) -> Iterator[None]:
        """Within this requests have adapters of random numbers, one after the other; afterwards all is as it was."""
        pool, places = self._manager.memory_pool, min(2, self._none)
        halves = (pool.A_buffer, pool.B_buffer)
        layers = [each for half in halves for module in half.values() for each in module]
        before = [layer[:places].to("cpu", copy=True) for layer in layers]
        device = self.places.device
        generator = torch.Generator(device).manual_seed(0)
        for layer in layers:
            made = torch.randn(layer[:places].shape, generator=generator, device=device)
            layer[:places].copy_(made * layer.shape[-1] ** -0.5)
        self.places.copy_(torch.arange(len(self.places)) % places)
        self.ranks[:places], self.scalings[:places] = pool.max_lora_rank, 1.0
        self.request_ranks[:], self.request_scalings[:] = pool.max_lora_rank, 1.0
        try:
            yield
        finally:
            for layer, values in zip(layers, before, strict=True):
                layer[:places].copy_(values)
            self._integers.zero_()
            self._floats.zero_()
            self._filled = None

    def blocks(self, requests: int, width: int) -> AdaptedRows:
        """To the release's LoRA layers: blocks of `width` rows, each a request's, one behind the other."""
        ends = torch.arange(0, requests * width + 1, width, device=self.places.device)
        most, places = next_power_of_2(max(width, _TILE)), self.places[:requests]
        info = self._segments(ends, places, requests * width, width, most)
        rows = torch.arange(requests * width, dtype=torch.int32, device=ends.device)
        rows = pad(rows.view(requests, width), (0, most - width), value=-1)
        its = self.request_ranks[:requests], self.request_scalings[:requests]
        info.grouped = Segments(rows, places, *its)
        info.owners = Owners(places, width, self.ranks, self.scalings)
        return info

    def tiles(self, ends: torch.Tensor, rows: int, *, fused: bool = False) -> AdaptedRows:
        """Likewise: any numbers of rows of each request.

        Args:
            ends: [requests + 1] int32, where each request's rows begin, and end; only the device knows.
            rows: of all of them, and of what fills the pass up.
            fused: whether layers are; the release's fields are then only filled in where it has other LoRA layers.
        """
        manager, requests = self._manager, len(ends) - 1
        own = dict(owners=self._owners(ends, rows))
        if not fused or self.sorts_rows:
            own["grouped"] = self._grouped(ends, rows)
        if fused and manager.embed_tokens_module is None and manager.lm_head_module is None:
            return AdaptedRows(*[None] * len(fields(LoRABatchInfo)), **own)
        ends = ends.long()
        begins, request = _tiled(ends, rows)
        # What is no request has a larger number, and no adapter.
        places = self.places[request.clamp(max=requests - 1)]
        places = places.masked_fill(request >= requests, self._none)
        info = self._segments(begins, places, rows, _TILE, _TILE)
        info.grouped, info.owners = own.get("grouped"), own["owners"]
        return info

    def _owners(self, ends: torch.Tensor, rows: int) -> Owners:
        find = row_places if ends.is_cuda else row_places_reference
        places = find(ends, self.places[: len(ends) - 1], rows, self._none)
        return Owners(places, 1, self.ranks, self.scalings)

    def _grouped(self, ends: torch.Tensor, rows: int) -> Segments:
        most = _TILE if rows < _MANY_ROWS else 2 * _TILE
        group = group_rows if ends.is_cuda else group_rows_reference
        places = self.places[: len(ends) - 1]
        return group(ends, places, self.ranks, self.scalings, rows, most)

    def _segments(
        self, ends: torch.Tensor, places: torch.Tensor, rows: int, longest: int, tile: int
    ) -> AdaptedRows:
        order = torch.arange(rows, dtype=torch.int32, device=ends.device)
        # csgmv reads rows in an order, and takes for the length of a segment how many it computes at once.
        chunked = self._manager.lora_backend.name == "csgmv"
        return AdaptedRows(
            use_cuda_graph=False,
            bs=len(places),
            num_segments=len(places),
            seg_indptr=ends.to(torch.int32),
            weight_indices=places,
            lora_ranks=self.ranks,
            scalings=self.scalings,
            max_len=tile if chunked else longest,
            seg_lens=ends.diff().to(torch.int32),
            permutation=order if chunked else None,
            has_active_lora=True,
        )

    @contextmanager
    def over(self, info: LoRABatchInfo) -> Iterator[None]:
        """Within this the LoRA layers see such rows."""
        backend = self._manager.lora_backend
        before = getattr(backend, "batch_info", None)
        backend.batch_info = info
        try:
            yield
        finally:
            backend.batch_info = before

    def head(self, requests: int, width: int) -> AdaptedHead | None:
        """What the head adds to the rows of blocks of the first requests; None if no adapter can be on it."""
        head = self._manager.lm_head_module
        if head is None:
            return None
        owners = self.places[:requests, None].expand(-1, width).flatten()
        return AdaptedHead(head, self.blocks(requests, width), owners)


def _tiled(ends: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs of rows in segments of a tile's rows at most, as many as there may be.

    Args:
        ends: [runs + 1] int64, where each run begins, and where the last one ends; only the device knows.
        rows: of all runs, at most.

    Returns:
        [segments + 1] where each begins, and where the last one ends; [segments] of which run each is, of those without
        rows the number of runs.
    """
    runs = len(ends) - 1
    counts = -(-ends.diff() // _TILE)
    last = counts.cumsum(0)  # the segment behind each run's
    segment = torch.arange(rows // _TILE + runs, device=ends.device)
    run = torch.searchsorted(last, segment, right=True)
    at = run.clamp(max=runs - 1)
    begins = ends[at] + _TILE * (segment - (last - counts)[at])
    return torch.cat([begins.minimum(ends[at + 1]), ends[-1:]]), run
