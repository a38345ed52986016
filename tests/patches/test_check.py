"""check: each thing that a series must fulfil, broken once."""

import pytest

from tests.patches.fake_release import git


def test_a_good_series(queue):
    report = queue.good("check")
    assert "0001-first-change.patch" in report
    assert "2 patches, 4 changed lines of 20: good" in report


def test_check_leaves_the_checkout_alone(queue):
    queue.commit("Third", "sglang/b.py", "b = 1", "b = 2")
    head = git(queue.checkout, "rev-parse", "HEAD")
    (queue.checkout / "sglang/new.py").write_text("mine")
    queue.good("check")
    assert git(queue.checkout, "rev-parse", "HEAD") == head


def test_check_without_a_checkout(queue):
    queue.checkout.rename(queue.folder / "elsewhere")
    queue.good("check")
    assert not queue.checkout.exists()


def test_an_offset_is_refused(queue):
    queue.edit("0002*", "@@ -18,7 +18,7 @@", "@@ -15,7 +15,7 @@")
    message = queue.refused("check")
    assert "0002-second-change.patch applies only with an offset" in message
    assert "offset" in queue.refused("check")


@pytest.mark.parametrize("context", [" line_18 = 18\n", " line_23 = 23\n"])
def test_fuzz_is_refused(queue, context):
    queue.edit("0002*", context, " another = 0\n")
    assert "0002-second-change.patch does not apply" in queue.refused("check")


def test_less_context_is_refused(queue):
    """git apply takes a hunk with fewer context lines; what refresh writes has three."""
    queue.edit("0002*", "@@ -18,7 +18,7 @@", "@@ -19,6 +19,6 @@")
    queue.edit("0002*", " line_17 = 17\n", "")
    assert "not in the form that `make refresh` writes" in queue.refused("check")


def test_an_unlisted_upstream_file_is_refused(queue):
    queue.edit("pin.toml", '"sglang/a.py", ', "")
    message = queue.refused("check")
    assert "0001-first-change.patch touches sglang/a.py, which pin.toml does not list" in message


@pytest.mark.parametrize("field", ["Origin: sglang-dflash\n", "Drop-When: never\n"])
def test_a_missing_header_field_is_refused(queue, field):
    queue.edit("0001*", field, "")
    assert f"the header has no {field.split(':')[0]}" in queue.refused("check")


def test_free_text_in_the_header_is_refused(queue):
    queue.edit("0001*", "Origin:", "some text\nOrigin:")
    assert "'some text' is neither" in queue.refused("check")


def test_a_wrong_file_name_is_refused(queue):
    queue.edit("0001*", "Subject: First change", "Subject: Another subject")
    assert "should be named 0001-another-subject.patch" in queue.refused("check")


def test_an_orphan_patch_file_is_refused(queue):
    (queue.patches / "0003-orphan.patch").write_bytes(queue.files()["0001-first-change.patch"])
    assert "0003-orphan.patch is not listed in series" in queue.refused("check")


@pytest.mark.parametrize(
    ("series", "message"),
    [
        ("0001-first-change.patch\n0009-gone.patch\n", "lists 0009-gone.patch, which does not"),
        ("0001-first-change.patch\n" * 2, "lists 0001-first-change.patch twice"),
    ],
)
def test_a_wrong_series_is_refused(queue, series, message):
    (queue.patches / "series").write_text(series)
    assert message in queue.refused("check")


def test_a_file_without_a_diff_is_refused(queue):
    (queue.patches / "0001-first-change.patch").write_text("Subject: x\n")
    assert "no line `diff --git`" in queue.refused("check")


def test_every_intermediate_tree_must_compile(queue):
    queue.commit("Third", "sglang/b.py", "b = 1", "b = (")
    queue.commit("Fourth", "sglang/b.py", "b = (", "b = 2")
    queue.good("refresh")
    assert "0003-third.patch leaves sglang/b.py with a syntax error" in queue.refused("check")


def test_a_series_that_is_too_long_is_refused(queue):
    queue.edit("pin.toml", "max_changed_lines = 20", "max_changed_lines = 3")
    assert "changes 4 lines, more than the 3" in queue.refused("check")


def test_a_tree_other_than_the_pins_is_refused(queue):
    queue.edit("0002*", "+line_20 = 0", "+line_20 = 9")
    message = queue.refused("check")
    assert "0002-second-change.patch" in message or "series_tree" in message
    queue.good("unapply")
    assert "series_tree" in queue.refused("apply")


def test_a_binary_change_is_refused(queue):
    (queue.checkout / "sglang/b.py").write_bytes(b"\0\1\2")
    git(queue.checkout, "commit", "-q", "-a", "--amend", "--no-edit")
    assert "binary" in queue.refused("refresh")
