"""TensorFlow's own tests of maps give what they assert, and vectorise where pfor does (`tensorflow_tests.py`).

`TENSORFLOW_SOURCES` names a folder with TensorFlow's sources of the installed version; `make test-clients` gets them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from clients.tensorflow_tests import FILES, PYTHON

SOURCES = Path(os.environ.get("TENSORFLOW_SOURCES", f"build/tensorflow-{tf.__version__}"))
SURVEY = Path("build/tensorflow-tests")
CRASHES = 10
"""Most crashes of a file's tests after which the remaining tests still run."""

_MESSAGE = "expects an error message of TensorFlow's"
_RANK = "data of unknown rank"
_VARIABLES = "fn makes or reads variables of a graph of tf.compat.v1"
_SPLIT = "xla.compile of tf.compat.v1 needs constant sizes to split rows"
_PARTICLE = "a composite tensor of its own class is neither data nor a result"
APART = {
    "MapFnTest.testMapEmptyList": _MESSAGE,
    "MapFnTest.testMapOverScalarErrors": _MESSAGE,
    "MapFnTest.testMap_MultiOutputMismatchedDtype": _MESSAGE,
    "RaggedMapOpTest.testMismatchRaggedRank": _MESSAGE,
    "RaggedMapOpTest.testMismatchRaggedRank2": _MESSAGE,
    "ArrayTest.test_strided_slice_loop_variant": "expects that vectorising fails, and rows of the same shape are right",
    "ArrayTest.test_tile_loop_dependent": "expects that vectorising fails",
    "PForTest.test_parallel_iterations_one": "expects an error about an option of pfor",
    "PForTest.test_parallel_iterations_zero": "expects an error about an option of pfor",
    "MapFnTest.testMapUnknownShape": _RANK,
    "FunctionalOpsTest.testScanUnknownShape": _RANK,
    "MapFnTest.testMap_Scoped": _VARIABLES,
    "FunctionalOpsTest.testFoldl_Scoped": _VARIABLES,
    "FunctionalOpsTest.testFoldr_Scoped": _VARIABLES,
    "FunctionalOpsTest.testScan_Scoped": _VARIABLES,
    "FunctionalOpsTest.testScanGradientWithPartStopGradient": _VARIABLES,
    "LoggingTest.test_assert": "fn returns an operation",
    "LoggingTest.test_print_v2": "pfor prints once for all rows",
    "TensorListTest.test_no_fallback_with_internal_stacking": "an op without a kernel, which only a converter replaces",
    "CompositeTensorTest.test_composite_is_converted_to_batched_tensor0": _PARTICLE,
    "CompositeTensorTest.test_composite_is_converted_to_batched_tensor1": _PARTICLE,
    "CompositeTensorTest.test_create_composite_inside_loop0": _PARTICLE,
    "CompositeTensorTest.test_create_composite_inside_loop1": _PARTICLE,
    "CompositeTensorTest.test_vectorized_map_gathers_composite_tensors": _PARTICLE,
    "PForTest.test_xla": _SPLIT,
    "PForTest.test_xla_while_loop": _SPLIT,
    "WhileV2Test.test_while_unstacked_condition (xla)": _SPLIT,
}
"""Tests that `parallel_map` does not pass, and the reason."""


def short(test: str) -> str:
    file, _, name = test.partition("::")
    return f"{name} (xla)" if "/xla_" in file and f"{name} (xla)" in APART else name


def survey(file: str) -> list[dict[str, Any]]:
    """The outcomes of a file's tests, from a process of its own, which is started again behind a test that ends it."""
    SURVEY.mkdir(parents=True, exist_ok=True)
    output = SURVEY / f"{Path(file).stem}.jsonl"
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "clients.tensorflow_tests", str(SOURCES), str(output), file]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for _ in range(CRASHES):
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        if process.returncode == 0:
            break
        assert output.exists(), process.stderr
    else:
        pytest.fail(f"{CRASHES} processes ended, the last one with {process.returncode}:\n{process.stderr[-2000:]}")
    return read(output)


def read(output: Path) -> list[dict[str, Any]]:
    """The last line of each test: a test that ended the process has only the one before."""
    rows = map(json.loads, output.read_text().splitlines())
    return list({row["test"]: row for row in rows}.values())


def how(row: dict[str, Any]) -> str:
    """How `"auto"` runs a test that pfor and `vectorize=True` compute correctly; `""` for another test."""
    if row.get("pfor") != "passed" or row.get("vectorize=True") != "passed" or not row.get("loops"):
        return ""
    vectorized = [is_vectorized for is_vectorized, _ in row["loops"]]
    return "vectorised" if all(vectorized) else "vectorised in part" if any(vectorized) else "row by row"


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Lines for people: how many tests run how, and for each reason the number of tests that it keeps from vectorising."""
    rows = [row for row in rows if how(row)]
    counts = Counter(map(how, rows))
    lines = [f"{len(rows)} of TensorFlow's tests that pfor and vectorize=True compute correctly: {dict(counts)}"]
    of_tests = [{reason.split(",")[0] for is_vectorized, reason in row["loops"] if not is_vectorized} for row in rows]
    reasons, alone = (
        Counter(r for each in of_tests for r in each),
        Counter(r for e in of_tests if len(e) == 1 for r in e),
    )
    return lines + [f"{count:4} ({alone[reason]} alone) {reason}" for reason, count in reasons.most_common()]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", FILES)
def test_file(file: str) -> None:
    path = SOURCES / PYTHON / file
    assert path.exists(), (
        f"there is no {path}; set TENSORFLOW_SOURCES to TensorFlow's sources (tools/clients/README.md)"
    )
    failed = {}
    for row in survey(file):
        outcomes = {name: row.get(name, "") for name in ("vectorize=True", "auto")}
        does_not_apply = row["tensorflow"] != "passed" or row.get("auto", "").startswith("skipped")
        crashed = any("the process ended" in outcome for outcome in outcomes.values())
        wrong = outcomes["vectorize=True"].startswith("wrong") or outcomes["auto"] != "passed"
        if crashed or (wrong and not does_not_apply):
            failed[short(row["test"])] = outcomes
    assert {name: outcomes for name, outcomes in failed.items() if name not in APART} == {}
