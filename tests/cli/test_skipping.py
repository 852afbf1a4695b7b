"""`devicemap run --skip-errors`: which rows failed, exit codes, and repeated runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from devicemap import open_results
from devicemap.cli import main

MODULE = """
import tensorflow as tf

def length(text):
    with tf.control_dependencies([tf.debugging.assert_none_equal(text, b"bad", message="bad text")]):
        return tf.strings.length(text)
"""
TEXTS = [b"a", b"bad", b"ccc", b"bad", b"e"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    monkeypatch.chdir(tmp_path)
    module = f"texts_{request.node.name.partition('[')[0]}"
    Path(f"{module}.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.setenv("FUNCTION", f"{module}:length")
    Path("in").mkdir()
    for i, text in enumerate(TEXTS):
        Path(f"in/{i}.txt").write_bytes(text)
    with tf.io.TFRecordWriter("in.tfrecord") as writer:
        for text in TEXTS:
            writer.write(text)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    import os

    code = main(["run", os.environ["FUNCTION"], *arguments, "--quiet", "--devices", "CPU:0,CPU:1"])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "rows"),
    [("in", ["in/1.txt", "in/3.txt"]), ("in.tfrecord", ["in.tfrecord, row 1", "in.tfrecord, row 3"])],
)
def test_failed_rows_are_printed_and_kept(
    folder: Path, capsys: pytest.CaptureFixture[str], source: str, rows: list[str]
) -> None:
    arguments = [source, "--out", "out"]
    for _ in range(2):  # the second time, nothing is computed, and the failed rows are printed again
        code, out = run(capsys, *arguments, "--skip-errors")
        assert code == 3
        failures = [line for line in out.splitlines() if " failed on CPU:" in line]
        assert [line.partition(" failed on CPU:")[0] for line in failures] == rows
        assert all("InvalidArgumentError: " in line and "bad text" in line for line in failures)
        assert "3 rows in out, without 2 that failed; load them by" in out
    assert open_results("out").load().tolist() == [1, 3, 1]
    assert run(capsys, *arguments)[0] == 1  # without the option, they are tried again
    Path("in/1.txt").write_bytes(b"bb")
    if source == "in":
        Path("in/3.txt").write_bytes(b"dddd")
        assert run(capsys, *arguments)[0] == 0
        assert open_results("out").load().tolist() == [1, 2, 3, 4, 1]


@pytest.mark.parametrize("suffix", ["npy", "parquet", "tfrecord"])
def test_files_without_the_failed_rows(folder: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    code, out = run(capsys, "in", "--out", f"out.{suffix}", "--skip-errors")
    assert code == 3
    assert "in/3.txt failed on CPU:" in out
    assert not Path(f"out.{suffix}.partial").exists()
    if suffix == "npy":
        assert np.load("out.npy").tolist() == [1, 3, 1]
    elif suffix == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        assert parquet.read_table("out.parquet").column("result").to_pylist() == [1, 3, 1]
    else:
        example = {"result": tf.io.FixedLenFeature([], tf.int64)}
        records = tf.data.TFRecordDataset("out.tfrecord").batch(9).get_single_element()
        assert tf.io.parse_example(records, example)["result"].numpy().tolist() == [1, 3, 1]


def test_without_failures_the_exit_code_is_0(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("in/1.txt", "in/3.txt"):
        Path(name).unlink()
    code, out = run(capsys, "in", "--out", "out", "--skip-errors")
    assert code == 0
    assert "failed" not in out
