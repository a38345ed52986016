"""Both models' layers in few launches, for rounds that are captured."""

from __future__ import annotations

import logging

from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled

from sglang_dflash.gpu.qwen3 import fuse_attention
from sglang_dflash.gpu.rank_sums import open_rank_sums
from sglang_dflash.gpu.targets import Body, fused_body
from sglang_dflash.gpu.tiling_times import time_tilings
from sglang_dflash.gpu.tilings import tilings_of_process
from sglang_dflash.round.parts import Parts

logger = logging.getLogger(__name__)


def fuse_models(parts: Parts, rows: int) -> Body | None:
    """Fuses what can be fused of both models; all ranks call it alike.

    Args:
        rows: the most that a round has.

    Returns:
        The target but its head, as captured rounds run it; None for its own forward pass.
    """
    draft, target = parts.draft.runner.model, parts.target.runner
    body = None
    # Deterministic inference wants sums that do not depend on the batch; fused ones do.
    if not is_batch_invariant_mode_enabled():
        config = target.model_config
        size = max(config.hidden_size, draft.draft.hidden_size)
        ranks, tilings = open_rank_sums(size, rows, config.dtype), tilings_of_process(time_tilings)
        body = fused_body(target.model, tilings, ranks)
        draft.fuse(tilings, ranks)
    if body is None:
        logger.info("DFLASH fused the attention of %d target layers", fuse_attention(target.model))
    else:
        logger.info("DFLASH fused the target's layers")
    return body
