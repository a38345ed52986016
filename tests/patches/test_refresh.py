"""refresh: commits to patch files, the same bytes for the same commits."""

import pytest

from tests.patches.fake_release import HEADER, git


def test_refresh_changes_nothing_when_nothing_changed(queue):
    before = queue.files()
    assert sorted(before) == [
        "0001-first-change.patch",
        "0002-second-change.patch",
        "pin.toml",
        "series",
    ]
    queue.good("refresh")
    assert queue.files() == before
    queue.good("unapply")
    queue.good("apply")
    queue.good("refresh")
    assert queue.files() == before


def test_refresh_ignores_the_users_git_configuration(queue, monkeypatch):
    before = queue.files()
    config = queue.folder / "gitconfig"
    for key, value in {
        "diff.noprefix": "true",
        "diff.context": "1",
        "diff.algorithm": "patience",
        "color.ui": "always",
        "core.abbrev": "5",
        "commit.gpgSign": "true",
        "core.autocrlf": "true",
    }.items():
        git(queue.folder, "config", "--file", str(config), key, value)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    queue.good("refresh")
    assert queue.files() == before
    assert "good" in queue.good("check")


def test_an_amended_patch_changes_only_its_file_and_the_pin(queue):
    before = queue.files()
    path = queue.checkout / "sglang/a.py"
    path.write_text(path.read_text().replace("line_20 = 0", "line_20 = 1"))
    git(queue.checkout, "commit", "-q", "-a", "--amend", "--no-edit")
    queue.good("refresh")
    after = queue.files()
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"0002-second-change.patch", "pin.toml"}
    assert "good" in queue.good("check")
    assert "already applied" in queue.good("apply")


def test_a_dropped_commit_drops_its_file(queue):
    git(queue.checkout, "reset", "-q", "--hard", "HEAD^")
    queue.good("refresh")
    assert (queue.patches / "series").read_text() == "0001-first-change.patch\n"
    assert not (queue.patches / "0002-second-change.patch").exists()


@pytest.mark.parametrize("field", ["Subject", "Description", "Origin", "Forwarded", "Drop-When"])
def test_a_commit_without_a_full_header_is_refused(queue, field):
    before = queue.files()
    lines = [line for line in HEADER.splitlines() if not line.startswith(field)]
    header = "\n".join(lines if field != "Description" else [x for x in lines if x[0] != " "])
    queue.commit("Third", "sglang/b.py", "b = 1", "b = 2", header=header)
    assert f"no {field}" in queue.refused("refresh")
    assert queue.files() == before


def test_a_fixup_commit_is_refused(queue):
    queue.commit("", "sglang/b.py", "b = 1", "b = 2", header="fixup! Subject: First change")
    assert "fixup!" in queue.refused("refresh")


def test_a_rebase_under_way_is_refused(queue):
    """Its HEAD holds only the first patches: the others would be dropped from patches/."""
    (queue.checkout / ".git/rebase-merge").mkdir()
    assert "middle of a rebase" in queue.refused("refresh")
    (queue.checkout / ".git/rebase-merge").rmdir()
    git(queue.checkout, "checkout", "-q", "HEAD^")
    assert "branch dflash" in queue.refused("refresh")


def test_a_branch_beside_upstream_is_refused(queue):
    git(queue.checkout, "checkout", "-q", "--orphan", "other")
    git(queue.checkout, "commit", "-q", "-m", "other")
    git(queue.checkout, "branch", "-q", "-M", "dflash")
    assert "does not contain upstream" in queue.refused("refresh")


def test_refresh_without_a_checkout_is_refused(empty_queue):
    assert "make apply" in empty_queue.refused("refresh")
