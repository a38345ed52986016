"""checkpoints/inflate: the tokenizer of a large vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import Unigram

from benchmark.shapes import TINY
from checkpoints.inflate.vocabulary import widen_tokenizer

SMALL = TINY / "target" / "tokenizer.json"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(SMALL.read_bytes())
    return copy


def test_texts(file: Path) -> None:
    """Each token has one of its own, and what is encoded is encoded as before, their texts too."""
    widen_tokenizer(file, 768, 4096, seed=0)
    small, large = Tokenizer.from_file(str(SMALL)), Tokenizer.from_file(str(file))
    assert sorted(large.get_vocab().values()) == list(range(4096))
    assert small.get_vocab().items() <= large.get_vocab().items()
    told = [large.decode([token]) for token in range(768, 4096)]
    assert all(told)
    text = (TINY / "data" / "workloads" / "json.jsonl").read_text() + "Größe 日本" + "".join(told)
    assert large.encode(text).ids == small.encode(text).ids


def test_seed(file: Path, tmp_path: Path) -> None:
    again, other = tmp_path / "again", tmp_path / "other"
    for copy in (again, other):
        copy.write_bytes(SMALL.read_bytes())
    widen_tokenizer(file, 768, 1024, seed=0)
    widen_tokenizer(again, 768, 1024, seed=0)
    widen_tokenizer(other, 768, 1024, seed=1)
    assert file.read_bytes() == again.read_bytes() != other.read_bytes()


def test_another_kind_stays(tmp_path: Path) -> None:
    """Unigram would encode with the new texts."""
    file = tmp_path / "tokenizer.json"
    Tokenizer(Unigram([("a", -1.0), ("b", -2.0)])).save(str(file))
    before = file.read_bytes()
    widen_tokenizer(file, 2, 9, seed=0)
    assert file.read_bytes() == before
