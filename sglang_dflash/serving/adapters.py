"""LoRA adapters of the target: arguments, requests that name one, and when nobody uses one any more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from sglang_dflash.checkpoint.adapter import (
    check_adapter,
    check_limits,
    has_experts,
    read_adapter,
)
from sglang_dflash.checkpoint.target_class import has_linear_attention
from sglang_dflash.errors import DFlashError
from sglang_dflash.serving.declared import short

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import ServerArgs

_ON_CPU = "torch_native"
# What an adapter may call the modules that experts have, too.
_EXPERTS = {"all", "all-linear", "gate_proj", "up_proj", "gate_up_proj", "down_proj"}


def check_lora_arguments(args: ServerArgs) -> None:
    """Refuses what the release would stumble over when the target is loaded, and adapters that do not fit it.

    Raises:
        DFlashError: one sentence with the flag or the adapter, and what to do.
    """
    if args.enable_lora is False or not (args.enable_lora or args.lora_paths):
        return
    _check_flags(args)
    target = args.get_model_config()
    if target.is_multimodal:
        raise DFlashError(
            f"--enable-lora is not supported with DFLASH and a multimodal target ({args.model_path}): leave it out, "
            "or use a text model."
        )
    if has_linear_attention(target):
        raise DFlashError(
            f"--enable-lora is not supported with DFLASH and a target with linear attention ({args.model_path}), whose "
            "layers SGLang's LoRA does not know: leave it out."
        )
    adapters = [read_adapter(*named) for named in named_paths(args.lora_paths)]
    for adapter in adapters:
        check_adapter(adapter, target.hf_text_config, args.model_path)
        check_limits(adapter, args.max_lora_rank, _merged(args.lora_target_modules))
    if args.device == "cpu" and has_experts(target.hf_text_config):
        wanted = [adapter.config["target_modules"] for adapter in adapters]
        _check_no_experts([args.lora_target_modules or [], *wanted], args.model_path)


def _check_flags(args: ServerArgs) -> None:
    if args.device == "cpu":
        # The default is for a GPU, and cannot be told from one that was asked for.
        args.lora_backend = _ON_CPU if args.lora_backend == "csgmv" else args.lora_backend
        if args.lora_backend != _ON_CPU:
            raise DFlashError(
                f"--lora-backend {args.lora_backend} needs a GPU: leave it out, or choose {_ON_CPU}."
            )
    elif args.lora_backend == _ON_CPU:  # it reads a head's rows wrong
        raise DFlashError(f"--lora-backend {_ON_CPU} is for a CPU: choose csgmv or triton.")
    if args.max_loras_per_batch < 1:
        raise DFlashError(
            f"--max-loras-per-batch {args.max_loras_per_batch} is below 1: give 1 or more."
        )
    if args.enable_lora_overlap_loading:
        raise DFlashError(
            "--enable-lora-overlap-loading is not supported with DFLASH (a round loads what it needs itself): leave "
            "it out."
        )
    if not args.lora_paths and not (args.max_lora_rank and args.lora_target_modules):
        raise DFlashError(
            "--enable-lora needs --lora-paths, or --max-lora-rank and --lora-target-modules: give the adapters, or "
            "what later ones will need."
        )
    given = len(list(named_paths(args.lora_paths)))
    if args.max_loaded_loras is not None and args.max_loaded_loras < max(
        given, args.max_loras_per_batch
    ):
        raise DFlashError(
            f"--max-loaded-loras {args.max_loaded_loras} is less than --max-loras-per-batch "
            f"{args.max_loras_per_batch} or than the {given} adapters of --lora-paths: give at least as many."
        )


def named_paths(given: Any) -> Iterator[tuple[str, str]]:
    """Name and path of each adapter of --lora-paths, in any of the forms that the release takes."""
    if isinstance(given, dict):
        yield from given.items()
        return
    for each in given or ():
        if isinstance(each, dict):
            yield each["lora_name"], each["lora_path"]
        elif isinstance(each, str):
            name, _, path = each.partition("=")
            yield name, path or name
        else:
            yield each.lora_name, each.lora_path


def _check_no_experts(given: Iterable[Any], path: str) -> None:
    """Refuses modules of experts, which SGLang adapts with a GPU's kernels alone.

    Args:
        given: what the server and each adapter name.
    """
    for modules in given:
        words = {modules} if isinstance(modules, str) else set(modules)
        if over := sorted(words & _EXPERTS):
            raise DFlashError(
                f"LoRA on {over[0]} of experts needs a GPU ({path} has experts): use adapters of attention alone."
            )


def _merged(modules: Any) -> set[str] | None:
    from sglang.srt.lora.utils import get_normalized_target_modules

    return get_normalized_target_modules(modules) if modules and "all" not in modules else None


def check_adapter_of_request(request: Any, manager: TokenizerManager) -> None:
    """Refuses a request for an adapter that is not there, or in a session.

    Args:
        request: SGLang's `GenerateReqInput` of one request.

    Raises:
        DFlashError: names the adapter, and says what to do.
    """
    if not (name := request.lora_path):
        return
    given = f"lora_path {short(name)}"
    if not manager.server_args.enable_lora:
        raise DFlashError(
            f"{given} is not supported with DFLASH on a server without --enable-lora: leave it out, or start the "
            "server with it."
        )
    if name not in manager.lora_ref_cache:
        known = ", ".join(sorted(manager.lora_ref_cache)) or "none"
        raise DFlashError(
            f"{given} is not the name of a loaded adapter (there is {known}): load it with /load_lora_adapter first."
        )
    if (
        request.session_params
    ):  # a streaming session keeps K/V from turn to turn, whoever's they are
        raise DFlashError(
            f"{given} is not supported in a session with DFLASH: send the whole conversation as one request."
        )


async def until_unused(manager: TokenizerManager, lora_id: str) -> None:
    """Waits until no request uses an adapter that new ones can no longer name.

    Between two looks a request that was just given the adapter is written down.
    """
    while True:
        await asyncio.sleep(0.05)
        if not any(_uses(state.obj, lora_id) for state in list(manager.rid_to_state.values())):
            break
    manager.lora_registry._counters.pop(lora_id, None)


def _uses(request: Any, lora_id: str) -> bool:
    given = getattr(request, "lora_id", None)
    return lora_id in given if isinstance(given, list) else lora_id == given
