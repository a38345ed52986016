"""How graphs are captured, and where they have their memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_CUDA_GRAPH
from sglang.srt.server_args import get_global_server_args
from sglang.srt.utils import get_bool_env_var
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

Made = TypeVar("Made")


def graphs_can_be_released() -> bool:
    """Whether the memory saver takes the graphs' memory, which has to be asked for as in the release."""
    asked = get_global_server_args().enable_memory_saver
    return asked and get_bool_env_var("SGLANG_MEMORY_SAVER_CUDA_GRAPH")


def capturing(
    graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream
) -> AbstractContextManager[None]:
    """Captures what runs within it. Nothing in a graph's memory has to outlive a round."""
    saver = TorchMemorySaverAdapter.create(graphs_can_be_released())
    if not saver.enabled:
        return torch.cuda.graph(graph, pool=pool, stream=stream)
    return saver.cuda_graph(
        cuda_graph=graph, pool=pool, stream=stream, tag=GPU_MEMORY_TYPE_CUDA_GRAPH
    )


def warm_up(run: Callable[[], object]) -> None:
    """Compiles kernels and sizes workspaces, which a capture may not do."""
    for _ in range(2):
        torch.cuda.synchronize()
        run()
    torch.cuda.synchronize()


def captured(
    run: Callable[[], Made], pool: Any, stream: torch.cuda.Stream
) -> tuple[torch.cuda.CUDAGraph, Made]:
    """A graph of what is run, and what that made, which each replay writes anew."""
    warm_up(run)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, pool, stream):
        made = run()
    return graph, made
