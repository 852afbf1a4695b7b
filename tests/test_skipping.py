"""A test that is skipped because something is missing fails with `CI=true`, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import skipping


@pytest.mark.parametrize(
    ("ci", "reason", "outcome"),
    [
        ("", "could not import 'no_such_package'", "skipped"),
        ("true", "could not import 'no_such_package'", "failed"),
        ("true", "not applicable: complex numbers have no order", "skipped"),
    ],
)
@pytest.mark.parametrize("hook", [skipping.pytest_runtest_makereport, skipping.pytest_make_collect_report])
def test_missing_tools(hook: Any, ci: str, reason: str, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", ci)
    report = SimpleNamespace(skipped=True, outcome="skipped", longrepr=("test.py", 1, f"Skipped: {reason}"))
    running = hook()
    next(running)
    with pytest.raises(StopIteration):
        running.send(report)
    assert report.outcome == outcome
