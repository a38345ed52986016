"""Targets with linear attention: what their server takes, and the memory for what their rows read."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang_dflash.block_rows import KERNEL, bytes_of_row
from sglang_dflash.errors import DFlashError
from sglang_dflash.gpu.pass_sizes import LINEAR_ROWS

if TYPE_CHECKING:
    from sglang.srt.configs.mamba_utils import BaseLinearStateParams
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

GIB = 1 << 30

# Requests that run at once unless the user says how many.
_REQUESTS = 256


def choose_strategy(args: ServerArgs, linear: bool) -> None:
    """What `--mamba-scheduler-strategy auto`, the default, means.

    Args:
        linear: whether the target has linear attention.
    """
    if args.mamba_scheduler_strategy != "auto":
        return
    ends_alone = args.disable_overlap_schedule and (args.page_size or 1) == 1
    buffered = linear and not args.disable_radix_cache and not ends_alone
    args.mamba_scheduler_strategy = "extra_buffer" if buffered else "no_buffer"
    if buffered:
        logger.info(
            "DFLASH keeps states for the prefix cache with --mamba-scheduler-strategy extra_buffer."
        )


def check_linear_attention(args: ServerArgs) -> None:
    """Refuses what would lose states or mix them up, before the release does so in several steps.

    Raises:
        DFlashError: one sentence with the flag, its value and what to do.
    """
    _check_prefix_cache(args)
    if args.enable_streaming_session:
        raise DFlashError(
            f"--enable-streaming-session is not supported with DFLASH and {args.model_path}, of whose linear attention "
            "a session keeps no states: leave it out."
        )
    for field in (
        "linear_attn_backend",
        "linear_attn_decode_backend",
        "linear_attn_prefill_backend",
    ):
        if (value := getattr(args, field)) not in (None, "triton"):
            raise DFlashError(
                f"--{field.replace('_', '-')} {value} is not supported with DFLASH, which verifies blocks of linear "
                "attention with Triton's kernels: leave it out."
            )


def _check_prefix_cache(args: ServerArgs) -> None:
    """Whether states that the prefix cache gets are those after the tokens for which it gets them."""
    overlaps, width = not args.disable_overlap_schedule, args.speculative_num_draft_tokens
    strategy = f"--mamba-scheduler-strategy {args.mamba_scheduler_strategy}"
    buffered, interval = args.enable_mamba_extra_buffer(), args.mamba_track_interval
    page = args.page_size or 1
    if args.disable_radix_cache:
        if buffered:
            raise DFlashError(
                f"{strategy} keeps states for a prefix cache, and --disable-radix-cache leaves none: leave out one of "
                "both."
            )
        return
    if not buffered and overlaps:
        raise DFlashError(
            f"{strategy} has no states for the prefix cache while rounds overlap: add "
            "--mamba-scheduler-strategy extra_buffer, or --disable-radix-cache."
        )
    if not buffered and page > 1:
        raise DFlashError(
            f"--page-size {page} is not supported with {strategy}, whose prefix cache has pages of one token: give "
            "--page-size 1, or add --mamba-scheduler-strategy extra_buffer or --disable-radix-cache."
        )
    if not buffered:
        return
    # A round that is launched before the result of the one before does not know what that one wrote.
    least = 2 * width if overlaps else width
    if interval < least or interval % page:
        raise DFlashError(
            f"--mamba-track-interval {interval} does not go with blocks of {width} tokens and pages of {page}: give a "
            f"multiple of {page} that is at least {least}."
        )
    from sglang.srt.layers.attention.fla.chunk_delta_h import CHUNK_SIZE

    if max(CHUNK_SIZE, page) % min(CHUNK_SIZE, page):
        raise DFlashError(
            f"--page-size {page} does not go with {strategy}, which keeps states after chunks of {CHUNK_SIZE} tokens: "
            f"give a page size that divides {CHUNK_SIZE}, or a multiple of it."
        )


def reserve_rows(runner: ModelRunner, rest_gib: float) -> float:
    """Takes what rows of blocks read in layers of linear attention out of the memory for K/V and states.

    Lowers `max_running_requests` until those of all requests fit beside the requests' states. Called before the release
    divides the rest among states and K/V.

    Args:
        rest_gib: memory for K/V and states, GiB on this rank.

    Returns:
        What is left, GiB.

    Raises:
        DFlashError: there is no room for one request, or no kernel for its convolutions.
    """
    args, params = runner.server_args, runner.mambaish_config.mamba2_cache_params
    _check_kernel(runner, params)
    width, row = args.speculative_num_draft_tokens, bytes_of_row(params, runner.dtype.itemsize)
    rest_gib -= rows_of_linear_attention(args, 0) * row / GIB
    rows = width * row
    states = params.mamba_cache_per_req * runner._calculate_mamba_ratio()
    share = args.mamba_full_memory_ratio / (1 + args.mamba_full_memory_ratio)
    budget = rest_gib * GIB * share
    if args.max_mamba_cache_size is None:
        most = int(budget // (rows + states))
    else:
        most = args.max_mamba_cache_size // runner._calculate_mamba_ratio()
    if most < 1:
        raise DFlashError(
            f"--mamba-full-memory-ratio {args.mamba_full_memory_ratio} leaves {budget / GIB:.2f} GiB for states of "
            f"linear attention, and one request needs {(rows + states) / GIB:.2f} GiB: give more of it, more "
            "--mem-fraction-static or more --tp-size."
        )
    asked = args.max_running_requests or _REQUESTS
    args.max_running_requests = min(asked, most)
    logger.log(
        logging.WARNING if args.max_running_requests < asked else logging.INFO,
        "DFLASH keeps what linear attention reads in each of %d rows, %.1f MiB a request, beside %.1f MiB of states: "
        "there is room for %d requests at once, and %d may run. More --mamba-full-memory-ratio allows more.",
        width,
        rows / (1 << 20),
        states / (1 << 20),
        most,
        args.max_running_requests,
    )
    return rest_gib - args.max_running_requests * rows / GIB


def rows_of_linear_attention(args: ServerArgs, requests: int) -> int:
    """The most that a pass over blocks of so many requests has, and prompts beside them."""
    return requests * args.speculative_num_draft_tokens + LINEAR_ROWS


def _check_kernel(runner: ModelRunner, params: BaseLinearStateParams) -> None:
    """Whether there are kernels for the convolutions of a target on a GPU."""
    if runner.device == "cuda" and (window := params.shape.conv[0][1]) != KERNEL - 1:
        raise DFlashError(
            f"{runner.server_args.model_path} has convolutions of {window + 1} rows, and DFLASH knows those of "
            f"{KERNEL} on a GPU: serve it without --speculative-algorithm DFLASH."
        )
