"""How long this process has waited for its device, and copies for which it does not."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Event(Protocol):
    """What a device reaches when it has done all that came before."""

    def synchronize(self) -> None: ...


class DeviceWaits:
    """
    Attributes:
        seconds: that were waited so far.
        last: of them those of the last wait.
        ended: when that was over, of `time.perf_counter`.
    """

    def __init__(self) -> None:
        self.seconds = self.last = self.ended = 0.0

    def until(self, event: Event) -> None:
        """Waits until the device is there."""
        begin = time.perf_counter()
        event.synchronize()
        self.ended = time.perf_counter()
        self.last = self.ended - begin
        self.seconds += self.last

    def count(self, seconds: float) -> None:
        """So long the process did nothing, because the device was at work."""
        self.seconds += seconds


# A process has one device.
WAITS = DeviceWaits()


class Awaited:
    """Stands for an event that somebody else waits for, so that the time counts, too."""

    def __init__(self, event: Event):
        self._event = event

    def synchronize(self) -> None:
        WAITS.until(self._event)


def to_device(values: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A copy there, for which the host does not wait."""
    if torch.device(device).type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
