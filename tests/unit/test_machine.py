"""How models are named in results."""

from __future__ import annotations

from pathlib import Path

from benchmark.machine import label, revision
from benchmark.shapes import ROOT


def test_models_are_named_without_folders_of_the_machine(tmp_path: Path) -> None:
    assert label(str(ROOT / "checkpoints/tiny/target")) == "checkpoints/tiny/target"
    assert label(str(tmp_path)) == tmp_path.name
    assert label("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    (tmp_path / "config.json").write_text("{}")
    before = revision(str(tmp_path))
    (tmp_path / "config.json").write_text("{ }")
    assert before.startswith("sha256:") and revision(str(tmp_path)) != before


def test_drafters_of_one_shape_have_revisions_of_their_own(tmp_path: Path) -> None:
    """Whose weights differ by a byte, as those of two trainings do."""
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(100 << 20)
    before = revision(str(tmp_path))
    with weights.open("r+b") as file:
        file.seek(70 << 20)
        file.write(b"1")
    assert revision(str(tmp_path)) != before
