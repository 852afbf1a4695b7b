"""TensorFlow's own tests of `map_fn`, `scan` and pfor, run with `devicemap.parallel_map` in their place.

`python -m clients.tensorflow_tests FOLDER OUTPUT FILE` runs the tests of one file and appends lines of JSON to OUTPUT. FOLDER
holds TensorFlow's sources of the installed version. Each test runs in eager mode, once per engine:

- `"tensorflow"`: unchanged. A test that fails here does not apply.
- `"pfor"`: by pfor, which may not fall back to a loop.
- `"vectorize=True"` and `"auto"`: by `devicemap.DeviceMap` on three devices, over rows that are repeated and reordered.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import flags
from tensorflow.python.framework import indexed_slices, test_util
from tensorflow.python.ops import functional_ops, map_fn
from tensorflow.python.ops.parallel_for import control_flow_ops
from tensorflow.python.ops.parallel_for import test_util as pfor_test_util
from tensorflow.python.ops.ragged import ragged_map_ops, ragged_tensor

import devicemap
from devicemap.compile import trace

PYTHON = "tensorflow/python/"
FILES = [
    f"{folder}/{name}_test.py"
    for folder, names in {
        "kernel_tests/control_flow": ("map_fn", "functional_ops"),
        "ops/ragged": ("ragged_map_fn_op",),
        "ops/parallel_for": ("array", "control_flow_ops", "math", "xla_control_flow_ops"),
    }.items()
    for name in names
]
"""Their tests of gradients are for graphs of `tf.compat.v1`: `fn` differentiates what is outside of it."""

ENGINES = ("tensorflow", "pfor", "vectorize=True", "auto")
DEVICES = ["CPU:2", "CPU:0", "CPU:1"]
REPEATED = 3
MOST_REPEATED_ROWS = 16
"""Tests of more rows return large results, which are not repeated."""


class NotApplicableError(Exception):
    """The test uses what `parallel_map` does not offer, by design."""


class Engine:
    """Stands for TensorFlow's functions in the tests, and notes how `devicemap` runs each map."""

    name = "tensorflow"

    def __init__(self) -> None:
        self.loops: list[Any] = []

    def pfor(self, fn: Any, iters: Any, fallback_to_while_loop: bool = True, **options: Any) -> Any:
        if self.name == "tensorflow":
            return control_flow_ops.pfor(fn, iters, fallback_to_while_loop, **options)
        if self.name == "pfor":
            return control_flow_ops.pfor(fn, iters, False, **options)
        if control_flow_ops._loop_fn_has_config(fn):
            raise NotApplicableError("fn takes a pfor_config")
        return self._mapped(fn, tf.range(iters))

    def vectorized_map(self, fn: Any, elems: Any, fallback_to_while_loop: bool = True, **options: Any) -> Any:
        if self.name in ("tensorflow", "pfor"):
            return tf.vectorized_map(fn, elems, fallback_to_while_loop and self.name == "tensorflow", **options)
        return self._mapped(fn, elems)

    def map_fn(self, fn: Any, elems: Any, dtype: Any = None, fn_output_signature: Any = None, **options: Any) -> Any:
        signature = tf.nest.map_structure(_spec, fn_output_signature if dtype is None else dtype)
        if self.name == "tensorflow":
            return map_fn.map_fn(fn, elems, fn_output_signature=signature, **options)
        if self.name == "pfor":
            return tf.vectorized_map(fn, elems, fallback_to_while_loop=False)
        given = any(isinstance(spec, tf.TypeSpec) for spec in tf.nest.flatten(signature))
        return self._mapped(
            fn, elems, signature if given else None
        )  # no vectorising with dtypes, which say nothing new

    def of_rows(self, function: Any, fn: Any, elems: Any, initializer: Any = None, **options: Any) -> Any:
        """`scan` or a fold: one row of a map over three equal ones."""
        if self.name == "tensorflow":
            return function(fn, elems, initializer, **options)
        given = (elems,) if initializer is None else (elems, initializer)
        data = tf.nest.map_structure(lambda leaf: tf.stack([leaf] * 3), given)
        rows = self.vectorized_map(lambda row: function(fn, *row, **options), data)
        return tf.nest.map_structure(lambda leaf: leaf[1], rows)

    def _mapped(self, fn: Any, elems: Any, signature: Any = None) -> Any:
        """`DeviceMap` with what pfor takes: tuples and lists as one argument and as results, variables, `IndexedSlices`."""
        data = [leaf if _is_composite(leaf) else tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(elems)]
        if any(leaf.shape.rank and leaf.shape[0] != data[0].shape[0] for leaf in data):
            raise NotApplicableError("rows of a length of 1 are broadcast")
        structure: list[Any] = []

        def run(*leaves: Any) -> Any:
            results = fn(tf.nest.pack_sequence_as(elems, leaves))
            if signature is not None:
                return results
            structure[:] = [results]
            return tuple(map(_dense, tf.nest.flatten(results)))

        data, back = _reordered(data)
        vectorize = True if self.name == "vectorize=True" else "auto"
        mapper = devicemap.DeviceMap(run, devices=DEVICES, vectorize=vectorize, fn_output_signature=signature)
        results = tf.nest.map_structure(back, mapper(tuple(data)))
        return results if signature is not None else tf.nest.pack_sequence_as(structure[0], results)


def _spec(spec: Any) -> Any:
    if isinstance(spec, ragged_tensor.RaggedTensorType):  # of all rows
        return tf.RaggedTensorSpec(None, spec.dtype, spec.ragged_rank - 1, spec.row_splits_dtype)
    return spec


def _is_composite(leaf: Any) -> bool:
    return isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)


def _dense(leaf: Any) -> Any:
    return tf.convert_to_tensor(leaf) if isinstance(leaf, indexed_slices.IndexedSlices) else leaf


def _reordered(data: list[Any]) -> tuple[list[Any], Callable[[Any], Any]]:
    """Rows in reverse order and repeated, so that each device has several; and a function that selects each row once."""
    count = data[0].shape[0] if data[0].shape.rank else None
    if not count or count > MOST_REPEATED_ROWS or any(isinstance(leaf, tf.SparseTensor) for leaf in data):
        return data, lambda results: results
    rows = tf.range(count)
    places = (count - 1 - rows) + count * (rows % REPEATED)

    def select(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            split = tf.sparse.split(sp_input=leaf, num_split=REPEATED * count, axis=0)
            return tf.sparse.concat(0, [split[int(i)] for i in places])
        return tf.gather(leaf, places)

    def repeat(leaf: Any) -> Any:
        if isinstance(leaf, tf.RaggedTensor):
            return tf.concat([leaf[::-1]] * REPEATED, 0)
        return tf.tile(
            tf.reverse(leaf, [0]), [REPEATED, *[1] * (leaf.shape.rank - 1)]
        )  # gradients as of the leaf itself

    return list(map(repeat, data)), select


def load(path: Path, engine: Engine) -> list[unittest.TestCase]:
    """The tests of a file, for eager mode alone, with the functions of the engine in place of TensorFlow's."""
    pfor = _replaced(control_flow_ops, pfor=engine.pfor, vectorized_map=engine.vectorized_map)
    pfor_test_util.pfor_control_flow_ops = pfor
    for name in ("run_all_in_graph_and_eager_modes", "run_in_graph_and_eager_modes", "with_control_flow_v2"):
        setattr(test_util, name, lambda decorated: decorated)
    test_util.run_v1_only = lambda *reason: lambda decorated: decorated
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    folds = {
        name: functools.partial(engine.of_rows, getattr(functional_ops, name))
        for name in ("scan", "foldl", "foldr")
        if "functional_ops" in path.stem
    }
    replaced = {
        control_flow_ops: pfor,
        map_fn: _replaced(map_fn, map_fn=engine.map_fn),
        ragged_map_ops: _replaced(ragged_map_ops, map_fn=engine.map_fn),
        functional_ops: _replaced(functional_ops, **folds),
    }
    for name, value in list(vars(module).items()):
        if isinstance(value, types.ModuleType) and value in replaced:
            setattr(module, name, replaced[value])
    suites = unittest.defaultTestLoader.loadTestsFromModule(module)
    tests: list[Any] = [test for suite in suites for test in suite]  # type: ignore[union-attr]
    names = ("Fold", "Scan") if folds else ("test",)
    return [test for test in tests if test._testMethodName != "test_session" and any(n in test.id() for n in names)]


def _replaced(module: Any, **names: Any) -> Any:
    """A copy of the module with other functions: TensorFlow goes on to use its own."""
    copy = types.ModuleType(module.__name__)
    vars(copy).update(vars(module), **names)
    return copy


def run(test: unittest.TestCase, engine: Engine, name: str) -> str:
    """The outcome: `"passed"`, `"skipped: ..."`, `"wrong: ..."` for a failed comparison, or `"error: ..."`."""
    engine.name, engine.loops = name, []
    result = unittest.TestResult()
    result.addError = result.addFailure = lambda _, info: result.errors.append(info[1])  # type: ignore[assignment,method-assign]
    result.addSubTest = lambda _, __, info: info and result.errors.append(info[1])  # type: ignore[assignment,method-assign]
    test.run(result)
    tf.config.run_functions_eagerly(False)
    if result.skipped:
        return f"skipped: {result.skipped[0][1]}"
    if not result.errors:
        return "passed"
    error: Any = result.errors[0]
    if isinstance(error, NotApplicableError):
        return f"skipped: {error}"
    message = f"{type(error).__name__}: {error}"[:600]
    of_errors = "not raised" in message or "does not match" in message
    return f"{'wrong' if isinstance(error, AssertionError) and not of_errors else 'error'}: {message}"


@contextlib.contextmanager
def noted(engine: Engine) -> Iterator[None]:
    """Append how rows are mapped to `engine.loops`, for each function that is traced."""
    chosen = trace.loops_over_rows

    def choose(*args: Any) -> Any:
        loops = chosen(*args)
        engine.loops.append(loops[0])
        return loops

    trace.loops_over_rows = choose
    try:
        yield
    finally:
        trace.loops_over_rows = chosen


def main(folder: Path, output: Path, file: str) -> None:
    """Run the tests of which `output` does not have a line: after a crash, the ones behind it."""
    devicemap.simulate_devices(len(DEVICES))
    flags.FLAGS.mark_as_parsed()
    engine = Engine()
    started = {json.loads(line)["test"] for line in output.read_text().splitlines()} if output.exists() else set()
    with output.open("a") as lines, noted(engine):
        for test in load(folder / PYTHON / file, engine):
            row: dict[str, Any] = {"test": f"{file}::{type(test).__name__}.{test._testMethodName}"}
            if row["test"] in started:
                continue
            for name in ENGINES:
                if name == "tensorflow" or row["tensorflow"] == "passed":
                    print(json.dumps({**row, name: "error: the process ended"}), file=lines, flush=True)
                    row[name] = run(test, engine, name)
            row["loops"] = [[bool(loop.vectorized), str(loop.reason)] for loop in engine.loops]
            print(json.dumps(row), file=lines, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
