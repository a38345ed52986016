"""Which requests are admitted.

What is not served right is refused here with status 400 and one sentence; nothing that a client
asks for is silently ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any

from sglang_dflash.errors import DFlashError
from sglang_dflash.serving.adapters import check_adapter_of_request
from sglang_dflash.serving.by_prompt import fit_to_prompts
from sglang_dflash.serving.declared import short
from sglang_dflash.serving.media import (
    check_media,
    check_places,
    is_of_media,
    media_in,
    media_of,
    unreadable,
)
from sglang_dflash.serving.metrics import refusing
from sglang_dflash.serving.parameters import (
    check_embeddings,
    check_indices,
    check_processor,
    check_session,
    check_types,
)

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_WITHOUT = "leave it out, or start the server without --speculative-algorithm DFLASH"

# Request field, the values that ask for nothing.
_NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
    "return_routed_experts": (None, False),
    "audio_data": (None, []),
}


def check_received(received: Any) -> None:
    """Refuses what cannot be read, before SGLang reads it.

    Raises:
        DFlashError: see `check_types`, `fit_to_prompts` and `check_session`.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    with refusing("unreadable"):
        if isinstance(received, GenerateReqInput):
            check_types(received.sampling_params)
            fit_to_prompts(received)
            check_session(received.session_params)
        split = copy(received)
        with splitting():
            split.normalize_batch_and_arguments()
        if split.is_single and isinstance(split.rid, list):
            raise DFlashError(f"rid {short(split.rid)} is a list: give one for one prompt.")


@contextmanager
def splitting() -> Iterator[None]:
    """Makes a refusal of what SGLang stumbles over while it gives each prompt its part of a request.

    Raises:
        DFlashError: with what it stumbled over.
    """
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise DFlashError(
            f"The request cannot be split into its prompts ({error}): give each field one value, or one for each "
            "prompt."
        ) from error


def check_requests(manager: TokenizerManager, received: Any) -> None:
    """Refuses a request, or a whole batch of them, before SGLang keeps anything of it.

    A request that SGLang refuses while it tokenizes is never forgotten: the server would wait for
    it when it is told to end.

    Raises:
        DFlashError: see `check_request`.
        ValueError: SGLang's own, for a sampling parameter that cannot be.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    if not isinstance(received, GenerateReqInput):
        return
    with refusing("unreadable"), splitting():
        requests = (
            [received] if received.is_single else [received[i] for i in range(received.batch_size)]
        )
    with refusing("unsupported"):
        check_labels(received.custom_labels, manager.server_args)
    for request in requests:
        given = (manager.preferred_sampling_params or {}) | request.sampling_params
        with refusing("sampling_params"):
            sampling = manager.sampling_params_class(**given)
            sampling.normalize(manager.tokenizer)
            sampling.verify(manager.model_config.vocab_size)
        with refusing("out_of_range"):
            if manager.server_args.enable_custom_logit_processor:
                check_processor(request.custom_logit_processor)
            check_embeddings(request.input_embeds, manager.model_config.hidden_size)
            check_indices(request, sampling, manager.model_config.vocab_size)
        with refusing("unsupported"):
            check_request(request, sampling, manager.server_args.enable_deterministic_inference)
            check_media(request, sampling, media_of(manager.model_config))
            check_places(request, manager)
            check_adapter_of_request(request, manager)


def check_labels(labels: dict[str, str] | None, server_args: Any) -> None:
    """Refuses labels of metrics that the metrics do not have, at which SGLang would end.

    Raises:
        DFlashError: names the label.
    """
    known = server_args.tokenizer_metrics_allowed_custom_labels or ()
    for label in labels or ():
        if server_args.enable_metrics and label not in known:
            raise DFlashError(
                f"custom_labels has {label!r}, which the metrics do not have: leave it out, or start the server "
                "with it in --tokenizer-metrics-allowed-custom-labels."
            )


def check_request(request: Any, sampling: Any, deterministic: bool) -> None:
    """Refuses what DFLASH does not serve.

    Args:
        request: SGLang's `GenerateReqInput` of one request.
        sampling: its `SamplingParams`, normalised.
        deterministic: whether the server runs deterministic inference.

    Raises:
        DFlashError: names the field and its value, and says what to do.
    """
    if deterministic and sampling.min_p > 0:
        raise DFlashError(
            f"min_p {sampling.min_p} cannot be drawn with a seed, as deterministic inference does: leave it out, or "
            "start the server without --enable-deterministic-inference."
        )
    for name, neutrals in _NEUTRAL_FIELDS.items():
        value = getattr(request, name, None)
        if value not in neutrals:
            raise DFlashError(f"{name} {short(value)} is not supported with DFLASH: {_WITHOUT}.")


@contextmanager
def forgotten_if_refused(manager: TokenizerManager, received: Any) -> Iterator[None]:
    """Makes SGLang forget what it refuses within this, of a batch also the requests that were good.

    It keeps a state for each request until the scheduler answers, and refuses some after that state
    was made and before the scheduler knows of them, such as a prompt that is too long. Told to end, the
    server would wait for those for ever. So it would for `n` above 1, where each prompt gets a state
    for each copy, and copies get others.

    Raises:
        DFlashError: pictures or videos cannot be read, which the release calls an error of its own.
    """
    batch = isinstance(received.rid, list)
    states = {
        rid: manager.rid_to_state.get(rid) for rid in (received.rid if batch else [received.rid])
    }
    over = batch  # a request alone is sent after this
    try:
        yield
    except (ValueError, RuntimeError) as error:
        over = True
        for rid, state in states.items():
            if state is not None and state.time_stats.api_server_dispatch_time:
                manager.abort_request(rid)  # it was sent, and its end will come
        if is_of_media(error) and media_in(received):
            with refusing("unreadable"):
                raise unreadable(received, error) from error
        raise
    finally:
        for rid, state in states.items() if over else ():
            sent = state is None or state.time_stats.api_server_dispatch_time
            if not sent and manager.rid_to_state.get(rid) is state:  # the id may have a new owner
                del manager.rid_to_state[rid]
