"""A draft checkpoint as the release's model loader can open it.

The release lets transformers read a checkpoint's config.json. Neither format promises that this works:
speculators' file names no model type, and `auto_map` names code. So the loader gets a folder with a
config.json of its own and links to the weights.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sglang_dflash.checkpoint.formats.config import DraftConfig
from sglang_dflash.checkpoint.formats.zlab import ARCHITECTURE


@contextmanager
def release_folder(config: DraftConfig, context_len: int) -> Iterator[Path]:
    """The folder, while the draft model is loaded from it.

    Args:
        context_len: the target's; the draft model's is the same, whatever its own file says.
    """
    fields = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dflash_checkpoint": str(Path(config.path).resolve()),
        "dflash_context_len": context_len,
        "max_position_embeddings": context_len,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
    }
    with tempfile.TemporaryDirectory(prefix="dflash-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(fields))
        for file in Path(config.path).glob("*.safetensors*"):
            (folder / file.name).symlink_to(file.resolve())
        yield folder
