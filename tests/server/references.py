"""What the packages that define the formats draft for the bundled pair, in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import dflash.model
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tests.server.harness import DRAFTER, TARGET, Server

END = 2  # <|im_end|>


def hugging_face_target() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


def zlab_generation(
    target: torch.nn.Module, prompts: Sequence[list[int]], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[list[int], list[int]]]:
    """Answers and accept lengths of the PyPI package `dflash` with the bundled drafter."""
    # The package asks for a later transformers, whose caches are cropped in other words.
    monkeypatch.setattr(dflash.model, "_make_cache", lambda config: DynamicCache(config=config))
    monkeypatch.setattr(dflash.model, "_crop_to", lambda cache, length: cache.crop(length))
    monkeypatch.setattr(dflash.model, "_cuda_time", lambda: 0.0)  # it measures a GPU
    draft = dflash.model.DFlashDraftModel.from_pretrained(DRAFTER, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        result = dflash.model.dflash_generate(
            draft, target, torch.tensor([prompt]), 256, [END], return_stats=True
        )
        answers.append((result.output_ids[0, len(prompt) :].tolist(), result.acceptance_lengths))
    return answers


def accept_lengths(
    tokens: list[int], first: int, drafts: torch.Tensor, block_size: int
) -> list[int]:
    """Accept lengths of rounds over a known sequence.

    Args:
        tokens: prompt and answer.
        first: index of the answer's first token, the bonus token of the first round.
        drafts: [n, block_size - 1], what is drafted after the bonus tokens at `first` and on.
    """
    lengths, at = [], first
    while at + 1 < len(tokens):
        rest = tokens[at + 1 : at + block_size]
        drafted = drafts[at - first].tolist()
        pairs = zip(drafted, rest, strict=False)
        agreed = next((i for i, (mine, its) in enumerate(pairs) if mine != its), len(rest))
        lengths.append(min(agreed + 1, len(tokens) - 1 - at))
        at += lengths[-1]
    return lengths


def served(server: Server, prompt: list[int]) -> tuple[list[int], list[int]]:
    """A server's answer and its accept lengths, which a stream shows: a chunk is a round.

    Chunks that arrive together are merged on the way, so a stream with too few is asked for again.
    """
    for _ in range(10):
        chunks = list(server.stream(prompt))
        counts = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
        if len(counts) == chunks[-1]["meta_info"]["spec_verify_ct"] + 1:
            lengths = [b - a for a, b in zip(counts, counts[1:], strict=False)]
            return chunks[-1]["output_ids"], lengths
    raise AssertionError(f"chunks were merged in each of ten streams: {counts}")


def convert(folder: Path) -> Path:
    """The bundled drafter in speculators format, converted by the package `speculators`."""
    from speculators.convert.dflash.converter import DFlashConverter

    import tests.unit.speculators_writer  # noqa: F401  silences the package's log

    DFlashConverter().convert(DRAFTER, folder, str(TARGET), validate=False)
    return folder
