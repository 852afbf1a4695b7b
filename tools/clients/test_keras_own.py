"""Keras's own tests of trainers, callbacks and models pass with each compiled model parallelized (`keras_tests.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras
import pytest

SOURCES = Path(keras.__file__).parent / "src"
FILES = [
    path.relative_to(SOURCES).as_posix()
    for pattern in ("trainers/trainer", "callbacks/*", "models/*", "layers/normalization/batch_normalization")
    for path in sorted(SOURCES.glob(f"{pattern}_test.py"))
]
"""Keras's wheel has these files."""

OUTCOMES = Path("build/keras-tests")
APART = {
    "SwapEMAWeightsTest::test_swap_ema_weights_with_tf_distribute": "refused: made in the scope of a strategy",
}
"""Tests that fail for a parallelized model only, and the reason."""


def run(file: str, devices: int, tests: Iterable[str] = ()) -> dict[str, Any]:
    """Run tests of a file, all by default, in a process of their own, and return the row of each."""
    OUTCOMES.mkdir(parents=True, exist_ok=True)
    output = OUTCOMES / f"{Path(file).stem}-{devices}.jsonl"
    output.unlink(missing_ok=True)
    nodes = [f"{SOURCES / file}::{test}" for test in tests] or [str(SOURCES / file)]
    options = ["-c", os.devnull, "-p", "clients.keras_tests", "-p", "no:cacheprovider", "-W", "ignore"]
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OUTPUT": str(output.absolute()),
        "DEVICES": str(devices),
    }
    command = [sys.executable, "-m", "pytest", *options, *nodes]
    process = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True)
    assert process.returncode in (0, 1), process.stdout + process.stderr
    return {row["test"]: row for row in map(json.loads, output.read_text().splitlines())}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", FILES)
def test_file(file: str, record_property: Callable[[str, object], None]) -> None:
    """A test that fails on two devices fails on one, too, except those in `APART`."""
    rows = run(file, 2)
    failed = {test: row["error"] for test, row in rows.items() if row["outcome"] == "failed"}
    alone = run(file, 1, failed) if failed else {}
    counts = Counter(row["outcome"] for row in rows.values())
    counts["parallelized"] = sum(row["parallelized"] > 0 for row in rows.values())
    counts["mapped"] = sum(row["mapped"] > 0 for row in rows.values())
    counts["failed on one device"] = sum(row["outcome"] == "failed" for row in alone.values())
    for name, count in counts.items():
        record_property(name, count)
    differs = {test: error for test, error in failed.items() if alone[test]["outcome"] != "failed"}
    assert differs.keys() == APART.keys() & rows.keys(), differs
