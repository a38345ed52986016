"""Memory that is released and resumed, and new weights, as a scheduler under DFLASH is asked for them.

The release's scheduler ends at a request of this kind that it does not expect, such as one to release memory while
requests run. Here it is refused with a sentence, or there is nothing to do.

New weights are the target's; the drafter keeps its own. Nobody sends those again, so they are kept on the host while
memory is released. All of it can be resumed in parts; what the drafter and rounds need is put back with the last part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang.srt.constants import (
    GPU_MEMORY_ALL_TYPES,
    GPU_MEMORY_TYPE_CUDA_GRAPH,
    GPU_MEMORY_TYPE_KV_CACHE,
    GPU_MEMORY_TYPE_WEIGHTS,
    HEALTH_CHECK_RID_PREFIX,
)
from sglang.srt.managers import io_struct as io

from sglang_dflash.errors import DFlashError
from sglang_dflash.round.capturing import graphs_can_be_released
from sglang_dflash.scheduler.new_weights import UPDATES, from_disk, from_elsewhere

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

_MODELS = {GPU_MEMORY_TYPE_WEIGHTS, GPU_MEMORY_TYPE_KV_CACHE}
_PROMPTS = (io.TokenizedGenerateReqInput, io.BatchTokenizedGenerateReqInput)
_READERS = (io.CheckWeightsReqInput, io.GetWeightsByNameReqInput)
_WITHOUT_MESSAGE = {
    io.ReleaseMemoryOccupationReqInput: io.ReleaseMemoryOccupationReqOutput,
    io.ResumeMemoryOccupationReqInput: io.ResumeMemoryOccupationReqOutput,
}


class Operations:
    """A scheduler's dispatcher: request → what its sender is answered, None if nothing yet."""

    def __init__(self, scheduler: Scheduler, dispatch: Callable[[Any], Any]):
        """
        Args:
            dispatch: the release's.
        """
        self._scheduler, self._dispatch = scheduler, dispatch
        self._asked = {
            io.ReleaseMemoryOccupationReqInput: self._release,
            io.ResumeMemoryOccupationReqInput: self._resume,
            tuple(UPDATES): self._update,
            _READERS: self._read,
        }
        self._needed = _MODELS | (
            {GPU_MEMORY_TYPE_CUDA_GRAPH} if graphs_can_be_released() else set()
        )

    def __call__(self, request: Any) -> Any:
        if isinstance(request, _PROMPTS):
            return self._prompt(request)
        for kind, asked in self._asked.items():
            if isinstance(request, kind):
                try:
                    return asked(request)
                except DFlashError as refusal:
                    return _refused(request, str(refusal))
        return self._dispatch(request)

    def _prompt(self, request: Any) -> Any:
        """While memory is released, requests are refused, and the server is well."""
        released = self._scheduler.offload_tags & self._needed
        if not released:
            return self._dispatch(request)
        why = (
            f"The server has released its memory ({', '.join(sorted(released))}): ask again after "
            "/resume_memory_occupation."
        )
        reason = {"type": "abort", "status_code": HTTPStatus.SERVICE_UNAVAILABLE, "message": why}
        send = self._scheduler.send_to_tokenizer.send_output
        for each in getattr(request, "batch", [request]):
            if each.rid.startswith(HEALTH_CHECK_RID_PREFIX):
                send(io.HealthCheckOutput(), each)
            else:
                send(io.AbortReq(rid=each.rid, finished_reason=reason), each)
        return None

    def _release(self, request: io.ReleaseMemoryOccupationReqInput) -> Any:
        scheduler = self._scheduler
        tags = [tag for tag in _known(request.tags) if tag not in scheduler.offload_tags]
        if not tags:
            return io.ReleaseMemoryOccupationReqOutput()
        self._must_be_idle("Memory cannot be released", "ask again")
        if _MODELS & {*tags}:
            scheduler.draft_worker.set_aside()
            # Also with the weights alone: what other weights made of tokens is of no use.
            scheduler.flush_cache()
        output = self._dispatch(replace(request, tags=tags))
        logger.info("DFLASH: released %s", ", ".join(tags))
        return output

    def _resume(self, request: io.ResumeMemoryOccupationReqInput) -> Any:
        scheduler = self._scheduler
        tags = [tag for tag in _known(request.tags) if tag in scheduler.offload_tags]
        if not tags:
            return io.ResumeMemoryOccupationReqOutput()
        output = self._dispatch(replace(request, tags=tags))
        if not scheduler.offload_tags & _MODELS:
            scheduler.draft_worker.put_back()
        logger.info("DFLASH: resumed %s", ", ".join(tags))
        return output

    def _read(self, request: Any) -> Any:
        self._weights_must_be_there()
        return self._dispatch(request)

    def _update(self, request: Any) -> Any:
        self._weights_must_be_there()
        if request.flush_cache:
            self._must_be_idle(
                "K/V of the old weights cannot be flushed",
                "send the weights again, or send them with flush_cache false",
            )
        disk = isinstance(request, io.UpdateWeightFromDiskReqInput)
        output = (from_disk if disk else from_elsewhere)(self._scheduler, self._dispatch, request)
        if output.success:
            self._scheduler.draft_worker.new_weights()
        return output

    def _weights_must_be_there(self) -> None:
        if GPU_MEMORY_TYPE_WEIGHTS in self._scheduler.offload_tags:
            raise DFlashError(
                "The memory of the weights is released: call /resume_memory_occupation with the tag weights first."
            )

    def _must_be_idle(self, what: str, then: str) -> None:
        scheduler = self._scheduler
        _settle(scheduler)
        if not scheduler.is_fully_idle():
            running, waiting = len(scheduler.running_batch.reqs), len(scheduler.waiting_queue)
            raise DFlashError(
                f"{what} while requests run ({running}) or wait ({waiting}): let them end, or abort them, and {then}."
            )


def _known(tags: list[str] | None) -> list[str]:
    """All tags if none are given, as in the release."""
    for tag in tags or ():
        if tag not in GPU_MEMORY_ALL_TYPES:
            raise DFlashError(
                f"tags has {tag!r}, which names no memory: choose of {', '.join(GPU_MEMORY_ALL_TYPES)}."
            )
    return tags or GPU_MEMORY_ALL_TYPES


def _refused(request: Any, why: str) -> Any:
    logger.warning("%s", why)
    if isinstance(request, io.GetWeightsByNameReqInput):
        return io.GetWeightsByNameReqOutput(None)
    if (made := _WITHOUT_MESSAGE.get(type(request))) is not None:
        output = made()
        output.refusal = why  # raised where it is received: `serving/refused.py`
        return output
    return UPDATES.get(type(request), io.CheckWeightsReqOutput)(success=False, message=why)


def _settle(scheduler: Scheduler) -> None:
    """Looks at the result of a pass in flight that is in vain for all of its requests, which makes the scheduler idle.

    A client has its last token before the scheduler has seen that there is nothing left to do.
    """
    batches = [batch for batch in (scheduler.running_batch, scheduler.last_batch) if batch]
    finished = all(req.finished() for batch in batches for req in batch.reqs)
    if not finished or scheduler.waiting_queue or scheduler.chunked_req is not None:
        return
    while scheduler.enable_overlap and scheduler.result_queue:
        scheduler.process_batch_result(*scheduler.result_queue.popleft())
    scheduler.last_batch = scheduler.cur_batch = None
    scheduler.running_batch.filter_batch(v1_spec_info_filtered=True)
    scheduler.running_batch.batch_is_full = False
