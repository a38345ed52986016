"""The servers of a sweep."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests

from benchmark import servers
from benchmark.gsm8k.arguments import BUNDLED
from benchmark.gsm8k.cells import Arm
from benchmark.gsm8k.errors import CannotSweep

_REQUEST_SECONDS = 60


def gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def device() -> str:
    return "cuda" if gpu_count() else "cpu"


def server_arguments(args: argparse.Namespace, arm: Arm, device: str) -> list[str]:
    """Of `sglang.launch_server`, the user's own last."""
    most = max(args.concurrencies)
    given = ["--model-path", args.target_model, "--device", device, "--tp", str(arm.tp)]
    given += ["--attention-backend", arm.backend, "--max-running-requests", str(most)]
    if device == "cuda":
        given += ["--cuda-graph-max-bs", str(most)]
        if args.target_model == str(BUNDLED / "target"):
            # Piecewise graphs of the release fail on so small a model.
            given += ["--dtype", "bfloat16", "--disable-piecewise-cuda-graph"]
    else:
        tokens = most * (min(args.max_new_tokens, 1024) + 1024)
        given += ["--dtype", "float32", "--max-total-tokens", str(tokens)]
    if args.page_size:
        given += ["--page-size", str(args.page_size)]
    if args.disable_radix_cache:
        given += ["--disable-radix-cache"]
    if arm.speculative:
        given += ["--speculative-algorithm", "DFLASH"]
        given += ["--speculative-draft-model-path", args.draft_model]
        for name in ("speculative_draft_attention_backend", "speculative_dflash_draft_window_size"):
            if (value := getattr(args, name)) is not None:
                given += ["--" + name.replace("_", "-"), str(value)]
    return given + args.server_args


@contextmanager
def running(args: argparse.Namespace, arm: Arm, logs: Path) -> Iterator[str]:
    """The URL of an arm's server while it runs; nothing of it is left afterwards.

    Raises:
        CannotSweep: it did not start, or ended.
    """
    where = device()
    system = servers.System(arm.name, environment=arm.environment)
    log = logs / f"{arm.backend}-tp{arm.tp}-{arm.name}.log"
    try:
        with servers.running(
            system, where, server_arguments(args, arm, where), log, args.timeout_s
        ) as server:
            yield server.url
    except servers.ServerFailed as failure:
        raise CannotSweep(f"the server ({arm}) failed, see {log}: {failure}") from None


def running_arm(url: str) -> Arm:
    """What a server is that runs already."""
    try:
        info = requests.get(f"{url}/server_info", timeout=_REQUEST_SECONDS).json()
    except (requests.RequestException, ValueError) as error:
        raise CannotSweep(f"--base-url {url} is no SGLang server ({error}): start one.") from None
    name = "baseline"
    if info.get("speculative_algorithm") == "DFLASH":
        name = "v1" if info.get("disable_overlap_schedule") else "v2"
    return Arm(str(info.get("attention_backend")), int(info.get("tp_size", 1)), name)


def version(url: str) -> str:
    """SGLang's, as the server says it; a checkout that is not installed has no other."""
    try:
        return str(requests.get(f"{url}/server_info", timeout=_REQUEST_SECONDS).json()["version"])
    except (requests.RequestException, ValueError, KeyError):
        return "unknown"


def flush(url: str) -> None:
    """Forgets prefixes of earlier requests."""
    try:
        for _ in range(50):
            answer = requests.post(f"{url}/flush_cache", timeout=_REQUEST_SECONDS)
            if answer.status_code == 200:
                return
    except requests.RequestException as error:
        raise CannotSweep(f"the server at {url} is gone: {error!r}.") from None
    raise CannotSweep(f"the server at {url} does not flush its cache: {answer.text[:200]}")
