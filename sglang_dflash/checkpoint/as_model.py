"""`--model-path` of a drafter: serve the model that it names, with it as the drafter."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dflash.checkpoint.formats.speculators import is_speculators, parse_speculators
from sglang_dflash.checkpoint.formats.variants import refuse_variants
from sglang_dflash.errors import DFlashError, end_with_the_sentence

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


def settle_model(args: ServerArgs) -> None:
    """What the model is, before SGLang reads anything of it.

    Raises:
        DFlashError: see `serve_verifier`; or the release cannot serve the target of a drafter.
    """
    serve_verifier(args)
    if args.speculative_algorithm != "DFLASH":
        return
    from sglang.srt.configs.model_config import ModelConfig

    try:
        ModelConfig.from_server_args(args)
    except ValueError as reason:
        end_with_the_sentence()
        text = " ".join(str(reason).split()).rstrip(".")
        raise DFlashError(
            f"--model-path {args.model_path} cannot be served by this SGLang ({text}): change what it names, or use "
            "another checkpoint."
        ) from reason


def serve_verifier(args: ServerArgs) -> None:
    """If the model is a checkpoint in speculators format, makes its verifier the model.

    Flags that the user gave stay as they are.

    Raises:
        DFlashError: the checkpoint is not DFlash, or names no verifier that can be found.
    """
    path = args.model_path
    raw = _config(path, args.revision)
    if raw is None or not is_speculators(raw):
        return
    end_with_the_sentence()
    refuse_variants(path, raw)
    verifier = parse_speculators(path, raw).verifier
    instead = f"give --model-path TARGET --speculative-draft-model-path {path}"
    if verifier is None:
        raise DFlashError(f"--model-path {path} is a drafter that names no verifier: {instead}.")
    if not os.path.isdir(verifier) and not _is_repository(verifier):
        raise DFlashError(
            f"--model-path {path} is a drafter whose verifier {verifier} is not a folder here: {instead}."
        )
    logger.info("%s is a drafter in speculators format; serving its verifier %s", path, verifier)
    args.model_path = verifier
    args.speculative_algorithm = args.speculative_algorithm or "DFLASH"
    if args.speculative_draft_model_path is None:
        args.speculative_draft_model_path = path
        args.speculative_draft_model_revision = args.revision
    args.revision = None  # it was the drafter's


def _config(path: str, revision: str | None) -> dict[str, Any] | None:
    """config.json of a folder or repository; None if there is none, which SGLang finds out itself."""
    file = Path(path) / "config.json"
    if not os.path.exists(path) and _is_repository(path):
        from huggingface_hub import hf_hub_download

        try:
            file = Path(hf_hub_download(path, "config.json", revision=revision))
        except Exception:
            return None
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw, dict) else None


def _is_repository(path: str) -> bool:
    """Whether a path looks like a Hugging Face id."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~"))
