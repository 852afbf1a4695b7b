"""A trace of a call of a layer for more rows than the batch has, which shows how the call can be mapped."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.gradient_links import Lookups, sources_of_gradients
from devicemap._tensorflow.gradients import can_redirect_gradients, order_of_gradients
from devicemap._tensorflow.keras import batch_norms_of, is_seed, moving_averages_of, replacing_moments, tf_variable
from devicemap._tensorflow.keras_calls import may_train
from devicemap.compile.audit import Audit, audit, op_types
from devicemap.compile.graph_walker import CALLS, depends_on
from devicemap.compile.lookups import lookups_in, mixed_lookups
from devicemap.devices import python_calls_at_once
from devicemap.errors import failure, warn_user
from devicemap.training.differences import dependence_in_call, fixed_seed, is_comparable, ops_in
from devicemap.training.forward import ForwardPass
from devicemap.training.row_losses import RowLosses
from devicemap.training.stateless import CallArguments, CallScope

_ADDS = frozenset(["AssignAddVariableOp", "AssignSubVariableOp"])
"""Ops that the audit allows in any order. In a mapped call, each device would apply them once."""

_MORE_ROWS = 83
"""The least number of additional rows of the trace, which show what depends on the number of rows. The sum is a prime number,
because other sizes, such as those of tables, are seldom multiples of one."""

OTHER_LENGTHS = (
    "If one of several arguments has no rows, add a first axis of length 1, or set the length of its first axis with "
    "tf.ensure_shape"
)
"""Advice for a call whose arguments have first axes of unknown length, which count as rows."""


class CallAnalysis:
    """What the trace of a call shows."""

    def __init__(
        self,
        forward: ForwardPass,
        layer: Any,
        given: CallArguments,
        tensors: Sequence[Any],
        row_losses: RowLosses | None,
        runs_again: bool,
    ):
        """Trace the call. `tensors`: the rows of `given`, and then targets. `runs_again`: for the gradients of layers.

        Raises:
            FunctionError: each device would change a variable or a table, or variables would lose their gradients.
        """
        self._layer, self._trace_rows = layer, _prime_from(_MORE_ROWS + (given.count or 0))
        self._advice = f". {OTHER_LENGTHS}" if given.count is None and len(given.masked) > 1 else ""
        synchronized = forward.batch_norm == "synchronized" and len(forward.devices) > 1
        norms, scope, normalizing = batch_norms_of(forward.model), CallScope(), list[Any]()
        dense = all(isinstance(leaf, tf.Tensor) for leaf in given.rows)

        def moments(norm: Any, mean: Any, variance: Any, *_: Any) -> tuple[Any, Any]:
            normalizing.append(norm)
            return mean, variance

        @tf.function(autograph=False)
        def call(*leaves: Any) -> tuple[list[Any], list[Any]]:
            args, kwargs = given.with_rows(leaves)
            with given.calls.continued(), scope, replacing_moments(norms if synchronized else [], moments):
                results = layer.call(*args, **kwargs)
            if row_losses is not None:
                row_losses.find(results, leaves[len(given.rows) :], self._trace_rows)
            losses = [loss for _, loss, _ in scope.added]
            graph = tf.compat.v1.get_default_graph()
            if any(getattr(loss, "graph", None) is not graph for loss in losses):  # a number, or of an inner graph
                losses = []
            return [leaf for leaf in tf.nest.flatten(results) if tf.is_tensor(leaf)], losses

        concrete = self._trace(call, tensors, dense)
        outputs = concrete.structured_outputs[0]
        self.synchronizes = synchronizes = bool(normalizing)
        """Whether batch normalization takes mean and variance of the rows of all devices."""
        self.averaged = {id(v) for norm in (normalizing if synchronized else norms) for v in moving_averages_of(norm)}
        """Moving averages of batch normalization, by identity."""
        found = audit(concrete)
        self.devices = forward.devices[: python_calls_at_once()] if found.python_ops else forward.devices
        """The devices that may run the call at the same time."""
        self.fixed_seeds = found.fixed_seeds
        """The seeds of random ops that keep state for each trace."""
        self.keeps_state = found.keeps_state(differentiable=True)
        """Whether ops keep state for each trace, so that each device needs a trace of its own."""
        _check(concrete, found, layer.name, synchronizes=synchronizes, runs_again=runs_again)
        drawn = {id(variable): variable for variable in scope.changed if is_seed(variable)}
        own = {id(variable) for variable in layer.variables}
        known = [v for v in forward.variables if (id(v) in drawn if is_seed(v) else id(v) in own)]
        if _reason_against_values(concrete):  # their gradients would be lost
            known = [*filter(is_seed, known)]
        self.variables = [*known, *map(drawn.get, drawn.keys() - map(id, known))]
        """The variables of which devices get values: those of the layer, and the seeds from which it draws, such as Keras's
        global seed."""
        self._difference: str | None = None
        """How outputs differ from those of one device."""
        if len(forward.devices) > 1:
            training = may_train() and is_comparable(found, scope)
            self._difference = fixed_seed(concrete, self._trace_rows) if dense else None
            self._difference = self._difference or dependence_in_call(layer, given, forward.home, training)
        self.lookups: dict[int, Lookups] = {}
        """The lookups in trained variables, by identity of the latter."""
        if len(forward.devices) > 1 or runs_again:
            self.lookups = _lookups(concrete, layer, [*drawn.values()], self._trace_rows)
        self._shapes = [spec.shape for spec in outputs] if dense else []
        dense = dense and all(isinstance(spec, tf.Tensor | tf.TensorSpec) for spec in outputs)
        sources = sources_of_gradients(concrete) if dense else []
        self.sources, self.sources_of_losses = sources[: len(outputs)], sources[len(outputs) :]
        """The arguments and variables to which the gradient of each output goes, or nothing if there are other tensors."""
        self.trained = [variable for variable in concrete.graph.variables if variable.trainable]
        """The `tf.Variable`s that the call reads and that may be trained, also those of other layers."""
        self.not_for_xla = _reason_against_xla(found, dense, synchronizes=synchronizes, runs_again=runs_again)
        """The reason why XLA does not compile the call, or `None`."""
        watched = [*tf.nest.flatten(list(tensors), expand_composites=True), *concrete.captured_inputs]
        once = runs_again or (forward.model.jit_compile and self.not_for_xla is None)
        self.inline = synchronizes or (not (once or self.keeps_state) and order_of_gradients(concrete, watched) > 1)
        """Whether the ops of all devices are in one function. They are if devices exchange statistics, or under nested or
        persistent tapes, which would differentiate inner functions several times."""

    def _trace(self, function: Any, tensors: Sequence[Any], dense: bool) -> Any:
        """Trace a function of leaves for more rows than these tensors have, if they are dense."""
        specs = [
            tf.TensorSpec([self._trace_rows, *leaf.shape[1:]], leaf.dtype) if dense else tf.type_spec_from_value(leaf)
            for leaf in tensors
        ]
        try:
            return function.get_concrete_function(*specs)
        except Exception as error:
            # If this raises the same error, the error shows the shapes of the batch.
            function.get_concrete_function(*tensors)
            raise failure(
                f"{self._layer.name} works for the rows of this batch, but not for {self._trace_rows} rows, and each device "
                "sees some of the rows; use keras.ops.shape(x)[0] instead of a fixed number, pass a state of each row as an "
                "input and an output, or compute values of several rows in compute_loss, or in a train_step of the "
                f"model{self._advice}"
            ) from error

    def repeats_draws(self, concrete: Any, shards: int) -> bool:
        """Return whether this number of shards in one function draw the same numbers, as functions traced before do."""
        return bool(self.fixed_seeds) and len(audit(concrete).fixed_seeds) < shards * len(self.fixed_seeds)

    def warn(self, jit_compile: bool) -> None:
        """Warn of outputs that differ from those of one device, and if XLA cannot compile the call although it should."""
        if self._difference:
            warn_user(f"{self._layer.name}: {self._difference}")
        if self.not_for_xla and jit_compile:
            warn_user(
                f"jit_compile=True, Keras's default with GPUs, is ignored for {self._layer.name}: {self.not_for_xla}. "
                "Compile the model with jit_compile=False",
            )

    def check_new_value(self, variable: Any, value: Any, rows: Sequence[Any]) -> None:
        """Refuse a new value of a variable that depends on the rows of one device, except for moving averages."""
        if id(variable) not in self.averaged and depends_on(value, rows):
            raise failure(
                f"{variable.path} gets a new value that depends on the rows, which only batch normalization may; change the "
                "variable in a train_step of the model. A subclass of BatchNormalization that computes mean and variance "
                "itself needs batch_norm='local'"
            )

    def check_outputs(self, shapes: Sequence[Any]) -> None:
        """Refuse outputs without one row for each row, by their static shapes for shards and for the rows of the trace."""
        for known, shape in zip(shapes, self._shapes):
            if None in (known.rank, shape.rank):
                continue
            varying = [size for size, now in zip(shape[1:], known[1:]) if size != now]
            if not shape.rank or shape[0] not in (None, self._trace_rows) or self._trace_rows in varying:
                raise failure(
                    f"{self._layer.name} returns an output of shape {shape} for {self._trace_rows} rows; expected one row for "
                    "each row, whose shape does not depend on other rows, because outputs of devices are joined. Compute "
                    f"values of several rows in compute_loss, or in a train_step of the model{self._advice}"
                )


def _prime_from(start: int) -> int:
    return next(n for n in itertools.count(start) if all(n % k for k in range(2, math.isqrt(n) + 1)))


def _check(concrete: Any, found: Audit, name: str, *, synchronizes: bool, runs_again: bool) -> None:
    if found.ordered or op_types(concrete) & _ADDS:
        raise failure(
            f"a layer of {name} changes a tf.Variable or a table, and each device would change it for its rows only; "
            "create the variable by add_weight, or change it in a train_step of the model"
        )
    if (synchronizes or runs_again) and (reason := _reason_against_values(concrete)):
        raise failure(f"a layer of {name} {reason}")
    calls = (op for op in ops_in(concrete) if op.type in CALLS)
    if runs_again and any(each.dtype == tf.resource for op in calls for each in op.inputs):
        raise failure(
            f"a layer of {name} uses a variable or a table in a tf.function, which would lose its gradient with "
            "accumulate or recompute; remove the tf.function, because Keras compiles the whole step"
        )


def _reason_against_values(concrete: Any) -> str | None:
    """Return why variables would lose gradients that go to values that are read before, or `None`."""
    for op in ops_in(concrete):
        custom = op.type == "IdentityN" and "_gradient_op_type" in op.node_def.attr
        if custom and any(each.dtype == tf.resource or each.op.type == "ReadVariableOp" for each in op.inputs):
            return (
                "reads a variable in a tf.custom_gradient, tf.recompute_grad or keras.remat, which would lose its gradient "
                "with synchronized batch normalization, accumulate or recompute; use recompute= instead, and "
                "batch_norm='local'"
            )
    return None


def _lookups(concrete: Any, layer: Any, seeds: Sequence[Any], rows: int) -> dict[int, Lookups]:
    """Return the lookups in the trained variables of a layer, by identity."""
    known = lookups_in(concrete, [tf_variable(seed).handle for seed in seeds], rows)
    found = {id(v): known.get(tf_variable(v).handle.ref(), Lookups.NONE) for v in layer.trainable_variables}
    mixed = [variable.path for variable in layer.trainable_variables if found[id(variable)] is Lookups.MIXED]
    if mixed:
        raise mixed_lookups(mixed[0])
    joined = [v.path for v in layer.trainable_variables if found[id(v)] not in (Lookups.NONE, Lookups.OF_ROWS)]
    if joined and not can_redirect_gradients():
        raise failure(
            f"{joined[0]} is looked up by indices that are the same for all rows, and with this version of TensorFlow its "
            "gradient would have other slices than that of one device; look it up for each row"
        )
    return found


def _reason_against_xla(found: Audit, dense: bool, *, synchronizes: bool, runs_again: bool) -> str | None:
    if synchronizes:
        return "synchronized batch normalization exchanges values between devices"
    if runs_again:
        return "accumulate and recompute call layers again for their gradients"
    if may_train() and found.gradient_needs_variants:
        return "XLA does not compile a loop or branch apart from its gradient"
    if not dense:
        return "XLA has no ragged or sparse tensors"
    if found.keeps_state(differentiable=True):
        return "its random ops or Python functions keep state for each device"
    return "it runs eagerly" if tf.executing_eagerly() else None
