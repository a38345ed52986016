"""The target as rounds need it: what it hands out beside its logits.

Set up once, when the model is loaded. Its layers give their outputs where the draft model taps them, and its
logits processor lies behind a head that passes those on: after a prefill beside the logits, of a block instead
of them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import nn

from sglang_dflash.checkpoint.load import load_config
from sglang_dflash.drafter.vocabulary import embedding_of
from sglang_dflash.drawing.not_finite import take_out
from sglang_dflash.errors import DFlashError
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
    """

    hidden_states: torch.Tensor
    taps: torch.Tensor | None
    head: TargetHead
    lm_head: nn.Module
    batch: ForwardBatch

    def at(self, rows: torch.Tensor) -> TargetRows:
        """Some of the rows ([n] int64), and in that order."""
        batch = copy.copy(self.batch)
        batch.input_ids = batch.input_ids[rows]
        return replace(self, hidden_states=self.hidden_states[rows], batch=batch)

    def logits(self, rows: slice | torch.Tensor) -> LogitsProcessorOutput:
        """Output of the target's own logits processor for some rows, logits in float32."""
        ids, x = self.batch.input_ids[rows], self.hidden_states[rows]
        return self.head.processor(ids, x, self.lm_head, self.batch, None)


@dataclass
class TappedOutput(LogitsProcessorOutput):
    """A prefill's output, and what becomes context of the draft model.

    Attributes:
        taps: [rows, taps * hidden] of all rows.
        not_finite: [requests] bool, whose next token NaN would choose.
    """

    taps: torch.Tensor | None = None
    not_finite: torch.Tensor | None = None


class TargetHead(nn.Module):
    """Stands before a target's logits processor."""

    def __init__(self, model: nn.Module, taps_embedding: bool):
        super().__init__()
        # In a tuple, so that neither becomes part of this module: weights keep their names.
        self._behind = (model.logits_processor, embedding_of(model) if taps_embedding else None)

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
        taps = self._taps(input_ids, batch, aux_hidden_states or ())
        if isinstance(batch.spec_info, DFlashVerifyInput):
            return TargetRows(hidden_states, taps, self, lm_head, batch)
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
        self, input_ids: torch.Tensor, batch: ForwardBatch, layers: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        embedding = self._behind[1]
        if embedding is None:
            return torch.cat(list(layers), dim=-1)
        embeds = getattr(batch, "input_embeds", None)
        embedded = embedding(input_ids) if embeds is None else embeds
        return torch.cat([embedded.to(layers[0].dtype) if layers else embedded, *layers], dim=-1)


def tap_target(runner: ModelRunner) -> None:
    """Makes the target hand out the outputs of the layers that the draft model taps.

    `set_eagle3_layers_to_capture` counts as the checkpoint does: i is the output of 0-based layer i.

    Raises:
        DFlashError: the target's model class cannot capture hidden states.
    """
    args, model = runner.server_args, runner.model
    config = load_config(args.speculative_draft_model_path, args.speculative_draft_model_revision)
    if not hasattr(model, "set_eagle3_layers_to_capture"):
        raise DFlashError(
            f"--model-path {args.model_path} is a {type(model).__name__}, whose hidden states this SGLang "
            "release cannot capture: use a target with set_eagle3_layers_to_capture, as Qwen3 or Llama."
        )
    layers = [tap for tap in config.taps if tap != EMBEDDING]
    if layers:
        model.set_eagle3_layers_to_capture(layers)
        sum_at_once(model.model, layers)
    model.logits_processor = TargetHead(model, EMBEDDING in config.taps)


def sum_at_once(body: nn.Module, layers: Collection[int]) -> None:
    """Makes tapped layers sum their outputs over the ranks themselves.

    Where the release fuses that sum with the next layer's norm, what it captures between the two is one
    rank's part. A layer that is the last has no next one, so it is told that it is. Models that capture
    after the norm need nothing.
    """
    for index in layers:
        layer = body.layers[index]
        after = body.layers[index + 1]
        communicator = getattr(layer, "layer_communicator", None)
        captures_sums = "captured_last_layer_outputs" in inspect.signature(after.forward).parameters
        if communicator is not None and not captures_sums:
            communicator.is_last_layer = True
