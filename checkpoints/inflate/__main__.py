"""The command: python -m checkpoints.inflate --shape qwen3-8b --out DIR."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmark.options import number
from benchmark.shapes import SHAPES, TINY, plain_shapes
from checkpoints.inflate.pair import inflate
from sglang_dflash.errors import DFlashError

_EPILOG = """OUT/target and OUT/drafter are then served as any pair:
  make serve MODEL=OUT/target DRAFT=OUT/drafter
The target must be of the shape's kind: Qwen3ForCausalLM, or LlamaForCausalLM for llama-3.1-8b.
docs/inflated-pairs.md says how it is done and what it can show.
example: python -m checkpoints.inflate --shape qwen3-8b --out /tmp/qwen3-8b"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 with one sentence on stderr."""
    args = _parser().parse_args(arguments)
    torch.set_num_threads(1)  # more wait for each other over pieces of few megabytes
    drafters = args.drafter or [TINY / "drafter"]
    try:
        lines = inflate(
            *(SHAPES[args.shape], args.shape, args.target, drafters, args.out, args.seed),
            noises=list(dict.fromkeys(args.noise or [0.0])),
        )
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m checkpoints.inflate",
        description="Writes a trained small pair into the shape of a large one: it costs what the large one costs, and "
        "answers, drafts and accepts as the small one does.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", required=True, choices=plain_shapes(), help="of the large pair")
    add("--out", required=True, type=Path, metavar="DIR", help="new folders are made in it")
    add(
        "--target",
        type=Path,
        metavar="DIR",
        default=TINY / "target",
        help="small target; default: the bundled one",
    )
    add(
        "--drafter",
        type=Path,
        metavar="DIR",
        action="append",
        help="small drafter; may be given several times, and each gets a folder of its name; default: the bundled one",
    )
    add(
        "--noise",
        type=number(0, 100),
        metavar="X",
        action="append",
        help="of the drafters' weights, which are multiplied by 1 + X × normal numbers: such a drafter is right less "
        "often. May be given several times, and each gets a folder DRAFTER-noise-X; default: 0, which is none",
    )
    add("--seed", type=int, default=0, help="of the random weights, and of noise; default: 0")
    return parser


if __name__ == "__main__":
    sys.exit(main())
