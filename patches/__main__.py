"""`python -m patches <command>`; the Makefile has a target for each."""

import argparse
import os
import sys
from pathlib import Path

from patches import check, checkout, pack
from patches.pin import QueueError, load_pin
from patches.upstream import fetch

ROOT = Path(__file__).resolve().parent.parent


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m patches", description=checkout.__doc__)
    parser.add_argument(
        "--patches", type=Path, default=ROOT / "patches", help="folder of pin.toml and series"
    )
    parser.add_argument(
        "--build",
        type=Path,
        default=Path(os.environ.get("BUILD") or ROOT / "build"),
        help="folder for the download and the checkout (default: $BUILD, else build/)",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fetch", help="download the pinned wheel, hash-checked")
    commands.add_parser("apply", help="make build/sglang the patched release")
    commands.add_parser("unapply", help="put build/sglang back on the release as published")
    commands.add_parser("refresh", help="write the commits in build/sglang to the patch files")
    commands.add_parser("check", help="check the whole series")
    rebase = commands.add_parser("rebase", help="try the series on another release")
    rebase.add_argument("version", help="for example 0.5.11")
    wheel = commands.add_parser("pack", help="pack build/sglang into a wheel")
    wheel.add_argument(
        "--editable", action="store_true", help="a wheel that points at build/sglang"
    )
    return parser.parse_args(arguments)


def run(arguments: argparse.Namespace) -> int:
    build = arguments.build.resolve()
    build.mkdir(parents=True, exist_ok=True)
    places = checkout.Places(arguments.patches.resolve(), build)
    match arguments.command:
        case "fetch":
            print(fetch(load_pin(places.pin), places.build))
        case "apply":
            print(checkout.apply(places))
        case "unapply":
            print(checkout.unapply(places))
        case "refresh":
            print(checkout.refresh(places))
        case "check":
            print(check.check(places))
        case "rebase":
            report, good = check.rebase(places, arguments.version)
            print(report)
            return 0 if good else 1
        case "pack":
            print(pack.pack(places, arguments.editable))
    return 0


def main(arguments: list[str] | None = None) -> int:
    try:
        return run(parse_arguments(arguments))
    except QueueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
