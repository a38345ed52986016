"""The outcome as text for people and as JSON for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_dflash.losslessness.greedy import Divergence, Greedy
from sglang_dflash.losslessness.sampling import Arm, Discovery, Sampling

SHOWN = 20  # rows of a table in the text; the JSON has them all
PASSED, FAILED, NO_COMPARISON, INCONCLUSIVE = 0, 1, 2, 3  # exit status


@dataclass
class Report:
    """What was compared, and how it came out; a part that was not asked for is None."""

    provenance: dict[str, Any] = field(default_factory=dict)
    greedy: Greedy | None = None
    sampling: Sampling | None = None

    @property
    def status(self) -> int:
        parts = [part for part in (self.greedy, self.sampling) if part is not None]
        if all(part.passed for part in parts):
            return PASSED
        if self.greedy is not None and not self.greedy.passed:
            return FAILED
        return FAILED if self.sampling.conclusive else INCONCLUSIVE

    @property
    def verdict(self) -> str:
        return {PASSED: "lossless", FAILED: "NOT lossless", INCONCLUSIVE: "inconclusive"}[
            self.status
        ]

    def text(self) -> str:
        lines: list[str] = []
        if self.greedy is not None:
            lines += [*greedy_lines(self.greedy), ""]
        if self.sampling is not None:
            lines += [*sampling_lines(self.sampling), ""]
        return "\n".join([*lines, f"Verdict: {self.verdict}"])

    def json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "status": self.status,
            "provenance": self.provenance,
            "greedy": self.greedy and greedy_json(self.greedy),
            "sampling": self.sampling and sampling_json(self.sampling),
        }

    def write_json(self, path: Path) -> None:
        """Atomically: a reader sees the whole file or none."""
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(self.json(), indent=1) + "\n")
        os.replace(partial, path)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Right-aligned columns, indented."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return [
        "    " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]


def accept_length(rounds: int, committed: int) -> str:
    return f"{committed / rounds:.2f} tokens a verify step" if rounds else "no speculation"


def greedy_lines(greedy: Greedy) -> list[str]:
    divergences = greedy.divergences
    lines = [
        f"Greedy: {len(greedy.lengths)} answers, {sum(greedy.lengths):,} tokens, "
        + accept_length(greedy.rounds, greedy.committed),
    ]
    if divergences:
        worst = max(divergences, key=lambda d: d.regret)
        answers = len({d.prompt for d in divergences})
        lines.append(
            f"  {len(divergences)} divergences in {answers} answers, "
            f"{len(greedy.failures)} above {greedy.max_regret:g} nat; "
            f"largest regret {worst.regret:.3g} nat"
        )
        lines += divergence_table(divergences)
    else:
        lines.append("  no divergence: token for token what plain decoding gives")
    lines += [
        f"  answer {end.prompt} after {end.position} tokens: speculative decoding: "
        f"{end.speculated}, plain decoding: {end.plain}"
        for end in greedy.wrong_ends[:SHOWN]
    ]
    return [*lines, "  passed" if greedy.passed else "  FAILED"]


def divergence_table(divergences: list[Divergence]) -> list[str]:
    worst = sorted(divergences, key=lambda d: -d.regret)[:SHOWN]
    rows = [
        (d.prompt, d.position, d.speculated, d.chosen, f"{d.regret:.4f}", f"{d.gap:.4f}")
        for d in worst
    ]
    header = ("prompt", "position", "speculated", "plain", "regret", "top-2 gap")
    return [*table(header, rows), *more(len(divergences))]


def more(rows: int) -> list[str]:
    return [f"    and {rows - SHOWN} more" for _ in range(rows > SHOWN)]


def sampling_lines(sampling: Sampling) -> list[str]:
    plan = sampling.plan
    lines = [
        f"Sampling: {len(plan.prompts)} prompts x {len(plan.settings)} settings x "
        f"{plan.positions} positions x {plan.runs} runs (plain: {2 * plan.runs}), q = {plan.q:g}"
    ]
    for setting, length in zip(plan.settings, sampling.accept_lengths, strict=True):
        shown = f"{length:.2f} tokens a verify step" if length else "no speculation"
        lines.append(f"  {json.dumps(setting)}: {shown}")
    lines += arm_lines("null arm, plain against plain", sampling.null)
    lines += arm_lines("speculative against plain", sampling.test)
    if not sampling.null.accepted:
        lines.append("  INCONCLUSIVE: the plain server does not agree with itself")
    elif not sampling.test.hypotheses:
        lines.append("  INCONCLUSIVE: all runs are equal, so there is nothing to test")
    else:
        lines.append("  passed" if sampling.passed else "  FAILED")
    return lines


def arm_lines(name: str, arm: Arm) -> list[str]:
    smallest = "" if arm.smallest is None else f", smallest adjusted p {arm.smallest:.2g}"
    found = len(arm.discoveries)
    lines = [
        f"  {name}: {arm.hypotheses:,} hypotheses{smallest}; {found} discoveries, "
        f"{len(arm.confirmed)} of them confirmed: {'accepted' if arm.accepted else 'REJECTED'}"
    ]
    return lines + (discovery_table(arm.discoveries) if found else [])


def discovery_table(found: list[Discovery]) -> list[str]:
    def shown(value: float | None, form: str = "", none: str = "-") -> str:
        return none if value is None else format(value, form)

    rows = [
        (shown(d.prompt, none="all"), shown(d.setting, none="all"), d.kind)
        + (shown(d.position, none="all"), shown(d.adjusted, ".2g"), shown(d.again, ".2g"))
        + (shown(d.token), shown(d.first, ".1%"), shown(d.second, ".1%"))
        for d in found[:SHOWN]
    ]
    header = ("prompt", "setting", "kind", "position", "p", "p again", "token", "first", "second")
    return [*table(header, rows), *more(len(found))]


def greedy_json(greedy: Greedy) -> dict[str, Any]:
    return asdict(greedy) | {"failures": len(greedy.failures), "passed": greedy.passed}


def sampling_json(sampling: Sampling) -> dict[str, Any]:
    plan = asdict(sampling.plan)
    return {
        "plan": plan | {"prompts": len(sampling.plan.prompts)},
        "accept_lengths": sampling.accept_lengths,
        "conclusive": sampling.conclusive,
        "passed": sampling.passed,
    } | {
        name: asdict(arm) | {"confirmed": len(arm.confirmed), "accepted": arm.accepted}
        for name, arm in (("null", sampling.null), ("test", sampling.test))
    }
