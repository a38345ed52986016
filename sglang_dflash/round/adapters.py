"""LoRA adapters in rounds: the target's layers see those of the requests, the draft model sees none.

Graphs hold the target without the release's LoRA layers, for rounds and prompts of requests without adapters, and the
target with them, for those in which a request has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled
from sglang.srt.lora.layers import BaseLayerWithLoRA, FusedMoEWithLoRA
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.utils import replace_submodule
from torch import nn

from sglang_dflash.device_waits import to_device
from sglang_dflash.gpu.kernels.adapter_sums import Wide
from sglang_dflash.gpu.wide_products import widen_products
from sglang_dflash.round.adapted_head import AdaptedHead
from sglang_dflash.round.adapter_buffers import AdapterBuffers, Ids, has_adapters
from sglang_dflash.round.block_model import BlockModel
from sglang_dflash.round.opened import Round

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_dflash.round.target import TargetRows
    from sglang_dflash.serving.lora_manager import CheckingLoRAManager


class Adapters:
    """The adapters of one target."""

    def __init__(self, runner: ModelRunner):
        self._runner = runner
        self.manager: CheckingLoRAManager = runner.lora_manager
        self.buffers: AdapterBuffers | None = None  # that graphs read; None if none have adapters
        self._wide: dict[nn.Module, Wide] = {}

    def widen_products(self) -> None:
        """Before anything is captured: moves weights so that products have adapters in them, where that pays."""
        # What is released and resumed by this flag is where weights were loaded; deterministic inference fuses nothing.
        released = self._runner.server_args.enable_memory_saver
        if not released and not is_batch_invariant_mode_enabled():
            self._wide = widen_products(self.manager.base_model, self.manager.memory_pool)

    def make_buffers(self, requests: int) -> None:
        """What graphs of so many requests read."""
        self.buffers = AdapterBuffers(self.manager, requests, self._runner.device, self._wide)

    @property
    def can_be_captured(self) -> bool:
        """Experts with adapters make buffers as large as their batch is."""
        return not any(
            isinstance(module, FusedMoEWithLoRA) for module in self.manager.base_model.modules()
        )

    def model(self, ids: Ids) -> AdaptedModel:
        """The target as it runs blocks of requests with these adapters."""
        return AdaptedModel(self._runner, self, ids)

    def prepare(self, ids: Ids, rows: int) -> None:
        """Brings the adapters to the device and tells the layers whose rows they will see.

        Args:
            ids: of each request.
            rows: of each request, side by side.
        """
        self.manager.fetch_new_loras(set(ids))
        # To the release's LoRA backends rows that are verified are rows of prompts.
        bs, device = len(ids), self._runner.device
        batch = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            batch_size=bs,
            lora_ids=list(ids),
            extend_seq_lens=torch.full((bs,), rows, dtype=torch.int32, device=device),
            extend_seq_lens_cpu=[rows] * bs,
            extend_num_tokens=bs * rows,
            return_logprob=False,
        )
        self.manager.prepare_lora_batch(batch)

    def head_of(self, ids: Ids, rows: int) -> AdaptedHead | None:
        """What the head adds to rows that were just prepared; None if no adapter can be on it."""
        head = self.manager.lm_head_module
        if head is None or not has_adapters(ids):
            return None
        places = torch.tensor(self.manager.places_of(ids), dtype=torch.int32)
        owners = to_device(places.repeat_interleave(rows), self._runner.device)
        return AdaptedHead(head, head.lora_backend.batch_info, owners)

    def hold(self, ids: Ids) -> None:
        """Whatever else runs until `let_go`, the weights of these adapters stay where they are."""
        self.manager.held = frozenset(ids)

    def let_go(self) -> None:
        """The draws of the round that holds adapters are launched."""
        self.manager.held = frozenset()

    @contextmanager
    def taken_off(self) -> Iterator[None]:
        """Within this the target has no LoRA layers: for graphs, and for what fuses its layers."""
        model = self.manager.base_model
        wrapped = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, BaseLayerWithLoRA)
        }
        for name, module in wrapped.items():
            replace_submodule(model, name, module.base_layer)
        try:
            yield
        finally:
            for name, module in wrapped.items():
                replace_submodule(model, name, module)


class AdaptedModel(BlockModel):
    """The target with the adapters of a round's requests."""

    def __init__(self, runner: ModelRunner, adapters: Adapters, ids: Ids):
        super().__init__(runner)
        self._adapters, self._ids = adapters, ids

    def run(self, round: Round, tokens: torch.Tensor, capture: CaptureHiddenMode) -> TargetRows:
        self._adapters.prepare(self._ids, round.width)
        rows = super().run(round, tokens, capture)
        return replace(rows, adapted=self._adapters.head_of(self._ids, round.width))
