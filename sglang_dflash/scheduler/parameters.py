"""Parameters of requests, which go to the device while the host goes on.

The release makes tensors of them on the device, one by one, and waits for each. Under DFLASH it makes them here.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_dflash.device_waits import to_device

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


def hand_over_unawaited() -> None:
    """From now on, what any batch of this process is drawn with."""
    SamplingBatchInfo.adjusted_from_schedule_batch = _hand_over


def _hand_over(info: SamplingBatchInfo, batch: ScheduleBatch, vocabulary: int) -> None:
    """The last step of `from_schedule_batch`, for those who have something to add to it."""
    for field in fields(info):
        value = getattr(info, field.name)
        if isinstance(value, torch.Tensor):
            setattr(info, field.name, to_device(value, batch.device))
    if info.custom_logit_processor:
        info.custom_logit_processor = {
            key: (processor, to_device(mask, batch.device))
            for key, (processor, mask) in info.custom_logit_processor.items()
        }
    info.device = batch.device
