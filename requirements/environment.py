"""Make .venv: locked dependencies, the patched SGLang, the overlay. Behind `make setup`.

A stamp inside .venv holds the hash of everything that went in. It is removed before a change and
written after the last one, so a run that was interrupted leaves no stamp, and the next run starts
that environment afresh (uv's cache makes this cheap).
"""

import argparse
import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from patches import checkout, pack
from patches.pin import QueueError, load_pin

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
PYTHONS = ((3, 11), (3, 12))


def digest(*parts: str | Path) -> str:
    """One hash over texts and file contents."""
    data = [part.read_bytes() if isinstance(part, Path) else part.encode() for part in parts]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in data)).hexdigest()


def run(*command: str | Path, failure: str, **keywords) -> None:
    if subprocess.run([str(part) for part in command], **keywords).returncode:
        raise QueueError(f"{failure}; then run `make setup` again, it continues from there.")


def check_machine() -> None:
    version = sys.version_info[:2]
    if version not in PYTHONS:
        raise QueueError(
            f"{sys.executable} is Python {version[0]}.{version[1]}, but 3.11 or 3.12 is needed: "
            "install one, or name it with `make setup PYTHON=…`."
        )
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise QueueError(
            f"the locks are for Linux on x86_64, not {sys.platform} on {platform.machine()}: "
            "use such a machine or a container."
        )


def bootstrap(build: Path) -> Path:
    """The folder of programs of a small environment with uv and wheel, made when needed."""
    home = build / "bootstrap"
    stamp = home / "stamp"
    key = digest(LOCKS / "bootstrap.lock", platform.python_version())
    if stamp.is_file() and stamp.read_text() == key:
        return home / "bin"
    print("Installing uv, which installs the rest …", flush=True)
    run(
        *(sys.executable, "-m", "venv", "--clear", home),
        failure=f"{sys.executable} cannot make an environment: install its venv module "
        "(python3-venv on Debian and Ubuntu)",
    )
    run(
        *(home / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--require-hashes", "-r", LOCKS / "bootstrap.lock"),
        failure="pip could not install requirements/bootstrap.lock: see its message above",
    )
    stamp.write_text(key)
    return home / "bin"


def uv_environment(python: Path) -> dict[str, str]:
    """uv reads no pip configuration, so a mirror that the user set for pip is passed on."""
    env = os.environ | {"UV_PYTHON_DOWNLOADS": "never"}
    index = env.get("PIP_INDEX_URL")
    for key in ("install.index-url", "global.index-url"):
        command = [str(python), "-m", "pip", "config", "get", key]
        index = index or subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if index:
        env.setdefault("UV_DEFAULT_INDEX", index)
    return env


def install_dependencies(
    venv: Path, lock: Path, references: Path, programs: Path, fresh: bool
) -> None:
    env = uv_environment(programs / "python")
    uv = programs / "uv"
    if fresh:
        run(
            *(uv, "venv", "--quiet", "--clear", "--python", sys.executable, venv),
            failure=f"uv could not make {venv}: see its message above",
            env=env,
        )
    print(f"Installing {lock.name} (about 3 GB to download the first time) …", flush=True)
    # Only a terminal can show progress. Byte code is compiled once here, not by each of the
    # server's processes at its first start.
    options = ["--require-hashes", "--no-build", "--compile-bytecode"]
    options += [] if sys.stderr.isatty() else ["--quiet"]
    run(
        *(uv, "pip", "sync", "--python", venv / "bin/python", *options, lock, references),
        failure=f"uv could not install {lock.relative_to(ROOT)}: see its message above",
        env=env,
    )


def install_code(venv: Path, places: checkout.Places, programs: Path, dev: bool) -> None:
    """Install the patched SGLang as a wheel (dev: as a path to build/sglang), and the overlay."""
    command = [programs / "python", "-m", "patches", "--build", places.build, "pack"]
    command += ["--editable"] if dev else []
    failure = "the patched SGLang could not be packed: see the message above"
    run(*command, failure=failure, cwd=ROOT, stdout=subprocess.DEVNULL)
    wheel = pack.target(places, dev)
    install = [programs / "uv", "pip", "install", "--python", venv / "bin/python", "--no-deps"]
    install += ["--quiet", "--offline", "--no-build-isolation", "--compile-bytecode"]
    failure = "uv could not install the patched SGLang and the overlay: see its message above"
    run(*install, "--reinstall", wheel, "--editable", ROOT, failure=failure)


def set_up(accel: str, dev: bool, venv: Path, places: checkout.Places) -> str:
    check_machine()
    pin = load_pin(places.pin)
    lock, references = LOCKS / f"{accel}.lock", LOCKS / "references.lock"
    if not dev and places.checkout.exists():
        try:
            checkout.apply(places)  # notices edits that the installed wheel does not have
        except QueueError as error:
            raise QueueError(f"{error} Or add DEV=1, which runs the checkout as it is.") from None
    keys = {
        "dependencies": digest(lock, references, sys.version, accel, Path(__file__)),
        "code": digest(places.pin, ROOT / "pyproject.toml", f"{ROOT} {places.build} {dev}"),
    }
    stamp = venv / "sglang-dflash.json"
    done = json.loads(stamp.read_text()) if stamp.is_file() else {}
    if done == keys:
        return f"{venv} is up to date ({accel}, sglang {pin.local_version})"
    programs = bootstrap(places.build)
    if not places.checkout.exists():
        print(f"Unpacking and patching sglang {pin.version} …", flush=True)
        checkout.apply(places)
    stamp.unlink(missing_ok=True)
    if done.get("dependencies") != keys["dependencies"]:
        install_dependencies(venv, lock, references, programs, fresh=not done)
    install_code(venv, places, programs, dev)
    stamp.write_text(json.dumps(keys))
    return f"{venv} is ready ({accel}, sglang {pin.local_version})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accel", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--dev", action="store_true", help="run build/sglang as it is, no wheel")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    arguments = parser.parse_args()
    places = checkout.Places(ROOT / "patches", arguments.build.resolve())
    places.build.mkdir(parents=True, exist_ok=True)
    try:
        with (places.build / "setup.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two targets at once must not mix their steps
            print(set_up(arguments.accel, arguments.dev, arguments.venv.absolute(), places))
    except QueueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
