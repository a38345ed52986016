"""Attention metadata that a graph computes for itself.

The release prepares metadata on the host before each replay, with lengths that only the result of
the round before tells. Here it is part of the graph, so nothing has to wait for a result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_dflash.round import Round

if TYPE_CHECKING:
    from sglang_dflash.pair import DraftTargetPair


class Fa3Metadata:
    """For FlashAttention 3: lengths and a page table, the same for draft model and target.

    Both models use the same slots, and both attend over `start + width` keys.
    """

    def __init__(self, pair: DraftTargetPair, max_batch_size: int):
        self.pair = pair
        self.page_size = pair.target.runner.page_size
        device = pair.req_to_token.device
        pages = -(-pair.req_to_token.shape[1] // self.page_size)
        self.cache_lengths = torch.zeros(max_batch_size, dtype=torch.int32, device=device)
        self.page_table = torch.zeros(max_batch_size, pages, dtype=torch.int32, device=device)
        # Kept by key: graphs hold their addresses.
        self._metadata: dict[tuple[int, int], object] = {}

    def attach(self, bucket: int, width: int) -> None:
        """Makes both models' backends use this metadata for blocks of `width`."""
        if (bucket, width) not in self._metadata:
            self._metadata[bucket, width] = self._make(bucket, width)
        for model in (self.pair.draft, self.pair.target):
            model.runner.attn_backend.forward_metadata = self._metadata[bucket, width]

    def _make(self, bucket: int, width: int) -> object:
        from sglang.srt.layers.attention.flashattention_backend import FlashAttentionMetadata

        device = self.page_table.device
        return FlashAttentionMetadata(
            cache_seqlens_int32=self.cache_lengths[:bucket],
            max_seq_len_q=width,
            max_seq_len_k=self.pair.context_len + width,
            cu_seqlens_q=torch.arange(0, bucket * width + 1, width, dtype=torch.int32, device=device),
            page_table=self.page_table[:bucket],
        )

    def fill(self, round: Round) -> None:
        """Writes lengths and page table of a round; runs inside the graph."""
        bucket = len(round.rows)
        self.cache_lengths[:bucket] = round.start + round.width
        padding = (round.rows == self.pair.state.padding_row)[:, None]
        slots = self.pair.req_to_token[:, :: self.page_size][torch.where(padding[:, 0], 0, round.rows)]
        self.page_table[:bucket] = torch.where(padding, 0, slots // self.page_size)


_METADATA = {"fa3": Fa3Metadata}


def metadata_class(pair: DraftTargetPair) -> type | None:
    """The class for the backends of a pair, or None if their metadata needs the host."""
    backends = {backend_name(model.runner) for model in (pair.draft, pair.target)}
    return _METADATA.get(backends.pop()) if len(backends) == 1 else None


def backend_name(runner) -> str | None:
    """Name of the attention backend that runs a model's blocks; None if it is a mixture."""
    prefill, decode = runner.server_args.get_attention_backends()
    return prefill if prefill == decode else None
