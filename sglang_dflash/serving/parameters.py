"""What a client may write into a request, checked before SGLang reads it.

SGLang checks ranges of sampling parameters, but not their types, and not all that its scheduler
indexes with: a word where a number belongs ends its process, with everybody's requests.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sglang_dflash.errors import DFlashError

_Words = str | list[str] | None


class SamplingFields(BaseModel):
    """Sampling parameters by name, with their types; SGLang checks most ranges."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    max_new_tokens: int | None = None
    stop: _Words = None
    stop_token_ids: list[int] | None = None
    stop_regex: _Words = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    min_new_tokens: int = 0
    n: Annotated[int, Field(ge=1)] = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    custom_params: dict[str, Any] | None = None
    stream_interval: Annotated[int, Field(ge=1)] | None = None
    logit_bias: dict[str | int, float] | None = None
    sampling_seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None


def check_types(sampling_params: Any) -> None:
    """Refuses sampling parameters that SGLang would stumble over while it reads them.

    Args:
        sampling_params: of a request as received: None, an object, or one for each of a batch.

    Raises:
        DFlashError: names the parameter and its value.
    """
    for given in sampling_params if isinstance(sampling_params, list) else [sampling_params]:
        if given is None:
            continue
        if not isinstance(given, dict):
            raise DFlashError(
                f"sampling_params {_short(given)} is not an object: give names and values."
            )
        try:
            SamplingFields.model_validate(given)
        except ValidationError as error:
            raise DFlashError(_sentence(error)) from None
        _check_patterns(given.get("stop_regex"))


def _check_patterns(patterns: _Words) -> None:
    for pattern in [patterns] if isinstance(patterns, str) else patterns or []:
        try:
            re.compile(pattern)
        except re.error as error:
            raise DFlashError(
                f"stop_regex {_short(pattern)} is not a regular expression ({error}): correct it."
            ) from None


# Fields that may hold one value for each prompt of a batch.
_BY_PROMPT = (
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "custom_logit_processor",
    "session_params",
)


def check_lengths(request: Any) -> None:
    """Refuses lists that are not as long as the batch.

    Args:
        request: SGLang's `GenerateReqInput` as received.

    Raises:
        DFlashError: names the field, its length and that of the batch.
    """
    texts, ids = request.text, request.input_ids
    prompts = 1
    if isinstance(texts, list):
        prompts = len(texts)
    elif texts is None and ids and isinstance(ids[0], list):
        prompts = len(ids)
    for name in _BY_PROMPT:
        value = getattr(request, name)
        if isinstance(value, list) and len(value) != prompts:
            raise DFlashError(
                f"{name} has {len(value)} entries for {prompts} prompts: give one for each, or one for all."
            )


def check_processor(serialized: str | None) -> None:
    """Refuses a custom logit processor that cannot be loaded.

    Raises:
        DFlashError: says why.
    """
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    if serialized is None:
        return
    try:
        CustomLogitProcessor.from_str(serialized)
    except Exception as error:  # whatever a client's bytes make the loader raise
        raise DFlashError(
            f"custom_logit_processor {_short(serialized)} cannot be loaded ({error}): send what "
            "CustomLogitProcessor.to_str() gives."
        ) from None


def check_embeddings(embeddings: list[list[float]] | None, hidden_size: int) -> None:
    """Refuses input embeddings that are not as wide as the model.

    Raises:
        DFlashError: names both widths.
    """
    for row in embeddings or ():
        if len(row) != hidden_size:
            raise DFlashError(
                f"input_embeds has a row of {len(row)} numbers, but the model is {hidden_size} wide: send rows "
                "of that length."
            )


def check_indices(request: Any, sampling: Any, vocab_size: int) -> None:
    """Refuses token ids and counts that lie outside the vocabulary.

    Args:
        request: SGLang's `GenerateReqInput` of one request.
        sampling: its `SamplingParams`.

    Raises:
        DFlashError: names the field and its value, and says what is allowed.
    """
    named = {"input_ids": request.input_ids, "token_ids_logprob": request.token_ids_logprob}
    if sampling.min_new_tokens > 0:  # otherwise an id that no token has never ends a request
        named["stop_token_ids"] = sampling.stop_token_ids
    for name, ids in named.items():
        wrong = [token for token in ids or () if not 0 <= token < vocab_size]
        if wrong:
            raise DFlashError(
                f"{name} has the token id {wrong[0]}, which is not between 0 and {vocab_size - 1}: leave it out."
            )
    if not 0 <= (request.top_logprobs_num or 0) <= vocab_size:
        raise DFlashError(
            f"top_logprobs_num {request.top_logprobs_num} is not between 0 and {vocab_size}: choose one that is."
        )
    if (request.logprob_start_len or 0) < -1:
        raise DFlashError(
            f"logprob_start_len {request.logprob_start_len} is below -1, which means the output alone: give a position."
        )


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    name = first["loc"][0]
    what = {"extra_forbidden": "is not a sampling parameter: leave it out"}.get(
        first["type"], f"cannot be read ({first['msg']}): correct it"
    )
    value = first["input"]
    return f"{name} {_short(value)} {what}."


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"
