"""How long a request may be, said before it is queued.

SGLang knows the context's limit where requests arrive, and the KV pool's only in the scheduler, which
cuts an answer short without a word. Both are made one limit, which is where requests arrive, in
`/v1/models` and in `/server_info`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.managers.tp_worker import TpModelWorker

# A prompt may not be longer than the longest request less so many tokens: SGLang's own margin.
_INPUT_MARGIN = 5


def bound_requests(target_worker: TpModelWorker) -> None:
    """Makes the scheduler's limit one that a request alone in the pool can reach.

    SGLang counts prompts in whole pages when it admits them, so a request that fills the pool to the
    last token can wait for ever.
    """
    runner = target_worker.model_runner
    longest = runner.max_token_pool_size - (runner.page_size - 1)
    target_worker.max_req_len = min(target_worker.max_req_len, longest - 1)
    target_worker.max_req_input_len = target_worker.max_req_len - _INPUT_MARGIN


def advertise_limit(manager: TokenizerManager, scheduler_info: dict[str, Any]) -> None:
    """Makes the scheduler's limit the one that SGLang checks requests against and tells clients.

    Args:
        manager: with `--tokenizer-worker-num` above 1 one of each worker, and first what stands before them, which
            checks nothing.
        scheduler_info: what the scheduler said of itself when it was ready; gets `max_model_len`.
    """
    limit = scheduler_info["max_req_input_len"] + _INPUT_MARGIN + 1
    scheduler_info["max_model_len"] = limit
    if (config := getattr(manager, "model_config", None)) is not None:
        manager.context_len = config.context_len = limit
