"""What README and docs name is there: links, files, folders, modules, make targets, patches."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
PAGES.append("checkpoints/tiny/README.md")
ENDINGS = "py|md|json|jsonl|toml|lock|in|png|patch|txt|yaml"
FOLDERS = "benchmark checkpoints deploy docs patches requirements sglang_dflash tests".split()


@cache
def project() -> frozenset[str]:
    """Files of the project and their folders, from its root; not what it builds and downloads."""
    paths = [*ROOT.iterdir(), *(path for name in FOLDERS for path in (ROOT / name).rglob("*"))]
    return frozenset(str(path.relative_to(ROOT)) for path in paths)


def is_there(name: str) -> bool:
    """Whether a file or folder has this name, or one that ends with it."""
    name = name.rstrip("/")
    return any(each == name or each.endswith(f"/{name}") for each in project())


def anchors(page: str) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(str(file.relative_to(ROOT))), target


@pytest.mark.parametrize("page", PAGES)
def test_files_and_folders(page: str) -> None:
    text = (ROOT / page).read_text()
    quoted = re.findall(r"`([^`\n]+)`", text)
    named = {
        name
        for name in quoted
        if re.fullmatch(rf"[\w./-]*\w\.({ENDINGS})|[\w.-]+(/[\w.-]+)*/", name)
    }
    # In commands, what is under a folder of the project.
    named |= set(
        re.findall(r"(?<![\w/.-])((?:benchmark|checkpoints|docs|tests|patches)/[\w./-]*\w)", text)
    )
    assert not {name for name in named if not is_there(name)}


@pytest.mark.parametrize("page", PAGES)
def test_modules_targets_and_patches(page: str) -> None:
    text = (ROOT / page).read_text()
    for module in re.findall(r"(?:-m |`)((?:sglang_dflash|checkpoints|benchmark)(?:\.\w+)+)", text):
        path = module.replace(".", "/")
        assert is_there(f"{path}.py") or is_there(f"{path}/__init__.py"), module
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M):
        assert target in targets, target
    for number in re.findall(r"\bpatch (\d{4})\b", text):
        assert list((ROOT / "patches").glob(f"{number}-*.patch")), number


def test_comments_name_files_that_are_there() -> None:
    """Comments and docstrings of the package, tests and benchmarks; patches that they name, too."""
    wrong = []
    for file in (name for name in project() if name.endswith(".py")):
        text = (ROOT / file).read_text()
        named = re.findall(r"`([\w/]+\.py)`|\(([\w/]+\.(?:py|md))\)|\b(docs/\w+\.md)", text)
        wrong += [(file, name) for names in named for name in names if name and not is_there(name)]
        for number in re.findall(r"\bpatch (\d{4})\b", text):
            wrong += [] if list((ROOT / "patches").glob(f"{number}-*.patch")) else [(file, number)]
    assert not wrong
