"""`DeviceMap.verify`: run a function on some rows in three modes, and compare each with one device on all rows at once.

    "again"          the same call a second time
    "one by one"     one row per call
    "over devices"   the map itself

All modes run the same trace, so their results have the same structure and dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap._tensorflow.calls import Cancellation
from devicemap.base.devices import kind_of
from devicemap.base.options import check_count, check_tolerance
from devicemap.base.structure import map_nest
from devicemap.compile.compiled import Compiled
from devicemap.compile.invoke import interruptible
from devicemap.compile.program import Program
from devicemap.data.join import join
from devicemap.data.rows import HOST, Rows, take_rows
from devicemap.data.sample import rows_in_memory
from devicemap.errors import DeviceMapError, FunctionError, brief
from devicemap.events import short_name
from devicemap.run.calls import Calls, Nobody
from devicemap.tell.render import Result, page

_LEAST_ROWS = 16
_ROWS_PER_DEVICE = 2

_EPSILON = {tf.bfloat16: 2.0**-7, tf.float16: 2.0**-10, tf.float32: 2.0**-23, tf.float64: 2.0**-52}
"""The distance from 1 to the next number. NumPy does not know it for bfloat16."""

_EPSILON_OF_TENSOR_FLOAT = 2.0**-10
"""The same for float32 on GPUs, which multiply in TensorFloat-32 by default."""

_MEANINGS = {
    "again": "The same rows give different results each time: fn draws random numbers, or reads state that changes. For random "
    "numbers, use the option seed= and tf.random.stateless_* ops. Pass other state as data",
    "one by one": "A row's result depends on the other rows of its batch, as with a mean over the batch or batch normalization "
    "in training mode. It changes with the number of devices and with batch_size. Use fixed statistics (training=False), or "
    "compute them in a first pass. A fn of one row needs vectorize=False",
    "over devices": "Several devices compute something else than one device. A result may depend on the number of rows, or "
    "kernels of different devices may round differently",
}
"""The meaning of a difference, by mode. A mode also differs for the reasons of the modes before it."""


@dataclass(frozen=True)
class Finding:
    """One output that differs in one mode."""

    mode: str
    """`"again"`, `"one by one"` or `"over devices"`: the first mode in which the output differs."""

    output: str | None
    """The path of the output, as `the result['x']`; `None` if `fn` failed in this mode."""

    difference: str
    """The first difference: index, values, and how many numbers differ. If `fn` failed, the error."""

    meaning: str
    """The likely cause, and what to do."""

    def __str__(self) -> str:
        return f"{self.mode}: {self.difference}. {self.meaning}."


@dataclass(frozen=True, repr=False)
class Verification(Result):
    """The result of `DeviceMap.verify`. `print(verification)` shows all of it."""

    _derived = ("ok",)

    name: str
    """Name of the function."""

    rows: int
    """Number of rows that were run."""

    devices: tuple[str, ...]
    """Full names of the devices of the map."""

    findings: tuple[Finding, ...]
    """At most one per output and per mode that failed."""

    @property
    def ok(self) -> bool:
        """Whether all modes gave the same results, up to rounding."""
        return not self.findings

    def __bool__(self) -> bool:
        raise TypeError("a Verification is neither true nor false: ask for verification.ok")

    def __rich__(self) -> Any:
        answer = "the same results in all modes, up to rounding" if self.ok else "NOT the same results in all modes"
        title = f"{self.name}: {answer}; {self.rows} row(s) on {', '.join(map(short_name, self.devices))}"
        few = ["One row does not show whether rows depend on each other: verify more."] if self.rows == 1 else []
        return page(title, notes=[*map(str, self.findings), *few])


def verify(program: Program, data: Any, rows: int | None, tolerance: float | None) -> Verification:
    """Run a program on the first `rows` rows of `data` in each mode, and compare. See `DeviceMap.verify`."""
    if rows is not None:
        check_count("rows", rows)
    check_tolerance(tolerance)
    if not tf.executing_eagerly():
        raise DeviceMapError("verify was called inside a tf.function, which has no results to compare; call it outside")
    most = int(rows or max(_LEAST_ROWS, _ROWS_PER_DEVICE * len(program.devices)))
    some = rows_in_memory(data, program.options, most, most)
    compiled = program.compiled_for(some)
    results = {"over devices": Calls(program, Nobody()).over(some.structure)}  # first: its errors name rows and device
    at_once, one_by_one = _modes_on_one_device(program, compiled, some)
    wanted = at_once()
    findings = []
    for mode, run in (("again", at_once), ("one by one", one_by_one)):
        try:
            results[mode] = run()
        except (tf.errors.OpError, FunctionError) as error:
            findings.append(
                Finding(mode, None, f"fn failed with {type(error).__name__}: {brief(error)}", _MEANINGS[mode])
            )
    paths = tf.nest.flatten(map_nest(lambda _, path: path, wanted, "the result"))
    for i, (path, leaf) in enumerate(zip(paths, tf.nest.flatten(wanted))):
        relative = _relative_tolerance(leaf.dtype, compiled.devices) if tolerance is None else tolerance
        for mode in (mode for mode in _MEANINGS if mode in results):
            difference = find_difference(path, tf.nest.flatten(results[mode])[i], leaf, relative)
            if difference:
                findings.append(Finding(mode, path, difference, _MEANINGS[mode]))
                break
    return Verification(program.name, some.count or 0, compiled.devices, tuple(findings))


def _modes_on_one_device(
    program: Program, compiled: Compiled, rows: Rows
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return functions that run all rows at once, and one by one."""
    cancellation = Cancellation()
    function = compiled.functions(cancellation)[compiled.devices[0]]()
    leaves = program.seeded(rows.leaves, 0, rows.count)

    def run(start: int, stop: int) -> Any:
        with tf.device(HOST):
            some = [take_rows(leaf, start, stop) for leaf in leaves]
        return interruptible(partial(function, *compiled.flat(some)), cancellation)

    def run_in(size: int) -> Any:
        count = rows.count or 0
        parts = [run(start, start + size) for start in range(0, count, size)]
        return compiled.pack([join(leaf) for leaf in zip(*parts)])

    return partial(run_in, rows.count or 0), partial(run_in, 1)


def _relative_tolerance(dtype: tf.DType, devices: tuple[str, ...]) -> float:
    """Half of the digits of a dtype: far more than sums lose by rounding, and far less than another batch changes."""
    epsilon = _EPSILON.get(dtype.real_dtype, 0.0)
    if dtype.real_dtype == tf.float32 and tf.config.experimental.tensor_float_32_execution_enabled():
        epsilon = _EPSILON_OF_TENSOR_FLOAT if any(kind_of(device) == "GPU" for device in devices) else epsilon
    return math.sqrt(epsilon)


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
    """Return the arrays that a tensor consists of, with names. Values come last, after the layout."""
    if isinstance(leaf, tf.RaggedTensor):
        lengths = [(f"row lengths of axis {i}", part) for i, part in enumerate(leaf.nested_row_lengths(), start=1)]
        parts = [*lengths, ("flat values", leaf.flat_values)]
    elif isinstance(leaf, tf.SparseTensor):
        leaf = tf.sparse.reorder(leaf)
        parts = [("dense shape", leaf.dense_shape), ("indices", leaf.indices), ("values", leaf.values)]
    else:
        return [(path, np.asarray(leaf.numpy()))]
    return [(f"{path}, {name},", part.numpy()) for name, part in parts]
