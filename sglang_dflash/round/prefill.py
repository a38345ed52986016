"""Prompts: the target runs them, and their hidden states become context of the draft model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_dflash.drafter.context_kv import write_context
from sglang_dflash.drawing.not_finite import NOT_FINITE
from sglang_dflash.drawing.ranks import agreed
from sglang_dflash.round.parts import Parts
from sglang_dflash.round.state import ends_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ModelWorkerBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


def prefill(
    parts: Parts, target_worker: TpModelWorker, batch: ModelWorkerBatch
) -> GenerationBatchResult:
    """Runs prompts, or a chunk of one, and draws their first bonus tokens.

    Tokens that the radix cache gave are not run: their draft KV lies under the same slots as
    their target KV, from the request that computed them.
    """
    penalizer = parts.penalties.start(batch.reqs, batch.req_pool_indices)
    if penalizer is not None:
        batch.sampling_info = replace(batch.sampling_info, penalizer_orchestrator=penalizer)
    result = target_worker.forward_batch_generation(batch)
    wait_for_host(parts.target.runner)
    output = result.logits_output
    if output.taps is not None:  # a graph has written the context itself
        write_context(parts.draft.runner, output.taps, extend_positions(batch), batch.out_cache_loc)
        output.taps = None  # the result lives until the host has seen it; they need not
    result.next_token_ids = agreed(result.next_token_ids)
    result.next_token_ids.masked_fill_(output.not_finite, NOT_FINITE)
    # Both are read until the result is there.
    result.ends, result.rope_deltas = ends_of(batch.reqs), rope_deltas(parts, batch)
    parts.state.start(
        batch.req_pool_indices,
        result.next_token_ids,
        batch.seq_lens,
        result.ends,
        result.rope_deltas,
    )
    if penalizer is not None:
        tokens = result.next_token_ids.to(torch.int64)[:, None]
        parts.penalties.count(batch.req_pool_indices, tokens, torch.ones_like(tokens[:, 0]))
    result.launched = batch  # whose tensors are read until the result is there
    return result


def wait_for_host(target: ModelRunner) -> None:
    """Lets what is launched next wait for all K/V, of both models, that the present prompts get from the host.

    The release's attention waits for each of the target's layers; graphs, and the draft model, do not.
    """
    counter = getattr(target.token_to_kv_pool, "layer_transfer_counter", None)
    if counter is not None:
        counter.wait_until(counter.num_layers - 1)


def rope_deltas(parts: Parts, batch: ModelWorkerBatch) -> torch.Tensor | None:
    """For `RequestState.start`: [bs] int64 on the host, 0 without pictures; None for a target without M-RoPE."""
    if parts.state.rope_deltas is None:
        return None
    inputs = batch.multimodal_inputs or [None] * len(batch.reqs)
    deltas = [
        0 if each is None else int(each.mrope_position_delta.flatten()[-1]) for each in inputs
    ]
    made = torch.tensor(deltas)
    return made.pin_memory() if torch.cuda.is_available() else made


def extend_positions(batch: ModelWorkerBatch) -> torch.Tensor:
    """Position of every token that a prefill batch runs: [sum of extend_seq_lens] int64."""
    spans = zip(batch.extend_prefix_lens, batch.extend_seq_lens, strict=True)
    positions = torch.cat([torch.arange(prefix, prefix + length) for prefix, length in spans])
    return positions.to(batch.input_ids.device, non_blocking=True)
