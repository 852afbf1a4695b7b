"""Hooks that make CI fail where a user's run skips: a missing compiler, simulator or package.

Conftests import them. With `CI=true`, only a reason that starts with "not applicable" skips a test: a combination of
parameters that cannot exist.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail") or os.environ.get("CI") != "true":
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not reason.removeprefix("Skipped: ").startswith("not applicable"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not allow: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    report = yield
    _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    report = yield
    _fail_if_skipped(report)
    return report
