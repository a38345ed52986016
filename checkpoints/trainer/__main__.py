"""Makes the tiny pair from nothing: data, tokenizer, target, drafters, measurements.

python -m checkpoints.trainer --out checkpoints/tiny
python -m checkpoints.trainer --out DIR --target checkpoints/tiny/target --levels low middle high
"""

import argparse
import json
import random
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from . import checkpoint, corpus, rows, tokenizer, workloads
from .drafter import Drafter, DraftShape
from .evaluate import Answered, answer, measure_drafter, measure_grammar, measure_target
from .modules import Shape, initialize
from .problems import generate, write_jsonl
from .target import Target
from .training import Batches, DraftTraining, train_drafter, train_target

# Accept lengths on `chat` prompts; the folder of each but the bundled one has its name added.
LEVELS = {"low": 2.5, "middle": 4.0, "high": 6.5, "bundled": 8.0}
SAMPLE_PROBLEMS = 500
HELD_OUT_PROBLEMS = 1000
TOKENIZER_ROWS = 8192
# Held-out prompts of each kind that are bundled, and that are measured (as many at most as asked).
BUNDLED = {"chat": 200, "gsm8k": 200, "long-prompt": 64, "reasoning": 64, "json": 64, "tools": 64}
MEASURED = {"chat": 1000, "long-prompt": 64, "reasoning": 64}
# The drafters are chosen on prompts of another seed than those that they are measured on.
CHOICE_SHARE, CHOICE_SEED = 0.5, 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("checkpoints/tiny"))
    parser.add_argument("--target", type=Path, help="draft for this one, and train none")
    parser.add_argument("--levels", nargs="+", choices=tuple(LEVELS), default=["bundled"])
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=180_000, help="training rows")
    parser.add_argument(
        "--layers", type=int, default=Shape.num_layers, help="of the target: 4 or more"
    )
    parser.add_argument("--target-steps", type=int, default=5000)
    parser.add_argument("--target-tokens", type=int, default=65_536, help="of a step")
    parser.add_argument("--drafter-steps", type=int, default=3000, help="at most")
    parser.add_argument("--drafter-tokens", type=int, default=16_384, help="of a step")
    parser.add_argument("--measured", type=int, default=200, help="held-out prompts of a kind")
    parser.add_argument(
        "--kinds", nargs="+", choices=tuple(workloads.MAKERS), default=tuple(workloads.MAKERS)
    )
    args = parser.parse_args()
    if args.layers < 4:
        parser.error(f"--layers is {args.layers}, but must be at least 4: drafters read three")
    return args


def make_target(args: argparse.Namespace) -> tuple[Target, Tokenizer, list[corpus.Pool], Any]:
    """Train a tokenizer and a target, and write both; also the training rows and the losses."""
    rng = random.Random(f"tokenizer:{args.seed}")
    train = list(islice(generate("train", args.seed), TOKENIZER_ROWS // 2))
    lines = [line for p in train for line in (p.question, p.answer)]
    lines += [piece for p in train for piece, _ in rows.row(p, train, rng) if len(piece) < 2000]
    text = tokenizer.train(lines)
    tokenizer.save(text, args.out / "target")
    pools = make_rows(args, text)
    target = Target(Shape(num_layers=args.layers))
    initialize(target, torch.Generator().manual_seed(args.seed))
    target.to(args.device)
    history = train_target(target, batches(args, pools, args.target_tokens), args.target_steps)
    # From here on the target is what its bf16 files will hold.
    target = checkpoint.rounded(target)
    checkpoint.save_target(target, args.out / "target")
    return target, text, pools, history


def make_rows(args: argparse.Namespace, text: Tokenizer) -> list[corpus.Pool]:
    pools = [pool.to(args.device) for pool in corpus.build(text, args.rows, args.seed)]
    sizes = {pool.length: len(pool) for pool in pools}
    print(f"training rows by length: {sizes}", flush=True)
    return pools


def batches(args: argparse.Namespace, pools: list[corpus.Pool], tokens: int) -> Batches:
    return Batches(pools, tokens, torch.Generator().manual_seed(args.seed))


def make_drafters(
    args: argparse.Namespace, target: Target, text: Tokenizer, pools: list[corpus.Pool]
) -> tuple[dict[str, Drafter], list[tuple[int, float]]]:
    """Train one drafter and write it at every level that was asked for."""
    layers = target.shape.num_layers
    # The first layer and the last ones but the very last, which no drafter may read.
    drafter = Drafter(DraftShape(target_layer_ids=(0, layers - 3, layers - 2)))
    initialize(drafter, torch.Generator().manual_seed(args.seed + 1))
    drafter.to(args.device)
    levels = {LEVELS[name]: name for name in args.levels}
    kept: dict[str, Drafter] = {}

    def keep(goal: float, snapshot: Drafter) -> None:
        name = levels[goal]
        kept[name] = snapshot
        folder = "drafter" if name == "bundled" else f"drafter-{name}"
        checkpoint.save_drafter(snapshot, layers, args.out / folder)
        print(f"drafter {name} is kept", flush=True)

    answered = answer(target, text, "chat", max(1, int(CHOICE_SHARE * args.measured)), CHOICE_SEED)
    options = DraftTraining(goals=tuple(levels), max_steps=args.drafter_steps)
    history = train_drafter(
        drafter, target, batches(args, pools, args.drafter_tokens), answered, options, keep
    )
    return kept, history


def write_data(folder: Path, seed: int) -> None:
    """Problems in GSM8K's format, and held-out prompts of the kinds that benchmarks ask."""
    write_jsonl(folder / "train.jsonl", list(islice(generate("train", seed), SAMPLE_PROBLEMS)))
    write_jsonl(folder / "test.jsonl", list(islice(generate("held-out", seed), HELD_OUT_PROBLEMS)))
    for kind, number in BUNDLED.items():
        workloads.write(folder / "workloads" / f"{kind}.jsonl", kind, number)


def measure(
    args: argparse.Namespace, target: Target, text: Tokenizer
) -> tuple[dict[str, Any], dict[str, Answered]]:
    """What the target does with every kind of held-out prompts."""
    measured, answers = {}, {}
    for kind in args.kinds:
        count = args.measured * MEASURED.get(kind, 200) // 200
        answers[kind] = answer(target, text, kind, max(1, count))
        measured[kind] = asdict(measure_target(text, answers[kind]))
        print(f"target: {kind} {measured[kind]}", flush=True)
    return measured, answers


def measure_level(target: Target, drafter: Drafter, answers: dict[str, Answered]) -> dict[str, Any]:
    """What a drafter does with the same prompts."""
    measured = {}
    for kind, answered in answers.items():
        measured[kind] = asdict(measure_drafter(target, drafter, answered))
        short = {name: value for name, value in measured[kind].items() if name != "histogram"}
        print(f"    {kind} {short}", flush=True)
    return measured


def main() -> None:
    args = parse_arguments()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    options = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
    measured: dict[str, Any] = {"options": options, "torch": torch.__version__}
    cuda = args.device.startswith("cuda")
    measured["device"] = torch.cuda.get_device_name() if cuda else "CPU"

    def save() -> None:
        (args.out / "measured.json").write_text(json.dumps(measured, indent=1) + "\n")

    if args.target is None:
        write_data(args.out / "data", args.seed)
        target, text, pools, measured["target_losses"] = make_target(args)
    else:
        target, text = checkpoint.load_target(args.target)
        target.to(args.device)
        pools = make_rows(args, text)
    measured["target"], answers = measure(args, target, text)
    save()
    drafters, measured["accept_length_by_step"] = make_drafters(args, target, text, pools)
    measured["drafters"] = {}
    for name in sorted(drafters, key=LEVELS.get, reverse=True):
        print(f"drafter {name}:", flush=True)
        measured["drafters"][name] = measure_level(target, drafters[name], answers)
        save()
    measured["grammar"] = measure_grammar(target, text, args.measured)
    print(f"target: grammar {measured['grammar']}", flush=True)
    save()
    if "bundled" in drafters and "chat" in answers:
        in_bfloat16 = target.bfloat16(), drafters["bundled"].bfloat16()
        answered = answer(in_bfloat16[0], text, "chat", len(answers["chat"].ids))
        measured["bfloat16"] = {
            "target": {"chat": asdict(measure_target(text, answered))},
            "bundled": measure_level(*in_bfloat16, {"chat": answered}),
        }
        save()


if __name__ == "__main__":
    main()
