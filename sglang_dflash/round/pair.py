"""Draft model and target together: prefill, and a round as its four stages."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.server_args import set_global_server_args_for_scheduler

from sglang_dflash.checkpoint.formats.zlab import ARCHITECTURE
from sglang_dflash.checkpoint.load import load_config
from sglang_dflash.checkpoint.release_folder import release_folder
from sglang_dflash.drafter.context_kv import write_context
from sglang_dflash.drafter.model import DFlashDraftModel
from sglang_dflash.drafter.vocabulary import BorrowedVocabulary
from sglang_dflash.drawing.not_finite import NOT_FINITE, padding
from sglang_dflash.drawing.sampling import Sampling
from sglang_dflash.gpu.fa3_attention import can_capture
from sglang_dflash.gpu.kernels.accept import accept_and_advance
from sglang_dflash.round.accept import Accepted, accept
from sglang_dflash.round.block_model import BlockModel
from sglang_dflash.round.commit import commit_context
from sglang_dflash.round.draft_window import DraftWindow, WindowedModel
from sglang_dflash.round.opened import Round
from sglang_dflash.round.propose import propose
from sglang_dflash.round.startup_check import check_draft_model
from sglang_dflash.round.state import RequestState
from sglang_dflash.round.verify import GreedyHead, TappedHead, head_of, verify
from sglang_dflash.scheduler.width import widths
from sglang_dflash.serving.metrics import NO_GRAPH, SAMPLING, metrics

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ModelWorkerBatch
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.server_args import ServerArgs

    from sglang_dflash.round.graphs import RoundGraphs

logger = logging.getLogger(__name__)


class DraftTargetPair:
    """Both models over one set of KV slots; what the workers share."""

    def __init__(self, server_args: ServerArgs, target_worker: TpModelWorker, ranks: dict):
        self.target_worker = target_worker
        pool = target_worker.model_runner.req_to_token_pool
        self.window = draft_window(server_args, pool)
        runner = load_draft_model(server_args, target_worker, ranks, self.window)
        self.draft = WindowedModel(runner, self.window) if self.window else BlockModel(runner)
        self.target = BlockModel(target_worker.model_runner)
        self.req_to_token = pool.req_to_token
        self.context_len = target_worker.model_config.context_len
        self.state = RequestState(pool.size, self.req_to_token.device)
        vocabulary = BorrowedVocabulary(self.target.runner.model)
        self.head = GreedyHead(vocabulary)
        width = server_args.speculative_num_draft_tokens
        check_draft_model(self.draft.runner, vocabulary, width)
        padding.watch(self.target.runner, self.draft.runner)
        self.graphs = self._capture_graphs(server_args)

    def prefill(self, batch: ModelWorkerBatch) -> GenerationBatchResult:
        """Runs prompts (or a chunk of one) and turns their hidden states into draft context.

        Tokens that the radix cache gave are not run: their draft KV lies under the same slots as
        their target KV, from the request that computed them.
        """
        model = self.target.runner.model
        tapped = TappedHead(model.logits_processor)
        with head_of(model, tapped):
            result = self.target_worker.forward_batch_generation(batch)
        write_context(
            self.draft.runner, tapped.hidden_states, extend_positions(batch), batch.out_cache_loc
        )
        result.next_token_ids.masked_fill_(tapped.not_finite, NOT_FINITE)
        self.state.start(batch.req_pool_indices, result.next_token_ids, batch.seq_lens)
        return result

    def round(
        self,
        rows: torch.Tensor,
        start_bounds: torch.Tensor,
        width: int,
        sampling: Sampling | None = None,
    ) -> tuple[Accepted, LogitsProcessorOutput | None]:
        """One round over the requests at `rows` ([bs] int64); see `Round` and `verify`."""
        padding.clean()
        if self.graphs is not None:
            key = self.graphs.key(start_bounds, width) if sampling is None else None
            if key is not None:
                return self.graphs.replay(key, rows), None
            metrics.rounds.fell_back(NO_GRAPH if sampling is None else SAMPLING)
        round = Round.open(
            self.state, rows, start_bounds, width, self.req_to_token, self.context_len
        )
        return self.stages(round, self.draft, self.target, sampling)

    def stages(
        self, round: Round, draft: BlockModel, target: BlockModel, sampling: Sampling | None = None
    ) -> tuple[Accepted, LogitsProcessorOutput | None]:
        """propose → verify → accept → commit, without a wait between them."""
        draft_tokens = propose(draft, round)
        verified = verify(target, self.head, round, draft_tokens, sampling)
        if round.rows.is_cuda:
            accepted = accept_and_advance(verified.tokens, draft_tokens, round.rows, self.state)
        else:
            accepted = accept(verified.tokens, draft_tokens)
            self.state.advance(round.rows, accepted)
        commit_context(draft.runner, round, verified)
        return accepted, verified.output

    def _capture_graphs(self, server_args: ServerArgs) -> RoundGraphs | None:
        if self.req_to_token.device.type != "cuda" or server_args.disable_cuda_graph:
            return None
        from sglang_dflash.round.graphs import RoundGraphs, sizes_to_capture

        if not all(can_capture(model.runner) for model in (self.draft, self.target)):
            logger.warning(
                "DFLASH runs without CUDA graphs, which need fa3 attention, without MLA, for the target and the "
                "drafter and a KV cache in the target's dtype: set --attention-backend fa3."
            )
            return None
        sizes = sizes_to_capture(server_args.cuda_graph_bs, self.state.padding_row)
        return RoundGraphs(self, sizes, widths(server_args))


def draft_window(server_args: ServerArgs, whole: ReqToTokenPool) -> DraftWindow | None:
    """What `--speculative-dflash-draft-window-size` asks for."""
    size = server_args.speculative_dflash_draft_window_size
    if size is None:
        return None
    return DraftWindow(size, server_args.speculative_num_draft_tokens, server_args.page_size, whole)


def load_draft_model(
    server_args: ServerArgs, target_worker: TpModelWorker, ranks: dict, window: DraftWindow | None
) -> ModelRunner:
    """Loads the drafter beside the target, over the target's slots (same allocator)."""
    target = target_worker.model_runner
    args = draft_server_args(server_args, target)
    config = load_config(
        server_args.speculative_draft_model_path, server_args.speculative_draft_model_revision
    )
    ModelRegistry.models[ARCHITECTURE] = DFlashDraftModel
    req_to_token_pool, allocator = target_worker.get_memory_pool()
    try:
        with release_folder(config, target.model_config.context_len) as folder:
            args.speculative_draft_model_path = str(folder)
            draft = TpModelWorker(
                server_args=args,
                is_draft_worker=True,
                req_to_token_pool=window.pool if window else req_to_token_pool,
                token_to_kv_pool_allocator=allocator,
                memory_pool_config=target.memory_pool_config,
                **ranks,
            ).model_runner
    finally:
        # A model runner makes its own arguments the process's; the scheduler needs the user's.
        set_global_server_args_for_scheduler(server_args)
    draft.model.finish_loading(target.model)
    if window is not None:
        window.narrow(draft.model)
    return draft


def draft_server_args(server_args: ServerArgs, target: ModelRunner) -> ServerArgs:
    """The user's arguments as the drafter's model runner must see them."""
    args = copy.copy(server_args)
    # These are about the target's checkpoint.
    args.context_length = args.revision = args.speculative_draft_model_revision = None
    args.json_model_override_args = "{}"
    args.dtype = str(target.model_config.dtype).removeprefix("torch.")
    args.kv_cache_dtype = "auto"
    args.speculative_draft_model_quantization = None
    args.trust_remote_code = False
    args.skip_tokenizer_init = True
    args.attention_backend = (
        server_args.speculative_draft_attention_backend or server_args.attention_backend
    )
    args.prefill_attention_backend = args.decode_attention_backend = None
    args.speculative_draft_attention_backend = None
    return args


def extend_positions(batch: ModelWorkerBatch) -> torch.Tensor:
    """Position of every token that a prefill batch runs: [sum of extend_seq_lens] int64."""
    spans = zip(batch.extend_prefix_lens, batch.extend_seq_lens, strict=True)
    positions = torch.cat([torch.arange(prefix, prefix + length) for prefix, length in spans])
    return positions.to(batch.input_ids.device, non_blocking=True)
