"""Checkpoints written by the package `speculators`, and the drafts of its own forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from loguru import logger
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig

logger.remove()  # it logs every file that it reads


def build(
    transformer: dict[str, Any],
    verifier: Path,
    *,
    layer_ids: list[int],
    mask_token_id: int,
    block_size: int,
    draft_ids: torch.Tensor | None = None,
    **changes: Any,
) -> DFlashDraftModel:
    """A draft model with random weights.

    Args:
        transformer: fields of the transformer's config.
        layer_ids: `aux_hidden_state_layer_ids`.
        draft_ids: ascending ids of a reduced vocabulary.
    """
    fields = {name: value for name, value in transformer.items() if name != "model_type"}
    config = AutoConfig.for_model(transformer["model_type"], **fields)
    config._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=block_size - 1)
    model = DFlashDraftModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=config,
            draft_vocab_size=config.vocab_size if draft_ids is None else len(draft_ids),
            block_size=block_size,
            aux_hidden_state_layer_ids=layer_ids,
            mask_token_id=mask_token_id,
            speculators_config=SpeculatorsConfig(
                algorithm="dflash",
                proposal_methods=[proposal],
                default_proposal_method="greedy",
                verifier=VerifierConfig.from_pretrained(str(verifier)),
            ),
            **changes,
        )
    )
    if draft_ids is not None:
        listed = torch.zeros(config.vocab_size, dtype=torch.bool)
        listed[draft_ids] = True
        model.load_vocab_mappings(listed, draft_ids - torch.arange(len(draft_ids)))
    model.load_verifier_weights()
    return model.eval()


@torch.no_grad()
def drafts(
    model: DFlashDraftModel, ids: torch.Tensor, hidden_states: torch.Tensor, anchors: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the package drafts for blocks whose bonus token is at each of `anchors`.

    Args:
        ids: [n] int64, tokens of a sequence that goes on for a block after the last anchor.
        hidden_states: [n, taps * hidden], of the tapped layers side by side.

    Returns:
        Logits [anchors, block_size - 1, draft vocabulary] and target ids [anchors, block_size - 1].
    """
    logits: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda *call: logits.append(call[2]))
    wanted = torch.zeros(1, len(ids))
    wanted[0, anchors] = 1
    model(
        hidden_states=hidden_states[None],
        input_ids=ids[None],
        loss_mask=wanted,
        verifier_last_hidden_states=torch.zeros(1, len(ids), model.hidden_size),
        document_ids=torch.zeros(1, len(ids), dtype=torch.long),
        max_anchors=len(anchors),
        loss_config=resolve_loss_config("kl_div", "eager"),  # the default is a Triton kernel
    )
    hook.remove()
    blocks = logits[0].view(len(anchors), model.block_size, -1)[:, 1:]
    tokens = blocks.argmax(-1)
    return blocks, tokens if model.d2t is None else tokens + model.d2t[tokens]
