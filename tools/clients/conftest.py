"""The devices and options of the test suite; packages may warn, and one that cannot be imported skips its tests."""

from __future__ import annotations

import pytest
from conftest import *  # noqa: F403
from conftest import pytest_collection_modifyitems as modify_items


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    modify_items(config, items)
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("default"))
        item.add_marker(pytest.mark.filterwarnings("error:::devicemap"))
