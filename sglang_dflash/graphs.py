"""Whole rounds as CUDA graphs: propose, verify, accept and commit in one launch."""

from __future__ import annotations

import bisect
import logging
import time
from typing import TYPE_CHECKING, Any, Callable, Iterable

import torch

from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.model_executor.cuda_graph_runner import freeze_gc, model_capture_mode
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from sglang_dflash.accept import Accepted
from sglang_dflash.block_model import BlockModel
from sglang_dflash.graph_metadata import metadata_class
from sglang_dflash.round import Round

if TYPE_CHECKING:
    from sglang_dflash.pair import DraftTargetPair

logger = logging.getLogger(__name__)


class CapturedModel(BlockModel):
    """Runs blocks while a graph is captured: the attention metadata is in place already."""

    def run(self, round: Round, tokens: torch.Tensor, capture: CaptureHiddenMode) -> Any:
        batch = round.forward_batch(self.runner, tokens, capture)
        return self.runner.model.forward(batch.input_ids, batch.positions, batch)


class RoundGraphs:
    """Graphs by (batch bucket, width).

    A batch runs in the smallest bucket that holds it, padded with requests whose K/V goes to slot 0.
    All that a round reads, it reads in the graph, by the requests' rows: state, slots, page table.
    """

    def __init__(self, pair: DraftTargetPair, sizes: Iterable[int], widths: Iterable[int]):
        self.pair = pair
        self.sizes = sorted(sizes)
        self.widths = sorted(widths)
        device = pair.req_to_token.device
        # Address baked into the graphs.
        self.rows = torch.full((self.sizes[-1],), pair.state.padding_row, dtype=torch.int64, device=device)
        self.metadata = metadata_class(pair)(pair, self.sizes[-1])
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Accepted]] = {}
        self._capture_all()

    def can_run(self, batch_size: int, width: int) -> bool:
        return batch_size <= self.sizes[-1] and width in self.widths

    def replay(self, rows: torch.Tensor, width: int) -> Accepted:
        """A round over the requests at `rows` ([bs] int64); its result is overwritten by the next."""
        batch_size = len(rows)
        bucket = self.sizes[bisect.bisect_left(self.sizes, batch_size)]
        self.rows[:batch_size].copy_(rows)
        if bucket > batch_size:
            self.rows[batch_size:bucket].fill_(self.pair.state.padding_row)
        graph, accepted = self._graphs[bucket, width]
        graph.replay()
        return Accepted(accepted.tokens[:batch_size], accepted.lengths[:batch_size], accepted.bonus_tokens[:batch_size])

    def _capture_all(self) -> None:
        begin, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        pool = torch.cuda.graph_pool_handle()
        with freeze_gc(False), model_capture_mode(), graph_capture() as context:
            # The largest first, so that the smaller ones reuse its memory.
            for bucket in reversed(self.sizes):
                for width in reversed(self.widths):
                    self._graphs[bucket, width] = self._capture(bucket, width, pool, context.stream)
        self.rows.fill_(self.pair.state.padding_row)
        logger.info(
            "DFLASH captured %d graphs of whole rounds (batch sizes %s, widths %s) in %.1f s, %.2f GiB",
            len(self._graphs),
            self.sizes,
            self.widths,
            time.perf_counter() - begin,
            (free - torch.cuda.mem_get_info()[0]) / (1 << 30),
        )

    def _capture(self, bucket: int, width: int, pool: Any, stream: torch.cuda.Stream):
        run = self._round_function(bucket, width)
        for _ in range(2):  # compiles kernels and sizes workspaces, which a capture may not do
            torch.cuda.synchronize()
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            accepted = run()
        return graph, accepted

    def _round_function(self, bucket: int, width: int) -> Callable[[], Accepted]:
        pair, rows = self.pair, self.rows[:bucket]
        bounds = torch.full((bucket,), pair.context_len, dtype=torch.int64)
        draft, target = CapturedModel(pair.draft.runner), CapturedModel(pair.target.runner)

        def run() -> Accepted:
            round = Round.open(pair.state, rows, bounds, width, pair.req_to_token, pair.context_len)
            self.metadata.attach(bucket, width)
            self.metadata.fill(round)
            return pair.stages(round, draft, target)

        return run
