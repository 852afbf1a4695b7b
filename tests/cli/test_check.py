"""`devicemap check` and `devicemap env`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf

from devicemap.cli import check as module
from devicemap.cli import main


def test_check(tmp_path: Path, devices: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "check.json"
    assert main(["check", "--devices", ",".join(devices), "--seconds", "0.001", "--json", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "All guarantees hold on these devices." in out
    found = json.loads(saved.read_text(encoding="utf-8"))
    assert found["ok"]
    assert found["versions"]["numpy"] == np.__version__
    assert len(found["guarantees"]) == out.count(" ok ") == 10
    counts = [speed["devices"] for speed in found["speed"] if speed["function"] == "transfer-bound"]
    assert counts == sorted({count for count in (1, 2, 4, 8) if count < len(devices)} | {len(devices)})
    assert all(speed["seconds"] > 0 for speed in found["speed"])


def test_a_guarantee_that_does_not_hold(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The other cases and measurements run; the table and the exit code show the failures."""
    names = "values: equal to one row at a time", "chunks: streams and reductions"
    monkeypatch.setattr(module, "CASES", {name: module.CASES[name] for name in names})
    monkeypatch.setattr(module, "parallel_reduce", lambda fn, rows, *args, **options: tf.reduce_sum(rows, 0) + 1)
    exhausted = tf.errors.ResourceExhaustedError(None, None, "OOM")
    monkeypatch.setattr(module, "median_seconds", Mock(side_effect=exhausted))
    saved = tmp_path / "check.json"
    assert main(["check", "--devices", "CPU:0,CPU:1", "--seconds", "0.001", "--json", str(saved)]) == 1
    out = capsys.readouterr().out
    speeds = [f"speed of a {name}-bound function" for name in ("compute", "transfer")]
    assert f"\nFAILED: chunks: streams and reductions, {', '.join(speeds)}. Please report it" in out
    assert "AssertionError: Not equal to tolerance" in out
    cases = json.loads(saved.read_text(encoding="utf-8"))["guarantees"]
    assert [(case["name"], bool(case["error"])) for case in cases[:2]] == [*zip(names, (False, True))]


def test_env(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json", str(tmp_path / "env.json")]) == 0
    out = capsys.readouterr().out
    assert f"numpy             {np.__version__}\n" in out
    assert "CPU:7" in out
    found = json.loads((tmp_path / "env.json").read_text(encoding="utf-8"))
    assert len(found["devices"]) >= 8
