"""Several processes that take requests over HTTP (`--tokenizer-worker-num`): uvicorn ends those that start slowly.

It asks each whether it lives, from the moment on that it is started, and kills one that does not answer within five
seconds. A process that has to import SGLang first is not that far by then.
"""

from __future__ import annotations

import time

from uvicorn.supervisors import multiprocess

START_SECONDS = 120.0  # until a process must have answered once
_GLANCE_SECONDS = 0.5  # for an answer of one that has not; signals wait as long


class PatientProcess(multiprocess.Process):
    """One of uvicorn's, which counts as alive while it starts."""

    _answered, _began = False, 0.0

    def start(self) -> None:
        self._began = time.monotonic()
        super().start()

    def is_alive(self, timeout: float = 5) -> bool:
        if not self.process.is_alive():
            return False
        if self.ping(timeout if self._answered else _GLANCE_SECONDS):
            self._answered = True
            return True
        return not self._answered and time.monotonic() - self._began < START_SECONDS


def be_patient() -> None:
    """Before uvicorn starts its processes."""
    multiprocess.Process = PatientProcess
