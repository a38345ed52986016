"""`--enable-hierarchical-cache`: which flags go with it under DFLASH, and how many tokens of both models it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from sglang_dflash.checkpoint.target_class import has_linear_attention
from sglang_dflash.errors import DFlashError

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

# What moves K/V, and the layouts on the host that it can write and read. `page_head` is none of MLA.
_LAYOUTS = {
    "kernel": ("layer_first", "page_first", "page_head"),
    "direct": ("layer_first", "page_first_direct"),
}
_LEFT_TO_OTHERS = 10 << 30  # bytes of the host's memory, by the release


def check_host_cache(args: ServerArgs, target: ModelConfig) -> None:
    """Refuses what would bring K/V of one model back without the other's, or would end the server later.

    Raises:
        DFlashError: one sentence with the flag, its value and what to do.
    """
    if not args.enable_hierarchical_cache:
        return
    _check_target(args, target)
    if args.hicache_size <= 0 and args.hicache_ratio <= 1:
        raise DFlashError(
            f"--hicache-ratio {args.hicache_ratio} makes the host's cache no larger than the device's, which the "
            "release cannot do: give more than 1, or --hicache-size in GB."
        )
    if args.device == "cpu" and args.hicache_io_backend == "kernel":  # the default; there are none
        args.hicache_io_backend = "direct"
        args._resolve_layout_io_compatibility()
    io, layout = args.hicache_io_backend, args.hicache_mem_layout
    if io not in _LAYOUTS:
        raise DFlashError(
            f"--hicache-io-backend {io} is not supported with DFLASH: choose one of {', '.join(_LAYOUTS)}."
        )
    layouts = [
        name for name in _LAYOUTS[io] if not (name == "page_head" and args.use_mla_backend())
    ]
    if layout not in layouts:
        raise DFlashError(
            f"--hicache-mem-layout {layout} is not supported with DFLASH and --hicache-io-backend {io} here: choose "
            f"one of {', '.join(layouts)}."
        )


def _check_target(args: ServerArgs, target: ModelConfig) -> None:
    flag = "--enable-hierarchical-cache is not supported with DFLASH and"
    if has_linear_attention(target):
        raise DFlashError(
            f"{flag} {args.model_path}, whose states of linear attention are not kept on the host beside both models' "
            "K/V: leave it out."
        )
    # For some targets the release sets the flag once it has looked at them.
    if target.is_hybrid_swa and not args.disable_hybrid_swa_memory:
        raise DFlashError(
            f"{flag} {args.model_path}, whose sliding layers keep K/V in a pool of their own: leave it out, or add "
            "--disable-hybrid-swa-memory."
        )
    if not args.use_mla_backend() and target.v_head_dim != target.head_dim:
        raise DFlashError(
            f"{flag} {args.model_path}, whose values have {target.v_head_dim} dimensions and whose keys have "
            f"{target.head_dim}, because the release copies both alike: leave it out."
        )


def host_slots(args: ServerArgs, device_slots: int, slot_bytes: int) -> int:
    """How many tokens the host holds, K/V of both models of each.

    Args:
        device_slots: how many the device holds.
        slot_bytes: bytes of both models' K/V of one token on this rank.

    Raises:
        DFlashError: no more than the device, or more than the host has memory for.
    """
    if args.hicache_size > 0:
        flag = f"--hicache-size {args.hicache_size}"
        slots = int(args.hicache_size * 1e9) // slot_bytes
    else:
        flag = f"--hicache-ratio {args.hicache_ratio}"
        slots = int(device_slots * args.hicache_ratio)
    if slots <= device_slots:
        least = int(device_slots * slot_bytes / 1e9) + 1
        raise DFlashError(
            f"{flag} holds K/V of both models for {slots} tokens, and the device for {device_slots}, which must be "
            f"fewer: give --hicache-size {least} or more, or a smaller --max-total-tokens."
        )
    needed, there = slots * slot_bytes, psutil.virtual_memory().available - _LEFT_TO_OTHERS
    if needed > there:
        raise DFlashError(
            f"{flag} needs {needed / 1e9:.2f} GB of the host's memory on each rank for K/V of both models, and "
            f"{max(there, 0) / 1e9:.2f} GB are free beside the 10 GiB that are left to others: give less."
        )
    return slots
