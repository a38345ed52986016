"""Weights for shapes that have none: outputs vary with the context, and are the same in every server.

What `--load-format dummy` fills with is so small that all logits are about the same. Here the residual ends with an RMS
of about one, whatever the depth; a logit of a token's own embedding in it is about as large as the largest of the
others, so that some tokens are answered again and others are not. A drafter that drafts what its context has most often
is right as often.

Rows of the embedding are of many lengths. Of as many as a vocabulary has, the two largest products would be too near
to each other for kernels that round: with rows of one length, one pair of five is nearer than a tenth of what they
vary, and with these one of fifteen. A long row's token is answered again for certain, a short one's is not.
"""

from __future__ import annotations

import re
import zlib

import torch
from torch import nn

MASK = 3  # token of drafters that stands for none
LENGTHS = 0.3  # standard deviation of the logarithm of a row's length
LOGIT = 1.5  # nat, standard deviation of the logits of a row of length one
# More of it makes more tokens their own successors. At 1.33 those of the rows that give the largest logits are so with
# even chances, of 2,000 rows as of 262,000: the largest logit is 1.33 times the square of that row's length.
REPEAT = 1.33
INWARD = 1.5  # of what reads the residual: attention and MLPs are to be far from their means
ROUTER = 3.0  # the last of the chosen experts weighs little: which that is, rounding may decide
SPREAD = 0.25  # of norms
FIRST = 0.1  # of layer 0 beside the others: its output is tapped, and is to be the token's embedding above all
FP8 = 48.0  # deviation of FP8 values where the matrix they stand for has one of one; the largest is 448
CHUNK = 1 << 27  # elements

OUTWARD = r"\b(o_proj|out_proj|down_proj)\.|\bw2_weight"
ROUTERS = r"\bmlp\.(gate|router)\.weight"


def fill(model: nn.Module, repeat: float = REPEAT) -> None:
    """Stands for SGLang's `initialize_dummy_weights`."""
    modules = dict(model.named_modules())
    name, embedding = next(
        (name, module) for name, module in modules.items() if name.endswith("embed_tokens")
    )
    depth = 1 + max(int(layer) for layer in map(layer_of, modules) if layer)
    filler = Filler(depth, repeat, getattr(embedding, "embed_scale", 1.0))
    for name, module in modules.items():
        for own, weight in module.named_parameters(recurse=False):
            if weight.is_floating_point():
                filler.fill(f"{name}.{own}", own, weight.data, module)
    for name, weight in model.named_parameters():
        if name.endswith("lm_head.weight"):
            weight.data.copy_(embedding.weight.data)


def layer_of(name: str) -> str | None:
    """Index of a layer of the text model, not of a tower of pictures."""
    found = re.search(r"\blayers\.(\d+)\b", name)
    return found[1] if found and "visual" not in name else None


class Filler:
    """
    Attributes:
        sublayer: RMS of what each half of a layer adds to the residual.
        repeat: see REPEAT.
        embed_scale: by which the model multiplies what it reads from its embedding.
    """

    def __init__(self, depth: int, repeat: float, embed_scale: float):
        self.sublayer, self.repeat, self.embed_scale = (2 * depth) ** -0.5, repeat, embed_scale

    def fill(self, name: str, own: str, weight: torch.Tensor, module: nn.Module) -> None:
        """
        Args:
            name: full name of a parameter.
            own: its name in its module.
        """
        generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
        if "embed_tokens" in name:
            self._fill_embedding(weight, generator)
        elif "Norm" in type(module).__name__:
            self._fill_norm(name, own, weight, type(module).__name__, generator)
        elif own.endswith("weight_scale_inv"):
            # Of each block another; the mean of their squares is that of 1 / FP8.
            weight.uniform_(0.5, 1.5, generator=generator).div_(FP8 * (13 / 12) ** 0.5)
        elif own == "A_log":  # with the next: states that forget within 3 to 200 tokens
            weight.uniform_(-4, 0, generator=generator)
        elif own == "dt_bias":
            weight.normal_(-1, 0.5, generator=generator)
        elif own == "sinks":
            weight.normal_(generator=generator)
        elif own.endswith("bias") or weight.dim() < 2:
            weight.normal_(std=0.3 * (self._outward(name) or 1), generator=generator)
        else:
            self._fill_matrix(name, weight, module, generator)

    def _in_layer(self, name: str) -> float:
        return self.sublayer * (FIRST if layer_of(name) == "0" else 1)

    def _outward(self, name: str) -> float | None:
        """RMS of what is added to the residual, if this belongs to what adds to it."""
        return self._in_layer(name) if re.search(OUTWARD, name) else None

    def _fill_embedding(self, weight: torch.Tensor, generator: torch.Generator) -> None:
        """A token's share of a residual with an RMS of one goes with its row's length; its logit with the square."""
        width = weight.shape[1]
        lengths = torch.empty(len(weight), 1, device=weight.device)
        lengths.normal_(std=LENGTHS, generator=generator).exp_()
        for rows, length in zip(chunks(weight), chunks(lengths, width), strict=True):
            rows.normal_(generator=generator)
            rows.mul_(length * (self.repeat * width**-0.5 / self.embed_scale))
        weight[MASK] = 0

    def _fill_norm(
        self, name: str, own: str, weight: torch.Tensor, kind: str, generator: torch.Generator
    ) -> None:
        mean = 1.0
        if re.search(r"\bmodel\.norm\b", name):
            # What it gives, times a row of the head, is to deviate by LOGIT.
            mean = LOGIT * self.embed_scale / self.repeat
        elif kind == "Gemma3RMSNorm" and re.search(r"\bpost_\w+norm\b", name):  # of outputs
            mean = self._in_layer(name)
        weight.uniform_(mean * (1 - SPREAD), mean * (1 + SPREAD), generator=generator)
        if own == "bias":
            weight.zero_()
        elif kind.startswith("Gemma"):  # which add one
            weight.sub_(1)

    def _fill_matrix(
        self, name: str, weight: torch.Tensor, module: nn.Module, generator: torch.Generator
    ) -> None:
        inputs = weight[0].numel()
        if re.search(r"\bw(13|2)_weight$", name):  # of experts
            inputs = weight.shape[1 if getattr(module, "use_triton_kernels", False) else 2]
        gain = self._outward(name) or (ROUTER if re.search(ROUTERS, name) else INWARD)
        std = gain * inputs**-0.5
        for rows in chunks(weight):
            if rows.dtype.itemsize == 1:  # of which torch draws none; see weight_scale_inv
                drawn = torch.empty(rows.shape, device=rows.device, dtype=torch.bfloat16)
                rows.copy_(drawn.normal_(std=std * FP8, generator=generator).clamp_(-448, 448))
            else:
                rows.normal_(std=std, generator=generator)


def chunks(weight: torch.Tensor, width: int | None = None) -> tuple[torch.Tensor, ...]:
    """Rows, of as many elements as may be copied."""
    return weight.split(max(1, CHUNK // (width or weight[0].numel())))
