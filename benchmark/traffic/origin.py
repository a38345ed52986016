"""What a cell's figures depend on, and where they come from."""

from __future__ import annotations

import argparse
from functools import cache
from typing import TYPE_CHECKING, Any

from benchmark import provenance, servers
from benchmark.machine import Machine, label, location, revision
from benchmark.traffic.counters import internal_state, kv_tokens
from benchmark.traffic.fleet import Served
from benchmark.traffic.systems import Choice, Pair
from benchmark.traffic.workloads import Workload

if TYPE_CHECKING:
    from benchmark.traffic.measure import Run


def settings(
    options: argparse.Namespace, choice: Choice, pair: Pair, machine: Machine, pool: Workload
) -> dict[str, Any]:
    """What the figures depend on besides the machine, the versions and the size of the servers."""
    found: dict[str, Any] = {
        "target_model": label(pair.target),
        "draft_model": label(pair.drafter) if choice.drafts else None,
        "block_size": (choice.block_size or pair.block_size) if choice.drafts else None,
        "device": machine.device,
        "tp_size": options.tp_size,
        "attention_backend": options.attention_backend,
        "data_sha256": pool.sha256,
        "max_tokens": pool.max_tokens,
        "sampling": options.sampling.fields(),
        "seconds": options.seconds,
        "requests": options.requests,
        "least_per_client": options.least_per_client,
        "keep_cache": options.keep_cache,
        "goal": {"ttft_ms": options.goal.ttft_ms, "tpot_ms": options.goal.tpot_ms},
    }
    if choice.system is not None:
        found["server_args"] = provenance.without_paths(choice.system.arguments, {})
    return found


def of(run: Run, served: Served) -> dict[str, Any]:
    """Where the figures of a system come from; asked once, when its server is up."""
    options, choice, pair = run.options, served.choice, run.options.pair
    commit = provenance.commit()
    if options.commit:
        commit = {"commit": options.commit, "changed_files": None}
    models = {"target": pair.target} | ({"drafter": pair.drafter} if choice.drafts else {})
    versions = {choice.kind if choice.kind != "own" else "sglang": servers.version(served.url)}
    environment: dict[str, str] = {}
    arguments: list[str] = []
    if choice.system is not None and served.server is not None:
        device = run.machine.device
        versions = provenance.versions(choice.system, device) | versions
        environment = provenance.environment(choice.system, device)
        arguments = _public(served.server.arguments, pair)
    info, page = served.tells()
    return commit | {
        "versions": versions,
        "models": {n: {"name": label(m), "revision": _revision(m)} for n, m in models.items()},
        "machine": provenance.machine(options.tp_size if run.machine.gpus else 0),
        "server_arguments": arguments,
        "environment": environment,
        "kv_tokens": {"wanted": run.needs().kv_tokens, "has": kv_tokens(info, page)},
        "source": internal_state(info).get("dflash_source"),
        "start_s": served.server and round(served.server.start_seconds, 1),
        "command": provenance.command_line(),
    }


def _public(arguments: list[str], pair: Pair) -> list[str]:
    """Arguments without this machine's folders, also where they stand inside of JSON."""
    names = {location(model): label(model) for model in (pair.target, pair.drafter)}
    for place, name in names.items():
        arguments = [argument.replace(place, name) for argument in arguments]
    return provenance.without_paths(arguments, {})


_revision = cache(revision)
