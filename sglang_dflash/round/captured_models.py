"""Models as graphs of rounds hold them: attention that the graph prepares, and layers that are fused or adapted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.gpu.block_attention import BlockAttention
from sglang_dflash.gpu.targets import Body
from sglang_dflash.round.adapter_buffers import AdapterBuffers
from sglang_dflash.round.block_model import BlockModel
from sglang_dflash.round.draft_window import DraftWindow
from sglang_dflash.round.opened import Round
from sglang_dflash.round.target import TargetRows


class CapturedModel(BlockModel):
    """Runs blocks while a graph is captured, with attention that the graph prepares."""

    def __init__(self, runner: ModelRunner, attention: BlockAttention):
        super().__init__(runner)
        self.attention = attention

    def prepare(self) -> None:
        """Before the round's stages, when lengths and page table are filled."""
        self.attention.prepare()

    def forward(self, batch: ForwardBatch) -> Any:
        self.attention.take(batch)
        return self.runner.model.forward(batch.input_ids, batch.positions, batch)


class CapturedTarget(CapturedModel):
    """The target, its layers fused where they can be."""

    def __init__(self, runner: ModelRunner, attention: BlockAttention, body: Body | None):
        super().__init__(runner, attention)
        self.body = body

    def forward(self, batch: ForwardBatch) -> Any:
        if self.body is None:
            return super().forward(batch)
        self.attention.take(batch)
        model = self.runner.model
        x, taps = self.body(batch.input_ids, batch.positions, batch)
        return model.logits_processor(batch.input_ids, x, model.lm_head, batch, taps)


class CapturedWindowedModel(CapturedModel):
    """The draft model behind its window."""

    def __init__(self, runner: ModelRunner, attention: BlockAttention, window: DraftWindow):
        super().__init__(runner, attention)
        self.window = window

    def prepare(self) -> None:
        """What it sees is only known in `run`."""

    def run(self, round: Round, tokens: torch.Tensor, capture: CaptureHiddenMode) -> Any:
        seen = self.window.look(round)
        self.window.page(seen, self.attention.cache_lengths, self.attention.page_table)
        self.attention.prepare()
        return super().run(seen, tokens, capture)


class CapturedAdaptedTarget(CapturedTarget):
    """The target with its LoRA layers, over blocks of requests that may each have another adapter."""

    def __init__(
        self,
        runner: ModelRunner,
        attention: BlockAttention,
        body: Body | None,
        adapters: AdapterBuffers,
        requests: int,
    ):
        super().__init__(runner, attention, body)
        self._adapters = adapters
        self._read = adapters.blocks(requests, attention.width)

    def run(self, round: Round, tokens: torch.Tensor, capture: CaptureHiddenMode) -> TargetRows:
        with self._adapters.over(self._read):
            rows = super().run(round, tokens, capture)
        return replace(rows, adapted=self._adapters.head(len(round.rows), round.width))


class CapturedAdaptedPass(CapturedTarget):
    """Likewise, over any numbers of rows of each request."""

    def __init__(
        self,
        runner: ModelRunner,
        attention: BlockAttention,
        body: Body | None,
        adapters: AdapterBuffers,
    ):
        super().__init__(runner, attention, body)
        self._adapters, self._fused = adapters, body is not None

    def forward(self, batch: ForwardBatch) -> Any:
        rows = len(batch.input_ids)
        info = self._adapters.tiles(self.attention.ends, rows, fused=self._fused)
        with self._adapters.over(info):
            return super().forward(batch)
