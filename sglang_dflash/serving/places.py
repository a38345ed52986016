"""Where a server runs: ranks on GPUs, replicas, nodes; what cannot be is refused before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_dflash.errors import DFlashError

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def check_places(args: ServerArgs) -> None:
    """Refuses nodes that cannot meet, replicas on several of them, and more ranks than there are GPUs.

    And keys that not all processes of HTTP would ask for.

    Raises:
        DFlashError: one sentence with the flag, its value and what to do.
    """
    for flag in ("tp_size", "dp_size", "nnodes", "tokenizer_worker_num"):
        if (value := getattr(args, flag)) < 1:
            raise DFlashError(f"--{flag.replace('_', '-')} {value} is below 1: give 1 or more.")
    if args.tokenizer_worker_num > 1 and (args.api_key or args.admin_api_key):
        key = "--api-key" if args.api_key else "--admin-api-key"
        raise DFlashError(
            f"--tokenizer-worker-num {args.tokenizer_worker_num} with {key} is not supported, because only one process "
            "of HTTP asks for it: leave one of them out, or have what stands before the server ask for the key."
        )
    _check_nodes(args)
    if args.device == "cuda":
        check_gpus(args, torch.cuda.device_count())


def _check_nodes(args: ServerArgs) -> None:
    nodes = f"--nnodes {args.nnodes}"
    if not 0 <= args.node_rank < args.nnodes:
        raise DFlashError(
            f"--node-rank {args.node_rank} is none of {nodes}: give 0 on the first node, 1 on the second, and so on."
        )
    if args.nnodes == 1:
        return
    if args.dp_size > 1:
        raise DFlashError(
            f"--dp-size {args.dp_size} with {nodes} is not supported: start a server on each node, and a router in "
            "front of them."
        )
    if args.tp_size % args.nnodes:
        raise DFlashError(
            f"--tp-size {args.tp_size} is not divisible by {nodes}, of which each runs as many ranks: choose a "
            "multiple."
        )
    if not args.dist_init_addr:
        raise DFlashError(
            f"{nodes} needs --dist-init-addr, where the nodes meet: give all of them the same HOST:PORT, with an "
            "address of the first node and a port that is free there."
        )


def check_gpus(args: ServerArgs, there: int) -> None:
    """Refuses more ranks than so many GPUs of this node can run, one on each."""
    ranks = args.tp_size // args.nnodes * args.dp_size
    needed = args.base_gpu_id + (ranks - 1) * args.gpu_id_step + 1
    if needed <= there:
        return
    sizes = f"--tp-size {args.tp_size}"
    sizes += f" with --nnodes {args.nnodes}" if args.nnodes > 1 else ""
    sizes = f"--dp-size {args.dp_size} with {sizes}" if args.dp_size > 1 else sizes
    for flag, value, usual in (
        ("--base-gpu-id", args.base_gpu_id, 0),
        ("--gpu-id-step", args.gpu_id_step, 1),
    ):
        sizes += f" and {flag} {value}" if value != usual else ""
    raise DFlashError(
        f"{sizes} needs {needed} GPUs on this node, and {there} are visible: choose smaller sizes, or show it more "
        "with CUDA_VISIBLE_DEVICES."
    )
