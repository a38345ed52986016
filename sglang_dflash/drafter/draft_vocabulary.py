"""Embedding and LM head of the draft model: the target's, or the checkpoint's own."""

from __future__ import annotations

import torch
from torch import nn

from sglang_dflash.checkpoint.formats.config import DraftConfig
from sglang_dflash.drafter.vocabulary import BorrowedVocabulary


class DraftVocabulary(BorrowedVocabulary):
    """Embeds a block's tokens and picks the likeliest token that the draft model can draft."""

    def __init__(
        self,
        target: nn.Module,
        config: DraftConfig,
        embedding: nn.Module | None,
        head: nn.Module | None,
        token_ids: torch.Tensor | None,
    ):
        """
        Args:
            embedding, head: the checkpoint's own; None for the target's.
            token_ids: [draft_vocab_size] int64, target id of each token that can be drafted; None for
                the target's whole vocabulary.
        """
        super().__init__(target, embedding, head)
        self._scale = config.embedding_scale
        like = next(self.head.parameters())
        device, dtype = like.device, like.dtype if like.is_floating_point() else torch.float32
        self._target_ids = None
        if token_ids is not None and head is not None:
            self._target_ids = token_ids.to(device)
        elif token_ids is not None:
            # The target's head has a row for every token: those that cannot be drafted never win.
            barred = torch.full((config.vocab_size,), float("-inf"), device=device)
            barred[token_ids.to(device)] = 0
            mine = barred[self._first_id : self._first_id + self._rows].to(dtype)
            self._bias = mine if self._bias is None else self._bias + mine

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[n] int64 → [n, hidden]."""
        embedded = super().embed(token_ids)
        return embedded if self._scale == 1 else embedded * self._scale

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        """Likeliest token that can be drafted, as a target's id: [n, hidden] → [n] int64."""
        return self._target_id(super().argmax(hidden))

    def likeliest_with_odds(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same token, and the log-odds that it is the one, of all that can be drafted."""
        drafted, log_odds = super().likeliest_with_odds(hidden)
        return self._target_id(drafted), log_odds

    def _target_id(self, drafted: torch.Tensor) -> torch.Tensor:
        return drafted if self._target_ids is None else self._target_ids[drafted]
