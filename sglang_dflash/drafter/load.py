"""The draft model, loaded beside the target."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING

from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.server_args import set_global_server_args_for_scheduler

from sglang_dflash.checkpoint.formats.zlab import ARCHITECTURE
from sglang_dflash.checkpoint.load import load_config
from sglang_dflash.checkpoint.release_folder import release_folder
from sglang_dflash.checkpoint.target_class import language_model
from sglang_dflash.drafter.model import DFlashDraftModel
from sglang_dflash.gpu.fp8 import least_elements

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


def load_draft_model(
    server_args: ServerArgs,
    target_worker: TpModelWorker,
    ranks: dict,
    req_to_token_pool: ReqToTokenPool,
) -> ModelRunner:
    """Loads the drafter over the target's slots (same allocator).

    Args:
        ranks: this process's, by SGLang's names.
        req_to_token_pool: the table that the drafter's attention backend reads.
    """
    target = target_worker.model_runner
    args = draft_server_args(server_args, target)
    config = load_config(
        server_args.speculative_draft_model_path, server_args.speculative_draft_model_revision
    )
    if config.quantization:
        logger.info(
            "DFLASH reads the drafter's weights, which are quantized, as those of %s.", args.dtype
        )
    ModelRegistry.models[ARCHITECTURE] = DFlashDraftModel
    _, allocator = target_worker.get_memory_pool()
    try:
        with release_folder(config, target.model_config.context_len) as folder:
            args.speculative_draft_model_path = str(folder)
            draft = TpModelWorker(
                server_args=args,
                is_draft_worker=True,
                req_to_token_pool=req_to_token_pool,
                token_to_kv_pool_allocator=allocator,
                memory_pool_config=target.memory_pool_config,
                **ranks,
            ).model_runner
    finally:
        # A model runner makes its own arguments the process's; the scheduler needs the user's.
        set_global_server_args_for_scheduler(server_args)
    draft.model.finish_loading(language_model(target.model))
    if (least := least_elements(server_args)) is not None:
        draft.model.run_in_fp8(least)
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
    args.enable_lora, args.lora_paths = False, None  # adapters are the target's
    args.enable_weights_cpu_backup = args.enable_draft_weights_cpu_backup = (
        False  # see set_aside.py
    )
    args.skip_tokenizer_init = True
    args.attention_backend = (
        server_args.speculative_draft_attention_backend or server_args.attention_backend
    )
    args.prefill_attention_backend = args.decode_attention_backend = None
    args.speculative_draft_attention_backend = None
    return args
