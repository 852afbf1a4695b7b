"""`DeviceMap.verify`: run a function on some rows in several ways, and compare what comes out.

    rows ── in a graph: at once, again, one by one, over the devices ──┐
         ── in eager code: at once, again, in reverse, one by one    ──┴─ compared ──> findings

The ways are made of the map's own traced function and of its user's Python, so that nothing is traced that mapping does
not trace as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.calls import Cancellation
from devicemap.base.interruption import Signals
from devicemap.base.options import Options, check_count, check_tolerance
from devicemap.compile.audit import ATOMIC, Audit, Treatment, variable_of
from devicemap.compile.compiled import Compiled
from devicemap.compile.invoke import interruptible
from devicemap.compile.seeds import row_seeds
from devicemap.data.join import join
from devicemap.data.rows import HOST, Rows, as_rows, take_rows
from devicemap.data.sample import rows_in_memory
from devicemap.errors import DeviceMapError, brief
from devicemap.run.eager import EagerMap
from devicemap.tell.verify.comparison import allowance, compare_results, output_paths
from devicemap.tell.verify.diagnosis import Facts, diagnose
from devicemap.tell.verify.findings import Comparison, Verification

_LEAST_ROWS = 16
_ROWS_PER_DEVICE = 2

_GENERATORS = ATOMIC - {"AssignAddVariableOp", "AssignSubVariableOp"}

_QUESTIONS = (
    ("graph again", "the graph again", "a graph on one device"),
    ("eager again", "eager code again", "eager code"),
    ("coupled", "the graph on one row at a time", "a graph on one device"),
    ("coupled", "eager code on one row at a time", "eager code"),
    ("order", "eager code on the rows in reverse", "eager code"),
    ("devices", "the devices", "a graph on one device"),
    ("eager", "eager code", "a graph on one device"),
)
"""What is asked, of which way, held against which other one."""


def check_limits(rows: Any, tolerance: Any) -> None:
    """Raise `OptionError` for a number of rows, or a tolerance, that cannot be."""
    if rows is not None:
        check_count("rows", rows)
    check_tolerance(tolerance)


def rows_to_verify(data: Any, rows: int | None, options: Options, devices: tuple[str, ...]) -> Rows:
    """The first `rows` rows of the data; `None` for two per device and at least 16.

    Raises:
        DataError: data that cannot be rows, or has none.
    """
    if not tf.executing_eagerly():
        raise DeviceMapError("verify was called inside a tf.function, where eager code cannot run; call it outside")
    most = int(rows or max(_LEAST_ROWS, _ROWS_PER_DEVICE * len(devices)))
    return rows_in_memory(data, options, most, most)


def verify_rows(
    fn: Callable[..., Any],
    rows: Rows,
    options: Options,
    compiled: Compiled,
    mapper: Callable[[Any], Any],
    tolerance: float | None,
    name: str,
) -> Verification:
    """Run `fn` on all of `rows`, which `compiled` was traced for, in each way, and compare; `mapper` maps over the devices.

    Raises:
        FunctionError: `fn` fails over the devices.
    """
    results = {"the devices": mapper(rows.structure)}  # the first one: its errors name the rows and the device
    device = compiled.devices[0]
    errors: dict[str, str] = {}
    with Signals() as signals:
        ways = {**_ways_in_graph(rows, options, compiled, device), **_ways_in_eager_code(fn, rows, options, device)}
        for way, run in ways.items():
            try:
                results[way] = run()
            except Exception as error:  # whatever fn raises
                signals.check()
                original = error.__cause__ or error
                errors[way] = f"{type(original).__name__}: {brief(original)}"
    comparisons = []
    allowed = allowance(tolerance, compiled.devices)
    for question, way, other in _QUESTIONS:
        if way in results and other in results:
            differences = compare_results(results[way], results[other], allowed)
            comparisons.append(Comparison(question, (way, other), differences))
        elif way in errors and other in results:
            comparisons.append(Comparison(question, (way, other), (), errors[way]))
    findings = diagnose(comparisons, output_paths(results["the devices"]), _facts(compiled, options))
    return Verification(name, rows.count or 0, compiled.devices, findings, tuple(comparisons))


def _ways_in_graph(rows: Rows, options: Options, compiled: Compiled, device: str) -> dict[str, Callable[[], Any]]:
    cancellation = Cancellation()
    function = compiled.functions(cancellation)[device]()
    leaves = [*rows.leaves, *_seeds(rows, options)]

    def run(leaves: list[Any]) -> Any:
        return interruptible(partial(function, *compiled.flat(leaves)), cancellation)

    def one_by_one() -> Any:
        parts = []
        for i in range(rows.count or 0):
            with tf.device(HOST):
                row = [take_rows(leaf, i, i + 1) for leaf in leaves]
            parts.append(run(row))
        return compiled.pack([join(leaf) for leaf in zip(*parts)])

    def at_once() -> Any:
        return compiled.pack(run(leaves))

    return {
        "a graph on one device": at_once,
        "the graph again": at_once,
        "the graph on one row at a time": one_by_one,
    }


def _ways_in_eager_code(
    fn: Callable[..., Any], rows: Rows, options: Options, device: str
) -> dict[str, Callable[[], Any]]:
    options = replace(options, output_device=HOST)
    if options.seed is not None:  # a row keeps its seed wherever it stands: seeds are data here
        seeds = _seeds(rows, options)
        fn, rows = _with_seeds_as_data(fn), as_rows((rows.structure, *seeds))
        options = replace(options, seed=None)
    at_once, one_by_one = EagerMap(fn, (device,), None, options), EagerMap(fn, (device,), 1, options)

    def in_reverse() -> Any:
        with tf.device(HOST):
            backwards = as_rows(tf.nest.map_structure(_reverse_rows, rows.structure))
        results = at_once(backwards)
        with tf.device(HOST):
            return tf.nest.map_structure(_reverse_rows, results)

    ways: dict[str, Callable[[], Any]] = {
        "eager code": partial(at_once, rows),
        "eager code again": partial(at_once, rows),
        "eager code on the rows in reverse": in_reverse,
    }
    if options.batched:
        ways["eager code on one row at a time"] = partial(one_by_one, rows)
    return ways


def _seeds(rows: Rows, options: Options) -> tuple[Any, ...]:
    return () if options.seed is None else (row_seeds(options.seed, 0, rows.count),)


def _with_seeds_as_data(fn: Callable[..., Any]) -> Callable[..., Any]:
    def seeded(data: Any, seed: Any) -> Any:
        return fn(*data, seed=seed) if type(data) is tuple else fn(data, seed=seed)

    return seeded


def _reverse_rows(leaf: Any) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        last = leaf.dense_shape[0] - 1
        indices = tf.concat([last - leaf.indices[:, :1], leaf.indices[:, 1:]], axis=1)
        return tf.sparse.reorder(tf.SparseTensor(indices, leaf.values, leaf.dense_shape))
    if isinstance(leaf, tf.RaggedTensor):
        return tf.gather(leaf, tf.range(leaf.nrows() - 1, -1, -1))
    return tf.reverse(leaf, [0])


def _facts(compiled: Compiled, options: Options) -> Facts:
    concrete, audit = compiled.traced.concrete, compiled.traced.audit
    graph = concrete.graph.as_graph_def()
    types = {node.op for nodes in (graph.node, *(f.node_def for f in graph.library.function)) for node in nodes}
    random_ops = {*audit.random_ops, *(types & _GENERATORS), *(["Keras's seed generator"] * audit.advances_seed)}
    written = _written(concrete, audit, draws=bool(types & _GENERATORS))
    python_ops = tuple(op for op in audit.effects if "PyFunc" in op)
    return Facts(options.batched, tuple(sorted(random_ops)), written, audit.ordered, python_ops)


def _written(concrete: Any, audit: Audit, draws: bool) -> tuple[str, ...]:
    """Names of the variables and other resources that are written, but for the state of random generators."""
    names = []
    for captured, treatment in zip(concrete.captured_inputs, audit.treatments):
        if treatment in (Treatment.ATOMIC, Treatment.ORDERED):
            variable = variable_of(concrete, captured)
            name = "a table or another resource" if variable is None else variable.name.partition(":")[0]
            if not (draws and name == "StateVar"):  # tf.random.Generator calls it so
                names.append(name)
    return tuple(dict.fromkeys(names))
