"""What a client may write into a request, checked before SGLang reads it.

SGLang checks ranges of sampling parameters, but not their types, and not all that its scheduler
indexes with: a word where a number belongs ends its process, with everybody's requests.
"""

from __future__ import annotations

import json
import re
from functools import cache
from inspect import signature
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from sglang_dflash.errors import DFlashError
from sglang_dflash.serving.declared import check_body, check_values, short

# Each is a request of its own, which the API server makes before it asks whether there is room.
MOST_COPIES = 4096

# What must be narrower, or may be wider, than the release declares it.
_OTHERWISE: dict[str, Any] = {
    "max_new_tokens": int | None,
    "repetition_penalty": Annotated[float, Field(ge=1e-30)],  # by which logits are divided
    "top_k": Annotated[int, Field(lt=1 << 31)],
    "n": Annotated[int, Field(ge=1, le=MOST_COPIES)],
    "structural_tag": Annotated[str, Field(min_length=1)] | None,
    "stream_interval": Annotated[int, Field(ge=1)] | None,
    "logit_bias": dict[str | int, float] | None,
    "sampling_seed": Annotated[int, Field(ge=0, lt=1 << 63)] | None,
}


@cache
def sampling_fields() -> type[BaseModel]:
    """Sampling parameters by name, with the types that the release declares; it checks most ranges."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    hints = get_type_hints(SamplingParams.__init__)
    return create_model(
        "SamplingFields",
        __config__=ConfigDict(strict=True, extra="forbid"),
        **{
            parameter.name: (
                _OTHERWISE.get(parameter.name, hints[parameter.name]),
                parameter.default,
            )
            for parameter in list(signature(SamplingParams.__init__).parameters.values())[1:]
        },
    )


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
                f"sampling_params {short(given)} is not an object: give names and values."
            )
        check_values(given, sampling_fields())
        _check_patterns(given.get("stop_regex"))


def _check_patterns(patterns: str | list[str] | None) -> None:
    for pattern in [patterns] if isinstance(patterns, str) else patterns or []:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise DFlashError(
                f"stop_regex {short(pattern)} is not a regular expression ({error}): correct it."
            ) from None


def check_session(session_params: Any) -> None:
    """Refuses session parameters that SGLang's scheduler would stumble over.

    Args:
        session_params: of one request as received.

    Raises:
        DFlashError: names the parameter and its value.
    """
    from sglang.srt.managers.io_struct import SessionParams

    if session_params is not None:
        check_body(
            json.dumps(session_params).encode(), SessionParams, "session_params", closed=True
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
            f"custom_logit_processor {short(serialized)} cannot be loaded ({error}): send what "
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
