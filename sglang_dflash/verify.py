"""Stage 2: [bonus, drafts] → the target's logits and hidden states for every row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.block_model import BlockModel
from sglang_dflash.checkpoint import load_config
from sglang_dflash.errors import DFlashError
from sglang_dflash.round import Round


@dataclass(frozen=True)
class Verified:
    """What the target says about a block.

    Attributes:
        logits: [bs * width, vocab]; row i of a request is the distribution after its row i.
        hidden_states: [bs * width, taps * hidden], outputs of the tapped layers side by side.
    """

    logits: torch.Tensor
    hidden_states: torch.Tensor


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


def verify(target: BlockModel, round: Round, draft_tokens: torch.Tensor) -> Verified:
    """Runs the target over the blocks, causally.

    Args:
        draft_tokens: [bs, width - 1] int64.

    Writes the target's K/V of every row to the round's slots.
    """
    tokens = torch.cat([round.bonus_tokens[:, None], draft_tokens], dim=1).flatten()
    output = target.run(round, tokens, CaptureHiddenMode.FULL)
    return Verified(output.next_token_logits, output.hidden_states)
