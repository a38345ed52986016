"""Unit tests run on the CPU where there is no GPU; Triton kernels in Triton's interpreter."""

import os
from collections.abc import Iterator
from functools import cache

import pytest


@cache
def choose_device() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined


def pytest_pycollect_makemodule() -> None:
    """Before the first module of tests; the process that only hands them out imports nothing."""
    choose_device()


@pytest.fixture(autouse=True)
def loops_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of its loops are arrays of one element, which numpy 2.4 takes for no number."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture(autouse=True)
def arguments_of_the_process() -> Iterator[None]:
    """As they were: a test that sets its own must not choose the next one's attention."""
    from sglang.srt import server_args

    before = server_args._global_server_args
    yield
    server_args._global_server_args = before


@pytest.fixture(scope="session")
def one_rank() -> Iterator[None]:
    """The process group that SGLang's tensor-parallel layers ask for."""
    from tests.unit.drafters import one_rank

    with one_rank():
        yield


@pytest.fixture(scope="module")
def eager() -> Iterator[None]:
    """As on a server on a CPU."""
    import torch

    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")
