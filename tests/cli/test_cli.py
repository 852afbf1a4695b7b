"""The command line, as a user of a shell meets it; what the inputs hold is compared with the rows that come out."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import re
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

calls = 0

def double(row):
    return row * 2

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

class Model:
    def apply(self, row):
        return row + 1

model = Model()
number = 3
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
def test_a_tfrecord_that_is_cut_inside_a_header(suffix: str, kept: int) -> None:
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
    assert [len(read_input(pattern, False, None)) for pattern in ("files/**/*.jpg", "files/6.jpg")] == [8, 1]


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


def test_run_says_what_it_did_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    np.save("x.npy", X)
    run("double", "x.npy")
    assert re.fullmatch(r"20 rows in .* s \(.* rows/s\) in .*\n20 rows in out; .*\n", capsys.readouterr().out)
    files = {file.name: file.stat().st_mtime_ns for file in pathlib.Path("out").glob("*.npz")}
    run("double", "x.npy")
    assert capsys.readouterr().out.startswith("no row was missing\n20 rows in out; ")
    assert files == {file.name: file.stat().st_mtime_ns for file in pathlib.Path("out").glob("*.npz")}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["functions:double", "nowhere.npy"], 1, "nowhere.npy: there is no such file or folder"),
        (["functions:double", "no*.npy"], 1, "no file matches this pattern"),
        (["functions", "x.npy"], 2, "'functions' is no function; expected MODULE:FUNCTION"),
        (["functions.py:double", "x.npy"], 2, "is a file; expected a module, as in functions:double"),
        (["nowhere:double", "x.npy"], 2, "there is no module 'nowhere' in"),
        (["functions:treble", "x.npy"], 2, "there is no 'treble' in it; there is Model, broken, double,"),
        (["functions:number", "x.npy"], 2, "is of type int, which cannot be called"),
        (["raises:fn", "x.npy"], 1, "importing raises failed: ZeroDivisionError"),
        (["needs:fn", "x.npy"], 1, "importing needs failed: ModuleNotFoundError: No module named 'not_there'"),
        (["functions:double", "x.npy", "--devices", "GPU:99"], 2, "'GPU:99', which is not a device here"),
        (["functions:double", "x.npy", "--seed", "-1"], 2, "seed=-1; expected None or an int"),
        (["functions:broken", "x.npy"], 1, "fn could not be traced"),
        (["functions:double", "x.npy", "--out", "full"], 1, "no results of devicemap"),
        (["functions:double", "y.npz", "--out", "other"], 1, "holds results of another call"),
        (["functions:stop", "x.npy"], 130, "interrupted. What was finished is kept: run the same command again"),
    ],
)
def test_mistakes(arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("x.npy", X)
    np.savez("y.npz", X)
    pathlib.Path("raises.py").write_text("1 / 0")
    pathlib.Path("needs.py").write_text("import not_there")
    pathlib.Path("full").mkdir()
    pathlib.Path("full/thesis.tex").touch()
    if "other" in arguments:
        assert main(["run", "functions:length", "functions.py", "--out", "other", "--quiet"]) == 0
        arguments = ["functions:double", "x.npy", "--out", "other"]
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
    np.savez("none.npz")
    pathlib.Path("uneven").mkdir()
    np.save("uneven/0.npy", X)
    np.save("uneven/1.npy", X[:, 0])
    pathlib.Path("packed").mkdir()
    pathlib.Path("packed/0.tfrecord").touch()
    pathlib.Path("packed/1.tfrecord.gz").write_bytes(gzip.compress(b""))
    for path, words in {
        "mixed": "several kinds",
        "empty": "without files",
        "scalar.npy": "a single number",
        "nothing.npy": "5 rows .*nothing in them",
        "objects.npy": "not a .npy file of a plain array",
        "dates.npy": "which TensorFlow has no dtype for",
        "text.npy": "not a .npy file",
        "text.npz": "not a .npz file",
        "none.npz": "holds no arrays",
        "uneven": "rows of one dtype and shape",
        "packed": "some are compressed",
    }.items():
        with pytest.raises(DataError, match=words):
            read_input(path, False, None)


def test_a_large_npy_is_not_read_before_it_is_asked_for() -> None:
    shape = (2**22, 2**12)  # 64 GiB, of holes
    array = np.lib.format.open_memmap("large.npy", mode="w+", dtype=np.float32, shape=shape)
    array[0], array[-1] = 1, 2
    dataset = read_input("large.npy", False, None)
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
    assert "double: 8 row(s) on" in capsys.readouterr().out
    assert json.loads(pathlib.Path("b.json").read_text())["rows"] == 8
    assert pathlib.Path("b.png").read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "functions:double", "x.npy", "--batch-size", "auto"]) == 2
    capsys.readouterr()
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
