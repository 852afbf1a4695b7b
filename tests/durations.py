"""Write `durations.json`, by which `conftest.py` starts the longest test files first.

    make test && python tests/durations.py build/test.xml

prints the seconds of each test file in a JUnit XML report and records those that take a second or more.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds by test file, longest first."""


def seconds_per_file(report: Path) -> dict[str, float]:
    """Seconds by test file, longest first, from a JUnit XML report."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        module = case.get("classname", "").replace(".", "/")
        seconds[f"{module}.py"] += float(case.get("time", 0.0))
    return {path: round(total, 1) for path, total in seconds.most_common()}


def main(report: str) -> None:
    """Print all files and record the long ones."""
    found = seconds_per_file(Path(report))
    for path, seconds in found.items():
        print(f"{seconds:7.1f} s  {path}")
    print(f"{sum(found.values()):7.1f} s  in {len(found)} files")
    recorded = {path: seconds for path, seconds in found.items() if seconds >= 1.0}
    DURATIONS.write_text(json.dumps(recorded, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
