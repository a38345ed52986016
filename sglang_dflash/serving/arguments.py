"""Server arguments of DFLASH: defaults, derivations, refusals."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import torch

from sglang_dflash.checkpoint.formats.config import DraftConfig
from sglang_dflash.checkpoint.formats.weights import check_weights
from sglang_dflash.checkpoint.load import load_config
from sglang_dflash.checkpoint.target_class import check_model, has_linear_attention
from sglang_dflash.errors import DFlashError, end_with_the_sentence
from sglang_dflash.serving.adapters import check_lora_arguments
from sglang_dflash.serving.host_cache import check_host_cache
from sglang_dflash.serving.linear_attention import check_linear_attention, choose_strategy
from sglang_dflash.serving.memory_saver import check_memory_saver
from sglang_dflash.serving.places import check_places

if TYPE_CHECKING:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# Field, the values that switch it off, and why DFLASH does not run with it.
_UNSUPPORTED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("pp_size", (1,), "a drafter needs hidden states of all stages"),
    ("enable_dp_attention", (False,), "batches are not synchronised between data-parallel ranks"),
    ("attn_cp_size", (1,), "a block is not split over ranks"),
    ("disaggregation_mode", ("null",), "draft KV is not transferred"),
    ("hicache_storage_backend", (None,), "it would not hold the draft model's K/V"),
    (
        "enable_mixed_chunk",
        (False,),
        "prompts run in rounds without it, as far as --speculative-dflash-prompt-slowdown allows",
    ),
    ("enable_two_batch_overlap", (False,), "a round is not split"),
    ("enable_double_sparsity", (False,), "verification needs full attention"),
    ("enable_hisparse", (False,), "verification needs full attention"),
    ("enable_pdmux", (False,), "prompts run in rounds without it"),
    (
        "enable_attn_tp_input_scattered",
        (False,),
        "tapped hidden states would be one rank's part",
    ),
    ("moe_a2a_backend", ("none",), "tapped hidden states would be one rank's part"),
    ("dllm_algorithm", (None,), "the target must be autoregressive"),
    ("enable_multi_layer_eagle", (False,), "it belongs to EAGLE"),
    ("speculative_token_map", (None,), "it belongs to EAGLE"),
    ("speculative_eagle_topk", (None, 1), "a block is a chain"),
    ("speculative_accept_threshold_single", (1.0,), "only the target's own choice is accepted"),
    ("speculative_accept_threshold_acc", (1.0,), "only the target's own choice is accepted"),
    ("is_embedding", (False, None), "an embedding model generates nothing"),
    ("encoder_only", (False,), "an encoder generates nothing"),
    ("language_only", (False,), "pictures are embedded by the server that drafts"),
)

# Backends that read K/V of context and block by the block's own rows, not causally.
DRAFT_BACKENDS = ("fa3", "flashinfer", "triton", "torch_native")

# Backends that verify blocks over two pools, of sliding layers and of the others.
TWO_POOL_BACKENDS = ("fa3", "fa4", "triton", "trtllm_mha", "torch_native")

# What --kv-cache-dtype may name beside the model's dtype.
_KV_DTYPES = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


def apply_dflash_arguments(args: ServerArgs) -> None:
    """Checks the arguments and fills in what follows from them; called once they are all parsed.

    Raises:
        DFlashError: one sentence with the flag, its value and what to do.
    """
    end_with_the_sentence()
    _refuse_unsupported(args)
    check_places(args)
    if not args.speculative_draft_model_path:
        raise DFlashError(
            "--speculative-algorithm DFLASH needs --speculative-draft-model-path: give the folder of a DFlash "
            "checkpoint, or its Hugging Face repository id."
        )
    config = load_config(args.speculative_draft_model_path, args.speculative_draft_model_revision)
    _check_against_target(args, config)
    if "dummy" not in (args.speculative_draft_load_format, args.load_format):
        check_weights(config)
    _check_tensor_parallelism(args, config)
    _check_draft_backend(args)
    _check_quantization(args)
    _check_draft_quantization(args)
    _check_attention(args)
    _choose_worker(args)

    args.speculative_num_draft_tokens = block_size(args, config)
    _check_draft_window(args)
    check_lora_arguments(args)
    check_host_cache(args, args.get_model_config())
    check_memory_saver(args)
    _check_prompt_slowdown(args)
    _check_verify(args)
    args.speculative_eagle_topk = 1
    args.speculative_num_steps = args.speculative_num_draft_tokens - 1
    args.disable_piecewise_cuda_graph = True
    linear = has_linear_attention(args.get_model_config())
    choose_strategy(args, linear)
    if linear:
        check_linear_attention(args)


def block_size(args: ServerArgs, config: DraftConfig) -> int:
    """Rows of a block from the two flags that mean it; what the checkpoint asks for by default."""
    given = {
        "--speculative-dflash-block-size": args.speculative_dflash_block_size,
        "--speculative-num-draft-tokens": args.speculative_num_draft_tokens,
    }
    given = {flag: value for flag, value in given.items() if value is not None}
    if len(set(given.values())) > 1:
        both = " and ".join(f"{flag} {value}" for flag, value in given.items())
        raise DFlashError(f"{both} mean the same and differ: give one of them.")
    for flag, value in given.items():
        if not 2 <= value <= config.block_size:
            raise DFlashError(
                f"{flag} {value} is not between 2 and {config.block_size}, the block size that the drafter was "
                "trained for: choose a value in that range or leave it out."
            )
    size = next(iter(given.values()), config.default_width)
    if args.speculative_num_steps not in (None, size - 1):
        raise DFlashError(
            f"--speculative-num-steps {args.speculative_num_steps} does not apply to DFLASH, which drafts a block in "
            "one step: leave it out, and set the width with --speculative-dflash-block-size."
        )
    return size


def _check_draft_window(args: ServerArgs) -> None:
    size, width = args.speculative_dflash_draft_window_size, args.speculative_num_draft_tokens
    if size is not None and size < width:
        raise DFlashError(
            f"--speculative-dflash-draft-window-size {size} is less than the block size {width}: give at least the "
            "block size, or leave it out to let the drafter see all of the context."
        )


def _check_prompt_slowdown(args: ServerArgs) -> None:
    slowdown = args.speculative_dflash_prompt_slowdown
    if not 0 <= slowdown < float("inf"):
        raise DFlashError(
            f"--speculative-dflash-prompt-slowdown {slowdown} is not a part of a round's time: give 0 or more, as 0.5 "
            "for rounds that take half as long again."
        )


def _check_verify(args: ServerArgs) -> None:
    asked = args.speculative_dflash_verify
    if asked not in ("all", "auto"):
        raise DFlashError(
            f"--speculative-dflash-verify {asked} does not exist: choose auto, for the rows that pay, or all, for "
            "every row of every block."
        )


def _refuse_unsupported(args: ServerArgs) -> None:
    for field, off, why in _UNSUPPORTED:
        value = getattr(args, field, off[0])
        if value not in off:
            given = f"--{field.replace('_', '-')}" + ("" if value is True else f" {value}")
            raise DFlashError(f"{given} is not supported with DFLASH ({why}): leave it out.")


def _check_draft_quantization(args: ServerArgs) -> None:
    """By default the release gives the drafter the target's, which is no wish for it."""
    asked = args.speculative_draft_model_quantization
    if asked in (None, "unquant", args.quantization):
        return
    flag = f"--speculative-draft-model-quantization {asked}"
    if asked != "fp8":
        raise DFlashError(
            f"{flag} is not supported with DFLASH: choose fp8, or unquant for a drafter as it is stored, or leave it "
            "out."
        )
    if args.device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        raise DFlashError(f"{flag} cannot run here, because this GPU has no FP8: leave it out.")


def _check_against_target(args: ServerArgs, config: DraftConfig) -> None:
    target = args.get_model_config()
    check_model(config, target, args.model_path, "--model-path")
    if target.is_hybrid_swa:
        _check_two_pools(args)


def _check_two_pools(args: ServerArgs) -> None:
    """Other backends read sliding layers' K/V where the other layers have theirs, or verify without windows."""
    for backend in args.get_attention_backends():
        if backend not in TWO_POOL_BACKENDS:
            raise DFlashError(
                f"--attention-backend {backend} cannot verify with {args.model_path}, whose sliding layers keep K/V in "
                f"a pool of their own: choose one of {', '.join(TWO_POOL_BACKENDS)}, or add "
                "--disable-hybrid-swa-memory."
            )


def _check_tensor_parallelism(args: ServerArgs, config: DraftConfig) -> None:
    tp_size, kv_heads = args.tp_size, config.num_key_value_heads
    splits = config.num_attention_heads % tp_size == 0 and config.intermediate_size % tp_size == 0
    if not splits or max(kv_heads, tp_size) % min(kv_heads, tp_size):
        raise DFlashError(
            f"--tp-size {tp_size} does not divide the drafter's {config.num_attention_heads} heads, {kv_heads} KV "
            f"heads and intermediate size {config.intermediate_size}: choose a --tp-size that does."
        )


def _check_draft_backend(args: ServerArgs) -> None:
    """The drafter uses its own flag, else the backend with which the target decodes."""
    backend = args.speculative_draft_attention_backend or args.attention_backend
    if (
        args.device == "cuda"
        and backend not in DRAFT_BACKENDS
        and not args.speculative_draft_attention_backend
    ):
        # What the target decodes with need not run the drafter, whose rounds in graphs have attention of their own.
        args.speculative_draft_attention_backend = backend = "triton"
    if backend not in DRAFT_BACKENDS:
        flag = (
            "speculative-draft-attention-backend"
            if args.speculative_draft_attention_backend
            else "attention-backend"
        )
        raise DFlashError(
            f"--{flag} {backend} cannot run the drafter, whose attention is not causal: set "
            f"--speculative-draft-attention-backend to one of {', '.join(DRAFT_BACKENDS)}."
        )


def _check_attention(args: ServerArgs) -> None:
    """What computes attention in CUDA graphs; by default it is chosen when they are captured."""
    asked = args.speculative_dflash_attention
    if asked == "auto":
        return
    from sglang_dflash.gpu.choose_attention import BACKEND, CHOICES, FA3, TRITON, why_not_fa3

    flag = f"--speculative-dflash-attention {asked}"
    if asked not in CHOICES:
        raise DFlashError(f"{flag} does not exist: choose one of {', '.join(CHOICES)}.")
    if asked != BACKEND and args.device != "cuda":
        raise DFlashError(f"{flag} needs a GPU: leave it out.")
    if asked == TRITON and _has_latents(args):
        raise DFlashError(
            f"{flag} does not read the latents of MLA that {args.model_path} keeps: choose fa3, backend or auto."
        )
    if asked == FA3:
        if args.get_model_config().attention_chunk_size:
            raise DFlashError(
                f"{flag} does not know chunks of the context, to which layers of {args.model_path} attend: choose "
                "triton or auto."
            )
        dtype = args.get_model_config().dtype
        kv_dtype = _KV_DTYPES.get(args.kv_cache_dtype, dtype)
        if why := why_not_fa3(torch.cuda.get_device_capability(), dtype, kv_dtype):
            raise DFlashError(f"{flag} cannot run here, because {why}: choose triton or auto.")


def _check_quantization(args: ServerArgs) -> None:
    """Whether the release runs a quantized target here, before it loads the weights."""
    target = args.get_model_config()
    if target.quantization is None:
        return
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import _get_quantization_config

    try:
        _get_quantization_config(target, LoadConfig())
    except DFlashError:
        raise
    except Exception as reason:
        text = " ".join(str(reason).split()).rstrip(".")
        dtype = _dtype_that_runs(target, LoadConfig())
        do = f"add --dtype {dtype}" if dtype else "use another checkpoint, or another GPU"
        raise DFlashError(
            f"--model-path {args.model_path} is quantized as {target.quantization}, which SGLang does not run here "
            f"({text}): {do}."
        ) from reason


def _dtype_that_runs(target: ModelConfig, load: LoadConfig) -> str | None:
    """As which the release runs a quantized target that it does not run as what it is to be."""
    from sglang.srt.model_loader.loader import _get_quantization_config

    for dtype in (torch.float16, torch.bfloat16):
        other = copy.copy(target)
        other.dtype = dtype
        try:
            _get_quantization_config(other, load)
            return str(dtype).removeprefix("torch.")
        except Exception:
            continue
    return None


def _has_latents(args: ServerArgs) -> bool:
    from sglang.srt.configs.model_config import AttentionArch

    return args.get_model_config().attention_arch == AttentionArch.MLA


def _choose_worker(args: ServerArgs) -> None:
    """The overlapped worker is asked for by two environment variables, as in the reference work."""
    from sglang.srt.environ import envs
    from sglang.srt.utils import get_bool_env_var

    asked = {
        "SGLANG_ENABLE_SPEC_V2": envs.SGLANG_ENABLE_SPEC_V2.get(),
        "SGLANG_ENABLE_DFLASH_SPEC_V2": get_bool_env_var("SGLANG_ENABLE_DFLASH_SPEC_V2"),
    }
    if any(asked.values()) and not all(asked.values()):
        missing = next(name for name, value in asked.items() if not value)
        logger.warning("DFLASH runs without overlap scheduling, because %s=1 is not set.", missing)
    if not all(asked.values()):
        args.disable_overlap_schedule = True
