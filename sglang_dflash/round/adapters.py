"""LoRA adapters in rounds: the target's layers see those of the requests, the draft model sees none.

Graphs hold the target without the release's LoRA layers, for rounds and prompts of requests without adapters, and the
target with them, for rounds in which a request has one. Prompts with adapters run kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from sglang.srt.lora.layers import BaseLayerWithLoRA, FusedMoEWithLoRA
from sglang.srt.lora.utils import LoRABatchInfo
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.utils import next_power_of_2, replace_submodule

from sglang_dflash.round.adapted_head import AdaptedHead
from sglang_dflash.round.block_model import BlockModel
from sglang_dflash.round.opened import Round

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_dflash.round.target import TargetRows
    from sglang_dflash.serving.lora_manager import CheckingLoRAManager

# By request: the id of its adapter, None for the target alone.
Ids = Sequence[str | None]


def has_adapters(ids: Ids | None) -> bool:
    """Whether any of some requests has an adapter."""
    return any(each is not None for each in ids or ())


class Adapters:
    """The adapters of one target."""

    def __init__(self, runner: ModelRunner):
        self._runner = runner
        self.manager: CheckingLoRAManager = runner.lora_manager
        self.buffers: AdapterBuffers | None = None  # of captured rounds

    def make_buffers(self, requests: int) -> AdapterBuffers:
        """What captured rounds of so many requests read."""
        self.buffers = AdapterBuffers(self.manager, requests, self._runner.device)
        return self.buffers

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
        owners = _to_device(places.repeat_interleave(rows), self._runner.device)
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


class AdapterBuffers:
    """Which adapter each request of a captured round has, where graphs read it.

    Attributes:
        places: [requests] int32, of a request's adapter in the release's pool of them.
        ranks, scalings: [places] int32 and float32, of the adapter at a place; a rank of 0 for none.
    """

    def __init__(self, manager: CheckingLoRAManager, requests: int, device: torch.device | str):
        self._manager, most = manager, manager.max_loras_per_batch
        self.places = torch.zeros(requests, dtype=torch.int32, device=device)
        self.ranks = torch.zeros(most, dtype=torch.int32, device=device)
        self.scalings = torch.zeros(most, dtype=torch.float32, device=device)
        self._filled: tuple[list, ...] | None = None

    def fill(self, ids: Ids) -> None:
        """Before a round of requests with these adapters is replayed, which are brought to the device.

        What pads the batch has any adapter.
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
        self._filled = given
        for buffer, values in zip((self.places, self.ranks, self.scalings), given, strict=True):
            told = _to_device(torch.tensor(values, dtype=buffer.dtype), buffer.device)
            buffer[: len(told)].copy_(told)

    def segments(self, requests: int, width: int) -> LoRABatchInfo:
        """To the release's LoRA layers: blocks of `width` rows, each a request's, one behind the other."""
        rows = torch.arange(requests * width + 1, dtype=torch.int32, device=self.places.device)
        # csgmv reads rows in an order, a segment in tiles of at least 16.
        chunked = self._manager.lora_backend.name == "csgmv"
        return LoRABatchInfo(
            use_cuda_graph=False,
            bs=requests,
            num_segments=requests,
            seg_indptr=rows[::width].contiguous(),
            weight_indices=self.places[:requests],
            lora_ranks=self.ranks,
            scalings=self.scalings,
            max_len=max(16, next_power_of_2(width)) if chunked else width,
            seg_lens=torch.full_like(self.places[:requests], width),
            permutation=rows[:-1] if chunked else None,
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

    def head(self, info: LoRABatchInfo, width: int) -> AdaptedHead | None:
        """What the head adds to such rows; None if no adapter can be on it."""
        head = self._manager.lm_head_module
        if head is None:
            return None
        owners = info.weight_indices[:, None].expand(-1, width).flatten()
        return AdaptedHead(head, info, owners)


def _to_device(values: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A copy there, for which the host does not wait."""
    if torch.device(device).type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


class AdaptedModel(BlockModel):
    """The target with the adapters of a round's requests."""

    def __init__(self, runner: ModelRunner, adapters: Adapters, ids: Ids):
        super().__init__(runner)
        self._adapters, self._ids = adapters, ids

    def run(self, round: Round, tokens: torch.Tensor, capture: CaptureHiddenMode) -> TargetRows:
        self._adapters.prepare(self._ids, round.width)
        rows = super().run(round, tokens, capture)
        return replace(rows, adapted=self._adapters.head_of(self._ids, round.width))
