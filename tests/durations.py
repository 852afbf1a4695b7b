"""Write `durations.json`, by which `conftest.py` starts the longest test files first and marks slow tests.

    make check && python tests/durations.py build/test.xml

prints the seconds of each test file in a JUnit XML report, and records the files and the tests that take `LONG` seconds or
more.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds by test file (`files`) and by test (`slow`), longest first."""

LONG = 1.0
"""Seconds. `make test` leaves out the tests that take as long; `make check` runs them."""


def seconds_by_test(report: Path) -> Counter[str]:
    """Seconds by test, from a JUnit XML report."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        module = case.get("classname", "").replace(".", "/")
        seconds[f"{module}.py::{case.get('name')}"] += float(case.get("time", 0.0))
    return seconds


def main(report: str) -> None:
    """Print the seconds of all files, and record long files and tests."""
    tests = seconds_by_test(Path(report))
    files: Counter[str] = Counter()
    for test, seconds in tests.items():
        files[test.partition("::")[0]] += seconds
    for path, seconds in files.most_common():
        print(f"{seconds:7.1f} s  {path}")
    quick = sum(seconds for seconds in tests.values() if seconds < LONG)
    print(f"{sum(tests.values()):7.1f} s  in {len(files)} files; {quick:.1f} s in tests of less than {LONG:.0f} s")
    recorded = {"files": _long(files), "slow": _long(tests)}
    DURATIONS.write_text(json.dumps(recorded, indent=2) + "\n", encoding="utf-8")


def _long(seconds: Counter[str]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in seconds.most_common() if value >= LONG}


if __name__ == "__main__":
    main(*sys.argv[1:])
