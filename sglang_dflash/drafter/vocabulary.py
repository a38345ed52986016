"""The target's embedding and LM head, as the draft model uses them."""

from __future__ import annotations

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.lora.layers import BaseLayerWithLoRA
from torch import nn

from sglang_dflash.errors import DFlashError
from sglang_dflash.gpu.fp8 import Fp8Weight
from sglang_dflash.gpu.kernels.argmax import row_max, row_max_and_rest


class BorrowedVocabulary:
    """Embeds token ids and picks the likeliest token, with weights that belong to the target.

    Both modules are split over the vocabulary under tensor parallelism. Each can be given instead.

    Attributes:
        fp8_head: what multiplies instead of the head; None for the head.
    """

    def __init__(
        self,
        target: nn.Module,
        embedding: nn.Module | None = None,
        head: nn.Module | None = None,
        fp32: bool = False,
        scale: float | None = None,
    ):
        """
        Args:
            fp32: whether logits are float32 products, as plain decoding's are with --enable-fp32-lm-head.
            scale: of plain decoding's logits, which it rounds to the same number more often than without.
        """
        self._fp32, self._logit_scale = fp32, scale
        self.fp8_head: Fp8Weight | None = None
        self.embedding = base_of(embedding_of(target) if embedding is None else embedding)
        head = base_of(head_of(target) if head is None else head)
        # Without a weight it has what its method of quantization keeps instead.
        self._quantized = not isinstance(getattr(head, "weight", None), torch.Tensor)
        shard = getattr(head, "shard_indices", None)
        if self._quantized and (shard is None or not hasattr(head, "quant_method")):
            raise DFlashError(
                f"The target {type(target).__name__} has no LM head that a DFlash drafter can share: use a target "
                "with lm_head.weight."
            )
        if not self._quantized and not _is_plain(head.weight):
            raise DFlashError(
                f"The target's LM head is quantized ({head.weight.dtype}) in a way that neither SGLang nor a DFlash "
                "drafter reads: use a checkpoint whose LM head is not quantized."
            )
        self.head = head
        if shard is None:  # a plain embedding, whole on every rank
            self._rows, self._first_id = len(head.weight), 0
        else:  # what is behind a rank's part is padding
            self._rows = shard.org_vocab_end_index - shard.org_vocab_start_index
            self._first_id = shard.org_vocab_start_index
        self._bias = None if getattr(head, "bias", None) is None else head.bias[: self._rows]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[n] int64 → [n, hidden]."""
        return self.embedding(token_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of this rank's part of the vocabulary: [n, hidden] → [n, rows]."""
        logits = self._quantized_logits(hidden) if self._quantized else self._plain_logits(hidden)
        return logits if self._logit_scale is None else logits.mul_(self._logit_scale)

    @property
    def plain_head(self) -> torch.Tensor | None:
        """The head's weight, [rows, hidden]; None where it is quantized. Not kept: a weight update may replace it."""
        return None if self._quantized else self.head.weight[: self._rows]

    def _plain_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.fp8_head is not None:
            return self.fp8_head.product(hidden, self._bias)
        weight, bias = self.plain_head, self._bias
        if self._fp32:
            weight, bias = weight.float(), None if bias is None else bias.float()
        return torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias)

    def _quantized_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.float() if self._fp32 else hidden
        logits = self.head.quant_method.apply(self.head, hidden, None)[:, : self._rows]
        return logits.contiguous() if self._bias is None else logits + self._bias

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        """Likeliest token: [n, hidden] → [n] int64; all ranks agree, the lower id wins a tie."""
        return self.likeliest(hidden)[1]

    def likeliest(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Largest logit of each row, NaN if one is, and its token: [n, hidden] → [n], [n] int64.

        Each rank looks at its part of the vocabulary, and one gather of two numbers a row decides.
        """
        value, index = row_max(self.logits(hidden))
        group = get_tp_group()
        if group.world_size == 1:
            return value, index
        # float64 holds every logit and every token id exactly.
        mine = torch.stack([value.double(), (index + self._first_id).double()])  # [2, n]
        values, ids = group.all_gather(mine[None], dim=0).unbind(dim=1)  # [tp, n] each
        best = values.argmax(dim=0, keepdim=True)
        token = ids.gather(0, best).squeeze(0).to(torch.int64)
        return values.gather(0, best).squeeze(0), token

    def likeliest_with_odds(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Likeliest token, and the log-odds that it is the one, not any other: [n, hidden] → [n] int64, [n] float32.

        All ranks get the same numbers.
        """
        value, index, rest = row_max_and_rest(self.logits(hidden))
        group = get_tp_group()
        if group.world_size == 1:
            return index, value - rest
        token_ids = (index + self._first_id).double()
        mine = torch.stack([value.double(), token_ids, rest.double()])  # [3, n]
        return of_all_parts(*group.all_gather(mine[None], dim=0).unbind(dim=1))


def of_all_parts(
    values: torch.Tensor, ids: torch.Tensor, rests: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Likeliest tokens, and the log-odds that they are the ones, of a vocabulary in parts: [n] int64, [n] float32.

    Args:
        values, ids: [parts, n] float64, the largest logit of each part, and its token.
        rests: likewise, the logarithm of the sum of the exponentials of its others.
    """
    best = values.argmax(dim=0, keepdim=True)
    top = values.gather(0, best).squeeze(0)
    others = torch.logaddexp(values, rests).scatter(0, best, rests.gather(0, best))
    token = ids.gather(0, best).squeeze(0).to(torch.int64)
    return token, (top - others.logsumexp(dim=0)).float()


def _is_plain(weight: torch.Tensor) -> bool:
    return weight.is_floating_point() and weight.itemsize > 1


def base_of(module: nn.Module | None) -> nn.Module | None:
    """A module without the LoRA adapters that the release has put around it."""
    return module.base_layer if isinstance(module, BaseLayerWithLoRA) else module


def head_of(target: nn.Module) -> nn.Module | None:
    """The module whose weight makes a target's logits; the embedding, if the two are tied and no other is there."""
    head = getattr(target, "lm_head", None)
    if head is None and getattr(getattr(target, "config", None), "tie_word_embeddings", False):
        return embedding_of(target)
    return head


def embedding_of(target: nn.Module) -> nn.Module:
    """The module that embeds a target's tokens.

    Raises:
        DFlashError: there is none where models have it.
    """
    for owner in (getattr(target, "model", None), target):
        for name in ("embed_tokens", "word_embeddings"):  # the second as in Bailing
            if isinstance(embedding := getattr(owner, name, None), nn.Module):
                return embedding
    raise DFlashError(
        f"The target {type(target).__name__} has no embed_tokens that a DFlash drafter can share: use a target "
        "such as Qwen3 or Llama."
    )
