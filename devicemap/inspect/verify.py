"""`DeviceMap.verify`: run a function on some rows in three modes, and compare each with one device on all rows at once.

    "again"          the same call a second time
    "one by one"     one row per call
    "over devices"   the map itself

All modes run the same trace, so their results have the same structure and dtypes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap._tensorflow.calls import Cancellation
from devicemap.compile.compiled import CompiledMap
from devicemap.compile.invoke import interruptible
from devicemap.compile.program import Program
from devicemap.data.rows import HOST, Rows, first_rows, take_rows
from devicemap.data.shards import join
from devicemap.data.sources import rows_in_memory
from devicemap.data.structure import as_nodes, map_nest
from devicemap.devices import kind_of
from devicemap.errors import DeviceMapError, FunctionError, brief, warn_user
from devicemap.events import Shard, short_name
from devicemap.inspect.render import Result, page
from devicemap.options import check_count, check_number
from devicemap.run.graph_engine import CallObservers
from devicemap.run.mapper import Mapper

_LEAST_ROWS, _ROWS_PER_DEVICE = 16, 2

_SINGLE_ROWS_SHARE = 0.25
"""Single rows run for this share of the time limit. Then all of these rows run three more times, as one batch."""

_MEANINGS = {
    "again": "The same rows give different results each time: fn draws random numbers, or reads state that changes. For random "
    "numbers, use the option seed= and tf.random.stateless_* ops. Pass other state as data",
    "one by one": "A row's result depends on the other rows of its batch, as with a mean over the batch or batch normalization "
    "in training mode: use fixed statistics (training=False), or compute them in a first pass. Or rounding decides a branch, "
    "an argmax or a number of steps",
    "over devices": "Several devices compute something else than one device. A result may depend on the number of rows, or "
    "kernels of different devices may round differently",
}
"""The meaning of a difference by mode. A mode also differs for the reasons of the modes before it."""


_EPSILON = {tf.bfloat16: 2.0**-7, tf.float16: 2.0**-10, tf.float32: 2.0**-23, tf.float64: 2.0**-52}
"""The distance from 1 to the next number. NumPy has no value for bfloat16."""


@dataclass(frozen=True)
class Finding:
    """One output that differs in one mode."""

    mode: str
    """`"again"`, `"one by one"` or `"over devices"`: the first mode in which the output differs."""

    output: str | None
    """The path of the output, as `the result['x']`; `None` if `fn` failed on a single row."""

    difference: str
    """The first difference: index, values, and how many numbers differ. If `fn` failed, the error."""

    meaning: str
    """The likely cause, and what to do."""

    def __str__(self) -> str:
        return f"{self.mode}: {self.difference}. {self.meaning}."


@dataclass(frozen=True, repr=False)
class Verification(Result):
    """The result of `DeviceMap.verify`. `print(verification)` shows all of it."""

    name: str
    """Name of the function."""

    rows: int
    """Number of rows that were compared."""

    expected_rows: int
    """Number of rows to compare if time allows, without those that `on_error="skip"` leaves out."""

    devices: tuple[str, ...]
    """Full names of the devices of the map."""

    findings: tuple[Finding, ...]
    """At most one per output, and one if `fn` failed on a single row."""

    @property
    def ok(self) -> bool:
        """Whether the rows gave the same results in all modes, up to rounding."""
        return not self.findings

    def __bool__(self) -> bool:
        raise TypeError("a Verification is neither true nor false: use verification.ok")

    def __rich__(self) -> Any:
        answer = "the same results in all modes, up to rounding" if self.ok else "NOT the same results in all modes"
        title = f"{self.name}: {answer}; {self.rows} row(s) on {', '.join(map(short_name, self.devices))}"
        few = ["One row does not show whether rows depend on each other: verify more."] if self.rows == 1 else []
        limited = [f"The time limit left out {self.expected_rows - self.rows} of {self.expected_rows} rows."]
        return page(title, notes=[*map(str, self.findings), *few, *limited * (self.rows < self.expected_rows)])


def verify(
    program: Program, data: Any, rows: int | None, tolerance: float | None, seconds: float | None
) -> Verification:
    """Run a program on the first `rows` rows of `data` in each mode, and compare. See `DeviceMap.verify`."""
    if rows is not None:
        check_count("rows", rows)
    check_number("tolerance", tolerance)
    check_number("seconds", seconds)
    if not tf.executing_eagerly():
        raise DeviceMapError("verify was called inside a tf.function, which has no results to compare; call it outside")
    most = int(rows or max(_LEAST_ROWS, _ROWS_PER_DEVICE * len(program.devices)))
    some = rows_in_memory(data, program.options, most)
    compiled, count = program.compiled_for(some), some.count or 0
    run = _on_one_device(program, compiled, some)
    alone, failed = _run_single_rows(run, count, math.inf if seconds is None else _SINGLE_ROWS_SHARE * seconds)
    tried = len(alone) + len(failed)
    kept = [*range(tried)]
    if tried < count:
        warn_user(
            f"{program.name}: verify compares {tried} of {count} rows, because fn is slow. Pass seconds=None for all rows",
        )
    left_out = len(failed) if program.options.skips and alone else 0
    if left_out:
        kept, failed = [*alone], {}
    results: dict[str, list[Any]] = {}
    findings = []
    try:
        if failed:
            raise next(iter(failed.values()))
        results["one by one"] = [join(leaf) for leaf in zip(*alone.values())]
    except (tf.errors.OpError, FunctionError) as error:  # from `fn`, or for results with different inner shapes
        difference = f"fn failed with {type(error).__name__}: {brief(error)}"
        findings.append(Finding("one by one", None, difference, _MEANINGS["one by one"]))
    try:
        wanted, results["again"] = run(kept), run(kept)
    except tf.errors.OpError as error:
        start, stop, first = next(((row, row + 1, found) for row, found in failed.items()), (0, tried, error))
        raise program.located_error(first, [Shard(compiled.devices[0], start, stop)]) from first
    mapped = Mapper(program, CallObservers()).run(first_rows(some, tried).structure)
    results["over devices"] = tf.nest.flatten(as_nodes(mapped))
    findings += _differences(compiled, wanted, results, tolerance)
    return Verification(program.name, len(kept), count - left_out, compiled.devices, tuple(findings))


def of_first_layer(verification: Verification, names: Mapping[str, str]) -> Verification:
    """Return the findings of a model's first layer only. `names`: of the layers, by the keys of their outputs, in order."""
    found = next((key for key in names for each in verification.findings if f"['{key}']" in (each.output or "")), None)
    if found is None:
        return verification
    path, text = f"the result['{found}']", f"the output of layer {names[found]!r}"
    findings = tuple(
        replace(each, output=each.output.replace(path, text), difference=each.difference.replace(path, text))
        for each in verification.findings
        if each.output is not None and path in each.output
    )
    return replace(verification, findings=findings)


def _on_one_device(program: Program, compiled: CompiledMap, rows: Rows) -> Callable[[Sequence[int]], list[Any]]:
    """Return a function that computes some rows at once on the first device; Ctrl-C stops it."""
    leaves, cancellation = program.with_row_seeds(rows.leaves, 0, rows.count), Cancellation()
    function = compiled.chunk_functions(cancellation)[compiled.devices[0]]()

    def run(rows: Sequence[int]) -> list[Any]:
        with tf.device(HOST):
            taken = [join([take_rows(leaf, row, row + 1) for row in rows]) for leaf in leaves]
        results: list[Any] = interruptible(partial(function, taken, len(rows)), cancellation.cancel)
        return results

    return run


def _run_single_rows(
    run: Callable[[Sequence[int]], list[Any]], count: int, seconds: float
) -> tuple[dict[int, list[Any]], dict[int, Exception]]:
    """Return the results and the errors of the first two rows, and of more rows as long as time allows."""
    alone, failed, began = dict[int, list[Any]](), dict[int, Exception](), 0.0
    for row in range(count):
        if row > 1 and time.perf_counter() - began >= seconds:
            break
        try:
            alone[row] = run([row])
        except tf.errors.OpError as error:
            failed[row] = error
        if row == 0:  # the first call compiles
            began = time.perf_counter()
    return alone, failed


def _differences(
    compiled: CompiledMap, wanted: list[Any], results: Mapping[str, list[Any]], tolerance: float | None
) -> Iterator[Finding]:
    """Yield the first difference of each output."""
    meanings = dict(_MEANINGS)
    if compiled.traced.vectorized:
        meanings["one by one"] += ", which vectorize=False keeps the same for all numbers of rows"
    paths = tf.nest.flatten(map_nest(lambda _, path: path, compiled.traced.structure, "the result"))
    for i, (path, leaf) in enumerate(zip(paths, wanted, strict=True)):
        relative = usual_tolerance(leaf.dtype, compiled.devices) if tolerance is None else tolerance
        for mode, meaning in meanings.items():
            if mode in results and (found := find_difference(path, results[mode][i], leaf, relative)):
                yield Finding(mode, path, found, meaning)
                break


def usual_tolerance(dtype: tf.DType, devices: tuple[str, ...]) -> float:
    """Return the allowed difference of numbers, relative to the largest: the square root of the distance from 1 to the next.

    That is half of the digits. Sums lose far fewer digits by rounding, and another batch changes far more.
    """
    real = dtype.real_dtype
    if real == tf.float32 and tf.config.experimental.tensor_float_32_execution_enabled():
        real = tf.float16 if any(kind_of(device) == "GPU" for device in devices) else real  # TF32 has as many
    return float(np.sqrt(_EPSILON.get(real, 0.0)))


def find_difference(path: str, got: Any, wanted: Any, tolerance: float) -> str | None:
    """Describe the first difference between two dense, ragged or sparse tensors of one dtype.

    Fractions may differ by `tolerance`, relative to the largest number. A single number is no measure: a sum of numbers of
    both signs is small compared with its rounding error. NaN equals NaN.
    """
    for (name, x), (_, y) in zip(_arrays(path, got), _arrays(path, wanted)):
        if x.shape != y.shape:
            return f"{name} has the shapes {list(x.shape)} and {list(y.shape)}"
        different = x != y
        if x.dtype == wanted.dtype.as_numpy_dtype and (wanted.dtype.is_floating or wanted.dtype.is_complex):
            wide = np.complex128 if wanted.dtype.is_complex else np.float64
            x, y = x.astype(wide), y.astype(wide)
            largest = np.abs(y).max(initial=0.0, where=np.isfinite(y))
            with np.errstate(invalid="ignore"):  # infinity minus infinity
                near = np.abs(x - y) <= tolerance * largest
            different = ~((x == y) | near | (np.isnan(x) & np.isnan(y)))
        if different.any():
            index = tuple(np.argwhere(different)[0].tolist())
            values = f"{x.item(index)!r} and {y.item(index)!r} at index {list(index)}"
            return f"{name} has {values}; {different.sum()} of {different.size} values differ"
    return None


def _arrays(path: str, leaf: Any) -> list[tuple[str, Any]]:
    """Return the arrays of a tensor, with names. Values come last, after the layout."""
    if isinstance(leaf, tf.RaggedTensor):
        lengths = [(f"row lengths of axis {i}", part) for i, part in enumerate(leaf.nested_row_lengths(), start=1)]
        parts = [*lengths, ("flat values", leaf.flat_values)]
    elif isinstance(leaf, tf.SparseTensor):
        leaf = tf.sparse.reorder(leaf)
        parts = [("dense shape", leaf.dense_shape), ("indices", leaf.indices), ("values", leaf.values)]
    else:
        return [(path, np.asarray(leaf.numpy()))]
    return [(f"{path}, {name},", part.numpy()) for name, part in parts]
