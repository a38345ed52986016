"""Pictures and videos of requests: which a model is shown; and videos for a processor that would read files itself."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from sglang_dflash.checkpoint.target_class import WITH_VIDEOS
from sglang_dflash.errors import DFlashError
from sglang_dflash.serving.declared import short

if TYPE_CHECKING:
    import numpy as np
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.utils.video_decoder import VideoDecoderWrapper
    from transformers.video_utils import VideoMetadata

# Request fields, and what to call what they have.
_CALLED = {"image_data": "pictures", "video_data": "videos"}
_MODALITY = {"image_data": "IMAGE", "video_data": "VIDEO"}  # SGLang's names of them
PICTURES, VIDEOS = ("image_data",), ("video_data",)
BOTH = PICTURES + VIDEOS


def media_of(model: ModelConfig) -> tuple[tuple[str, ...], ...]:
    """Which fields of media a request may have, alone or together."""
    name = model.hf_config.architectures[0]
    if not model.is_multimodal:
        return ()
    if name not in WITH_VIDEOS:
        return (PICTURES,)
    # A frame of GLM's is a picture's tokens, which the release takes for those of either.
    return (PICTURES, VIDEOS) if name.startswith("Glm4v") else (PICTURES, VIDEOS, BOTH)


def media_in(request: Any) -> tuple[str, ...]:
    """The fields of a request that have pictures or videos."""
    return tuple(name for name in BOTH if getattr(request, name))


def check_media(request: Any, sampling: Any, shown: tuple[tuple[str, ...], ...]) -> None:
    """Refuses what the model is not shown, what is no video, and where SGLang's scheduler would end.

    Args:
        request: SGLang's `GenerateReqInput` of one request.
        sampling: its `SamplingParams`.
        shown: see `media_of`.

    Raises:
        DFlashError: names the field, and says what to do.
    """
    if shown and request.input_embeds:
        raise DFlashError("input_embeds is not read by a multimodal model: send text or input_ids.")
    given = media_in(request)
    if not given:
        return
    for name in given:
        if (name,) not in shown:
            raise DFlashError(
                f"{name} {short(getattr(request, name))} is not supported with DFLASH and a model that takes no "
                f"{_CALLED[name]}: leave it out, or start the server with a multimodal target of docs/targets.md."
            )
    if given not in shown:
        raise DFlashError(
            f"video_data {short(request.video_data)} is not supported with DFLASH and this model beside image_data: "
            "send one of them, or frames of the video as pictures."
        )
    if sampling.n > 1:  # the copies share memory that the first to be read gives back
        raise DFlashError(
            f"n {sampling.n} is not supported with DFLASH and {_CALLED[given[0]]}: send the request as many times."
        )
    if request.session_params:
        raise DFlashError(
            f"{given[0]} {short(getattr(request, given[0]))} is not supported in a session with DFLASH: send the whole "
            "conversation as one request."
        )
    videos = request.video_data or []
    for video in videos if isinstance(videos, list) else [videos]:
        if not isinstance(video, str):  # the release makes something else of lists of frames
            raise DFlashError(
                f"video_data {short(video)} is not a video: give a URL, a path or base64 of one, or its frames as "
                "pictures in image_data."
            )


def check_places(request: Any, manager: TokenizerManager) -> None:
    """Refuses more pictures or videos than the prompt has places for: SGLang would leave out the rest.

    Args:
        request: SGLang's `GenerateReqInput` of one request.

    Raises:
        DFlashError: names the field, and how many it has for how many places.
    """
    given = media_in(request)
    prompt = request.text
    if given and prompt is None and manager.tokenizer is not None:
        prompt = manager.tokenizer.decode(request.input_ids)
    if not given or prompt is None:
        return
    tokens = manager.mm_processor.mm_tokens  # in which SGLang looks for places, too
    found = [
        tokens.get_modality_of_token(part) for part in tokens.get_combined_regex().split(prompt)
    ]
    places = Counter(modality.name for modality in found if modality is not None)
    for name in given:
        value = getattr(request, name)
        count, room = len(value) if isinstance(value, list) else 1, places[_MODALITY[name]]
        if count > room:
            raise DFlashError(
                f"{name} has {count} entries, and the prompt has places for {room}: give as many as it has places."
            )


def is_of_media(error: Exception) -> bool:
    """Whether SGLang refused pictures or videos: what it cannot open, or a video of too few frames."""
    return isinstance(error, RuntimeError) or str(error).startswith("nframes ")


def unreadable(received: Any, error: Exception) -> DFlashError:
    """What SGLang stumbled over while it read pictures or videos.

    Args:
        received: SGLang's `GenerateReqInput` that has some, maybe of several requests.
    """
    given = media_in(received)
    told = str(error)
    name = given[-1] if "VIDEO" in told or "nframes" in told else given[0]
    reason = told.rpartition(": ")[2][:100] or "there are too few"
    return DFlashError(
        f"{name} {short(getattr(received, name))} cannot be read ({reason}): give a URL, a path or base64 of one for "
        "each place that the prompt has."
    )


def sampled(
    videos: list[VideoDecoderWrapper], processor: Any
) -> tuple[list[np.ndarray], list[VideoMetadata]]:
    """The frames that a processor looks at, and which they are.

    Args:
        videos: as the release opens what a request has, be it a path, a URL or base64.
        processor: transformers' processor of videos, which knows how many frames a second it wants.

    Returns:
        Of each video, bytes [frames, height, width, 3], and times in seconds.
    """
    from transformers.video_utils import VideoMetadata

    frames, told = [], []
    for video in videos:
        counted = {"total_num_frames": len(video), "fps": video.avg_fps}
        metadata = VideoMetadata(**counted, duration=len(video) / video.avg_fps)
        metadata.frames_indices = processor.sample_frames(metadata=metadata)
        frames.append(video.get_frames_at(metadata.frames_indices.tolist()))
        told.append(metadata)
    return frames, told
