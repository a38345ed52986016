"""When requests are sent."""

from __future__ import annotations

import random
from dataclasses import dataclass

SEED = 20


@dataclass(frozen=True)
class Closed:
    """So many clients, each of which asks again as soon as it has its answer."""

    clients: int

    def __str__(self) -> str:
        return f"c={self.clients}"


@dataclass(frozen=True)
class Open:
    """Requests that come at random, so many a second on average, whether others were answered or not."""

    rate: float

    def __str__(self) -> str:
        return f"{self.rate:g}/s"


Load = Closed | Open


def poisson(rate: float, seconds: float, most: int, seed: int = SEED) -> list[float]:
    """Seconds at which requests come, the same for everybody: a Poisson process.

    At least one and at most `most`; none after `seconds`, unless it is the first.
    """
    generator = random.Random(seed)
    found = [generator.expovariate(rate)]
    while len(found) < most and (at := found[-1] + generator.expovariate(rate)) < seconds:
        found.append(at)
    return found
