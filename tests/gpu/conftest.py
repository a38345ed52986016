"""Tests that need a GPU; `make test-gpu` runs them with those of `tests/server`."""

from __future__ import annotations

import pytest
import torch

from tests.server import harness
from tests.server.conftest import (  # noqa: F401
    _plain,
    answers,
    logs,
    plain,
    problems,
    prompts,
    shared,
    tokenizer,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available() or harness.DEVICE != "cuda":
        skip = pytest.mark.skip(reason="needs a GPU and DFLASH_TEST_DEVICE=cuda")
        for item in items:
            if "tests/gpu" in item.path.as_posix():
                item.add_marker(skip)
