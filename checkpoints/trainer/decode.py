"""Greedy decoding of a batch, plainly and speculatively; both must give the same tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from .drafter import Drafter
from .target import KVCache, Target
from .tokenizer import END_ID, PAD_ID

# Positions of a batch, prompts and answers together: 2 GB of keys and values in float32.
BATCH_POSITIONS = 1 << 19


@dataclass
class Decoded:
    """One row's completion, its <|im_end|> included, and the tokens each verify step committed."""

    tokens: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)

    def commit(self, tokens: list[int], limit: int) -> None:
        """Append what fits, up to the first <|im_end|>."""
        if END_ID in tokens:
            tokens = tokens[: tokens.index(END_ID) + 1]
        tokens = tokens[: limit - len(self.tokens)]
        self.tokens += tokens
        self.committed.append(len(tokens))

    def finished(self, limit: int) -> bool:
        return self.tokens[-1] == END_ID or len(self.tokens) == limit


@dataclass
class State:
    """Where a batch stands: `start` int64 [B] is the bonus token's position."""

    cache: KVCache
    start: Tensor
    bonus: Tensor  # int64 [B], produced but not yet run
    outputs: list[Tensor]  # each layer's output for the prompts, [B, longest prompt, hidden]


def prefill(target: Target, prompts: list[list[int]], room: int) -> State:
    """Run right-padded prompts and leave `room` more positions in the cache."""
    device = target.embed_tokens.weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    longest = int(lengths.max())
    ids = torch.full((len(prompts), longest), PAD_ID)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    ids, lengths = ids.to(device), lengths.to(device)
    cache = KVCache(target.shape, len(prompts), longest + room, target.embed_tokens.weight)
    outputs = target(ids, cache=cache)
    last = outputs[-1][torch.arange(len(prompts), device=device), lengths - 1]
    return State(cache, lengths, target.logits(last).argmax(-1), outputs)


def in_batches(
    decode: Callable[[list[list[int]]], list[Decoded]], prompts: list[list[int]], limit: int
) -> list[Decoded]:
    """Decode prompts of about one length together, as many as memory is meant for."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    results: list[Decoded] = [Decoded()] * len(prompts)
    while order:
        rows = max(1, BATCH_POSITIONS // (len(prompts[order[-1]]) + limit))
        chosen, order = order[-rows:], order[:-rows]
        decoded = decode([prompts[index] for index in chosen])
        for index, result in zip(chosen, decoded, strict=True):
            results[index] = result
    return results


def greedy(target: Target, prompts: list[list[int]], limit: int) -> list[Decoded]:
    """Plain decoding, one token a step; finished rows idle until the last one is done."""
    return in_batches(lambda some: _greedy(target, some, limit), prompts, limit)


def speculative(
    target: Target, drafter: Drafter, prompts: list[list[int]], limit: int
) -> list[Decoded]:
    """DFlash decoding: propose a block, verify it in one target pass, commit what agrees."""
    return in_batches(lambda some: _speculative(target, drafter, some, limit), prompts, limit)


@torch.inference_mode()
def _greedy(target: Target, prompts: list[list[int]], limit: int) -> list[Decoded]:
    state = prefill(target, prompts, room=limit)
    steps = [state.bonus]
    done = state.bonus == END_ID
    while len(steps) < limit and not done.all():
        positions = state.start[:, None] + len(steps) - 1
        outputs = target(steps[-1][:, None], positions, state.cache)
        steps.append(target.logits(outputs[-1][:, 0]).argmax(-1))
        done |= steps[-1] == END_ID
    results = [Decoded() for _ in prompts]
    for result, tokens in zip(results, torch.stack(steps, 1).tolist(), strict=True):
        result.commit(tokens, limit)
    return results


@torch.inference_mode()
def _speculative(
    target: Target, drafter: Drafter, prompts: list[list[int]], limit: int
) -> list[Decoded]:
    block = drafter.shape.block_size
    state = prefill(target, prompts, room=limit + block)
    capacity = state.cache.slots.numel()
    context = drafter.tap(state.outputs)
    context = F.pad(context, (0, 0, 0, capacity - context.shape[1]))
    results = [Decoded([token]) for token in state.bonus.tolist()]
    slots = torch.arange(block, device=context.device)
    while not all(result.finished(limit) for result in results):
        drafts = drafter(target, state.bonus[:, None], state.start[:, None], context)[:, 0]
        proposal = torch.cat((state.bonus[:, None], drafts.argmax(-1)), dim=1)  # [B, block]
        positions = state.start[:, None] + slots
        outputs = target(proposal, positions, state.cache)
        best = target.logits(outputs[-1]).argmax(-1)  # [B, block]
        accepted = (proposal[:, 1:] == best[:, :-1]).cumprod(1).sum(1)
        taps = drafter.tap(outputs)
        context.scatter_(1, positions[..., None].expand_as(taps), taps)
        running = commit(results, best.tolist(), accepted.tolist(), limit)
        # A finished row stands still, so that it never outgrows the cache.
        advance = (accepted + 1) * torch.tensor(running, device=accepted.device)
        state.bonus = torch.where(advance > 0, best.gather(1, accepted[:, None])[:, 0], state.bonus)
        state.start = state.start + advance
    return results


def commit(
    results: list[Decoded], best: list[list[int]], accepted: list[int], limit: int
) -> list[bool]:
    """Append each unfinished row's accepted tokens and its bonus; True for rows that go on."""
    for result, tokens, count in zip(results, best, accepted, strict=True):
        if not result.finished(limit):
            result.commit(tokens[: count + 1], limit)
    return [not result.finished(limit) for result in results]
