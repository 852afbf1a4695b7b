"""The benchmark suite: what it makes of measured seconds, and which results a run replaces. Nothing here is timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as suite
from benchmarks import report
from benchmarks.records import Record, judge, read

SECONDS = {"devicemap": [1.1, 1.0, 1.2], "slow peer": [4.0, 4.0], "joblib threads": [2.2, 2.0, 2.4]}


@pytest.mark.parametrize(
    ("demand", "facts", "reached", "met", "missed"),
    [
        ("least share", {}, 0.9, 0.899, 0.901),
        ("most ratio", {}, 0.5, 0.50, 0.49),
        ("most ratio to base", {"base": "slow peer"}, 0.275, 0.276, 0.274),
        ("most megabytes", {"rise_megabytes": {"devicemap": 96}}, 96, 300, 90),
    ],
)
def test_targets(demand: str, facts: dict[str, Any], reached: float, met: float, missed: float) -> None:
    for target, good in ((met, True), (missed, False)):
        targets = {demand: {"devicemap": target}}
        (verdict,) = judge(
            [Record("balance", "even", 8, SECONDS, {}, ideal_seconds=0.99, targets=targets, facts=facts)]
        )
        assert (verdict.reached, verdict.met) == (pytest.approx(reached), good)


def write_raw(path: Path) -> None:
    info = {"topic": "call_cost", "case": "16 rows", "devices": int(path.stem[-2:])}
    info |= {"seconds": {"devicemap": [1e-4, 2e-4]}, "first_seconds": {"devicemap": 0.5}}
    content = {"datetime": "2026-01-01T00:00:00", "commit_info": {"id": "0123456789", "dirty": False}}
    content |= {"machine_info": {"description": "a machine"}, "benchmarks": [{"extra_info": info}]}
    path.write_text(json.dumps(content))


def test_a_run_replaces_the_results_of_what_passed(tmp_path: Path, monkeypatch: Any) -> None:
    ran: list[int] = []
    broken: set[int] = set()

    def measure(topic: str, devices: int, path: Path, extra: Any) -> bool:
        ran.append(devices)
        if devices not in broken:
            write_raw(path)
        return devices not in broken

    monkeypatch.setattr(suite, "measure", measure)
    monkeypatch.setattr(suite, "COUNTS", {"call_cost": (1, 2, 8, 16)})
    assert suite.run(["call_cost"], None, tmp_path) == 0
    broken.add(8)
    assert suite.run(["call_cost"], [2, 8], tmp_path) == 1
    assert ran == [1, 2, 8, 16, 2, 8]
    assert [r.devices for r in read(tmp_path / "raw")] == [1, 2, 8, 16]
    report.write(tmp_path)
    assert "| 16 rows | 8 | 150 µs ± 17% |" in (tmp_path / "call_cost.md").read_text()
