"""The command line, as a user of a shell meets it; what the inputs hold is compared with the rows that come out."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import devicemap
from devicemap.cli import main
from devicemap.cli.input import read_input
from devicemap.errors import DataError

ROOT = pathlib.Path(__file__).parents[2]

FUNCTIONS = """
import tensorflow as tf

def double(row):
    return row * 2

def keep(row):
    return row

def named(rows):
    return {"sum": rows["a"] + rows["b"]}

def length(content):
    return tf.strings.length(content)

def noise(row, seed):
    return row + tf.random.stateless_normal([], seed)

def stop(row):
    raise KeyboardInterrupt

def broken(row):
    return row @ row

def not_30(row):
    with tf.control_dependencies([tf.debugging.assert_none_equal(row, 30.0)]):
        return tf.identity(row)

def short(content):
    length = tf.strings.length(content)
    with tf.control_dependencies([tf.debugging.assert_less(length, 30)]):
        return tf.identity(length)

def text(content):
    return {"length": tf.strings.length(content), "chars": tf.strings.bytes_split(content)}

def numbers():
    return tf.data.Dataset.range(20).map(lambda n: tf.cast(n, tf.float32))

batches = tf.data.Dataset.from_tensor_slices(tf.range(20.0)).batch(6)

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


def run(function: str, path: str, *options: str) -> Any:
    """The results of `devicemap run`, which has to work."""
    command = ["run", f"functions:{function}", path, "--out", "out", "--quiet", "--devices", "CPU:0,CPU:1", *options]
    assert main(command) == 0
    return devicemap.open_results("out").load()


X = np.arange(40, dtype=np.float32).reshape(20, 2)


@pytest.mark.parametrize("options", [[], ["--batched"], ["--batch-size", "3"], ["--batched", "--batch-size", "3"]])
def test_npy(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("devicemap.cli.input._SLICE_BYTES", 7 * X[0].nbytes)  # several slices, and an uneven one
    np.save("x.npy", X)
    np.testing.assert_array_equal(run("double", "x.npy", *options), X * 2)


def test_results_of_another_function_are_refused_unless_it_is_trusted(capsys: pytest.CaptureFixture[str]) -> None:
    np.save("x.npy", X)
    run("double", "x.npy")
    arguments = ["run", "functions:model.apply", "x.npy", "--out", "out", "--quiet"]
    assert main(arguments) == 1
    assert "--trust-function" in capsys.readouterr().err
    assert main([*arguments, "--trust-function"]) == 0


def test_several_npy_are_one_after_another() -> None:
    pathlib.Path("parts").mkdir()
    for i, part in enumerate(np.split(X, 4)):
        np.save(f"parts/{i}.npy", np.asfortranarray(part.astype(">f4")))
    np.testing.assert_array_equal(run("double", "parts"), X * 2)
    np.testing.assert_array_equal(run("double", "parts/*.npy"), X * 2)  # the same rows: nothing is left to do


def test_text_in_npy() -> None:
    np.save("x.npy", np.array(["one", "three", "\u00e4"]))
    assert run("length", "x.npy").tolist() == [3, 5, 2]


def test_npz_is_a_dict() -> None:
    np.savez("x.npz", a=X, b=X + 1)
    np.testing.assert_array_equal(run("named", "x.npz")["sum"], X + X + 1)


@pytest.mark.parametrize("options", [[], ["--batched"]])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_tfrecord(suffix: str, options: list[str]) -> None:
    for i in range(2):
        name = f"x.tfrecord-0000{i}-of-00002{suffix}"
        with tf.io.TFRecordWriter(name, options="GZIP" if suffix else "") as writer:
            for n in range(5):
                writer.write(b"x" * (5 * i + n))
    assert run("length", f"x.tfrecord*{suffix}", *options).tolist() == list(range(10))


@pytest.mark.parametrize("kept", [1, 11])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_tfrecord_that_was_cut_inside_a_header(suffix: str, kept: int) -> None:
    """TensorFlow finds other cuts itself, and takes this one for the end."""
    with tf.io.TFRecordWriter("whole") as writer:
        for n in range(3):
            writer.write(b"x" * n)
    whole = pathlib.Path("whole").read_bytes()
    whole = whole[: len(whole) - (8 + 4 + 2 + 4) + kept]
    pathlib.Path(f"cut.tfrecord{suffix}").write_bytes(gzip.compress(whole) if suffix else whole)
    with pytest.warns(RuntimeWarning, match=f"cut.tfrecord{suffix} was cut .*lost"):
        assert run("length", f"cut.tfrecord{suffix}").tolist() == [0, 1]


@pytest.mark.parametrize("options", [[], ["--batched"]])
def test_a_folder_or_pattern_of_files(options: list[str]) -> None:
    folder = pathlib.Path("files")
    (folder / "deeper").mkdir(parents=True)
    for n in range(7):
        (folder / f"{n}.jpg").write_bytes(b"x" * n)
    (folder / "deeper" / "a.jpg").write_bytes(b"x" * 100)
    (folder / ".hidden").write_bytes(b"x" * 1000)
    assert run("length", "files", *options).tolist() == list(range(7))
    assert [len(read_input(pattern, False, None).data) for pattern in ("files/**/*.jpg", "files/6.jpg")] == [8, 1]


@pytest.mark.parametrize("batched", [False, True])
def test_a_saved_dataset(batched: bool) -> None:
    dataset = tf.data.Dataset.from_tensor_slices(X)
    (dataset.batch(6) if batched else dataset).save("saved")
    np.testing.assert_array_equal(run("double", "saved", *["--batched"] * batched), X * 2)


def test_seed_and_a_method() -> None:
    np.save("x.npy", X[:, 0])
    one = run("noise", "x.npy", "--seed", "3", "--batch-size", "7")
    noise = lambda row, seed: row + tf.random.stateless_normal([], seed)
    two = devicemap.parallel_map(noise, X[:, 0], seed=3, devices=["CPU:0"])
    np.testing.assert_allclose(one, two, rtol=1e-6)
    assert main(["run", "functions:model.apply", "x.npy", "--out", "other", "--quiet", "--simulate", "8"]) == 0


@pytest.mark.parametrize(("name", "options"), [("numbers", []), ("batches", ["--batched"])])
def test_data_of_a_module(name: str, options: list[str]) -> None:
    assert run("double", f"functions:{name}", *options).tolist() == [2.0 * n for n in range(20)]


def test_run_says_what_it_did_and_continues(capsys: pytest.CaptureFixture[str]) -> None:
    np.save("x.npy", X)
    run("double", "x.npy")
    assert capsys.readouterr().out.endswith("20 rows in out; load them by devicemap.open_results('out').load()\n")
    run("double", "x.npy")
    assert capsys.readouterr().out.startswith("no row was missing\n20 rows in out; ")


def write(out: str, function: str = "double", path: str = "x.npy", *options: str) -> int:
    devices = ["--devices", "CPU:0,CPU:1"]
    return main(["run", f"functions:{function}", path, "--out", out, "--quiet", *devices, *options])


def test_npy_and_npz_files(capsys: pytest.CaptureFixture[str]) -> None:
    np.save("x.npy", X)
    np.savez("x.npz", a=X, b=X)
    assert write("y.npy") == write("y.npz", "named", "x.npz") == write("one.npz") == 0
    assert capsys.readouterr().out.splitlines()[1] == "20 rows in y.npy; load them by numpy.load('y.npy')"
    np.testing.assert_array_equal(np.load("y.npy"), 2 * X)
    np.testing.assert_array_equal(np.load("y.npz")["sum"], 2 * X)
    np.testing.assert_array_equal(np.load("one.npz")["result"], 2 * X)
    assert not {*pathlib.Path().glob("*.partial"), *pathlib.Path().glob("*.tmp")}
    assert write("y.npy") == 1  # which would compute all rows again
    assert "y.npy already exists; remove it" in capsys.readouterr().err


def test_parquet_files() -> None:
    parquet = pytest.importorskip("pyarrow.parquet", exc_type=ImportError)  # it may need a newer NumPy
    np.save("x.npy", np.array(["one", "", "four"]))
    assert write("y.parquet", "text", "x.npy", "--batched") == 0
    assert parquet.read_table("y.parquet").to_pydict() == {
        "length": [3, 0, 4],
        "chars": [[b"o", b"n", b"e"], [], [b"f", b"o", b"u", b"r"]],
    }
    np.save("x.npy", X)
    assert write("z.parquet") == 0
    assert parquet.read_table("z.parquet").to_pydict() == {"result": (2 * X).tolist()}


def test_a_file_is_continued_after_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    np.save("x.npy", X)
    assert write("y.npy", "not_30", "x.npy", "--batch-size", "5") == 1
    missing = sum((stop or 20) - start for start, stop in devicemap.open_results("y.npy.partial").missing)
    assert missing >= 5
    assert not pathlib.Path("y.npy").exists()
    arguments = ["--trust-function", "--batch-size", "5"]
    capsys.readouterr()
    pathlib.Path("functions.py").write_text(FUNCTIONS.replace("row, 30.0", "row, 99.0"))
    del sys.modules["functions"]
    assert write("y.npy", "not_30", "x.npy", *arguments) == 0
    assert capsys.readouterr().out.startswith(f"{missing} rows in ")
    np.testing.assert_array_equal(np.load("y.npy"), X)


@pytest.mark.parametrize(
    ("out", "function", "words"),
    [
        ("y.npy", "named", "returns 'result': {'sum': TensorSpec"),
        ("y.npz", "text", "returns 'chars': RaggedTensorSpec"),
        ("y.npy", "keep", "TensorSpec(shape=(None,), dtype=tf.string, name=None), which a .npy file cannot hold"),
    ],
)
def test_results_that_a_file_cannot_hold(
    out: str, function: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez("x.npz", a=X, b=X)
    np.save("x.npy", np.array(["one"]))
    assert write(out, function, "x.npz" if function == "named" else "x.npy", "--batched") == 2
    assert words in capsys.readouterr().err
    assert not pathlib.Path(f"{out}.partial").exists()


def test_parquet_needs_pyarrow(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    np.save("x.npy", X)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert write("y.parquet") == 1
    assert "needs pyarrow (" in capsys.readouterr().err
    assert not pathlib.Path("y.parquet.partial").exists()


@pytest.mark.parametrize("options", [[], ["--batched"]])
def test_errors_name_the_file_and_its_row(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for i, part in enumerate(np.split(X, 2)):
        np.save(f"{i}.npy", part)
    assert write("out", "not_30", "?.npy", *options) == 1
    assert "error: 1.npy, row 5: not_30 failed on row" in capsys.readouterr().err
    for name, size in (("a.txt", 3), ("b.txt", 40)):
        pathlib.Path(name).write_bytes(b"x" * size)
    assert write("out3", "short", "?.txt", *options) == 1
    assert "error: b.txt: short failed on row" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--batched"]])
def test_a_damaged_record_is_named(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(2):
        with tf.io.TFRecordWriter(f"{i}.tfrecord") as writer:
            for _ in range(3):
                writer.write(b"x" * 10)
    content = bytearray(pathlib.Path("1.tfrecord").read_bytes())
    content[26 + 15] ^= 1  # in the second record
    pathlib.Path("1.tfrecord").write_bytes(content)
    assert write("out", "length", "?.tfrecord", *options) == 1
    assert "error: 1.tfrecord, row 1 cannot be read: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["functions:double", "nowhere.npy"], 1, "nowhere.npy: no such file or folder with files"),
        (["functions", "x.npy"], 2, "fn is of type module, not callable"),
        (["functions.py:double", "x.npy"], 2, "No module named 'functions.py'"),
        (["nowhere:double", "x.npy"], 2, "No module named 'nowhere'"),
        (["functions:treble", "x.npy"], 2, "has no attribute 'treble'"),
        (["raises:fn", "x.npy"], 2, "raises:fn: ZeroDivisionError"),
        (["functions:double", "x.npy", "--devices", "GPU:99"], 2, "'GPU:99', which is not a device here"),
        (["functions:double", "x.npy", "--seed", "-1"], 2, "seed=-1; expected None or an int"),
        (["functions:broken", "x.npy"], 1, "fn could not be traced"),
        (["functions:double", "x.npy", "--out", "full"], 1, "no results of devicemap"),
        (["functions:stop", "x.npy"], 130, "interrupted. Finished chunks are kept: repeat the command"),
    ],
)
def test_mistakes(arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("x.npy", X)
    pathlib.Path("raises.py").write_text("1 / 0")
    pathlib.Path("full").mkdir()
    pathlib.Path("full/thesis.tex").touch()
    out = [] if "--out" in arguments else ["--out", "out"]
    assert main(["run", *arguments, *out, "--quiet"]) == code
    said = capsys.readouterr().err
    assert words in said
    assert said.startswith("devicemap run: ")
    assert ("error: " in said) == (code != 130)
    assert "Traceback" not in said
    assert main(["run", *arguments, *out, "--quiet", "--traceback"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_inputs_that_cannot_be_read() -> None:
    pathlib.Path("mixed").mkdir()
    np.save("mixed/x.npy", X)
    pathlib.Path("mixed/readme.txt").touch()
    pathlib.Path("empty").mkdir()
    np.save("scalar.npy", np.float32(1))
    np.save("nothing.npy", np.zeros([5, 0]))
    np.save("objects.npy", np.array([{}, None]), allow_pickle=True)
    np.save("dates.npy", np.array(["2020-01-01"], "datetime64[D]"))
    pathlib.Path("text.npy").write_text("not an array")
    pathlib.Path("text.npz").write_text("not an archive")
    np.savez("x.npz", X)
    pathlib.Path("uneven").mkdir()
    np.save("uneven/0.npy", X)
    np.save("uneven/1.npy", X[:, 0])
    pathlib.Path("packed").mkdir()
    pathlib.Path("packed/0.tfrecord").touch()
    pathlib.Path("packed/1.tfrecord.gz").write_bytes(gzip.compress(b""))
    for path, words in {
        "mixed": "has mixed/readme.txt, mixed/x.npy; expected files of one kind",
        "empty": "no such file or folder with files",
        "scalar.npy": r"an array of float32 \[\]; expected rows",
        "nothing.npy": r"an array of float64 \[5, 0\]; expected rows",
        "objects.npy": "objects.npy is not a file of plain arrays",
        "dates.npy": "dates.npy is not a file of plain arrays with dtypes of TensorFlow",
        "text.npy": "text.npy is not a file of plain arrays",
        "text.npz": "text.npz is not a file of plain arrays",
        "uneven": r"uneven/1.npy has an array of float32 \[20\]; .* as in uneven/0.npy of float32 \[2\]",
        "packed": "expected files of one kind",
        "*.npz": "expected files of one kind, or one .npz file",
    }.items():
        with pytest.raises(DataError, match=words):
            read_input(path, False, None)


def test_a_large_npy_is_not_read_before_it_is_asked_for() -> None:
    shape = (2**22, 2**12)  # 64 GiB, of holes
    array = np.lib.format.open_memmap("large.npy", mode="w+", dtype=np.float32, shape=shape)
    array[0], array[-1] = 1, 2
    dataset = read_input("large.npy", False, None).data
    assert int(dataset.cardinality()) == 2**22
    assert next(iter(dataset)).numpy().tolist() == [1.0] * 2**12


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    np.save("x.npy", X)
    assert main(["explain", "functions:double", "x.npy", "--json", "plan.json"]) == 0
    assert capsys.readouterr().out.startswith("double: 20 rows on ")
    assert json.loads(pathlib.Path("plan.json").read_text())["rows"] == 20


def test_bench(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    np.save("x.npy", X)
    saving = ["--json", "b.json", "--plot", "b.png"]
    few = ["--devices", "CPU:0,CPU:1", "--rows", "8", "--seconds", "0.5", "--batch-size", "4"]
    assert main(["bench", "functions:double", "x.npy", *few, *saving]) == 0
    assert "double on 2 device(s)" in capsys.readouterr().out
    assert [m["rows"] for m in json.loads(pathlib.Path("b.json").read_text())["measurements"]] == [4, 8, 8, 8]
    assert pathlib.Path("b.png").read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "nothing:is_called", "x.npy", "--plot", "b.npy"]) == 2
    assert "b.npy cannot be drawn: its suffix has to be one of" in capsys.readouterr().err


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
