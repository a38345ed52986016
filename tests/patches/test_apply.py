"""fetch, apply, unapply: what they do, what they refuse, and what repairs them."""

import os

import pytest

import patches.checkout
from patches.pin import QueueError
from tests.patches.fake_release import git


def test_apply_makes_one_commit_a_patch(queue):
    git(queue.checkout, "reset", "-q", "--hard", "upstream")
    assert "applied 2 patches" in queue.good("apply")
    subjects = git(queue.checkout, "log", "--format=%B", "upstream..HEAD")
    assert "Subject: First change" in subjects and "Subject: Second change" in subjects
    assert f'series_tree = "{queue.head_tree()}"' in (queue.patches / "pin.toml").read_text()
    text = (queue.checkout / "sglang/a.py").read_text()
    assert "line_5 = 55\n" in text and "line_20 = 0\n" in text


def test_commit_hashes_are_the_same_everywhere(queue, monkeypatch):
    first = git(queue.checkout, "rev-parse", "HEAD")
    queue.checkout.rename(queue.folder / "elsewhere")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "somebody")
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2001-01-01T00:00:00")
    queue.good("apply")
    assert git(queue.checkout, "rev-parse", "HEAD") == first


def test_apply_twice_does_nothing(queue):
    path = queue.checkout / "sglang/a.py"
    os.utime(path, (1, 1))
    assert "already applied" in queue.good("apply")
    assert path.stat().st_mtime == 1


def test_apply_after_unapply(queue):
    after = queue.head_tree()
    queue.good("unapply")
    assert git(queue.checkout, "rev-parse", "HEAD", "upstream").split()[0] in git(
        queue.checkout, "rev-parse", "upstream"
    )
    assert "line_5 = 5\n" in (queue.checkout / "sglang/a.py").read_text()
    queue.good("apply")
    assert queue.head_tree() == after


@pytest.mark.parametrize("command", ["apply", "unapply", "refresh"])
@pytest.mark.parametrize("name", ["sglang/a.py", "sglang/new.py"])
def test_uncommitted_work_is_refused_and_kept(queue, command, name):
    (queue.checkout / name).write_text("mine")
    assert "uncommitted changes" in queue.refused(command)
    assert (queue.checkout / name).read_text() == "mine"


def test_byte_code_is_not_a_change(queue):
    (queue.checkout / "sglang/__pycache__").mkdir()
    (queue.checkout / "sglang/__pycache__/a.pyc").write_text("")
    assert "already applied" in queue.good("apply")


@pytest.mark.parametrize("command", ["apply", "unapply"])
def test_commits_that_no_patch_holds_are_not_lost(queue, command):
    queue.commit("Third change", "sglang/b.py", "b = 1", "b = 2")
    head = git(queue.checkout, "rev-parse", "HEAD")
    assert "make refresh" in queue.refused(command)
    assert git(queue.checkout, "rev-parse", "HEAD") == head


def test_a_changed_series_is_applied_again(queue):
    """As after a pull: the checkout holds the old series, the files the new one."""
    old = queue.files()
    queue.commit("Third change", "sglang/b.py", "b = 1", "b = 2")
    queue.good("refresh")
    new = queue.files()
    for files in (old, new):
        for path in queue.patches.iterdir():
            path.unlink()
        for name, data in files.items():
            (queue.patches / name).write_bytes(data)
        queue.good("apply")
        subjects = git(queue.checkout, "log", "--format=%H", "upstream..HEAD").split()
        assert len(subjects) == len(files) - 2  # without series and pin.toml


def test_interrupted_unpack_is_repaired(empty_queue, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(patches.checkout, "checked_tip", interrupt)
        with pytest.raises(KeyboardInterrupt):
            empty_queue.run("apply")
    assert not empty_queue.checkout.exists()
    # A process that was killed could not even remove its folder.
    (empty_queue.folder / "build/.unpack-killed/sglang").mkdir(parents=True)
    empty_queue.good("apply")
    assert [path.name for path in (empty_queue.folder / "build").glob(".unpack-*")] == []


def test_interrupted_move_is_finished(queue):
    head = git(queue.checkout, "rev-parse", "HEAD").strip()
    queue.good("unapply")
    (queue.checkout / ".git/dflash-moving-to").write_text(head)
    (queue.checkout / ".git/index.lock").write_text("")
    (queue.checkout / "sglang/a.py").write_text("half writ")
    assert "already applied" in queue.good("apply")
    assert git(queue.checkout, "status", "--porcelain") == ""


def test_a_damaged_download_is_not_used(empty_queue, monkeypatch):
    (wheel,) = (empty_queue.folder / "build/download").glob("*.whl")
    good = wheel.read_bytes()
    wheel.write_bytes(good[:-1])

    def download(requirement, folder):
        assert "--hash=sha256:" in requirement
        (folder / wheel.name).write_bytes(good + b"x")
        return folder / wheel.name

    monkeypatch.setattr("patches.upstream.download", download)
    assert "sha256" in empty_queue.refused("fetch")
    monkeypatch.setattr(
        "patches.upstream.download",
        lambda _, folder: (folder / wheel.name).write_bytes(good) and folder / wheel.name,
    )
    assert str(wheel) in empty_queue.good("fetch")
    assert wheel.read_bytes() == good


def test_wrong_upstream_tree_is_refused(empty_queue):
    empty_queue.edit("pin.toml", 'upstream_tree = "', 'upstream_tree = "0')
    assert "upstream_tree" in empty_queue.refused("apply")
    assert not empty_queue.checkout.exists()


def test_a_folder_that_is_no_checkout_is_refused(empty_queue):
    empty_queue.checkout.mkdir(parents=True)
    assert "not a checkout" in empty_queue.refused("apply")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('version = "1.0"\n', "", "has no `version`"),
        ("max_changed_lines = 20", 'max_changed_lines = "20"', "must be a int"),
        ("files = ", "fields = ", "has no `files`"),
        ("files = ", "x = 1\nfiles = ", "unknown key `x`"),
        ("files = ", "files == ", "not valid TOML"),
    ],
)
def test_a_wrong_pin_is_refused(empty_queue, old, new, message):
    empty_queue.edit("pin.toml", old, new)
    assert message in empty_queue.refused("apply")


def test_git_missing(queue, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(QueueError, match="git is not installed"):
        patches.checkout.Repo(queue.checkout).git("status")
