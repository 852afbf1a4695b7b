"""The devices and options of the test suite; packages may warn, and one that cannot be imported skips its tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import *  # noqa: F403
from conftest import pytest_collection_modifyitems as modify_items


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    modify_items(config, items)
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("default"))
        item.add_marker(pytest.mark.filterwarnings("error:::devicemap"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How TensorFlow's own tests ran, if they did."""
    if any("test_tensorflow_own" in report.nodeid for reports in terminalreporter.stats.values() for report in reports
           if hasattr(report, "nodeid")):  # fmt: skip
        from clients.test_tensorflow_own import SURVEY, read, table

        for line in table(row for path in sorted(Path(SURVEY).glob("*.jsonl")) for row in read(path)):
            terminalreporter.write_line(line)
