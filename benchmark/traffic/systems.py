"""Which systems are measured, and how their servers are started."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark.errors import CannotMeasure
from benchmark.machine import location
from benchmark.servers import OWN, System, peer_system
from benchmark.shapes import TINY, read_config

# Rows of prompts that a captured step of vLLM may have beside everybody's blocks.
VLLM_PROMPT_ROWS = 512

# This project's systems, and how they are started.
_OWN = {"plain": "plain", "v1": "v1", "v2": "v2-plan"}
OWN_NAMES = tuple(_OWN)
_VLLM = {
    # Without it there is no /reset_prefix_cache.
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# Systems share their GPUs on purpose, and load side by side.
_SGLANG = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
_PEERS = {"sglang": _SGLANG, "vllm": _VLLM}
_LAUNCH = {"vllm": ("vllm.entrypoints.cli.main", "serve")}
ATTENTION = {"cuda": "fa3", "cpu": "torch_native"}


@dataclass(frozen=True)
class Choice:
    """A system as the command line names it.

    Attributes:
        kind: "own", "sglang", "vllm", or "url" for a server that runs already.
        system: how its server is started; None for a URL.
        drafts: whether it is given the drafter.
        block_size: of its blocks; None for the pair's.
    """

    name: str
    kind: str
    system: System | None = None
    url: str = ""
    drafts: bool = True
    block_size: int | None = None


@dataclass(frozen=True)
class Pair:
    """The models that everybody serves, in folders."""

    target: str
    drafter: str
    block_size: int | None = None

    @property
    def tiny(self) -> bool:
        """Whether it is the bundled pair."""
        return Path(location(self.target)) == (TINY / "target").resolve()

    def block(self, choice: Choice) -> int | None:
        """Slots of a system's blocks, as far as it is known."""
        wanted = choice.block_size or self.block_size
        return wanted or read_config(Path(self.drafter)).get("block_size")

    def kv_bytes(self, tokens: int, tp: int) -> int:
        """Bytes of keys and values on one rank for so many tokens, in bfloat16."""
        total = 0
        for model in (self.target, self.drafter):
            config = read_config(Path(model))
            heads = max(config["num_key_value_heads"] // tp, 1)
            width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            total += config["num_hidden_layers"] * heads * width * 2 * 2
        return total * tokens


@dataclass(frozen=True)
class Needs:
    """What a server must hold.

    Attributes:
        requests: at once, the most.
        kv_tokens: slots of the KV pool, the same for everybody.
        context: tokens of the longest request.
    """

    requests: int
    kv_tokens: int
    context: int


def named(text: str, option: str) -> tuple[str, str]:
    """(name, value) of NAME=VALUE.

    Raises:
        CannotMeasure: not of that form.
    """
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise CannotMeasure(f"{option} {text} is not NAME=VALUE: write it so.")
    return name, value


def choices(
    own: Sequence[str],
    peers: Mapping[str, Sequence[str]],
    without_draft: Sequence[str],
    arguments: Sequence[str],
    environment: Sequence[str],
    blocks: Sequence[str] = (),
) -> list[Choice]:
    """The systems to measure, in their order.

    Args:
        own: of OWN_NAMES.
        peers: NAME=VALUE by kind: "sglang" and "vllm" with a PYTHONPATH or interpreter, "url".
        without_draft: names of systems that decode without the drafter, beside "plain".
        arguments: NAME=ARGUMENTS, more server arguments of a system.
        environment: NAME=VARIABLE=VALUE, of a system.
        blocks: NAME=SLOTS, of a system's blocks.

    Raises:
        CannotMeasure: a name that is used twice, or not at all, or nothing where a path points to.
    """
    found = {name: _own(name) for name in own}
    for kind, given in peers.items():
        for text in given:
            name, value = named(text, f"--{kind}")
            if name in found:
                raise CannotMeasure(f"two systems are named {name}: give one another name.")
            found[name] = _peer(kind, name, value)
    if not found:
        raise CannotMeasure("there is nothing to measure: name a system, as --systems plain,v2.")
    for text in environment:
        name, value = named(text, "--env-of")
        variable = named(value, "--env-of")
        system = _started(found, name, "--env-of")
        changed = dict(system.environment) | dict([variable])
        found[name] = _changed(found[name], environment=changed)
    for text in arguments:
        name, value = named(text, "--args-of")
        system = _started(found, name, "--args-of")
        found[name] = _changed(found[name], arguments=(*system.arguments, *shlex.split(value)))
    for text in blocks:
        name, value = named(text, "--block-size-of")
        _started(found, name, "--block-size-of")
        found[name] = dataclasses.replace(found[name], block_size=_slots(text, value))
    for name in without_draft:
        _known(found, name, "--without-draft")
        found[name] = dataclasses.replace(found[name], drafts=False)
    return list(found.values())


def _slots(text: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 2:
        raise CannotMeasure(
            f"--block-size-of {text} is not NAME=SLOTS with at least 2: write it so."
        )
    return int(value)


def _known(found: Mapping[str, Choice], name: str, option: str) -> Choice:
    if name not in found:
        raise CannotMeasure(f"{option} names {name}, which is none of {', '.join(found)}.")
    return found[name]


def _started(found: Mapping[str, Choice], name: str, option: str) -> System:
    system = _known(found, name, option).system
    if system is None:
        raise CannotMeasure(f"{option} names {name}, which runs already: leave {option} out.")
    return system


def _changed(choice: Choice, **fields: object) -> Choice:
    return dataclasses.replace(choice, system=dataclasses.replace(choice.system, **fields))


def _own(name: str) -> Choice:
    if name not in OWN_NAMES:
        raise CannotMeasure(f"--systems {name} is not one of {', '.join(OWN_NAMES)}: name one.")
    system = System(name, environment=_SGLANG | OWN[_OWN[name]])
    return Choice(name, "own", system, drafts=name != "plain")


def _peer(kind: str, name: str, value: str) -> Choice:
    if kind == "url":
        return Choice(name, kind, url=value.rstrip("/"))
    try:
        system = peer_system(f"{name}={value}", _PEERS[kind], [])
    except ValueError as error:
        raise CannotMeasure(f"--{kind} {error}.") from None
    launch = _LAUNCH.get(kind, system.launch)
    return Choice(name, kind, dataclasses.replace(system, launch=launch))


def server_arguments(
    choice: Choice, pair: Pair, needs: Needs, device: str, tp: int, attention: str | None
) -> list[str]:
    """Command line of a system's server, without what only it is given.

    Args:
        attention: backend of SGLang's servers; None takes this benchmark's choice.
    """
    if choice.kind == "vllm":
        return _vllm_arguments(choice, pair, needs, tp)
    given = ["--model-path", location(pair.target), "--device", device, "--tp-size", str(tp)]
    given += ["--attention-backend", attention or ATTENTION[device], "--enable-metrics"]
    given += ["--max-running-requests", str(needs.requests)]
    given += ["--max-total-tokens", str(needs.kv_tokens)]
    # Servers wait for their turn side by side; one that polled would take a processor from who is asked.
    given += ["--sleep-on-idle"]
    if device == "cuda":
        given += ["--dtype", "bfloat16", "--cuda-graph-max-bs", str(needs.requests)]
        if choice.kind == "own":
            # The release's piecewise graphs fail on the bundled target, small or inflated.
            given += ["--disable-piecewise-cuda-graph"]
    else:
        given += ["--dtype", "float32"]
    if choice.drafts:
        given += ["--speculative-algorithm", "DFLASH"]
        given += ["--speculative-draft-model-path", location(pair.drafter)]
        if block := pair.block(choice):
            given += ["--speculative-num-draft-tokens", str(block)]
    return given


def _vllm_arguments(choice: Choice, pair: Pair, needs: Needs, tp: int) -> list[str]:
    given = [location(pair.target), "--dtype", "bfloat16", "--tensor-parallel-size", str(tp)]
    given += ["--max-num-seqs", str(needs.requests), "--max-model-len", str(needs.context)]
    # The first is looked at when it starts and must be free; the second is what it takes.
    given += ["--gpu-memory-utilization", "0.2"]
    given += ["--kv-cache-memory-bytes", str(pair.kv_bytes(needs.kv_tokens, tp))]
    rows = 1
    if choice.drafts:
        drafter: dict[str, object] = {"method": "dflash", "model": location(pair.drafter)}
        if block := pair.block(choice):
            drafter["num_speculative_tokens"] = block - 1
            rows = block
        given += ["--speculative-config", json.dumps(drafter)]
    # Its default ends at 512 rows: 32 requests with blocks of 16 and one prompt would run without graphs.
    return [*given, "--max-cudagraph-capture-size", str(needs.requests * rows + VLLM_PROMPT_ROWS)]
