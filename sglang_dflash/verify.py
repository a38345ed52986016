"""Stage 2: [bonus, drafts] → the target's choice and its hidden states for every row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import nn

from sglang_dflash.block_model import BlockModel
from sglang_dflash.checkpoint import load_config
from sglang_dflash.errors import DFlashError
from sglang_dflash.round import Round
from sglang_dflash.vocabulary import BorrowedVocabulary


@dataclass(frozen=True)
class Verified:
    """What the target says about a block.

    Attributes:
        tokens: [bs, width] int64, the target's greedy choice after each row.
        hidden_states: [bs * width, taps * hidden], outputs of the tapped layers side by side.
    """

    tokens: torch.Tensor
    hidden_states: torch.Tensor


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
        tokens = self.vocabulary[0].argmax(hidden_states)
        return Verified(
            tokens.view(-1, batch.spec_info.draft_token_num), torch.cat(aux_hidden_states, dim=-1)
        )


@contextmanager
def greedy_head(model: nn.Module, head: GreedyHead) -> Iterator[None]:
    """Within it, `model` gives a `Verified` instead of logits."""
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
    runner.model.set_eagle3_layers_to_capture(list(config.target_layer_ids))


def verify(
    target: BlockModel, head: GreedyHead, round: Round, draft_tokens: torch.Tensor
) -> Verified:
    """Runs the target over the blocks, causally.

    Args:
        draft_tokens: [bs, width - 1] int64.

    Writes the target's K/V of every row to the round's slots.
    """
    tokens = torch.cat([round.bonus_tokens[:, None], draft_tokens], dim=1).flatten()
    with greedy_head(target.runner.model, head):
        return target.run(round, tokens, CaptureHiddenMode.FULL)
