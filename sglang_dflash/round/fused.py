"""Both models' layers in few launches, for rounds that are captured."""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import partial

import torch
from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled
from sglang.srt.distributed import get_tp_group
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import nn

from sglang_dflash.drafter.model import DFlashDraftModel
from sglang_dflash.gpu.block_attention import BlockAttention
from sglang_dflash.gpu.fused_attention import can_fuse
from sglang_dflash.gpu.fused_layers import FusedLayers
from sglang_dflash.gpu.in_place import fuse_in_place, restore
from sglang_dflash.gpu.rank_sums import open_rank_sums
from sglang_dflash.gpu.targets import Body, fused_body
from sglang_dflash.gpu.tiling_times import time_tilings
from sglang_dflash.gpu.tilings import tilings_of_process
from sglang_dflash.round.adapted_check import product_ways, trial_rows
from sglang_dflash.round.adapter_buffers import AdapterBuffers
from sglang_dflash.round.fused_check import (
    MIDDLE_FP8,
    WORST_FP8,
    Way,
    first_right,
    trial_blocks,
)
from sglang_dflash.round.parts import Parts

logger = logging.getLogger(__name__)

LAYERS, PARTS, RELEASE = "fused layers", "fused parts of layers", "layers as the release runs them"


def fuse_models(
    parts: Parts,
    draft_attention: type[BlockAttention],
    target_attention: type[BlockAttention],
    requests: int,
    width: int,
    rows: Collection[int] = (),
) -> Body | None:
    """Fuses what can be fused of both models, and gives the right results; all ranks call it alike.

    Args:
        draft_attention, target_attention: what computes attention in rounds.
        requests: the most that a round has.
        width: the most rows of a block.
        rows: that passes are captured for.

    Returns:
        The target but its head, as captured rounds run it; None for its own forward pass.
    """
    draft, target = parts.draft.runner, parts.target.runner
    body = None
    # Deterministic inference wants sums that do not depend on the batch; fused ones do.
    if not is_batch_invariant_mode_enabled():
        config = target.model_config
        size = max(config.hidden_size, draft.model.draft.hidden_size)
        ranks = open_rank_sums(size, requests * width, config.dtype)
        tilings = tilings_of_process(time_tilings)
        body = fused_body(target.model, tilings, ranks, rows)
        draft.model.fuse(tilings, ranks, rows)
    group, rest = get_tp_group(), (width, parts.context_len)
    trials = trial_blocks(target, target_attention, True, *rest)
    chosen = first_right("target", target_ways(target.model, body), trials, group)
    trials = trial_blocks(draft, draft_attention, False, *rest)
    drafting = first_right("drafter", draft_ways(draft.model), trials, group)
    logger.info("DFLASH runs the target with %s, the drafter with %s", chosen.name, drafting.name)
    draft.model.settle()
    return body if chosen.name == LAYERS else None


def fuse_adapted(
    buffers: AdapterBuffers, body: Body | None, requests: int, width: int
) -> Body | None:
    """The target with its LoRA layers, likewise, if it is fused without them.

    Its products are compared with the release's under adapters of random numbers, which are gone afterwards.
    """
    adapted = None if body is None else body.adapted(buffers.wide)
    if adapted is None:
        return None
    buffers.sorts_rows = not adapted.layers.all_are_wide
    ways = product_ways(adapted.layers, (LAYERS, RELEASE))
    with buffers.random_adapters():
        trials = trial_rows(buffers, requests, width)
        chosen = first_right("target under LoRA adapters", ways, trials, get_tp_group())
    said = (chosen.name, len(adapted.layers.wide))
    logger.info(
        "DFLASH runs the target under LoRA adapters with %s, %d products with adapters in them",
        *said,
    )
    return adapted if chosen.name == LAYERS else None


def target_ways(model: nn.Module, body: Body | None) -> list[Way]:
    """Ways to run a target, the one with the fewest launches first.

    Args:
        body: with its layers fused, where they can be.
    """

    def run(batch: ForwardBatch) -> list[torch.Tensor]:
        made = model.model(batch.input_ids, batch.positions, batch)
        return [made] if isinstance(made, torch.Tensor) else [made[0], *made[1]]

    def run_fused(batch: ForwardBatch) -> list[torch.Tensor]:
        states, taps = body(batch.input_ids, batch.positions, batch)
        return [states, *taps]

    ways = [Way(RELEASE, partial(restore, model), run)]
    if fuse_in_place(model) > 0:
        restore(model)
        ways.insert(0, Way(PARTS, partial(fuse_in_place, model), run))
    if body is not None:
        ways.insert(0, Way(LAYERS, partial(restore, model), run_fused))
    return ways


def draft_ways(model: DFlashDraftModel) -> list[Way]:
    """Likewise for the drafter, whose layers `fuse` has fused if they can be.

    With products in FP8 before any without.
    """
    layers, fp8 = model.fused, model.fp8

    def use(layers: FusedLayers | None, attention: bool, in_fp8: bool = False) -> None:
        model.use(layers, attention)
        if fp8 is not None:
            fp8.use(in_fp8)

    def run(batch: ForwardBatch) -> list[torch.Tensor]:
        return [model.draft_states(batch.input_ids, batch.positions, batch)]

    ways = [Way(RELEASE, partial(use, None, False), run)]
    if any(can_fuse(layer.self_attn) for layer in model.layers):
        ways.insert(0, Way(PARTS, partial(use, None, True), run))
    if layers is not None:
        ways.insert(0, Way(LAYERS, partial(use, layers, True), run))
    if fp8 is not None:
        best = ways[0]
        in_fp8 = partial(best.use, in_fp8=True)
        ways.insert(0, Way(f"{best.name} in FP8", in_fp8, run, MIDDLE_FP8, WORST_FP8))
    return ways
