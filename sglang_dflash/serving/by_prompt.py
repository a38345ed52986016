"""Fields that may hold one value for all prompts of a request, or one for each."""

from __future__ import annotations

from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from sglang_dflash.errors import DFlashError
from sglang_dflash.serving.declared import short

_PROMPTS = ("text", "input_ids", "input_embeds")
# Lists of one prompt's, or lists of such lists: the release tells them apart.
_PICTURES = ("image_data", "video_data", "audio_data")
# Of these SGLang gives each prompt all, and takes no list for one prompt.
_ONE_FOR_ALL = ("extra_key", "session_params")


@cache
def _fields() -> tuple[str, ...]:
    """Those that the release declares as a list of something or that something."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    return tuple(
        name
        for name, hint in get_type_hints(GenerateReqInput).items()
        if name not in _PROMPTS + _PICTURES and len(_kinds(hint)) == 2
    )


def _kinds(hint: Any) -> set[bool]:
    """Of a union's members other than None, whether each is a list."""
    union = get_origin(hint) in (Union, UnionType)
    parts = get_args(hint) if union else (hint,)
    return {get_origin(part) is list for part in parts if part is not type(None)}


def fit_to_prompts(request: Any) -> None:
    """Refuses lists that are not as long as the batch; a lone prompt's list of one is that one.

    Args:
        request: SGLang's `GenerateReqInput` as received.

    Raises:
        DFlashError: names the field, its length and that of the batch.
    """
    prompts = _batch(request)
    given = {name: getattr(request, name) for name in _fields()}
    if any(isinstance(ids, list) for ids in request.token_ids_logprob or ()):
        given["token_ids_logprob"] = request.token_ids_logprob
    for name, value in given.items():
        if not isinstance(value, list):
            continue
        if len(value) != (prompts or 1):
            raise DFlashError(
                f"{name} has {len(value)} entries for {prompts or 1} prompts: give one for each, or one for all."
            )
        if prompts is None:
            setattr(request, name, value[0])
        elif name in _ONE_FOR_ALL:
            raise DFlashError(f"{name} {short(value)} is a list: give one for all prompts.")


def _batch(request: Any) -> int | None:
    """Prompts of a batch; None for a prompt that is not in a list."""
    texts, ids, embeddings = (getattr(request, name) for name in _PROMPTS)
    batches = {}
    if texts is not None:
        batches["text"] = len(texts) if isinstance(texts, list) else None
    if ids is not None:
        batches["input_ids"] = len(ids) if ids and isinstance(ids[0], list) else None
    if embeddings:
        nested = embeddings[0] and isinstance(embeddings[0][0], list)
        batches["input_embeds"] = len(embeddings) if nested else None
    if len(set(batches.values())) > 1:
        raise DFlashError(f"{' and '.join(batches)} are not as many prompts: give one of them.")
    return next(iter(batches.values()), None)
