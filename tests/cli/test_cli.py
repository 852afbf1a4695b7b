"""The command line, as a user of a shell meets it; what the inputs hold is compared with the rows that come out."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import pathlib
import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf

import devicemap
from devicemap.cli import main
from devicemap.cli.input import read_input
from devicemap.errors import DataError

ROOT = pathlib.Path(__file__).parents[2]
X = np.arange(40, dtype=np.float32).reshape(20, 2)

FUNCTIONS = """
import tensorflow as tf

named = lambda rows: {"sum": rows["a"] + rows["b"]}
length = lambda content: tf.strings.length(content)
ones = lambda n: tf.ones([tf.cast(n, tf.int32)])
noise = lambda row, seed: row + tf.random.stateless_normal([], seed)
broken = lambda row: row @ row
numbers = lambda: tf.data.Dataset.range(20).map(lambda n: tf.cast(n, tf.float32))
batches = tf.data.Dataset.from_tensor_slices(tf.range(20.0)).batch(6)

def double(row):
    return row * 2

def stop(row):
    raise KeyboardInterrupt

def not_30(row):
    with tf.control_dependencies([tf.debugging.assert_none_equal(row, 30.0)]):
        return tf.identity(row)

def short(content):
    with tf.control_dependencies([tf.debugging.assert_less(length(content), 30, "too long")]):
        return length(content)

class Model:
    def apply(self, row):
        return row + 1

model = Model()
"""


@pytest.fixture(autouse=True)
def _in_a_folder_with_functions(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "functions", raising=False)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    np.save("x.npy", X)
    np.savez("x.npz", a=X, b=X + 1)
    np.save("text.npy", np.array(["one", "", "four"]))


def write(function: str, path: str, *options: str, out: str = "out") -> int:
    command = ["run", f"functions:{function}", path, "--out", out, "--quiet", "--devices", "CPU:0,CPU:1"]
    return main([*command, *options])


def run(function: str, path: str, *options: str) -> Any:
    """The results of `devicemap run`, which has to work."""
    assert write(function, path, *options) == 0
    return devicemap.open_results("out").load()


def _records(name: str, *records: bytes) -> None:
    with tf.io.TFRecordWriter(name, options="GZIP" if name.endswith(".gz") else "") as writer:
        for record in records:
            writer.write(record)


# Inputs


def _make_inputs() -> None:
    np.save("large.npy", np.ones([9, 2**19]))
    pathlib.Path("parts").mkdir()
    for i, part in enumerate(np.split(X, 4)):
        np.save(f"parts/{i}.npy", np.asfortranarray(part.astype(">f4")))
    pathlib.Path("texts").mkdir()
    for i, words in enumerate((["a", "bc"], ["defg"])):  # NumPy's dtypes differ
        np.save(f"texts/{i}.npy", np.array(words))
    for suffix in ("", ".gz"):
        for i in range(2):
            _records(f"x.tfrecord-0000{i}-of-00002{suffix}", *(b"x" * (5 * i + n) for n in range(5)))
    for name in ("y.tfrec", "y.tfrec-00001-of-00002"):
        _records(name, b"x")
    pathlib.Path("my-code/package").mkdir(parents=True)
    pathlib.Path("my-code/package/__init__.py").touch()
    pathlib.Path("my-code/2020.py").write_text("from package.numbers import numbers")
    pathlib.Path("my-code/package/relative.py").write_text("from .numbers import numbers")
    pathlib.Path("my-code/package/numbers.py").write_text("numbers = list(range(20))")
    pathlib.Path("files/deeper").mkdir(parents=True)
    for name, size in (*((f"{n}.jpg", n) for n in range(7)), ("deeper/a.jpg", 7), (".hidden", 1000)):
        pathlib.Path("files", name).write_bytes(b"x" * size)
    dataset = tf.data.Dataset.from_tensor_slices(X)
    dataset.save("saved")
    dataset.batch(6).save("batches")


INPUTS: list[tuple[str, str, list[str], Any]] = [
    ("double", "x.npy", [], X * 2),
    ("double", "x.npy", ["--batched", "--batch-size", "3"], X * 2),
    ("double", "large.npy", [], np.full([9, 2**19], 2)),  # in several slices, and an uneven one
    ("double", "parts", [], X * 2),
    ("double", "parts/*.npy", [], X * 2),
    ("length", "text.npy", [], [3, 0, 4]),
    ("length", "texts", [], [1, 2, 4]),
    ("length", "x.tfrecord*2", ["--batched"], range(10)),
    ("length", "x.tfrecord*.gz", [], range(10)),
    ("length", "y.tfrec*", [], [1, 1]),
    ("length", "files", ["--batched"], range(7)),
    ("length", "files/**/*.jpg", [], range(8)),
    ("double", "saved", [], X * 2),
    ("double", "batches", ["--batched"], X * 2),
    ("double", "functions:numbers", [], range(0, 40, 2)),
    ("double", "./functions.py:numbers", [], range(0, 40, 2)),
    ("double", "my-code/2020.py:numbers", [], range(0, 40, 2)),
    ("double", "my-code/package/relative.py:numbers", [], range(0, 40, 2)),
    ("double", "functions:batches", ["--batched"], range(0, 40, 2)),
    ("model.apply", "x.npy", ["--simulate", "8"], X + 1),
]


def test_inputs() -> None:
    _make_inputs()
    for number, (function, path, options, expected) in enumerate(INPUTS):
        assert write(function, path, *options, out=str(number)) == 0
        found = devicemap.open_results(str(number)).load()
        np.testing.assert_array_equal(found, expected, err_msg=path)


def test_npz_is_a_dict_and_seeds_are_passed_on() -> None:
    np.testing.assert_array_equal(run("named", "x.npz")["sum"], X + X + 1)
    assert write("noise", "functions:numbers", "--seed", "3", "--batch-size", "7", out="noise") == 0
    noise = lambda row, seed: row + tf.random.stateless_normal([], seed)
    expected = devicemap.parallel_map(noise, np.arange(20, dtype=np.float32), seed=3, devices=["CPU:0"])
    np.testing.assert_allclose(devicemap.open_results("noise").load(), expected, rtol=1e-6)


@pytest.mark.parametrize("kept", [1, 11])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_tfrecord_that_was_cut_inside_a_header(suffix: str, kept: int) -> None:
    """TensorFlow finds other cuts itself, and takes this one for the end."""
    _records("whole", b"", b"x", b"xx")
    whole = pathlib.Path("whole").read_bytes()[: -(8 + 4 + 2 + 4) + kept]
    pathlib.Path(f"cut.tfrecord{suffix}").write_bytes(gzip.compress(whole) if suffix else whole)
    assert main(["explain", "functions:length", f"cut.tfrecord{suffix}"]) == 0  # does not count the records
    with pytest.warns(RuntimeWarning, match=f"cut.tfrecord{suffix} was cut .*lost"):
        assert run("length", f"cut.tfrecord{suffix}").tolist() == [0, 1]


def test_a_large_npy_is_not_read_before_it_is_asked_for() -> None:
    shape = (2**22, 2**12)  # 64 GiB, of holes
    array = np.lib.format.open_memmap("large.npy", mode="w+", dtype=np.float32, shape=shape)
    array[0], array[-1] = 1, 2
    dataset = read_input("large.npy", False, None).data
    assert int(dataset.cardinality()) == 2**22
    assert next(iter(dataset)).numpy().tolist() == [1.0] * 2**12


def test_inputs_that_cannot_be_read() -> None:
    for folder in ("mixed", "empty", "uneven", "packed"):
        pathlib.Path(folder).mkdir()
    for name, array in {
        "mixed/x": X,
        "scalar": np.float32(1),
        "dates": np.array(["2020-01-01"], "datetime64[D]"),
        "uneven/0": X,
        "uneven/1": X[:, 0],
    }.items():
        np.save(f"{name}.npy", array)
    pathlib.Path("spec").mkdir()
    for name in (
        "mixed/readme.txt",
        "bad.npz",
        "train-00000-of-00010",
        "spec/dataset_spec.pb",
        "packed/0.tfrecord",
        "packed/1.tfrecord.gz",
    ):
        pathlib.Path(name).write_text("not an array")
    for path, words in {
        "mixed": "has mixed/readme.txt, mixed/x.npy; expected files of one kind",
        "empty": "no such file or folder with files",
        os.devnull: "is a pipe or a device",
        "scalar.npy": r"an array of float32 \[\]; expected rows",
        "dates.npy": "dates.npy is not a file of plain arrays with dtypes of TensorFlow",
        "bad.npz": "bad.npz is not a file of plain arrays",
        "uneven": r"uneven/1.npy has an array of float32 \[20\]; .* as in uneven/0.npy of float32 \[2\]",
        "train*": "train-00000-of-00010 has the name of a shard; rename TFRecord files to NAME.tfrecord, or pass MODULE:",
        "spec": "spec cannot be read: ",
        "packed": "expected files of one kind",
        "*.npz": "expected files of one kind, or one .npz file",
    }.items():
        with pytest.raises(DataError, match=words):
            read_input(path, False, None)


# Outputs


def test_run_says_what_it_did_and_continues(capsys: pytest.CaptureFixture[str]) -> None:
    run("double", "x.npy")
    assert capsys.readouterr().out.endswith("20 rows in out; load them by devicemap.open_results('out').load()\n")
    run("double", "x.npy")
    assert capsys.readouterr().out.startswith("no row was missing\n20 rows in out; ")
    assert write("model.apply", "x.npy") == 1
    assert "--trust-function" in capsys.readouterr().err
    assert write("model.apply", "x.npy", "--trust-function") == 0


def test_npy_and_npz_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert write("double", "x.npy", out="y.npy") == 0
    assert capsys.readouterr().out.splitlines()[1] == "20 rows in y.npy; load them by numpy.load('y.npy')"
    assert write("named", "x.npz", out="y.npz") == write("double", "x.npy", out="one.npz") == 0
    np.testing.assert_array_equal(np.load("y.npy"), 2 * X)
    np.testing.assert_array_equal(np.load("y.npz")["sum"], 2 * X + 1)
    np.testing.assert_array_equal(np.load("one.npz")["result"], 2 * X)
    assert not {*pathlib.Path().glob("*.partial"), *pathlib.Path().glob("*.tmp")}
    pathlib.Path("y.npy.partial").mkdir()  # as after a kill that interrupts the removal of the directory
    pathlib.Path("y.npy.partial/lock.sqlite").touch()
    assert write("double", "x.npy", out="y.npy") == 1  # which would compute all rows again
    assert "y.npy already exists; remove it" in capsys.readouterr().err


def test_a_file_is_written_if_the_output_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `devicemap run ... | head`."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Mock(write=Mock(side_effect=BrokenPipeError), fileno=lambda: os.dup(1)))
        assert write("double", "x.npy", out="y.npy") == 141
    np.testing.assert_array_equal(np.load("y.npy"), 2 * X)


def test_a_file_is_written_after_the_disk_was_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        assert write("double", "x.npy", out="y.npy") == 1
    said = "writing y.npy failed: [Errno 28] No space left on device. All rows are in y.npy.partial: repeat the command"
    assert said in capsys.readouterr().err
    assert write("double", "x.npy", out="y.npy") == 0


def test_a_name_that_the_output_cannot_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert write("double", "x.npy", out="é") == 0
    assert b"20 rows in \\xe9; load" in sys.stdout.buffer.getvalue()  # type: ignore[attr-defined]


def test_names_of_files_and_directories() -> None:
    for name, is_file in {"a.NPY": True, "a.parquet": True, "a.v2": False, "a-0.1": False}.items():
        assert write("double", "x.npy", out=name) == 0
        assert pathlib.Path(name).is_file() == is_file
    pathlib.Path("a.v2").rename("a.csv")
    assert write("double", "x.npy", out="a.csv") == 0  # results of an earlier version


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [("y.npy", 2, "rows of the shapes [0] and [1]"), ("y.npz", 1, "cannot be returned at once")],
)
def test_rows_of_different_shapes(name: str, code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert write("ones", "functions:numbers", "--batch-size", "1", out=name) == code
    said = capsys.readouterr().err
    assert words in said
    saving = f"devicemap.open_results('{name}.partial').to_parquet('y.parquet')"
    assert f"All rows are in {name}.partial: {saving} saves them" in said
    assert not pathlib.Path(name).exists()


def test_a_file_is_continued_after_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert write("not_30", "x.npy", "--batch-size", "5", out="y.npy") == 1
    missing = sum((stop or 20) - start for start, stop in devicemap.open_results("y.npy.partial").missing)
    assert missing >= 5
    assert not pathlib.Path("y.npy").exists()
    capsys.readouterr()
    # Python would run the cached bytecode of a file of the same size and second.
    pathlib.Path("functions.py").write_text(FUNCTIONS.replace("row, 30.0", "row, 999.0"))
    del sys.modules["functions"]
    assert write("not_30", "x.npy", "--trust-function", "--batch-size", "5", out="y.npy") == 0
    assert capsys.readouterr().out.startswith(f"{missing} rows in ")
    np.testing.assert_array_equal(np.load("y.npy"), X)


# Failing rows


def _write_texts() -> None:
    """Files, and records in one file, of which the second and the fourth are too long for `short`."""
    texts = [b"a", b"x" * 30, b"ccc", b"x" * 40, b"e"]
    pathlib.Path("in").mkdir()
    for i, text in enumerate(texts):
        pathlib.Path(f"in/{i}.txt").write_bytes(text)
    _records("in.tfrecord", *texts)


@pytest.mark.parametrize(
    ("path", "rows"), [("in", ["in/1.txt", "in/3.txt"]), ("in.tfrecord", ["in.tfrecord, row 1", "in.tfrecord, row 3"])]
)
def test_failed_rows_are_printed_and_kept(path: str, rows: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _write_texts()
    for _ in range(2):  # the second time, nothing is computed, and the failed rows are printed again
        assert write("short", path, "--skip-errors") == 3
        said = capsys.readouterr().out
        failures = [line for line in said.splitlines() if " failed on CPU:" in line]
        assert [line.partition(" failed on CPU:")[0] for line in failures] == rows
        assert all("InvalidArgumentError: " in line and "too long" in line for line in failures)
        assert "3 rows in out, without 2 that failed; load them by" in said
    assert devicemap.open_results("out").load().tolist() == [1, 3, 1]
    assert write("short", path) == 1  # without the option, they are tried again
    for name in ("in/1.txt", "in/3.txt"):
        pathlib.Path(name).write_bytes(b"bb")
    if path == "in":
        assert run("short", path).tolist() == [1, 2, 3, 2, 1]


def test_a_file_without_the_failed_rows(capsys: pytest.CaptureFixture[str]) -> None:
    _write_texts()
    assert write("short", "in", "--skip-errors", out="out.npy") == 3
    assert "in/3.txt failed on CPU:" in capsys.readouterr().out
    assert not pathlib.Path("out.npy.partial").exists()
    assert np.load("out.npy").tolist() == [1, 3, 1]
    assert write("short", "in/[13].txt", "--skip-errors") == 3  # without a warning that all failed


# Errors


@pytest.mark.parametrize("options", [[], ["--batched"]])
def test_errors_name_the_file_and_its_row(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for i, part in enumerate(np.split(X, 2)):
        np.save(f"{i}.npy", part)
        _records(f"{i}.tfrecord", *[b"x" * 10] * 3)
        pathlib.Path(f"{i}.txt").write_bytes(b"x" * (3 + 37 * i))
    content = bytearray(pathlib.Path("1.tfrecord").read_bytes())
    content[26 + 15] ^= 1  # in the second record
    pathlib.Path("1.tfrecord").write_bytes(content)
    tf.data.Dataset.from_tensors(X).repeat(2).save("saved")
    (damaged,) = pathlib.Path("saved").rglob("*.snapshot")
    damaged.write_bytes(damaged.read_bytes()[:-20])
    for function, path, words in [
        ("not_30", "[01].npy", "1.npy, row 5: not_30 failed on row"),
        ("short", "?.txt", "1.txt: short failed on row"),
        ("length", "?.tfrecord", "1.tfrecord, row 1 cannot be read: corrupted record at 38\n"),
        ("double", "saved", f"saved, row {20 if options else 1} cannot be read: truncated record at"),
    ]:
        assert write(function, path, *options, out=function) == 1
        assert f"error: {words}" in capsys.readouterr().err


MISTAKES = [
    (["functions:double", "nowhere:data"], 2, "expected a file, a folder or MODULE:DATASET, found from"),
    (["full/json.py:loads", "x.npy"], 2, "json/__init__.py has the same name; rename one of the files"),
    (["functions:double", "x.npy", "--batch-size", "9" * 21], 2, "expected None, 'auto' or a 64-bit int of at least 1"),
    (["functions:double", "nowhere.npy"], 1, "nowhere.npy: no such file or folder with files"),
    (["../functions.py:double", "x.npy"], 2, "found from the current directory and PYTHONPATH"),
    (["functions:treble", "x.npy"], 2, "has no attribute 'treble'"),
    (["raises:fn", "x.npy"], 2, "raises:fn: ZeroDivisionError"),
    (["exits:fn", "x.npy"], 2, "exits:fn: SystemExit: 0"),
    (["functions:double", "functions:numbers", "--batched"], 1, "but --batched takes batches of rows"),
    (["functions", "x.npy"], 2, "functions is a module; expected MODULE:FUNCTION"),
    (["function", "x.npy"], 2, "No module named 'function'; expected MODULE:FUNCTION, found"),
    (["functions:broken", "x.npy"], 1, "fn could not be traced"),
    (["nothing:is_called", "x.npy", "--out", ""], 2, "--out is empty; expected a file or a directory"),
    (["functions:double", "x.npy", "--out", "full"], 1, "no results of devicemap"),
    (["functions:named", "x.npz", "--batched", "--out", "y.npy"], 2, "returns 'result': {'sum': TensorSpec"),
    (["functions:double", "x.npy", "--out", "y.parquet"], 1, "needs pyarrow ("),
    (
        ["nothing:is_called", "x.npy", "--out", "y.CSV"],
        2,
        "--out y.CSV; expected the suffix .npy, .npz, .parquet, or a directory",
    ),
    (["nothing:is_called", "x.npy", "--out", "y.tfrecord"], 2, "--out y.tfrecord; expected the suffix .npy, .npz"),
    (["functions:stop", "x.npy"], 130, "interrupted. Finished chunks are kept: repeat the command"),
]


@pytest.mark.parametrize(("arguments", "code", "words"), MISTAKES)
def test_mistakes(arguments: list[str], code: int, words: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    pathlib.Path("raises.py").write_text("1 / 0")
    pathlib.Path("exits.py").write_text("raise SystemExit(0)")
    pathlib.Path("full").mkdir()
    pathlib.Path("full/thesis.tex").touch()
    pathlib.Path("full/json.py").touch()
    command = ["run", *arguments, *([] if "--out" in arguments else ["--out", "out"]), "--quiet"]
    assert main(command) == code
    said = capsys.readouterr().err
    assert words in said
    assert said.startswith("devicemap run: ")
    assert ("error: " in said) == (code != 130)
    assert "Traceback" not in said
    assert not [*pathlib.Path().glob("*.partial")]
    assert main([*command, "--traceback"]) == code
    assert "Traceback" in capsys.readouterr().err


# Other commands


def test_explain_and_bench(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["explain", "./functions.py:double", "x.npy", "--json", "plan.json"]) == 0
    assert capsys.readouterr().out.startswith("double: 20 rows on ")
    assert json.loads(pathlib.Path("plan.json").read_text())["rows"] == 20
    few = ["--devices", "CPU:0,CPU:1", "--rows", "8", "--seconds", "0.5", "--batch-size", "4"]
    assert main(["bench", "functions:double", "x.npy", *few, "--json", "b.json", "--plot", "b.png"]) == 0
    assert "double on 2 devices" in capsys.readouterr().out
    assert [m["rows"] for m in json.loads(pathlib.Path("b.json").read_text())["measurements"]] == [4, 8, 8, 8]
    assert pathlib.Path("b.png").read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "nothing:is_called", "x.npy", "--plot", "b.npy"]) == 2
    assert "b.npy cannot be drawn: its suffix has to be one of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "path", "words"),
    [
        ("--json", "nowhere/b.json", "nowhere/b.json is a folder, or its folder does not exist"),
        ("--plot", ".", ". is a folder, or its folder does not exist"),
        ("--json", "b.json", "there is no permission to write b.json"),
    ],
)
def test_results_that_cannot_be_saved_are_refused_at_once(
    option: str, path: str, words: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # the superuser may write anywhere
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "nothing:is_called", "x.npy", option, path])
    assert f"argument {option}: {words}" in capsys.readouterr().err


def test_help_does_not_wait_for_tensorflow() -> None:
    program = (
        "import runpy, sys\n"
        "try:\n    runpy.run_module('devicemap', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert not {'tensorflow', 'numpy', 'rich'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for option, words in (("--help", "usage: devicemap"), ("--version", f"devicemap {devicemap.__version__}\n")):
        command = [sys.executable, "-c", program, option]
        assert words in subprocess.check_output(command, env=environment, text=True, timeout=120)


def test_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--simulate", "8", "--json", "d.json"]) == 0
    said = capsys.readouterr().out
    names = [f"CPU:{i}" for i in range(8)]
    assert [line.split()[0] for line in said.splitlines() if line.startswith("CPU:")] == names
    assert ("\nNo GPU: " in said) == (not tf.config.list_physical_devices("GPU"))
    told = [device["name"] for device in json.loads(pathlib.Path("d.json").read_text()) if device["kind"] == "CPU"]
    assert told == [f"/job:localhost/replica:0/task:0/device:{name}" for name in names]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--open", "--port", "-1"], "port=-1; expected an int from 0 to 65535"),
        (["check", "--seconds", "nan"], "seconds=nan; expected None or a number of at least 0"),
    ],
)
def test_numbers_out_of_range(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
