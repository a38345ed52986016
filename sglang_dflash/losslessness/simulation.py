"""What the permutation test sees: false alarms and power on decoders whose faults are known.

    python -m sglang_dflash.losslessness.simulation --runs 256 --experiments 20

A decoder is a Markov chain for each prompt, with sharp and flat rows as language models have them.
The faults are those of `faults`, made weaker or stronger.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_dflash.losslessness.sampling import Arm, Cell, Runs, judge_arm

VOCABULARY = 40
TEMPERATURES = (0.7, 1.0, 1.0, 1.3)

Fault = Callable[[np.ndarray, np.random.Generator], np.ndarray]  # logits → logits


def none(logits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return logits


def sharper(factor: float) -> Fault:
    """A sampler that draws as if the temperature were divided by `factor`."""
    return lambda logits, rng: logits * factor


def lenient(share: float) -> Fault:
    """An accept rule that takes this share of the tokens from a drafter, whatever the target says.

    The drafter knows the target's logits up to noise of standard deviation 1.
    """

    def mix(logits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        drafted = softmax(logits + rng.normal(size=logits.shape))
        return np.log((1 - share) * softmax(logits) + share * drafted)

    return mix


FAULTS: dict[str, Fault] = {
    "none": none,
    "temperature / 1.05": sharper(1.05),
    "temperature / 1.10": sharper(1.10),
    "temperature / 1.25": sharper(1.25),
    "2% of the drafts unchecked": lenient(0.02),
    "5% of the drafts unchecked": lenient(0.05),
    "20% of the drafts unchecked": lenient(0.20),
}


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@dataclass(frozen=True)
class Decoder:
    """Chains for `prompts` prompts at each of TEMPERATURES.

    Attributes:
        logits: [prompts, VOCABULARY, VOCABULARY], of the token after each token.
    """

    logits: np.ndarray
    rng: np.random.Generator

    @classmethod
    def random(cls, prompts: int, rng: np.random.Generator) -> Decoder:
        scale = rng.gamma(2, 1.5, size=(prompts, VOCABULARY, 1))  # from flat to almost certain
        return cls(rng.normal(size=(prompts, VOCABULARY, VOCABULARY)) * scale, rng)

    def with_fault(self, fault: Fault) -> Decoder:
        return Decoder(fault(self.logits, self.rng), self.rng)

    def draw(self, cells: list[Cell], runs: int, positions: int) -> Runs:
        return {cell: self._runs(*cell, runs, positions) for cell in cells}

    def _runs(self, prompt: int, setting: int, runs: int, positions: int) -> np.ndarray:
        steps = softmax(self.logits[prompt] / TEMPERATURES[setting]).cumsum(axis=-1)
        tokens = np.zeros((runs, positions + 1), dtype=np.int64)
        for t in range(positions):
            draws = self.rng.random((runs, 1))
            tokens[:, t + 1] = (draws > steps[tokens[:, t]]).sum(axis=1).clip(max=VOCABULARY - 1)
        return tokens[:, 1:]


def experiment(
    fault: Fault, prompts: int, runs: int, positions: int, q: float, rng: np.random.Generator
) -> Arm:
    """One comparison of a decoder that has a fault with the one that has not."""
    plain = Decoder.random(prompts, rng)
    faulty = plain.with_fault(fault)
    cells = [(prompt, setting) for prompt in range(prompts) for setting in range(len(TEMPERATURES))]

    def fresh(chosen: list[Cell]) -> tuple[Runs, Runs]:
        return faulty.draw(chosen, runs, positions), plain.draw(chosen, 2 * runs, positions)

    return judge_arm("simulated", *fresh(cells), fresh, q, rng)


def rates(arms: Sequence[Arm]) -> tuple[float, float]:
    """Shares of the comparisons (with a discovery at first look, rejected after confirmation)."""
    return (
        float(np.mean([bool(arm.discoveries) for arm in arms])),
        float(np.mean([not arm.accepted for arm in arms])),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag, default in (("prompts", 8), ("runs", 256), ("positions", 32), ("experiments", 20)):
        parser.add_argument(f"--{flag}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="default: all")
    parser.add_argument("--q", type=float, default=0.05, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args()
    print("| fault | discovered at first look | rejected |\n|---|---|---|")
    for name in options.fault or FAULTS:
        rng = np.random.default_rng(options.seed)
        size = options.prompts, options.runs, options.positions, options.q
        first, rejected = rates(
            [experiment(FAULTS[name], *size, rng) for _ in range(options.experiments)]
        )
        print(f"| {name} | {first:.1%} | {rejected:.1%} |", flush=True)


if __name__ == "__main__":
    main()
