"""Stage 2: [bonus, drafts] → the target's choice and its hidden states for every row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import nn

from sglang_dflash.checkpoint.load import load_config
from sglang_dflash.drafter.vocabulary import BorrowedVocabulary
from sglang_dflash.drawing.not_finite import mark, take_out
from sglang_dflash.drawing.sampling import Sampling
from sglang_dflash.errors import DFlashError
from sglang_dflash.round.block_model import BlockModel
from sglang_dflash.round.opened import Round


@dataclass(frozen=True)
class Verified:
    """What the target says about a block.

    Attributes:
        tokens: [bs, width] int64, the target's choice after each row.
        hidden_states: [bs * width, taps * hidden], outputs of the tapped layers side by side.
        output: log-probabilities [bs, width] and final hidden states [bs * width, hidden] of the rows, if
            a request asks for more than the likeliest token.
    """

    tokens: torch.Tensor
    hidden_states: torch.Tensor
    output: LogitsProcessorOutput | None = None


class GreedyHead(nn.Module):
    """Takes the place of a target's logits processor while it verifies greedily.

    Gives the likeliest token of each row at once: the logits, the largest tensor of a round, are
    neither converted to float32 nor, under tensor parallelism, gathered.
    """

    def __init__(self, vocabulary: BorrowedVocabulary):
        super().__init__()
        self.vocabulary = (vocabulary,)  # in a tuple, so that it does not register the target again

    def forward(
        self, input_ids, hidden_states, lm_head, batch, aux_hidden_states, *_, **__
    ) -> Verified:
        logits, tokens = self.vocabulary[0].likeliest(hidden_states)
        tokens = mark(tokens, logits)
        return Verified(
            tokens.view(-1, batch.spec_info.draft_token_num), torch.cat(aux_hidden_states, dim=-1)
        )


class TappedHead(nn.Module):
    """Takes the place of a target's logits processor to keep the tapped hidden states aside.

    The output is then that of plain decoding, whose hidden states are the last layer's.

    Attributes:
        hidden_states: [rows, taps * hidden] of the forward pass.
        not_finite: [requests] bool, whose next token NaN would choose.
    """

    def __init__(self, processor: nn.Module):
        super().__init__()
        self.processor = (processor,)
        self.hidden_states: torch.Tensor | None = None
        self.not_finite: torch.Tensor | None = None

    def forward(
        self, input_ids, hidden_states, lm_head, batch, aux_hidden_states, *rest: Any
    ) -> LogitsProcessorOutput:
        self.hidden_states = torch.cat(aux_hidden_states, dim=-1)
        output = self.processor[0](input_ids, hidden_states, lm_head, batch, None, *rest)
        self.not_finite = take_out(output.next_token_logits)
        return output


class RowsHead(TappedHead):
    """Takes the place of a target's logits processor while it verifies for a sampler.

    Logits of all rows at once would be the largest tensors of the server, and the sampler copies them;
    so they are made when they are drawn from, some rows at a time.
    """

    def forward(
        self, input_ids, hidden_states, lm_head, batch, aux_hidden_states, *_, **__
    ) -> RowsHead:
        self.hidden_states = torch.cat(aux_hidden_states, dim=-1)
        self.last, self.batch = hidden_states, batch
        self.arguments = input_ids, lm_head
        return self

    def logits(self, rows: slice) -> LogitsProcessorOutput:
        """Output of the target's own logits processor for some rows, logits in float32."""
        input_ids, lm_head = self.arguments
        return self.processor[0](input_ids[rows], self.last[rows], lm_head, self.batch, None)


@contextmanager
def head_of(model: nn.Module, head: nn.Module) -> Iterator[None]:
    """Within it, `model` ends with `head` instead of its own logits processor."""
    processor = model.logits_processor
    model.logits_processor = head
    try:
        yield
    finally:
        model.logits_processor = processor


def capture_target_hidden_states(runner: ModelRunner) -> None:
    """Makes the target hand out the outputs of the layers that the draft model taps.

    `set_eagle3_layers_to_capture` counts as the checkpoint does: i is the output of 0-based layer i.

    Raises:
        DFlashError: the target's model class cannot capture hidden states.
    """
    args = runner.server_args
    config = load_config(args.speculative_draft_model_path, args.speculative_draft_model_revision)
    if not hasattr(runner.model, "set_eagle3_layers_to_capture"):
        raise DFlashError(
            f"--model-path {args.model_path} is a {type(runner.model).__name__}, whose hidden states this SGLang "
            "release cannot capture: use a target with set_eagle3_layers_to_capture, as Qwen3 or Llama."
        )
    runner.model.set_eagle3_layers_to_capture(list(config.taps))


def verify(
    target: BlockModel,
    head: GreedyHead,
    round: Round,
    draft_tokens: torch.Tensor,
    sampling: Sampling | None = None,
) -> Verified:
    """Runs the target over the blocks, causally, and chooses a token after every row.

    Args:
        draft_tokens: [bs, width - 1] int64.
        sampling: how to draw; None for the likeliest tokens.

    Writes the target's K/V of every row to the round's slots.
    """
    tokens = torch.cat([round.bonus_tokens[:, None], draft_tokens], dim=1).flatten()
    model = target.runner.model
    if sampling is None:
        with head_of(model, head):
            return target.run(round, tokens, CaptureHiddenMode.FULL)
    rows = RowsHead(model.logits_processor)
    with head_of(model, rows):
        target.run(round, tokens, CaptureHiddenMode.FULL)
    chosen, output = sampling.draw(target.runner.sampler, rows.logits, round, draft_tokens)
    if sampling.return_hidden_states:
        output.hidden_states = rows.last
    return Verified(chosen, rows.hidden_states, output)
