"""Whether this benchmark and `sglang.bench_serving` measure the same."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmark import agreement
from benchmark.shapes import TINY
from benchmark.traffic import workloads
from benchmark.traffic.arguments import PROG
from benchmark.traffic.clients import Clients, Job
from benchmark.traffic.counters import Counters
from benchmark.traffic.figures import Goal, figures
from benchmark.traffic.fleet import Served
from benchmark.traffic.profile import pool_of, server_at

# This package's names of figures, and bench_serving's.
FIGURES = {
    "output_tok_s": "output_throughput",
    "requests_s": "request_throughput",
    "completion_tokens": "total_output_tokens",
    "prompt_tokens": "total_input_tokens",
    "ttft_ms": "median_ttft_ms",
    "tpot_ms": "median_tpot_ms",
    "latency_ms": "median_e2e_latency_ms",
}


def parser() -> argparse.ArgumentParser:
    whole = agreement.parser(PROG, "this benchmark")
    add = whole.add_argument
    add("--workload", choices=workloads.FILES, default="chat", help="%(default)s")
    add("--data", type=Path, default=TINY / "data", metavar="DIR", help="the workloads' files")
    return whole


def main(given: Sequence[str]) -> int:
    options = parser().parse_args(given)
    served, target = server_at(options.base_url)
    pool = pool_of(options.workload, options.data, target)
    options.max_new_tokens = min(options.max_new_tokens, pool.max_tokens)
    bodies = pool.bodies("greedy", workloads.GREEDY, served.model, options.max_new_tokens)
    count = min(options.questions, len(bodies))
    job = Job(
        served.url,
        bodies[:count],
        clients=options.concurrency,
        most=count,
        least=count,
        timeout=options.timeout_s,
    )
    with Clients() as clients:
        return agreement.compare(
            options,
            "this benchmark",
            lambda: _ours(job, served, clients),
            pool.texts[:count],
            str(target),
            FIGURES,
        )


def _ours(job: Job, served: Served, clients: Clients) -> dict[str, float]:
    served.flush()
    found = figures(clients.ask(job), Goal(0, 0), Counters(), job.clients)
    return {name: v["p50"] if isinstance(v := found[name], dict) else v for name in FIGURES}
