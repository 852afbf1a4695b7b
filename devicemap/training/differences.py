"""How the outputs of a layer on devices differ from those of one device, as far as traces of a call show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from devicemap._tensorflow.functions import graphs_within
from devicemap._tensorflow.keras import is_seed, layers_of, moving_averages_of, replacing, replacing_moments
from devicemap._tensorflow.keras_calls import in_inference
from devicemap.compile.audit import Audit, audit, op_types
from devicemap.compile.graph_walker import is_constant
from devicemap.data.rows import spec_of
from devicemap.data.structure import freeze
from devicemap.inspect.independence import UNKNOWN_SIZE, dependence_on_rows
from devicemap.training.stateless import CallArguments, CallScope

IN_A_STEP = (
    "compute values of several rows in compute_loss or in a train_step of the model, by ops or by layers that are not its "
    "attributes"
)
"""Advice for layers that compute values of several rows."""

_SAME_NUMBERS = (
    "random numbers for rows are drawn from a fixed seed, so each device draws the same; draw them from a "
    "keras.random.SeedGenerator of the layer"
)

_COMPARED_ROWS = 2
"""Rows on which a layer runs, to find outputs that depend on other rows. A layer that refuses them, or adds rows by index, runs
on as many rows as it is called with. The edges of a graph may have larger indices, which GPUs ignore."""

_ADDS_ROWS = "Segment", "Scatter", "SparseTensorDenseMatMul"
"""Parts of the types of ops that add rows by index."""

_compared: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()
"""Layers, and the modes and other arguments with which their outputs for a row were compared beside other rows."""


def ops_in(concrete: Any) -> Iterator[Any]:
    """Return the ops in the graph of a `ConcreteFunction` and in the functions that were traced for it."""
    return (op for graph in graphs_within(concrete.graph) for op in graph.get_operations())


def fixed_seed(concrete: Any, rows: int) -> str | None:
    """Describe an op that draws numbers for each of this number of rows from a fixed seed."""
    for op in ops_in(concrete):
        if not op.type.startswith("Stateless"):
            continue
        sizes = [size for tensor in op.outputs if tensor.shape.rank for size in tensor.shape if size]
        seeds = [tensor for tensor, named in zip(op.inputs, op.op_def.input_arg) if named.name in ("seed", "key")]
        if any(size % rows == 0 for size in sizes) and any(map(is_constant, seeds)):
            return _SAME_NUMBERS
    return None


def dependence_in_call(
    layer: Any, given: CallArguments, device: str, training: bool, norms: Sequence[Any]
) -> str | None:
    """Describe how outputs for a row depend on other rows, in training or inference mode, unless they were compared before.

    `norms`: the batch normalizations, whose mean and variance are constants here.
    """
    known = _compared.setdefault(layer, set())
    others = {name: value for name, value in given.nest[1].items() if name != "training"}
    keys = {(freeze((given.nest[0], others), repr), mode) for mode in (training, False)}
    if known >= keys:
        return None
    scope = CallScope(losses=False)

    @tf.function(autograph=False)
    def run(rows: list[Any]) -> list[Any]:
        args, kwargs = given.with_rows(given.with_equal_scalars(rows))
        if not training and "training" in kwargs:
            kwargs |= {"training": False}
        mode = nullcontext() if training else in_inference()
        with given.calls.continued(), mode, scope, replacing_moments(norms, _constant_moments):
            outputs = layer.call(*args, **kwargs)
        return [leaf for leaf in tf.nest.flatten(outputs) if tf.is_tensor(leaf)]

    with ExitStack() as scopes:
        scopes.enter_context(tf.init_scope())
        scopes.enter_context(tf.device(device))
        for each in layers_of(layer):
            if not each.built:
                scopes.enter_context(replacing(each, build=_refuse_to_build))
        if not tf.executing_eagerly():
            return None
        try:
            concrete = run.get_concrete_function([spec_of(leaf) for leaf in given.rows])
        except Exception:  # for instance, it needs a static number of rows
            return None
        known |= keys
        if not is_comparable(audit(concrete), scope, norms):
            return None
        adds_rows = any(part in op for op in op_types(concrete) for part in _ADDS_ROWS)
        dense = all(isinstance(leaf, tf.Tensor) for leaf in given.rows)
        few = [_COMPARED_ROWS] if dense and not adds_rows else []
        draws = any(map(is_seed, scope.changed))
        difference = dependence_on_rows(concrete, given.rows, *few, given.count or UNKNOWN_SIZE, draws=lambda: draws)
    return difference and (
        f"{difference}. Each device sees some of the rows, so the results differ from those of one device; {IN_A_STEP}, and "
        "make a table that rows share an attribute of the layer"
    )


def is_comparable(found: Audit, scope: CallScope, norms: Sequence[Any]) -> bool:
    """Whether a call has no side effects, and draws the same numbers if it runs again. Loops may not end for random numbers.

    Moving averages of the batch normalizations `norms` may change.
    """
    averages = {id(variable) for norm in norms for variable in moving_averages_of(norm)}
    changed = any(not is_seed(variable) and id(variable) not in averages for variable in scope.changed)
    return not (changed or found.has_side_effects or found.random_ops or found.python_ops or found.loops)


def _constant_moments(_: Any, mean: Any, variance: Any, count: Any) -> tuple[Any, Any]:
    return tf.zeros_like(mean), tf.ones_like(variance)


def _refuse_to_build(*_: Any, **__: Any) -> None:
    raise RuntimeError("a call that is compared builds nothing")
