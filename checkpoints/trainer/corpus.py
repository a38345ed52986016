"""Training rows as padded token ids in pools of one length each, made by all cores."""

import os
import random
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from .problems import generate
from .rows import row
from .structured import Segment
from .tokenizer import PAD_ID

LENGTHS = (128, 160, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072)
# Rows of one stream of random numbers; the corpus does not depend on the number of cores.
SHARD_ROWS = 4096

# A row's ids, int16, and which of them are answers, bool.
Encoded = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Pool:
    """Rows of one length on one device: `ids` int16 and `answer` bool, both [rows, length]."""

    ids: Tensor
    answer: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def to(self, device: torch.device) -> "Pool":
        return Pool(self.ids.to(device), self.answer.to(device))

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """ids int64 and answer bool, both [batch, length], of the rows with these indices."""
        return self.ids[rows].long(), self.answer[rows]


def encode(tokenizer: Tokenizer, rows: Sequence[list[Segment]]) -> list[Encoded]:
    """Tokenize the rows, piece by piece."""
    encoded = iter(tokenizer.encode_batch_fast([text for row in rows for text, _ in row]))
    done = []
    for pieces in rows:
        tokens = [next(encoded).ids for _ in pieces]
        marks = [np.full(len(ids), said) for ids, (_, said) in zip(tokens, pieces, strict=True)]
        ids = np.concatenate([np.asarray(ids, dtype=np.int16) for ids in tokens])
        done.append((ids, np.concatenate(marks)))
    return done


def pooled(rows: Iterable[Encoded], lengths: Sequence[int] = LENGTHS) -> list[Pool]:
    """Right-pad each row to the smallest length that holds it; leave out what none holds."""
    groups: dict[int, list[Encoded]] = {length: [] for length in lengths}
    for ids, answer in rows:
        fitting = next((length for length in lengths if len(ids) <= length), None)
        if fitting is not None:
            groups[fitting].append((ids, answer))
    return [_pool(group, length) for length, group in groups.items() if group]


def _pool(rows: list[Encoded], length: int) -> Pool:
    ids = np.full((len(rows), length), PAD_ID, dtype=np.int16)
    answer = np.zeros((len(rows), length), dtype=bool)
    for index, (tokens, marks) in enumerate(rows):
        ids[index, : len(tokens)], answer[index, : len(tokens)] = tokens, marks
    return Pool(torch.from_numpy(ids), torch.from_numpy(answer))


def _shard(tokenizer: str, seed: int, shard: int, rows: int) -> list[Encoded]:
    rng = random.Random(f"rows:{seed}:{shard}")
    # Shard 0 begins with the training problems that are written out.
    problems = list(islice(generate("train", seed + shard * 1_000_003), rows))
    return encode(Tokenizer.from_str(tokenizer), [row(p, problems, rng) for p in problems])


def build(tokenizer: Tokenizer, rows: int, seed: int) -> list[Pool]:
    """About `rows` training rows of all kinds; the same ones whatever the machine."""
    shards = range(-(-rows // SHARD_ROWS))
    cores = min(len(os.sched_getaffinity(0)), len(shards))
    text = tokenizer.to_str()
    # Workers use one thread each, and must not inherit one that CUDA or torch has started.
    with ProcessPoolExecutor(cores, get_context("spawn"), _one_thread) as workers:
        size = min(rows, SHARD_ROWS)
        made = [workers.submit(_shard, text, seed, shard, size) for shard in shards]
        return pooled(row for shard in made for row in shard.result())


def _one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
