"""The table of published drafters: what the code says of the classes that it names."""

from __future__ import annotations

import re

import pytest
import transformers
from sglang.srt.models.registry import ModelRegistry
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from sglang_dflash.checkpoint.target_class import SUMS_LATER, check_class
from tests.unit.decoders import ARCHITECTURES
from tests.unit.kimi import KIMI
from tests.unit.test_docs import ROOT
from tests.unit.wrappers import WRAPPERS

DOCS = (ROOT / "docs" / "targets.md").read_text()
HEAD, SEEN = "| drafters | ", "| target | "


def rows(head: str) -> list[list[str]]:
    """Cells of the table that begins so."""
    table = DOCS[DOCS.index(head) :].partition("\n\n")[0]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()[2:]]


def classes() -> dict[str, str]:
    """Of the targets that tests run, what transformers names their classes."""
    text = {name: config for name, (config, _) in ARCHITECTURES.items()}
    shown = {name: wrapper.config for name, wrapper in WRAPPERS.items()}
    found = {KIMI: "KimiK25ForConditionalGeneration"}  # transformers has none
    for configs, names in (
        (text, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        (shown, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    ):
        for name, config in configs.items():
            found[name] = names[getattr(transformers, config).model_type]
    return found


@pytest.mark.parametrize("line", rows(HEAD), ids=lambda line: line[1].strip("`"))
def test_class(line: list[str]) -> None:
    name, taps, seen = line[1].strip("`"), *line[2:4]
    model_class = ModelRegistry.models.get(name)
    if model_class is None:
        assert (taps, seen) == ("not in the release", "")
        return
    check_class(model_class, "", "")
    assert taps == ("hooks" if name in SUMS_LATER else "release")
    if not seen:
        assert name not in classes().values(), "a target of this class is run by the tests"
        return
    assert classes()[seen] == name
    equal = {target: outcome for target, *outcome in rows(SEEN)}
    assert equal[seen][:2] == ["equal", "equal"]


def test_drafters() -> None:
    """Each once, with its owner; and GB, where they are told, for each size that the names have."""
    drafters = [re.findall(r"`([^`]+)`", line[0]) for line in rows(HEAD)]
    named = sum(drafters, [])
    assert all(re.fullmatch(r"[\w-]+/[\w.-]+", name) for name in named)
    assert len(set(named)) == len(named) and len(named) > 20
    for names, line in zip(drafters, rows(HEAD), strict=True):
        sizes = [match[1] for name in names if (match := re.search(r"(\d+)[Bb]\b", name))]
        told = re.findall(r"\d+", line[4])
        assert not told or list(dict.fromkeys(2 * int(size) for size in sizes)) == [
            int(size) for size in told
        ]
