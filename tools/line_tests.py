"""A pytest plugin that records the lines of the package that each test executes, for `mutants.py`.

    COVERAGE_FOLDER=build/mutants python -m pytest -p line_tests

Each process writes two files: `<process>.coverage`, a database of the package coverage whose contexts are the tests' ids, and
`<process>.json`, the seconds of the tests that passed.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import coverage
import pytest

PACKAGE = Path(__file__).parent.parent / "devicemap"

_measured: coverage.Coverage | None = None
_seconds: defaultdict[str, float] = defaultdict(float)
_not_passed: set[str] = set()


def _path(suffix: str) -> Path:
    return Path(os.environ["COVERAGE_FOLDER"], os.environ.get("PYTEST_XDIST_WORKER", "main") + suffix)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Start before the package is imported, except in the controller of pytest-xdist, which runs no test."""
    global _measured
    if config.getoption("dist", "no") == "no" or hasattr(config, "workerinput"):
        _measured = coverage.Coverage(
            _path(".coverage"), include=[f"{PACKAGE}/*"], concurrency="thread", config_file=False
        )
        _measured.start()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    """Count lines for this test from now on, in all threads: coverage.py detects a test's frame in its own thread only."""
    if _measured is not None:
        _measured.switch_context(nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add the seconds of one phase of a test."""
    _seconds[report.nodeid] += report.duration
    if not report.passed:
        _not_passed.add(report.nodeid)


def pytest_unconfigure() -> None:
    """Write both files."""
    if _measured is not None:
        _measured.stop()
        _measured.save()
        passed = {test: seconds for test, seconds in _seconds.items() if test not in _not_passed}
        _path(".json").write_text(json.dumps(passed), encoding="utf-8")
