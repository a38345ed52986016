"""Commands that need pip or wheel: rebase and pack."""

import email
import os
import re
import shutil
import subprocess
import zipfile

import pytest

from tests.patches.fake_release import NUMBERS, RELEASE, ROOT, make_wheel


def run(queue, python, *command, **env):
    places = ["--patches", queue.patches, "--build", queue.folder / "build"]
    done = subprocess.run(
        [python, "-m", "patches", *places, *command],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def offline(queue):
    """pip's settings for an index that holds releases 1.0, 1.1 and 2.0 only."""
    index = queue.folder / "index"
    make_wheel(index, "1.1", RELEASE | {"sglang/a.py": "# new line\n" + NUMBERS})
    make_wheel(index, "2.0", RELEASE | {"sglang/a.py": NUMBERS.replace("line_5 ", "other ")})
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}


def test_rebase_reports_each_patch_and_changes_no_patch(queue, tool_python, offline):
    before, tree = queue.files(), queue.head_tree()
    status, output, _ = run(queue, tool_python, "rebase", "1.1", **offline)
    assert status == 0
    assert output.splitlines()[:2] == [
        "applies         0001-first-change.patch (hunks at other lines: 1)",
        "applies         0002-second-change.patch (hunks at other lines: 1)",
    ]
    assert output.splitlines()[-1].startswith("2 of 2 patches apply to sglang 1.1. Next: put ")
    status, output, _ = run(queue, tool_python, "rebase", "2.0", **offline)
    first, second, *_, last = output.splitlines()
    assert status == 1
    assert first == ("does not apply  0001-first-change.patch: patch failed: sglang/a.py:3")
    assert second == "applies         0002-second-change.patch"
    assert last.startswith("1 of 2 patches apply to sglang 2.0. Next: commit the other 1 by hand")
    assert (queue.files(), queue.head_tree()) == (before, tree)


@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_the_pin_moves_as_the_last_line_of_rebase_says(queue, tool_python, offline, version):
    _, output, _ = run(queue, tool_python, "rebase", version, **offline)
    *_, values, last = output.strip().split("\n\n")
    trial = queue.folder / "build/rebase/sglang"
    assert f"put {trial} in the place of {queue.checkout}" in last
    shutil.rmtree(queue.checkout)
    trial.rename(queue.checkout)
    if version == "2.0":  # one does not apply
        queue.commit("First change", "sglang/a.py", "other = 5", "other = 55")
    pin = (queue.patches / "pin.toml").read_text()
    for line in values.splitlines()[1:]:
        name = line.split(" = ")[0]
        pin = re.sub(rf"(?m)^{name} = .*$", line, pin)
    (queue.patches / "pin.toml").write_text(pin)
    queue.good("refresh")
    assert "2 patches" in queue.good("check")
    assert "already applied" in queue.good("apply")


def test_rebase_on_an_unknown_release(queue, tool_python, offline):
    status, _, errors = run(queue, tool_python, "rebase", "9.9", **offline)
    assert status == 1
    assert errors.startswith("error: pip could not download sglang==9.9: No matching distribution")


def test_fetch_refuses_another_wheel_of_the_same_name(queue, tool_python, offline):
    (wheel,) = (queue.folder / "build/download").glob("*.whl")
    wheel.unlink()
    make_wheel(queue.folder / "index", "1.0", {"sglang/__init__.py": "other"})
    status, _, errors = run(queue, tool_python, "fetch", **offline)
    assert status == 1 and errors.count("\n") == 1
    assert "pip could not download sglang==1.0" in errors
    assert not wheel.exists()


def test_pack(queue, tool_python):
    status, output, errors = run(queue, tool_python, "pack")
    assert status == 0, errors
    with zipfile.ZipFile(output.strip()) as wheel:
        info = "sglang-1.0+dflash.1.dist-info"
        metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
        assert metadata["Version"] == "1.0+dflash.1"
        assert metadata["Requires-Dist"] is None
        assert "Version: not this one" in metadata.get_payload()
        assert b"line_5 = 55\n" in wheel.read("sglang/a.py")
        assert b"sglang/a.py,sha256=" in wheel.read(f"{info}/RECORD")


def test_pack_editable(queue, tool_python):
    status, output, errors = run(queue, tool_python, "pack", "--editable")
    assert status == 0, errors
    with zipfile.ZipFile(output.strip()) as wheel:
        assert wheel.read("sglang_checkout.pth").decode() == f"{queue.checkout}\n"
        assert "sglang/a.py" not in wheel.namelist()
