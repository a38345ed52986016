"""New weights for the target, so that a failure leaves a server that says so."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers import io_struct as io

from sglang_dflash.checkpoint.load import load_config
from sglang_dflash.errors import DFlashError

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# Requests with new weights, and what they are answered.
UPDATES = {
    io.UpdateWeightFromDiskReqInput: io.UpdateWeightFromDiskReqOutput,
    io.UpdateWeightsFromTensorReqInput: io.UpdateWeightsFromTensorReqOutput,
    io.UpdateWeightsFromDistributedReqInput: io.UpdateWeightsFromDistributedReqOutput,
    io.UpdateWeightsFromIPCReqInput: io.UpdateWeightsFromIPCReqOutput,
}


def from_disk(
    scheduler: Scheduler, dispatch: Callable[[Any], Any], request: io.UpdateWeightFromDiskReqInput
) -> Any:
    """Weights of a checkpoint; those of the one before, where they do not fit.

    Raises:
        DFlashError: it is a drafter's.
    """
    if _is_drafter(request.model_path):
        raise DFlashError(
            f"model_path {request.model_path} is a DFlash drafter, and new weights are the target's: give a checkpoint "
            "of the target, or start the server with this drafter."
        )
    runner, path = scheduler.tp_worker.model_runner, request.model_path
    before, load_format = runner.model_config.model_path, runner.load_config.load_format
    try:
        output = dispatch(request)
    except Exception as error:
        # The release puts weights back from the new path, which it takes for the old one, and raises again.
        if not _load(runner, before, load_format):
            raise DFlashError(
                f"The weights of {path} do not fit ({error!r}), and those of {before} cannot be loaded again: send "
                "others, or start the server again."
            ) from error
        scheduler.flush_cache()
        output = io.UpdateWeightFromDiskReqOutput(
            False,
            f"The weights of {path} do not fit ({error!r}), so those of {before} are loaded again.",
        )
    if not output.success:
        runner.model_config.model_path = before
    return output


def _load(runner: ModelRunner, path: str, load_format: Any) -> bool:
    try:
        return runner.update_weights_from_disk(path, load_format)[0]
    except Exception:
        logger.exception("Weights of %s", path)
        return False


def _is_drafter(path: str) -> bool:
    if not os.path.isdir(path):
        return False
    try:
        load_config(path)
    except DFlashError:
        return False
    return True


def from_elsewhere(scheduler: Scheduler, dispatch: Callable[[Any], Any], request: Any) -> Any:
    """Weights as tensors, from another process.

    Raises:
        DFlashError: the group is not there in which they are to be sent.
    """
    if isinstance(request, io.UpdateWeightsFromDistributedReqInput):
        groups = scheduler.tp_worker.model_runner._model_update_group
        if request.group_name not in groups:
            raise DFlashError(
                f"group_name {request.group_name!r} is not among the groups {sorted(groups)}: call "
                "/init_weights_update_group first."
            )
    try:
        return dispatch(request)
    except Exception as error:
        if not isinstance(request, io.UpdateWeightsFromDistributedReqInput):
            # Where those meet whose tensors did fit.
            torch.distributed.barrier(group=scheduler.tp_cpu_group)
        return UPDATES[type(request)](
            success=False,
            message=f"The tensors do not fit ({error!r}), and some may be loaded: send all weights again.",
        )
