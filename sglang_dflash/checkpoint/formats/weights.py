"""Names and shapes of a checkpoint's weights, and what they say beyond its config.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_dflash.checkpoint.formats.config import DraftConfig
from sglang_dflash.errors import DFlashError

if TYPE_CHECKING:
    import torch

Shapes = dict[str, tuple[int, ...]]
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
TO_TARGET, IN_DRAFT = "d2t", "t2d"
# What the training of speculators needs of the verifier; older files hold copies.
_COPIES = ("verifier_lm_head.weight", "verifier_norm.weight")


def canonical_name(name: str) -> str:
    """A weight's name without the `model.` that some writers put in front."""
    return name.removeprefix("model.")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those of its index, or all.

    Raises:
        DFlashError: there is none, or one that the index names is not there.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise DFlashError(
                f"{index} is not an index of safetensors files ({type(error).__name__}): download the checkpoint again."
            ) from error
        absent = [name for name in sorted(names) if not (folder / name).is_file()]
        if absent:
            raise DFlashError(
                f"{folder} misses {_some(absent)}, which its {index.name} names: download the checkpoint again."
            )
        return [folder / name for name in sorted(names)]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DFlashError(f"{folder} has no *.safetensors file: download the checkpoint again.")
    return files


def read_shapes(folder: Path) -> Shapes:
    """Canonical name and shape of every weight, from the headers of the files.

    Raises:
        DFlashError: no files, a file that cannot be read, or a weight that is there twice.
    """
    from safetensors import safe_open

    found: Shapes = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes = {
                    name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()
                }
        except Exception as error:
            raise DFlashError(
                f"{file} cannot be read ({error}): download the checkpoint again."
            ) from error
        for name, shape in shapes.items():
            name = canonical_name(name)
            if name in found:
                raise DFlashError(
                    f"{folder} has {name} twice, the second time in {file.name}: remove the files that do not belong "
                    "to it, or download it again."
                )
            found[name] = shape
    return found


def with_weights(config: DraftConfig, found: Shapes) -> DraftConfig:
    """The config completed by what only the weights tell."""
    other_width = config.hidden_size != config.target_hidden_size
    if config.format == "z-lab":
        own_embedding = EMBEDDING in found
        own_head = HEAD in found or own_embedding and config.tied
    else:
        # Copies of the verifier's, which speculators itself puts back from the verifier.
        own_embedding = other_width
        own_head = other_width or config.reduced_vocabulary and HEAD in found
    return replace(
        config,
        qk_norm=config.qk_norm or any(name.endswith(".q_norm.weight") for name in found),
        own_embedding=own_embedding,
        own_head=own_head,
        tied=own_head and HEAD not in found and config.tied,
    )


def expected_weights(config: DraftConfig) -> Shapes:
    """Name and shape of every weight that is loaded."""
    hidden, taps = config.hidden_size, len(config.target_layer_ids)
    shapes = {
        "fc.weight": (hidden, taps * config.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if config.own_embedding:
        shapes[EMBEDDING] = (config.vocab_size, hidden)
    if config.own_head and not config.tied:
        shapes[HEAD] = (config.draft_vocab_size, hidden)
    for index in range(config.num_hidden_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer_shapes(config).items()}
    return shapes


def _layer_shapes(config: DraftConfig) -> Shapes:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_attention_heads * dim, config.num_key_value_heads * dim
    products = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: Shapes = {f"{name}.weight": shape for name, shape in products.items()}
    for name, (rows, _) in products.items():
        if config.attention_bias if name.startswith("self_attn") else config.mlp_bias:
            shapes[f"{name}.bias"] = (rows,)
    shapes["input_layernorm.weight"] = shapes["post_attention_layernorm.weight"] = (hidden,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (dim,)
    return shapes


def ignored_weights(config: DraftConfig) -> tuple[str, ...]:
    """Names that a checkpoint may have and that are not loaded with the others."""
    if config.format == "z-lab":
        return ()
    copies = (*_COPIES, TO_TARGET, IN_DRAFT)
    copies += () if config.own_embedding else (EMBEDDING,)
    return copies if config.own_head else (*copies, HEAD)


def check_weights(config: DraftConfig) -> None:
    """Compares names and shapes in the safetensors headers with what the config needs.

    Raises:
        DFlashError: lists what is missing, left over or of another shape.
    """
    found = read_shapes(Path(config.path))
    compare_weights(config, found)
    draft_token_ids(config)


def compare_weights(config: DraftConfig, found: Shapes) -> None:
    """Raises `DFlashError` unless `found` is just what `config` needs."""
    expected = expected_weights(config)
    if config.quantization:
        from sglang_dflash.checkpoint.dequantize import weights_alone

        names = weights_alone(found, config.quantization, config.path)
        found = {name: found[name] for name in names}
    missing = expected.keys() - found.keys()
    unexpected = found.keys() - expected.keys() - set(ignored_weights(config))
    if missing or unexpected:
        parts = [f"misses {_some(missing)}"] if missing else []
        parts += [f"has left over {_some(unexpected)}"] if unexpected else []
        raise DFlashError(
            f"{config.path} {' and '.join(parts)}: its weights are not those of its config.json; download it again."
        )
    for name in sorted(expected):
        if found[name] != expected[name]:
            raise DFlashError(
                f"{name} of {config.path} has shape {list(found[name])} where its config.json says "
                f"{list(expected[name])}: download it again."
            )


def draft_token_ids(config: DraftConfig) -> torch.Tensor | None:
    """Target id of each token of a reduced vocabulary: [draft_vocab_size] int64, or None if it is whole.

    Raises:
        DFlashError: the mapping is missing or is not one.
    """
    if not config.reduced_vocabulary:
        return None
    import torch

    tensors = _read_tensors(Path(config.path), (TO_TARGET, IN_DRAFT))
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    offsets, in_draft = tensors.get(TO_TARGET), tensors.get(IN_DRAFT)
    if offsets is None and in_draft is None:
        raise DFlashError(
            f"{config.path} misses d2t, which maps its draft_vocab_size {size} to the vocab_size {vocab_size}: its "
            "weights are not those of its config.json; download it again."
        )
    listed = None if in_draft is None else in_draft.flatten().nonzero().flatten()
    if offsets is None:
        ids = listed
    else:
        ids = offsets.flatten().to(torch.int64) + torch.arange(offsets.numel())
    if len(ids) != size:
        name = IN_DRAFT if offsets is None else TO_TARGET
        raise DFlashError(
            f"{name} of {config.path} has {len(ids)} tokens where its config.json says {size}: download it again."
        )
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        token = int(outside.nonzero()[0])
        raise DFlashError(
            f"d2t of {config.path} maps draft token {token} to {int(ids[token])}, beyond the vocabulary of "
            f"{vocab_size}: the checkpoint is damaged; download it again."
        )
    same = listed is None or torch.equal(ids.sort().values, listed)
    if not same or len(ids.unique()) != size:
        raise DFlashError(
            f"d2t of {config.path} maps two draft tokens to one, or to others than t2d names: the checkpoint is "
            "damaged; download it again."
        )
    return ids


def _read_tensors(folder: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    tensors = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as content:
            for name in content.keys():
                if canonical_name(name) in names:
                    tensors[canonical_name(name)] = content.get_tensor(name)
    return tensors


def _some(names: Iterable[str], limit: int = 4) -> str:
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
