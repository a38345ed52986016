"""Quantized checkpoints as plain weights: FP8 drafters, and on a CPU, which has no kernels for them, targets.

A product has its numbers of few bits and what scales them as tensors of their own, under one prefix. Here they become
its weight as it was before, as far as the numbers tell.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig

from sglang_dflash.errors import DFlashError

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

Parts = dict[str, torch.Tensor]

# What only kernels read, of activations that they quantize.
_OF_ACTIVATIONS = {"input_scale", "input_zero_point", "input_global_scale", "act_scale"}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # columns in an int32, the lowest bits first


class Reader(ABC):
    """Reads one layout of quantized products.

    Attributes:
        needs: parts of a product, by their names behind its prefix.
        drops: parts that say nothing of its weight.
    """

    needs: frozenset[str]
    drops: frozenset[str] = frozenset(_OF_ACTIVATIONS)

    @abstractmethod
    def weight(self, parts: Parts) -> torch.Tensor:
        """All of `needs` → [out, in]."""


class _Fp8(Reader):
    """A float8 weight, and a scale of all of it, of each row, or of each block."""

    def __init__(self, block: list[int] | None):
        self._block = block
        self._scale = "weight_scale_inv" if block else "weight_scale"
        self.needs = frozenset(("weight", self._scale))

    def weight(self, parts: Parts) -> torch.Tensor:
        weight, scale = parts["weight"].float(), parts[self._scale].float()
        if self._block:
            for dim, size in enumerate(self._block):
                scale = scale.repeat_interleave(size, dim).narrow(dim, 0, weight.shape[dim])
        elif scale.numel() == len(weight):
            scale = scale.view(-1, 1)
        return weight * scale


class _Awq(Reader):
    """[in, out / 8] int32 of 4 bits each, groups of rows with a scale and a zero."""

    needs = frozenset(("qweight", "qzeros", "scales"))

    def __init__(self, group: int):
        self._group = group

    def weight(self, parts: Parts) -> torch.Tensor:
        q, zeros = (_unpacked(parts[name], 4, _AWQ_ORDER) for name in ("qweight", "qzeros"))
        group = torch.arange(len(q)) // (self._group if self._group > 0 else len(q))
        return ((q - zeros[group]) * parts["scales"].float()[group]).T


class _Gptq(Reader):
    """[in / n, out] int32 of n numbers each, groups of rows with a scale and a zero; rows may be in any group."""

    def __init__(self, bits: int, group: int, in_order: bool, zeros_less_one: bool):
        self._bits, self._group = bits, group
        self._in_order, self._less = in_order, zeros_less_one
        needs = {"qweight", "qzeros", "scales"}
        self.needs = frozenset(needs if in_order else needs | {"g_idx"})
        if in_order:
            self.drops = self.drops | {"g_idx"}

    def weight(self, parts: Parts) -> torch.Tensor:
        q = _unpacked(parts["qweight"].T, self._bits).T
        zeros = _unpacked(parts["qzeros"], self._bits) + self._less
        group = torch.arange(len(q)) // (self._group if self._group > 0 else len(q))
        if not self._in_order:
            group = parts["g_idx"].long()
        return ((q - zeros[group]) * parts["scales"].float()[group]).T


class _CompressedTensors(Reader):
    """What the library of that name reads."""

    def __init__(self, compressor: type[BaseCompressor], scheme: Any):
        self._compressor, self._scheme = compressor, scheme
        self.needs = frozenset(compressor.compression_param_names(scheme)) - self.drops

    def weight(self, parts: Parts) -> torch.Tensor:
        scale = parts["weight_scale"].float()  # whose dtype the weight gets
        return self._compressor.decompress(parts | {"weight_scale": scale}, self._scheme)["weight"]


def _unpacked(packed: torch.Tensor, bits: int, order: Iterable[int] | None = None) -> torch.Tensor:
    """[rows, columns / n] int32 → [rows, columns], n numbers of `bits` bits in each, the lowest first.

    Args:
        order: which column of n each of them is; None for one after the other.
    """
    count = 32 // bits
    numbers = (packed[..., None] >> (bits * torch.arange(count))) & ((1 << bits) - 1)
    if order is not None:
        numbers = numbers[..., torch.tensor(tuple(order)).argsort()]
    return numbers.flatten(-2)


def reader_of(quantization: dict[str, Any], path: str) -> Reader:
    """What reads a checkpoint's products.

    Args:
        quantization: the `quantization_config` of its config.json.
        path: of the checkpoint, as the user calls it.

    Raises:
        DFlashError: a layout that is none of these.
    """
    method = str(quantization.get("quant_method")).lower()
    if method == "fp8":
        return _Fp8(quantization.get("weight_block_size"))
    if method == "awq":
        return _awq(quantization, path)
    if method == "gptq":
        return _gptq(quantization, path)
    if method in ("compressed-tensors", "compressed_tensors"):
        return _compressed_tensors(quantization, path)
    raise _unknown(path, "quant_method", method, "fp8, awq, gptq or compressed-tensors")


def check_drafter(quantization: dict[str, Any], path: str) -> None:
    """Raises `DFlashError` unless a drafter's products are stored in 8 bits that keep their names and shapes."""
    method = str(quantization.get("quant_method")).lower()
    known = method in ("fp8", "compressed-tensors", "compressed_tensors")
    if not known or "weight" not in reader_of(quantization, path).needs:
        raise DFlashError(
            f"quantization_config of {path} has quant_method {method}, and of quantized drafters DFLASH reads those in "
            "FP8 (fp8, or compressed-tensors of 8 bits): use one of these, or one that is not quantized."
        )


def weights_alone(names: Iterable[str], quantization: dict[str, Any], path: str) -> set[str]:
    """Of the names of a drafter's tensors those of weights, not of what scales them."""
    reader = reader_of(quantization, path)
    others = (reader.needs | reader.drops) - {"weight"}
    return {name for name in names if name.rpartition(".")[2] not in others}


def plain_weights(
    weights: Iterable[tuple[str, torch.Tensor]], quantization: dict[str, Any], path: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a checkpoint, those of quantized products as if they were not.

    Args:
        weights, quantization, path: see `reader_of`.

    Raises:
        DFlashError: see `reader_of`; or a product lacks some of its parts.
    """
    reader, waiting = reader_of(quantization, path), {}
    for name, tensor in weights:
        product, _, part = name.rpartition(".")
        if part in reader.drops:
            continue
        plain = part == "weight" and tensor.is_floating_point() and tensor.itemsize > 1
        if plain or part not in reader.needs:
            yield name, tensor
            continue
        parts = waiting.setdefault(product, {})
        parts[part] = tensor
        if parts.keys() == reader.needs:
            yield f"{product}.weight", reader.weight(waiting.pop(product))
    for product, parts in sorted(waiting.items()):
        missing = ", ".join(sorted(reader.needs - parts.keys()))
        raise DFlashError(
            f"{path} misses {missing} of {product}, which its quantization_config asks for: download it again."
        )


def check_target(model: ModelConfig) -> None:
    """Raises `DFlashError` for a quantized target whose weights are not read here; on a CPU all are to be."""
    said = model._parse_quant_hf_config()
    if said is None:
        raise DFlashError(
            f"--quantization {model.quantization} is not supported on a CPU for {model.model_path}, which is not "
            "quantized: leave it out."
        )
    reader_of(said, model.model_path)


def weights_of_target(
    weights: Iterable[tuple[str, torch.Tensor]], model: ModelConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """A quantized target's weights as plain ones."""
    return plain_weights(weights, model._parse_quant_hf_config(), model.model_path)


def _awq(quantization: dict[str, Any], path: str) -> Reader:
    for field, value, known in (
        ("bits", quantization.get("bits", quantization.get("w_bit")), 4),
        ("version", str(quantization.get("version", "gemm")).lower(), "gemm"),
        ("zero_point", quantization.get("zero_point", True), True),
    ):
        if value != known:
            raise _unknown(path, field, value, str(known))
    return _Awq(int(quantization.get("group_size", quantization.get("q_group_size", 128))))


def _gptq(quantization: dict[str, Any], path: str) -> Reader:
    bits, layout = quantization.get("bits"), quantization.get("checkpoint_format", "gptq")
    if bits not in (2, 4, 8):
        raise _unknown(path, "bits", bits, "2, 4 or 8")
    if layout not in ("gptq", "gptq_v2"):
        raise _unknown(path, "checkpoint_format", layout, "gptq or gptq_v2")
    in_order = not quantization.get("desc_act", False)
    return _Gptq(bits, int(quantization.get("group_size", -1)), in_order, layout == "gptq")


def _compressed_tensors(quantization: dict[str, Any], path: str) -> Reader:
    try:
        config = QuantizationConfig.model_validate(quantization)
        compressor = BaseCompressor.get_value_from_registry(config.format)
    except Exception as reason:
        first = str(reason).splitlines()[0]
        raise DFlashError(
            f"quantization_config of {path} cannot be read ({first}): download it again."
        ) from reason
    schemes = list(config.config_groups.values())
    if any(scheme.weights != schemes[0].weights for scheme in schemes):
        raise _unknown(path, "config_groups", f"with {len(schemes)} kinds of weights", "one kind")
    if str(schemes[0].weights.actorder or "").endswith("group"):
        raise _unknown(path, "actorder", "group", "weight, or none")
    return _CompressedTensors(compressor, schemes[0])


def _unknown(path: str, field: str, value: object, known: str) -> DFlashError:
    return DFlashError(
        f"quantization_config of {path} has {field} {value}, and without a GPU's kernels DFLASH reads {known}: use "
        "such a checkpoint, or a GPU."
    )
