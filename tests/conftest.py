"""In which order the tests run, and which may run beside each other in the processes of `make test`.

With `-n 2 --dist loadgroup --no-loadscope-reorder` each process takes the next group when it has done one. The long
groups come first: commands, which take most memory, then the servers of one worker, then those of the other.
"""

from __future__ import annotations

import pytest

# Their modules prepare what takes longer than another server.
WHOLE = {"test_formats.py", "test_losslessness.py"}


def group(item: pytest.Item) -> str:
    """What runs in one process: each file, but tests on a worker's shared servers, and commands, across files."""
    if item.get_closest_marker("command"):
        return "commands"
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    for fixture in ("dflash", "either", "chunked", "workers"):
        if fixture in parameters and item.path.name not in WHOLE:
            chosen = parameters[fixture]
            return f"worker {chosen if isinstance(chosen, str) else chosen[0]}"
    return f"{item.path.parent.name}/{item.path.name}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The worker that comes second runs its files backwards, so that both do not ask plain decoding the same."""
    names = {item: group(item) for item in items}
    files = {item.path: number for number, item in enumerate(items)}
    workers = sorted({name for name in names.values() if name.startswith("worker ")})

    def place(item: pytest.Item) -> tuple[int, int]:
        name = names[item]
        if name == "commands":
            return 0, files[item.path]
        if name in workers:
            place = workers.index(name)
            return 1 + place, files[item.path] * (-1) ** place
        return 1 + len(workers) + ("server" not in item.path.parts), files[item.path]

    for item in items:
        item.add_marker(pytest.mark.xdist_group(names[item]))
        if "unit" in item.path.parts and not item.get_closest_marker("long"):
            item.add_marker("quick")
    items.sort(key=place)
