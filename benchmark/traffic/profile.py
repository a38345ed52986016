"""Where the time of a server goes while users ask it: rounds, prefills, rounds in vain, an idle GPU."""

from __future__ import annotations

import argparse
import re
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import requests

from benchmark import jsonl, traces
from benchmark.errors import CannotMeasure
from benchmark.options import at_least, number
from benchmark.prompts import load_tokenizer
from benchmark.shapes import TINY
from benchmark.traces import Activity
from benchmark.traffic import workloads
from benchmark.traffic.arguments import PROG
from benchmark.traffic.clients import Clients, Job
from benchmark.traffic.fleet import Served
from benchmark.traffic.systems import Choice
from benchmark.traffic.workloads import KINDS, Sampling, Workload

# The first and the last kernel of a round of DFlash.
_FIRST, _LAST = "_open_round", "_accept"
_SETTLE_SECONDS = 1.5  # until requests come and go evenly


@dataclass(frozen=True)
class Split:
    """Where time goes; shares of it, which sum to one.

    Attributes:
        seconds: that were traced.
        rounds_s: rounds of a batch, a second.
        round_ms: from the first kernel of a round to the end of its last.
        rounds: rounds for requests that took tokens of them.
        in_vain: rounds for requests that had ended: of the time of all rounds, what their share of the verify
            steps is.
        prefills: everything else that the GPU did.
        idle: no stream of the GPU ran anything.
    """

    seconds: float
    rounds_s: float
    round_ms: float
    rounds: float
    in_vain: float
    prefills: float
    idle: float


def split(activities: Sequence[Activity], in_vain: float) -> Split:
    """Splits a trace.

    Args:
        activities: of the GPU, sorted by their starts.
        in_vain: share of the verify steps that were for requests that had ended.

    Raises:
        CannotMeasure: no round of a captured graph is in the trace.
    """
    firsts = [a.start for a in activities if a.name.startswith(_FIRST)]
    lasts = [a.end for a in activities if a.name.startswith(_LAST)]
    if len(firsts) < 3 or len(lasts) < 3:
        raise CannotMeasure(
            f"only {min(len(firsts), len(lasts))} rounds of captured graphs are in the trace: the server must run "
            "DFLASH of this project with CUDA graphs, and be asked meanwhile."
        )
    begin, end = firsts[0], activities[-1].end
    spans = list(_rounds(firsts, lasts))
    inside = outside = 0.0
    seen, at = begin, 0
    for activity in activities:
        start, stop = max(activity.start, seen), activity.end
        if stop <= start:
            continue
        seen = stop
        while at < len(spans) and spans[at][1] <= start:
            at += 1
        if at < len(spans) and spans[at][0] <= start:
            inside += stop - start
        else:
            outside += stop - start
    whole = end - begin
    return Split(
        seconds=whole / 1e6,
        rounds_s=len(spans) / whole * 1e6,
        round_ms=sum(stop - start for start, stop in spans) / len(spans) / 1e3,
        rounds=inside * (1 - in_vain) / whole,
        in_vain=inside * in_vain / whole,
        prefills=outside / whole,
        idle=1 - (inside + outside) / whole,
    )


def _rounds(firsts: Sequence[float], lasts: Sequence[float]):
    """Start and end of each round: up to its last kernel, before the next one begins."""
    ends = iter(lasts)
    end = next(ends)
    for start, following in zip(firsts, [*firsts[1:], float("inf")], strict=True):
        while end is not None and end <= start:
            end = next(ends, None)
        if end is not None and end <= following:
            yield start, end


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog=f"{PROG} profile",
        description="Asks a server of this project that runs already, with --enable-metrics and on this machine, "
        "and splits its time by a trace of the GPU.",
    )
    add_asked(whole)
    add = whole.add_argument
    add("--clients", default="8,32", metavar="N,…", help="closed loops; %(default)s")
    add("--seconds", type=number(0, 60, above=True), default=2.0, help="of a trace; %(default)s")
    return whole


def add_asked(whole: argparse.ArgumentParser) -> None:
    """Options of commands that ask a server that runs already."""
    add = whole.add_argument
    add("--base-url", required=True, metavar="URL")
    add("--workload", choices=workloads.FILES, default="chat", help="%(default)s")
    add("--kind", choices=KINDS, default="greedy", help="%(default)s")
    add("--data", type=Path, default=TINY / "data", metavar="DIR", help="the workloads' files")
    add("--output-file", type=Path, metavar="FILE", help="JSON lines")


def server_at(url: str) -> tuple[Served, Path]:
    """A server of SGLang that runs already, and the folder of its tokenizer.

    Raises:
        CannotMeasure: none answers there.
    """
    served = Served(Choice("served", "url"), url.rstrip("/"))
    try:
        served.get_ready(0)
        about = requests.get(f"{served.url}/server_info", timeout=60).json()
        return served, Path(about["tokenizer_path"])
    except (requests.RequestException, ValueError, LookupError) as error:
        raise CannotMeasure(
            f"no SGLang answers at {url} ({type(error).__name__}): start it, or give its URL."
        ) from None


def pool_of(workload: str, data: Path, target: Path) -> Workload:
    """Prompts of a workload for a target in a folder; see `workloads.load`."""
    context = workloads.context_of(target)
    return workloads.load(workload, data, load_tokenizer(str(target)), context)


def served_by(options: argparse.Namespace) -> tuple[Served, Sequence[bytes]]:
    """The server of `add_asked`'s options, and the bodies of requests to it.

    Raises:
        CannotMeasure: no SGLang answers there.
    """
    served, target = server_at(options.base_url)
    pool = pool_of(options.workload, options.data, target)
    return served, pool.bodies(options.kind, Sampling(0.7, 0.9, 0), served.model, pool.max_tokens)


def main(given: Sequence[str]) -> int:
    options = parser().parse_args(given)
    loads = [at_least(1)(text) for text in options.clients.split(",")]
    served, bodies = served_by(options)
    rows = []
    with Clients() as clients:
        for load in loads:
            seconds = options.seconds + 2 * _SETTLE_SECONDS
            job = Job(served.url, bodies, clients=load, most=1 << 30, least=0, seconds=seconds)
            rows.append(
                {"workload": options.workload, "kind": options.kind, "clients": load}
                | asdict(_profile(served, job, clients, options.seconds))
            )
    print(_table(rows))
    if options.output_file is not None:
        jsonl.write(options.output_file, rows)
    return 0


def _profile(served: Served, job: Job, clients: Clients, seconds: float) -> Split:
    served.flush()
    asking = threading.Thread(target=clients.ask, args=(job,))
    asking.start()
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        time.sleep(_SETTLE_SECONDS)
        before = _steps(served.url)
        body = {"output_dir": folder, "activities": ["GPU"], "with_stack": False}
        requests.post(f"{served.url}/start_profile", json=body, timeout=60).raise_for_status()
        time.sleep(seconds)
        after = _steps(served.url)
        requests.post(f"{served.url}/stop_profile", timeout=600).raise_for_status()
        asking.join()
        activities = traces.read_trace(traces.wait_for_trace(Path(folder)))
    taken, in_vain = (now - then for now, then in zip(after, before, strict=True))
    return split(activities, in_vain / max(taken + in_vain, 1))


def _steps(url: str) -> list[float]:
    """Verify steps so far, those that were taken and those in vain.

    Raises:
        CannotMeasure: the server does not count them.
    """
    page = requests.get(f"{url}/metrics", timeout=60).text
    found = dict(
        re.findall(r"^sglang:dflash_rounds(_in_vain)?_total\{.*\} (\S+)$", page, re.MULTILINE)
    )
    if "" not in found:
        raise CannotMeasure(
            f"{url} counts no rounds of DFLASH: start this project's server with --enable-metrics, and ask it once."
        )
    return [float(found[""]), float(found.get("_in_vain", 0))]


def _table(rows: Sequence[dict]) -> str:
    lines = ["clients  rounds/s  ms a round   rounds  in vain  prefills     idle"]
    for row in rows:
        shares = (f"{row[name]:9.1%}" for name in ("rounds", "in_vain", "prefills", "idle"))
        lines.append(
            f"{row['clients']:7}{row['rounds_s']:10.1f}{row['round_ms']:12.2f}{''.join(shares)}"
        )
    return "\n".join(lines)
