"""What Kimi-K2.5's published processor does, as far as its release asks: a checkpoint takes this file along, so nothing
but packages is imported."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature, PreTrainedTokenizerBase, ProcessorMixin

PATCH, MERGED = 14, 2  # pixels of a patch; patches, of either side, that one token has


class Pictures:
    """Cut to whole tokens' patches."""

    def media_tokens_calculator(self, medium: dict[str, Any]) -> int:
        height, width = self._patches(medium["image"])
        return height * width // MERGED**2

    def __call__(self, media: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Patches [patches, 3, PATCH, PATCH] of all pictures, and [pictures, 3] their frames and sides in patches."""
        sides = [self._patches(medium["image"]) for medium in media]
        pairs = zip(media, sides, strict=True)
        cut = [self._cut(medium["image"], height, width) for medium, (height, width) in pairs]
        return {
            "pixel_values": torch.cat(cut),
            "grid_thws": torch.tensor([[1, height, width] for height, width in sides]),
        }

    def _patches(self, image: Image.Image) -> tuple[int, int]:
        unit = PATCH * MERGED
        return image.height // unit * MERGED, image.width // unit * MERGED

    def _cut(self, image: Image.Image, height: int, width: int) -> torch.Tensor:
        pixels = np.asarray(image.convert("RGB"), dtype=np.float32)[
            : height * PATCH, : width * PATCH
        ]
        patches = torch.from_numpy(pixels / 127.5 - 1).unflatten(0, (height, PATCH))
        patches = patches.unflatten(2, (width, PATCH))  # [height, PATCH, width, PATCH, 3]
        return patches.permute(0, 2, 4, 1, 3).flatten(0, 1).contiguous()


class KimiProcessor(ProcessorMixin):
    """Whoever calls it has written a placeholder for each token of a picture."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None):
        super().__init__(tokenizer, chat_template=chat_template)
        self.media_processor = Pictures()

    def __call__(
        self, text: list[str], medias: list[dict[str, Any]] | None = None, **given: Any
    ) -> BatchFeature:
        pictures = self.media_processor(medias) if medias else {}
        return BatchFeature(dict(self.tokenizer(text, return_tensors="pt")) | pictures)
