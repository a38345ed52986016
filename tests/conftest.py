"""Which tests may run beside each other under `pytest -n 2 --dist loadgroup`, as `make test` runs them."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests on the servers that live through the session are one group; else each file is one."""
    for item in items:
        shared = "_servers" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("servers" if shared else item.path.name))
