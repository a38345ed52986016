"""Trains the target, lets it answer the training problems, trains the drafter on its answers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm, trange

from .checkpoint import rounded
from .decode import greedy, speculative
from .drafter import Drafter
from .evaluate import accept_length, prompts_of
from .problems import Problem
from .rows import LONG_LENGTH, SHORT_LENGTH, Pool
from .target import Target

MUON_RATE = 0.02
ADAM_RATE = 3e-3
WARMUP_STEPS = 50
# Long rows teach distance; every so many steps one batch of them is enough.
LONG_BATCH_EVERY = 5
PROMPT_WEIGHT = 0.1
DECODE_BATCH = 2048


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
    """Draws batches of the short pool and now and then, at equal token count, of the long one."""

    short: Pool
    long: Pool
    size: int
    generator: torch.Generator

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        is_long = step % LONG_BATCH_EVERY == LONG_BATCH_EVERY - 1
        pool = self.long if is_long else self.short
        size = self.size * SHORT_LENGTH // LONG_LENGTH if is_long else self.size
        rows = torch.randint(len(pool), (max(1, size),), generator=self.generator)
        return pool.batch(rows.to(pool.ids.device))


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def target_loss(target: Target, ids: Tensor, answer: Tensor) -> Tensor:
    """Next-token loss; answers count fully, prompts a little, padding not at all."""
    with autocast(ids.device):
        logits = target.logits(target(ids)[-1][:, :-1])
    labels = ids[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
    padding = torch.cumsum((labels != 0).flip(1), 1).flip(1) == 0
    weights = torch.where(answer[:, 1:], 1.0, PROMPT_WEIGHT).masked_fill(padding, 0.0)
    return (losses * weights.flatten()).sum() / weights.sum()


def train_target(target: Target, batches: Batches, steps: int) -> None:
    """Train in place."""
    optimizer = Optimizer(target, cosine(steps))
    for step in (bar := trange(steps, desc="target", mininterval=5)):
        loss = target_loss(target, *batches(step))
        optimizer.step(loss)
        if step % 100 == 0:
            bar.set_postfix(loss=f"{loss.item():.4f}")


def answer_all(target: Target, tokenizer: Tokenizer, problems: list[Problem]) -> list[Problem]:
    """The same questions with the target's own greedy answers; unfinished ones are left out.

    Raises RuntimeError if the target finishes none: it is then too raw to draft for.
    """
    answered = []
    for start in trange(0, len(problems), DECODE_BATCH, desc="answers", mininterval=5):
        batch = problems[start : start + DECODE_BATCH]
        for problem, result in zip(
            batch, greedy(target, prompts_of(tokenizer, batch)), strict=True
        ):
            if result.finished(limit=len(result.tokens) + 1):
                answered.append(replace(problem, answer=tokenizer.decode(result.tokens)))
    if not answered:
        raise RuntimeError("the target finishes no answer within the limit: train it longer")
    return answered


def sample_anchors(answer: Tensor, count: int) -> Tensor:
    """Int64 [B, count] answer positions with an answer token after them; the first is the first.

    The first answer token is the anchor of every request's first block.
    """
    candidates = (answer & F.pad(answer[:, 1:], (0, 1))).float()
    first = candidates.argmax(1, keepdim=True)
    return torch.cat((first, torch.multinomial(candidates, count - 1, replacement=True)), dim=1)


@dataclass(frozen=True)
class DraftTraining:
    """How the drafter is trained, and the accept length at which training is to stop.

    A saturated drafter of this domain accepts nearly everything; `goal` keeps rejections frequent.
    """

    goal: float = 8.0
    max_steps: int = 3000
    snapshot_every: int = 25
    anchors: int = 8
    decay: float = 7.0


def draft_loss(
    drafter: Drafter, target: Target, ids: Tensor, answer: Tensor, options: DraftTraining
) -> Tensor:
    """Loss of slots 1..block-1 after each anchor, weighted exp(-(k - 1) / decay) in slot k."""
    with autocast(ids.device):
        with torch.no_grad():
            taps = drafter.tap(target(ids))
        anchors = sample_anchors(answer, options.anchors)
        logits = drafter(target, ids.gather(1, anchors), anchors, taps)
    slots = torch.arange(1, drafter.shape.block_size, device=ids.device)
    positions = anchors[..., None] + slots  # [B, A, block - 1]
    inside = positions.clamp(max=ids.shape[1] - 1).flatten(1)
    labels = ids.gather(1, inside)
    in_answer = answer.gather(1, inside).view_as(positions) & (positions < ids.shape[1])
    # A slot counts while the anchor's own answer goes on.
    weights = in_answer.cumprod(-1) * torch.exp((1 - slots) / options.decay)
    losses = F.cross_entropy(logits.flatten(0, 2).float(), labels.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def train_drafter(
    drafter: Drafter,
    target: Target,
    batches: Batches,
    prompts: list[list[int]],
    options: DraftTraining,
) -> tuple[Drafter, list[tuple[int, float]]]:
    """Train until past the goal; return the snapshot closest to it and (step, accept length).

    Snapshots are rounded to bf16 as they will be shipped, and measured on `prompts`.
    """
    optimizer = Optimizer(drafter, constant)
    best, history = rounded(drafter), []
    for step in (bar := tqdm(range(1, options.max_steps + 1), desc="drafter", mininterval=5)):
        loss = draft_loss(drafter, target, *batches(step), options)
        optimizer.step(loss)
        if step % options.snapshot_every:
            continue
        snapshot = rounded(drafter)
        length = accept_length(speculative(target, snapshot, prompts))
        history.append((step, round(length, 3)))
        bar.set_postfix(loss=f"{loss.item():.4f}", accept_length=f"{length:.2f}")
        distance = abs(length - options.goal)
        if distance <= min(abs(past - options.goal) for _, past in history):
            best = snapshot
        if length > options.goal + 1:
            break
    return best, history
