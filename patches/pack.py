"""The patched tree as a wheel, under the pin's local version."""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from patches.checkout import Places, load, open_repo
from patches.git import Repo
from patches.pin import Pin, QueueError
from patches.upstream import fetch

METADATA_TO_DROP = ("Requires-Dist:", "Provides-Extra:")


def write_dist_info(wheel: Path, pin: Pin, stage: Path) -> None:
    """Copy the release's dist-info under the local version.

    The release's requirements are left out: requirements/*.lock replaces several of them on
    purpose, and they would only make every check of the environment fail.
    """
    old = f"sglang-{pin.version}.dist-info/"
    new = stage / f"sglang-{pin.local_version}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(old) and not name.endswith(("/", "/RECORD")):
                path = new / name.removeprefix(old)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(name))
    metadata = new / "METADATA"
    head, separator, body = metadata.read_text().partition("\n\n")
    lines = [line for line in head.split("\n") if not line.startswith(METADATA_TO_DROP)]
    lines = [f"Version: {pin.local_version}" if x.startswith("Version:") else x for x in lines]
    metadata.write_text("\n".join(lines) + separator + body)


def target(places: Places, editable: bool = False) -> Path:
    """Where `pack` writes the wheel."""
    pin, _ = load(places, series=False)
    tree = Repo(places.checkout).resolve("HEAD:sglang")
    folder = places.build / "wheels" / ("editable" if editable else tree)
    return folder / f"sglang-{pin.local_version}-py3-none-any.whl"


def pack(places: Places, editable: bool = False) -> Path:
    """Write the wheel to build/wheels/<tree>/ and return its path; needs the package `wheel`.

    editable: the wheel holds only a path to build/sglang, so that edits there count at once.
    """
    pin, _ = load(places, series=False)
    repo = open_repo(places, pin)
    path = target(places, editable)
    if path.exists() and not editable:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        stage = Path(name) / "stage"
        stage.mkdir()
        if editable:
            (stage / "sglang_checkout.pth").write_text(f"{repo.path}\n")
        else:
            archive = Path(name) / "tree.tar"
            repo.git("archive", "--format=tar", f"--output={archive}", "HEAD", "sglang")
            with tarfile.open(archive) as tar:
                tar.extractall(stage, filter="data")
        write_dist_info(fetch(pin, places.build), pin, stage)
        command = [sys.executable, "-m", "wheel", "pack", str(stage), "--dest-dir", name]
        done = subprocess.run(command, capture_output=True, text=True)
        packed = Path(name) / path.name
        if done.returncode or not packed.exists():
            reason = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise QueueError(f"`wheel pack` failed ({reason}): run `make setup` to install wheel.")
        shutil.move(packed, path)
    return path
