"""The target as rounds need it: what it hands out beside its logits.

Set up once, when the model is loaded. Its layers give their outputs where the draft model taps them, by the
release's method or, in classes that have none, by hooks; and its logits processor lies behind a head that passes
those on: after a prefill beside the logits, of a block instead of them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import nn

from sglang_dflash.checkpoint.load import load_config
from sglang_dflash.checkpoint.target_class import (
    SUMS_LATER,
    check_class,
    is_wrapper,
    language_model,
)
from sglang_dflash.drafter.vocabulary import base_of, embedding_of
from sglang_dflash.drawing.not_finite import take_out
from sglang_dflash.round.adapted_head import AdaptedHead
from sglang_dflash.round.verify_input import DFlashVerifyInput

EMBEDDING = -1  # as a tap: what the first layer reads


@dataclass(frozen=True)
class TargetRows:
    """What a target's pass over blocks gives; which tokens follow is not decided yet.

    Logits of all rows at once would be the largest tensors of the server, so they are made by whoever wants
    them, as few rows at a time as it likes.

    Attributes:
        hidden_states: [rows, hidden], after the last norm.
        taps: [rows, taps * hidden], outputs of the tapped layers side by side; None when they are used.
        lm_head: the target's own.
        adapted: it with LoRA adapters, if rows have any there.
    """

    hidden_states: torch.Tensor
    taps: torch.Tensor | None
    head: TargetHead
    lm_head: nn.Module
    batch: ForwardBatch
    adapted: AdaptedHead | None = None

    def at(self, rows: torch.Tensor) -> TargetRows:
        """Some of the rows ([n] int64), and in that order."""
        batch = copy.copy(self.batch)
        batch.input_ids = batch.input_ids[rows]
        adapted = self.adapted and self.adapted.at(rows)
        return replace(self, hidden_states=self.hidden_states[rows], batch=batch, adapted=adapted)

    def logits(self, rows: slice | torch.Tensor) -> LogitsProcessorOutput:
        """Output of the target's own logits processor for some rows, logits in float32."""
        ids, x = self.batch.input_ids[rows], self.hidden_states[rows]
        if self.adapted is None:
            return self.head.processor(ids, x, self.lm_head, self.batch, None)
        with self.adapted.over(rows) as lm_head:
            return self.head.processor(ids, x, lm_head, self.batch, None)


@dataclass
class TappedOutput(LogitsProcessorOutput):
    """A prefill's output, and what becomes context of the draft model.

    Attributes:
        taps: [rows, taps * hidden] of all rows.
        not_finite: [requests] bool, whose next token NaN would choose.
    """

    taps: torch.Tensor | None = None
    not_finite: torch.Tensor | None = None


class LayerTaps:
    """What hooks on decoder layers keep of a pass, from the layers until the head takes it.

    Copies, since the norms of later layers add to such tensors in place. In a pass that is captured, hooks run when it
    is captured, and what they keep are the graph's tensors.
    """

    def __init__(self, layers: nn.ModuleList, taps: Sequence[int], sums_later: bool):
        """
        Args:
            taps: 0-based layers whose output is kept, `EMBEDDING` for the input of the first; ascending.
            sums_later: whether a layer returns hidden states and a residual that the next one adds.
        """
        self._taps, self._sums_later = taps, sums_later
        self._kept: dict[int, torch.Tensor] = {}
        for tap in taps:
            if tap == EMBEDDING:
                layers[0].register_forward_pre_hook(self._keep_input, with_kwargs=True)
            else:
                layers[tap].register_forward_hook(partial(self._keep_output, tap))

    def take(self) -> list[torch.Tensor]:
        """[rows, hidden] of each tap in the pass that runs; afterwards nothing is kept."""
        return [self._kept.pop(tap) for tap in self._taps]

    def _keep_input(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        # Scaled, where a model scales its embeddings.
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[1]
        self._kept[EMBEDDING] = x.clone()

    def _keep_output(self, tap: int, layer: nn.Module, args: tuple, output: Any) -> None:
        x = output[0] if isinstance(output, tuple) else output
        self._kept[tap] = x + output[1] if self._sums_later else x.clone()


class TargetHead(nn.Module):
    """Stands before a target's logits processor."""

    def __init__(self, model: nn.Module, taps_embedding: bool, kept: LayerTaps | None = None):
        """
        Args:
            taps_embedding: whether the embedding is tapped beside what the logits processor is given.
            kept: taps before those that the logits processor is given, which may be none.
        """
        super().__init__()
        # In a tuple, so that neither becomes part of this module: weights keep their names.
        embedding = base_of(embedding_of(model)) if taps_embedding else None
        self._behind = (model.logits_processor, embedding)
        self._kept = kept

    @property
    def processor(self) -> nn.Module:
        return self._behind[0]

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        lm_head: nn.Module,
        batch: ForwardBatch,
        aux_hidden_states: Sequence[torch.Tensor] | None = None,
        *rest: Any,
        **more: Any,
    ) -> LogitsProcessorOutput | TargetRows:
        kept = self._kept.take() if self._kept else []
        taps = self._taps(input_ids, batch, [*kept, *(aux_hidden_states or ())])
        if isinstance(batch.spec_info, DFlashVerifyInput):
            return TargetRows(hidden_states, taps, self, base_of(lm_head), batch)
        output = self.after_prompts(batch, hidden_states, lm_head, *rest, **more)
        output.taps = taps
        return output

    def after_prompts(
        self,
        batch: ForwardBatch,
        hidden_states: torch.Tensor,
        lm_head: nn.Module,
        *rest: Any,
        **more: Any,
    ) -> TappedOutput:
        """What a prefill gives of its rows' last hidden states [rows, hidden], without their taps."""
        # Nor are these given on, so that hidden states that a request asks for are the last layer's.
        output = self.processor(batch.input_ids, hidden_states, lm_head, batch, None, *rest, **more)
        values = {field.name: getattr(output, field.name) for field in fields(output)}
        return TappedOutput(**values, not_finite=take_out(output.next_token_logits))

    def _taps(
        self, input_ids: torch.Tensor, batch: ForwardBatch, layers: list[torch.Tensor]
    ) -> torch.Tensor:
        embedding = self._behind[1]
        if embedding is None:
            return torch.cat(layers, dim=-1)
        embeds = getattr(batch, "input_embeds", None)
        embedded = embedding(input_ids) if embeds is None else embeds
        return torch.cat([embedded.to(layers[0].dtype) if layers else embedded, *layers], dim=-1)


def tap_target(runner: ModelRunner) -> None:
    """Makes the target hand out the outputs of the layers that the draft model taps.

    `set_eagle3_layers_to_capture` counts as the checkpoint does: i is the output of 0-based layer i.

    Raises:
        DFlashError: targets of its class cannot be tapped.
    """
    args, model = runner.server_args, language_model(runner.model)
    config = load_config(args.speculative_draft_model_path, args.speculative_draft_model_revision)
    check_class(type(runner.model), args.model_path, "--model-path")
    layers = [tap for tap in config.taps if tap != EMBEDDING]
    hooked = type(model).__name__ in SUMS_LATER
    sum_at_once(model.model, layers, hooked)
    if hooked:
        kept = LayerTaps(model.model.layers, config.taps, SUMS_LATER[type(model).__name__])
        model.logits_processor = TargetHead(model, False, kept)
        return
    if layers:
        model.set_eagle3_layers_to_capture(layers)
    kept, taps_embedding = None, EMBEDDING in config.taps
    if taps_embedding and is_wrapper(type(runner.model)):
        # Only its layers are given what embeds pictures.
        kept = LayerTaps(model.model.layers, (EMBEDDING,), sums_later=False)
    model.logits_processor = TargetHead(model, taps_embedding and kept is None, kept)


def sum_at_once(body: nn.Module, layers: Collection[int], hooked: bool = False) -> None:
    """Makes tapped layers sum their outputs over the ranks themselves.

    Where the release fuses that sum with the next layer's norm, what it captures between the two is one
    rank's part. A layer that is the last has no next one, so it is told that it is. Models that capture
    after the norm need nothing.

    Args:
        hooked: whether hooks capture what layers return, whatever the release could capture after the norm.
    """
    for index in layers:
        layer = body.layers[index]
        after = body.layers[index + 1]
        communicator = getattr(layer, "layer_communicator", None)
        captures_sums = "captured_last_layer_outputs" in inspect.signature(after.forward).parameters
        if communicator is not None and (hooked or not captures_sums):
            communicator.is_last_layer = True
