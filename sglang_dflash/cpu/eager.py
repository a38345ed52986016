"""Nothing of the release is compiled on a CPU unless the user asks for it.

It compiles the short function that draws with a seed when that is first called. On a GPU that is a kernel; on a
CPU it takes a C++ compiler, ten seconds to a minute in which the scheduler serves nobody, and so many objects that
stay that full garbage collections become rare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def compile_only_when_asked(server_args: ServerArgs) -> None:
    """Lets `torch.compile` do nothing in this process: on a CPU, without --enable-torch-compile."""
    if server_args.device == "cpu" and not server_args.enable_torch_compile:
        torch.compiler.set_stance("force_eager")
