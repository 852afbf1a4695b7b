"""What others' packages warn of is theirs; and a package that cannot be imported skips its tests, with the reason."""

from __future__ import annotations

from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        if "clients" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.filterwarnings("error:::devicemap"))
