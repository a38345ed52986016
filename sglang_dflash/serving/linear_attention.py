"""Targets with linear attention: what their server takes, and the memory for states after each verified row."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang_dflash.errors import DFlashError

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

GIB = 1 << 30

# Of the memory for K/V and states, what states after each verified row may take.
ROW_STATES_PART = 0.5
# Requests that run at once unless the user says how many: the release's number for speculation.
_REQUESTS = 48


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
                f"--{field.replace('_', '-')} {value} is not supported with DFLASH, which needs the states after each "
                "row of a block as Triton's kernels write them: leave it out."
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


def bound_by_row_states(runner: ModelRunner, rest_gib: float) -> None:
    """Lowers `max_running_requests` until states after each verified row take no more than their part of the memory.

    Called before the release reserves them, for as many requests as that says.

    Args:
        rest_gib: memory for K/V and states, GiB on this rank.

    Raises:
        DFlashError: there is no room for one request.
    """
    args = runner.server_args
    state = runner.mambaish_config.mamba2_cache_params.mamba_cache_per_req
    each = state * args.speculative_num_draft_tokens
    budget = rest_gib * ROW_STATES_PART * GIB
    most = int(budget // each) - 1  # the release keeps one more, for padding
    asked = args.max_running_requests or _REQUESTS
    if most < 1:
        raise DFlashError(
            f"--speculative-dflash-block-size {args.speculative_num_draft_tokens} needs {2 * each / GIB:.2f} GiB for "
            f"states of linear attention after each row of one request's block, and {budget / GIB:.2f} GiB are there "
            "for them: give a smaller block, more --mem-fraction-static or more --tp-size."
        )
    args.max_running_requests = min(asked, most)
    logger.log(
        logging.WARNING if most < asked else logging.INFO,
        "DFLASH keeps states of linear attention after each of %d rows, %.1f MiB a request: the %.2f GiB that they may "
        "take allow %d requests at once, and %d may run. A smaller --speculative-dflash-block-size allows more.",
        args.speculative_num_draft_tokens,
        each / (1 << 20),
        budget / GIB,
        most,
        args.max_running_requests,
    )
