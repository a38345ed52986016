"""The measurement itself: systems one after the other, each at every concurrency."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmark import load, provenance, traces
from benchmark.servers import (
    STREAM_INTERVAL,
    Server,
    ServerFailed,
    System,
    begun,
    named,
    own_system,
    peer_system,
)
from benchmark.shapes import SHAPES, read_config, write_pair

_ATTENTION = {"cuda": "fa3", "cpu": "torch_native"}
_WARM_UP_TOKENS = 64
# Of dummy weights' drafts none is accepted, so none would be verified, or drafted.
_WHOLE_BLOCKS = ("--speculative-dflash-verify", "all")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one call measures; `pair` holds the folders of target and drafter."""

    args: argparse.Namespace
    device: str
    run: str
    pair: tuple[Path, Path]
    block_size: int
    vocab_size: int
    logs: Path

    def server_arguments(self, system: System) -> list[str]:
        args, (target, drafter) = self.args, self.pair
        most = max(args.concurrencies)
        given = ["--model-path", str(target), "--device", self.device, "--tp", str(args.tp)]
        backend = args.attention_backend or _ATTENTION[self.device]
        given += ["--attention-backend", backend, "--stream-interval", str(STREAM_INTERVAL)]
        # No larger batches than these come, so no more graphs are worth their start-up time.
        given += ["--max-running-requests", str(most)]
        if self.device == "cuda":
            given += ["--dtype", "bfloat16", "--cuda-graph-max-bs", str(most)]
        else:
            tokens = most * (args.prompt_tokens + args.new_tokens + 4 * self.block_size) + 1024
            given += ["--dtype", "float32", "--max-total-tokens", str(tokens)]
        if not args.with_tokenizer:
            given += ["--skip-tokenizer-init"]
        if SHAPES[args.shape].folder is None:
            given += ["--load-format", "dummy"]
        if system.speculative:
            given += ["--speculative-algorithm", "DFLASH"]
            given += ["--speculative-draft-model-path", str(drafter)]
            given += ["--speculative-num-draft-tokens", str(self.block_size)]
        return given + shlex.split(args.server_args)

    def public(self, arguments: Sequence[str]) -> list[str]:
        """Arguments without this machine's folders."""
        target, drafter = self.pair
        return provenance.without_paths(arguments, {str(target): "TARGET", str(drafter): "DRAFTER"})


def measure(args: argparse.Namespace) -> tuple[list[dict], list[str]]:
    """Measures what the arguments ask for, and appends each result to the output at once.

    Returns:
        The results, and why systems could not be measured.
    """
    systems = _systems(args)
    lines: list[dict] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="rounds-") as folder:
        plan = _plan(args, Path(folder))
        for repeat in range(args.repeats):
            for group in [systems] if args.start == "together" else [[each] for each in systems]:
                _measure_group(plan, group, repeat, lines, failures)
    return lines, failures


def _systems(args: argparse.Namespace) -> list[System]:
    chosen = [
        dataclasses.replace(system, arguments=_WHOLE_BLOCKS) if system.speculative else system
        for system in map(own_system, args.systems)
    ]
    peer_environment, peer_arguments = dict(args.peer_env), shlex.split(args.peer_args)
    chosen += [peer_system(given, peer_environment, peer_arguments) for given in args.peer]
    common = dict(args.env)
    return [
        dataclasses.replace(system, environment=common | dict(system.environment))
        for system in chosen
    ]


def _plan(args: argparse.Namespace, folder: Path) -> Plan:
    pair = write_pair(SHAPES[args.shape], folder / args.shape)
    logs = (args.logs or args.output.with_suffix(".logs")).resolve()
    logs.mkdir(parents=True, exist_ok=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    return Plan(
        args=args,
        device=args.device or ("cpu" if args.shape == "tiny" else "cuda"),
        run=provenance.now(),
        pair=pair,
        block_size=args.block_size or read_config(pair[1])["block_size"],
        vocab_size=read_config(pair[0])["vocab_size"],
        logs=logs,
    )


def _measure_group(
    plan: Plan, group: Sequence[System], repeat: int, lines: list[dict], failures: list[str]
) -> None:
    """Starts systems side by side, and measures those that come up one after the other."""

    @contextmanager
    def noted(system: System, server: Server) -> Iterator[None]:
        try:
            with named(system, server):
                yield
        except ServerFailed as failure:
            failures.append(str(failure))
            print(failure, flush=True)

    with ExitStack() as stack:
        started = []
        for system in group:
            print(f"[{repeat + 1}/{plan.args.repeats}] {system.name}: starting", flush=True)
            log, arguments = (
                plan.logs / f"{system.name}-{repeat}.log",
                plan.server_arguments(system),
            )
            server = stack.enter_context(begun(system, plan.device, arguments, log))
            started.append((system, server))
        up = []
        for system, server in started:
            with noted(system, server):
                server.wait_until_healthy(plan.args.start_timeout)
                up.append((system, server))
        for system, server in up:
            with noted(system, server):
                _measure_system(plan, system, server, repeat, lines)


def _measure_system(
    plan: Plan, system: System, server: Server, repeat: int, lines: list[dict]
) -> None:
    """Measures a running system at every concurrency."""
    args, origin, lines_here = plan.args, _origin(plan, system, server), []
    for concurrency in args.concurrencies:
        busy_gpu = _warm_up(plan, server, concurrency)
        try:
            samples = [
                _sample(plan, server, concurrency, f"{repeat}.{number}")
                for number in range(args.samples)
            ]
        except load.NoSteadyState as reason:
            raise ServerFailed(f"at concurrency {concurrency}: {reason}") from reason
        line = _line(plan, system, server, concurrency, repeat) | {
            "samples": [sample.to_json() for sample in samples],
            "provenance": origin | {"gpu": busy_gpu},
        }
        _keep(plan, line, lines)
        lines_here.append(line)
        _say(system, concurrency, samples)
    # Last, because a profiler that was once on may leave launches slower.
    for line in lines_here if args.profile and repeat == 0 else ():
        profile = _profile(plan, system, server, line["concurrency"])
        if profile:
            changed = {"kind": "profile", "time": provenance.now(), "samples": []}
            _keep(plan, line | changed | {"profile": profile}, lines)


def _keep(plan: Plan, line: dict, lines: list[dict]) -> None:
    lines.append(line)
    with plan.args.output.open("a") as out:
        out.write(json.dumps(line) + "\n")


def _origin(plan: Plan, system: System, server: Server) -> dict:
    found = provenance.versions(system, plan.device) | {"sglang": server.version()}
    commit = provenance.commit()
    if plan.args.commit:
        commit = {"commit": plan.args.commit, "changed_files": None}
    return commit | {
        "versions": found,
        "machine": provenance.machine(plan.args.tp if plan.device == "cuda" else 0),
        "command": provenance.command_line(),
    }


def _line(plan: Plan, system: System, server: Server, concurrency: int, repeat: int) -> dict:
    args = plan.args
    return {
        "kind": "rounds",
        "run": plan.run,
        "time": provenance.now(),
        "system": system.name,
        "shape": args.shape,
        "concurrency": concurrency,
        "repeat": repeat,
        "block_size": plan.block_size,
        "new_tokens": args.new_tokens,
        "prompt_tokens": args.prompt_tokens,
        "simulated_acceptance": args.simulate_acceptance,
        "server_arguments": plan.public(server.arguments),
        "environment": provenance.environment(system, plan.device),
        "start_s": round(server.start_seconds, 1),
    }


def _warm_up(plan: Plan, server: Server, concurrency: int) -> dict[str, str]:
    """Runs what will be measured, shorter; returns the state of the GPU under this load."""
    prompts = load.random_prompts(
        concurrency, plan.args.prompt_tokens, plan.vocab_size, f"warm-up {concurrency}"
    )
    state: dict[str, str] = {}
    tokens = min(max(_WARM_UP_TOKENS, 2 * STREAM_INTERVAL + 1), plan.args.new_tokens)
    load.generate(server.url, prompts, tokens, lambda: state.update(provenance.gpu()))
    return state


def _sample(plan: Plan, server: Server, concurrency: int, seed: str) -> load.Sample:
    prompts = load.random_prompts(concurrency, plan.args.prompt_tokens, plan.vocab_size, seed)
    return load.steady_state(load.generate(server.url, prompts, plan.args.new_tokens))


def _profile(plan: Plan, system: System, server: Server, concurrency: int) -> dict | None:
    """A profile of rounds in the steady state; None, with a word why, where there is none."""
    folder = plan.logs / f"trace-{system.name}-{concurrency}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    prompts = load.random_prompts(
        concurrency, plan.args.prompt_tokens, plan.vocab_size, f"profile {concurrency}"
    )
    steps, cpu = plan.args.profile_steps, plan.args.profile_cpu or plan.device == "cpu"
    load.generate(
        server.url,
        prompts,
        plan.args.new_tokens,
        lambda: traces.record(server.url, folder, steps, cpu),
    )
    try:
        trace = traces.read_trace(traces.wait_for_trace(folder))
        profile = traces.analyse(trace, steps).to_json()
    except traces.BadTrace as reason:
        print(f"  no profile of {system.name} at concurrency {concurrency}: {reason}", flush=True)
        return None
    print(
        f"  {system.name} c={concurrency}: GPU idle {profile['idle_share']:.1%} of a traced round "
        f"of {profile['round_us'] / 1e3:.2f} ms",
        flush=True,
    )
    return profile | {"host_traced": cpu}


def _say(system: System, concurrency: int, samples: Sequence[load.Sample]) -> None:
    if not samples:
        return
    rate = statistics.median(sample.rounds_per_s for sample in samples)
    spread = max(s.rounds_per_s for s in samples) - min(s.rounds_per_s for s in samples)
    accepted = statistics.median(sample.accept_length for sample in samples)
    print(
        f"  {system.name} c={concurrency}: {rate:,.1f} rounds/s (±{spread / 2 / rate:.1%}), "
        f"accept length {accepted:.2f}",
        flush=True,
    )
