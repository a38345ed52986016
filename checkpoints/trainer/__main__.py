"""Makes the tiny pair from nothing: data, tokenizer, target, drafter, measurements.

python -m checkpoints.trainer --out checkpoints/tiny
"""

import argparse
import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch

from . import checkpoint, rows, tokenizer
from .decode import greedy
from .drafter import Drafter, DraftShape
from .evaluate import accuracy, evaluate, prompts_of
from .modules import Shape, initialize
from .problems import Problem, generate, write_jsonl
from .target import Target
from .training import Batches, DraftTraining, answer_all, train_drafter, train_target

SAMPLE_PROBLEMS = 2000
TOKENIZER_PROBLEMS = 12_000
# The drafter is chosen on the last held-out problems and reported on the first.
CHOICE_PROBLEMS = 100
REPORT_PROBLEMS = 200


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("checkpoints/tiny"))
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problems", type=int, default=120_000, help="training problems")
    parser.add_argument("--held-out", type=int, default=1000, help="held-out problems")
    parser.add_argument("--answers", type=int, default=30_000, help="of these, for the drafter")
    parser.add_argument("--target-steps", type=int, default=3500)
    parser.add_argument("--target-batch", type=int, default=128)
    parser.add_argument("--drafter-steps", type=int, default=3000, help="at most")
    parser.add_argument("--drafter-batch", type=int, default=64)
    parser.add_argument("--accept-length", type=float, default=8.0, help="where to stop")
    return parser.parse_args()


def make_batches(
    args: argparse.Namespace, text: tokenizer.Tokenizer, problems: list[Problem], size: int
) -> Batches:
    short, long = rows.build(text, problems, args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    return Batches(short.to(args.device), long.to(args.device), size, generator)


def main() -> None:
    args = parse_arguments()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    weights_seed = torch.Generator().manual_seed(args.seed)

    train = list(islice(generate("train", args.seed), args.problems))
    held_out = list(islice(generate("held-out", args.seed), args.held_out))
    write_jsonl(args.out / "data" / "train.jsonl", train[:SAMPLE_PROBLEMS])
    write_jsonl(args.out / "data" / "test.jsonl", held_out)
    lines = (line for p in train[:TOKENIZER_PROBLEMS] for line in (p.question, p.answer))
    text = tokenizer.train(lines)
    tokenizer.save(text, args.out / "target")

    target = Target(Shape())
    initialize(target, weights_seed)
    target.to(args.device)
    train_target(target, make_batches(args, text, train, args.target_batch), args.target_steps)
    # From here on the target is what its bf16 files will hold.
    target = checkpoint.rounded(target)
    checkpoint.save_target(target, args.out / "target")
    right = accuracy(text, held_out, greedy(target, prompts_of(text, held_out)))
    print(f"target: {right:.1%} of {len(held_out)} held-out problems right", flush=True)

    drafter = Drafter(DraftShape())
    initialize(drafter, weights_seed)
    drafter.to(args.device)
    answered = answer_all(target, text, train[: args.answers])
    drafter, history = train_drafter(
        drafter,
        target,
        make_batches(args, text, answered, args.drafter_batch),
        prompts_of(text, held_out[-CHOICE_PROBLEMS:]),
        DraftTraining(goal=args.accept_length, max_steps=args.drafter_steps),
    )
    checkpoint.save_drafter(drafter, target.shape.num_layers, args.out / "drafter")
    report(args, target, drafter, text, held_out, right, history)


def report(
    args: argparse.Namespace,
    target: Target,
    drafter: Drafter,
    text: tokenizer.Tokenizer,
    held_out: list[Problem],
    right: float,
    history: list[tuple[int, float]],
) -> None:
    """Measure in both dtypes and write measured.json."""
    first = held_out[:REPORT_PROBLEMS]
    reports = [
        asdict(evaluate(target.to(dtype=dtype), drafter.to(dtype=dtype), text, first))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    options = {name: value for name, value in vars(args).items() if name != "out"}
    measured = {
        "options": options,
        "torch": torch.__version__,
        "target_accuracy": {"problems": len(held_out), "accuracy": right},
        "drafter_accept_length_by_step": history,
        "reports": reports,
    }
    (args.out / "measured.json").write_text(json.dumps(measured, indent=1) + "\n")
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
