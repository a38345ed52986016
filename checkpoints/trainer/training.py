"""Trains the target, and a drafter on what the target would say."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm, trange

from .checkpoint import rounded
from .corpus import Pool
from .decode import speculative
from .drafter import Drafter
from .evaluate import Answered, accept_length
from .target import Target

MUON_RATE = 0.02
ADAM_RATE = 3e-3
WARMUP_STEPS = 50
PROMPT_WEIGHT = 0.1
# Longer prompts weigh less a token: most of what they say cannot be foreseen.
SHORT_LENGTH = 256
LOG_EVERY = 100


class Optimizer:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms; one schedule."""

    def __init__(self, model: nn.Module, schedule: Callable[[int], float]):
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in named if p.ndim != 2 or "embed" in name]
        self.parameters = matrices + others
        self.parts = [
            torch.optim.Muon(matrices, lr=MUON_RATE),
            torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.schedules = [torch.optim.lr_scheduler.LambdaLR(p, schedule) for p in self.parts]

    def step(self, loss: Tensor) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer, schedule in zip(self.parts, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)


def cosine(steps: int) -> Callable[[int], float]:
    """Linear warm-up, then a cosine to zero."""

    def rate(step: int) -> float:
        progress = min(1.0, step / steps)
        return min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * progress))

    return rate


def constant(step: int) -> float:
    """Linear warm-up, then level, so that training may stop at any step."""
    return min(1.0, (step + 1) / WARMUP_STEPS)


@dataclass(frozen=True)
class Batches:
    """Draws batches of `tokens` tokens from one pool each; every row is as likely as any other."""

    pools: Sequence[Pool]
    tokens: int
    generator: torch.Generator

    def __call__(self) -> tuple[Tensor, Tensor]:
        sizes = torch.tensor([float(pool.ids.numel()) for pool in self.pools])
        pool = self.pools[int(torch.multinomial(sizes, 1, generator=self.generator))]
        count = max(1, self.tokens // pool.length)
        rows = torch.randint(len(pool), (count,), generator=self.generator)
        return pool.batch(rows.to(pool.ids.device))


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def target_loss(target: Target, ids: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
    """Next-token loss, and that of the answers alone.

    Answers count fully, prompts a little, padding not at all.
    """
    with autocast(ids.device):
        logits = target.logits(target(ids)[-1][:, :-1])
    labels = ids[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
    padding = torch.cumsum((labels != 0).flip(1), 1).flip(1) == 0
    prompt_weight = PROMPT_WEIGHT * min(1, SHORT_LENGTH / ids.shape[1])
    said = answer[:, 1:].float().flatten()
    weights = torch.where(answer[:, 1:], 1.0, prompt_weight).masked_fill(padding, 0.0).flatten()
    loss = (losses * weights).sum() / weights.sum()
    return loss, (losses.detach() * said).sum() / said.sum()


def train_target(target: Target, batches: Batches, steps: int) -> list[tuple[int, int, float]]:
    """Train in place; return (step, row length, loss of the answers) now and then."""
    optimizer, history = Optimizer(target, cosine(steps)), []
    recent: dict[int, Tensor] = {}
    for step in (bar := trange(1, steps + 1, desc="target", mininterval=5)):
        ids, answer = batches()
        loss, answer_loss = target_loss(target, ids, answer)
        optimizer.step(loss)
        recent[ids.shape[1]] = answer_loss
        if step % LOG_EVERY == 0:
            losses = {length: round(recent[length].item(), 4) for length in sorted(recent)}
            history += [(step, length, value) for length, value in losses.items()]
            recent.clear()
            bar.write(f"target step {step}: loss of answers by row length {losses}")
    return history


def sample_anchors(answer: Tensor, count: int) -> Tensor:
    """Int64 [B, count] answer positions with an answer token after them; the first is the first.

    The first answer token is the anchor of every request's first block.
    """
    candidates = (answer & F.pad(answer[:, 1:], (0, 1))).float()
    first = candidates.argmax(1, keepdim=True)
    return torch.cat((first, torch.multinomial(candidates, count - 1, replacement=True)), dim=1)


@dataclass(frozen=True)
class DraftTraining:
    """How drafters are trained, and the accept lengths at which one is kept.

    A saturated drafter of this domain accepts nearly everything; goals keep rejections frequent.
    """

    goals: Sequence[float] = (8.0,)
    max_steps: int = 3000
    snapshot_every: int = 10
    anchors: int = 8  # for 256 tokens of a row
    decay: float = 7.0


def draft_loss(
    drafter: Drafter, target: Target, ids: Tensor, answer: Tensor, options: DraftTraining
) -> Tensor:
    """Loss of slots 1..block-1 after each anchor, weighted exp(-(k - 1) / decay) in slot k."""
    with autocast(ids.device):
        with torch.no_grad():
            outputs = target(ids)
            taps = drafter.tap(outputs)
            best = target.logits(outputs[-1]).argmax(-1)
        anchors = sample_anchors(answer, max(2, options.anchors * ids.shape[1] // SHORT_LENGTH))
        logits = drafter(target, ids.gather(1, anchors), anchors, taps)
    # What the target would not have said itself is no prompt of its answers, either.
    agreed = answer & F.pad(best[:, :-1] == ids[:, 1:], (1, 0))
    slots = torch.arange(1, drafter.shape.block_size, device=ids.device)
    positions = anchors[..., None] + slots  # [B, A, block - 1]
    inside = positions.clamp(max=ids.shape[1] - 1).flatten(1)
    labels = ids.gather(1, inside)
    in_answer = agreed.gather(1, inside).view_as(positions) & (positions < ids.shape[1])
    # A slot counts while the anchor's own answer goes on.
    weights = in_answer.cumprod(-1) * torch.exp((1 - slots) / options.decay)
    losses = F.cross_entropy(logits.flatten(0, 2).float(), labels.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum().clamp(min=1)


def train_drafter(
    drafter: Drafter,
    target: Target,
    batches: Batches,
    answered: Answered,
    options: DraftTraining,
    keep: Callable[[float, Drafter], None],
) -> list[tuple[int, float]]:
    """Train past the last goal; return (step, accept length) of every snapshot.

    Snapshots are rounded to bf16 as they will be shipped, and measured on `answered`. `keep` is
    called once for every goal, with the snapshot closest to it.
    """
    optimizer, history = Optimizer(drafter, constant), [(0, 1.0)]
    before, goals = rounded(drafter), sorted(options.goals)
    for step in (bar := tqdm(range(1, options.max_steps + 1), desc="drafter", mininterval=5)):
        loss = draft_loss(drafter, target, *batches(), options)
        optimizer.step(loss)
        if step % options.snapshot_every and step < options.max_steps:
            continue
        snapshot = rounded(drafter)
        drafted = speculative(target, snapshot, answered.ids, answered.limit)
        length = accept_length(drafted)
        bar.set_postfix(loss=f"{loss.item():.4f}", accept_length=f"{length:.2f}")
        while goals and (length >= goals[0] or step == options.max_steps):
            goal = goals.pop(0)
            closer = abs(length - goal) <= abs(history[-1][1] - goal)
            keep(goal, snapshot if closer else before)
        history.append((step, round(length, 3)))
        before = snapshot
        if not goals:
            break
    return history
