"""Write the locks from the .in files and the overrides. Behind `make lock`."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

# Resolved for Python 3.11; hashes of every file of a release are taken, so that 3.12 installs from
# the same locks. No configuration is read and no index is written: the locks name none.
OPTIONS = (
    "--quiet --no-config --no-header --no-annotate --no-emit-index-url --generate-hashes "
    "--python-platform x86_64-manylinux_2_28 --python-version 3.11 --no-emit-package sglang"
).split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uv", required=True)
    arguments, options = parser.parse_known_args()
    uv = str(Path(arguments.uv).resolve())  # whatever folder it runs in
    # Local find-links folders would put builds that nobody else has into the locks.
    env = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
    for name in ("bootstrap", "cpu", "cuda", "references"):
        command = [uv, "pip", "compile", *OPTIONS, *options, f"{name}.in"]
        if name == "references":
            command += ["--no-deps"]
        elif name != "bootstrap":
            for overrides in ("overrides.txt", f"overrides-{name}.txt"):
                command += ["--override", overrides]
        command += ["--output-file", f"{name}.lock"]
        done = subprocess.run(command, cwd=FOLDER, env=env, stdout=subprocess.DEVNULL)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
