"""One round of the draft model on fixed tokens, before the server takes requests."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.drafter.context_kv import write_context
from sglang_dflash.drafter.vocabulary import BorrowedVocabulary
from sglang_dflash.errors import DFlashError
from sglang_dflash.round.block_model import set_block_width
from sglang_dflash.round.opened import Round
from sglang_dflash.round.propose import block_tokens

_CONTEXT = 8


def check_draft_model(draft: ModelRunner, target: BorrowedVocabulary, width: int) -> None:
    """Drafts a block after a few tokens, on slots that nobody owns yet.

    Args:
        target: its embeddings stand for hidden states of the target.

    Raises:
        DFlashError: a logit is not finite, so no draft would ever be accepted.
    """
    page, available = draft.page_size, draft.token_to_kv_pool.size
    model, table = draft.model, draft.req_to_token_pool.req_to_token
    n = min(_CONTEXT, available - width, table.shape[1] - width)
    if n < 1:
        return  # a pool in which no request fits, which SGLang refuses itself
    device = table.device
    positions = torch.arange(n + width, device=device)
    slots = page + positions  # the first page is for padding
    table[0, : n + width] = slots.to(table.dtype)
    tokens = torch.arange(1, n + 2, device=device)
    features = target.embed(tokens[:n]).repeat(1, len(model.draft.taps))
    write_context(draft, features, positions[:n], slots[:n])
    round = Round(
        rows=torch.zeros(1, dtype=torch.int64, device=device),
        width=width,
        start=torch.tensor([n], device=device),
        start_bounds=torch.tensor([n]),
        bonus_tokens=tokens[n:],
        positions=positions[n:],
        slots=slots[n:],
    )
    block = block_tokens(round.bonus_tokens, model.mask_token_id, width)
    batch = round.forward_batch(draft, block, CaptureHiddenMode.NULL)
    set_block_width(draft.attn_backend, width)
    draft.attn_backend.init_forward_metadata(batch)
    logits = model.vocabulary.logits(model.draft_states(block, round.positions, batch))
    table[0, : n + width] = 0
    # NaN is the largest, and a token that cannot be drafted has minus infinity.
    if not logits.max(dim=-1).values.isfinite().all():
        dtype = str(draft.dtype).removeprefix("torch.")
        raise DFlashError(
            f"The drafter {model.draft.path} gives logits that are not finite in {dtype}, so no draft could be "
            "accepted: its weights are damaged, or need another --dtype; download it again, or try --dtype bfloat16 "
            "or float32."
        )
