"""A trace of a call of a layer for more rows than the batch has, which shows how the call can be mapped."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import graphs_within, traced_graphs
from devicemap._tensorflow.gradient_links import Lookups, sources_of_gradients
from devicemap._tensorflow.gradients import can_redirect_gradients, order_of_gradients
from devicemap._tensorflow.keras import batch_norms_of, is_seed, moving_averages_of, replacing_moments, tf_variable
from devicemap._tensorflow.keras_calls import may_train
from devicemap.compile.audit import Audit, audit, op_types, read_in_custom_gradients
from devicemap.compile.graph_walker import CALLS, depends_on
from devicemap.compile.lookups import lookups_in, mixed_lookups
from devicemap.devices import python_calls_at_once
from devicemap.errors import failure, warn_user
from devicemap.training.differences import IN_A_STEP, dependence_in_call, fixed_seed, is_comparable
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


class _CallTrace:
    """A trace of a call of a layer for more rows than the batch has, if they are dense."""

    def __init__(
        self,
        forward: ForwardPass,
        layer: Any,
        given: CallArguments,
        tensors: Sequence[Any],
        row_losses: RowLosses | None,
    ):
        """`tensors`: the rows of `given`, and then targets, for which `row_losses` finds losses."""
        self._layer, self.rows = layer, _prime_from(_MORE_ROWS + (given.count or 0))
        self.advice = f". {OTHER_LENGTHS}" if given.count is None and len(given.masked) > 1 else ""
        """Advice for errors about the number of rows."""
        self.dense = all(isinstance(leaf, tf.Tensor) for leaf in given.rows)
        """Whether the arguments are dense."""
        self.scope = CallScope()
        """The losses that layers add, and the variables that they change."""
        self.synchronized = list[Any]()
        """The batch normalizations that take mean and variance of the rows of all devices."""
        norms = batch_norms_of(forward.model) if forward.synchronizes else []

        def moments(norm: Any, mean: Any, variance: Any, *_: Any) -> tuple[Any, Any]:
            self.synchronized.append(norm)
            return mean, variance

        @tf.function(autograph=False)
        def call(*leaves: Any) -> tuple[list[Any], list[Any]]:
            args, kwargs = given.with_rows(leaves)
            with given.calls.continued(), self.scope, replacing_moments(norms, moments):
                results = layer.call(*args, **kwargs)
            if row_losses is not None:
                row_losses.find(results, leaves[len(given.rows) :], self.rows)
            losses = [loss for _, loss, _ in self.scope.added]
            graph = tf.compat.v1.get_default_graph()
            if any(getattr(loss, "graph", None) is not graph for loss in losses):  # a number, or of an inner graph
                losses = []
            return [leaf for leaf in tf.nest.flatten(results) if tf.is_tensor(leaf)], losses

        self.concrete = self._traced(call, tensors)
        """Returns the outputs, and then the losses that layers add."""
        self.outputs = self.concrete.structured_outputs[0]
        """The specs of the outputs."""
        self.shapes = [spec.shape for spec in self.outputs] if self.dense else []
        """The static shapes of the outputs, if the arguments are dense."""
        self.returns_dense = self.dense and all(isinstance(spec, tf.Tensor | tf.TensorSpec) for spec in self.outputs)
        """Whether the arguments and the outputs are dense."""
        self.audit = audit(self.concrete)

    def _traced(self, function: Any, tensors: Sequence[Any]) -> Any:
        specs = [
            tf.TensorSpec([self.rows, *leaf.shape[1:]], leaf.dtype) if self.dense else tf.type_spec_from_value(leaf)
            for leaf in tensors
        ]
        try:
            return function.get_concrete_function(*specs)
        except Exception as error:
            # If this raises the same error, the error shows the shapes of the batch.
            function.get_concrete_function(*tensors)
            raise failure(
                f"{self._layer.name} works for the rows of this batch, but not for {self.rows} rows, and each device sees some "
                "of the rows; use keras.ops.shape(x)[0] instead of a fixed number, pass a state of each row as an input and an "
                f"output, or {IN_A_STEP}{self.advice}"
            ) from error


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
        trace = _CallTrace(forward, layer, given, tensors, row_losses)  # not an attribute, which would keep its graph
        self._layer, self._rows, self._shapes, self._advice = layer, trace.rows, trace.shapes, trace.advice
        self.synchronizes = bool(trace.synchronized)
        """Whether batch normalization takes mean and variance of the rows of all devices."""
        norms = trace.synchronized if forward.synchronizes else batch_norms_of(forward.model)
        self.averaged = {id(variable) for norm in norms for variable in moving_averages_of(norm)}
        """Moving averages of batch normalization, by identity."""
        self.devices = forward.devices[: python_calls_at_once()] if trace.audit.python_ops else forward.devices
        """The devices that may run the call at the same time."""
        self.fixed_seeds = trace.audit.fixed_seeds
        """The seeds of random ops that keep state for each trace."""
        self.keeps_state = trace.audit.keeps_state(differentiable=True)
        """Whether ops keep state for each trace, so that each device needs a trace of its own."""
        _check(trace.concrete, trace.audit, layer.name)
        seeds = {id(variable): variable for variable in trace.scope.changed if is_seed(variable)}
        self.variables = _used_variables(trace, forward, layer, seeds)
        """The variables of which devices get values: those of the layer, those of other layers that it reads, and the seeds
        from which it draws, such as Keras's global seed."""
        drawn = [tf_variable(seed).handle for seed in seeds.values()]
        _check_draws(trace.concrete, layer.name, drawn)
        self._difference: str | None = None
        """How outputs differ from those of one device."""
        if len(forward.devices) > 1:
            training = may_train() and is_comparable(trace.audit, trace.scope, norms)
            self._difference = fixed_seed(trace.concrete, trace.rows) if trace.dense else None
            self._difference = self._difference or dependence_in_call(layer, given, forward.home, training, norms)
        self.lookups = dict.fromkeys(map(id, self.variables), Lookups.OF_ROWS)
        """The lookups in trained variables, by identity of the latter. With one device, gradients of all may have slices."""
        if len(forward.devices) > 1 or runs_again:
            self.lookups = _lookups(trace.concrete, self.variables, drawn, trace.rows)
        sources = sources_of_gradients(trace.concrete) if trace.returns_dense else []
        self.sources, self.sources_of_losses = sources[: len(trace.outputs)], sources[len(trace.outputs) :]
        """The arguments and variables to which the gradient of each output goes, or nothing if there are other tensors."""
        self.trained = [variable for variable in trace.concrete.graph.variables if variable.trainable]
        """The `tf.Variable`s that the call reads and that may be trained, also those of other layers."""
        self.not_for_xla = self._reason_against_xla(trace, forward, runs_again)
        """The reason why XLA does not compile the call, or `None`."""
        watched = [*tf.nest.flatten(list(tensors), expand_composites=True), *trace.concrete.captured_inputs]
        once = self.keeps_state or runs_again or (forward.model.jit_compile and self.not_for_xla is None)
        self.inline = self.synchronizes or (not once and order_of_gradients(trace.concrete, watched) > 1)
        """Whether the ops of all devices are in one function. They are if devices exchange statistics, or under nested or
        persistent tapes, which would differentiate inner functions several times."""

    def _reason_against_xla(self, trace: _CallTrace, forward: ForwardPass, runs_again: bool) -> str | None:
        sent = {id(tf_variable(variable).handle) for variable in self.variables}
        others = [each for each in trace.concrete.captured_inputs if each.dtype == tf.resource and id(each) not in sent]
        if self.synchronizes:
            return "synchronized batch normalization exchanges values between devices"
        if runs_again:
            return "accumulate and recompute call layers again for their gradients"
        if may_train() and trace.audit.gradient_needs_variants:
            return "XLA does not compile a loop or branch apart from its gradient"
        if not trace.returns_dense:
            return "XLA has no ragged or sparse tensors"
        if others and len(forward.devices) > 1:
            return "it reads a variable or a table of another device"
        if self.keeps_state:
            return "its random ops or Python functions keep state for each device"
        return "it runs eagerly" if tf.executing_eagerly() else None

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

    def check_compiled(self, concrete: Any, devices: Sequence[str]) -> None:
        """Refuse functions of layers that XLA compiles and that read variables instead of the values on each device.

        They are not traced again, because the context in which XLA traces them is nearer than that of `retracing`.
        """
        calls = [op for graph in graphs_within(concrete.graph) for op in graph.get_operations() if op.type in CALLS]
        compiled = [op for op in calls if op.node_def.attr["_XlaMustCompile"].b]
        if len(devices) > 1 and any(each.dtype == tf.resource for op in compiled for each in op.inputs):
            raise failure(
                f"a layer of {self._layer.name} reads a variable in a tf.function(jit_compile=True), and XLA reads variables "
                "of one device only; remove jit_compile=True from the tf.function, and compile the model with jit_compile=True"
            )

    def check_outputs(self, shapes: Sequence[Any]) -> None:
        """Refuse outputs without one row for each row, by their static shapes for shards and for the rows of the trace."""
        rows = self._rows
        for known, shape in zip(shapes, self._shapes):
            if None in (known.rank, shape.rank):
                continue
            varying = [size for size, now in zip(shape[1:], known[1:]) if size != now]
            if not shape.rank or shape[0] not in (None, rows) or rows in varying:
                raise failure(
                    f"{self._layer.name} returns an output of shape {shape} for {rows} rows; expected one row for "
                    "each row, whose shape does not depend on other rows, because outputs of devices are joined; "
                    f"{IN_A_STEP}{self._advice}"
                )


def _prime_from(start: int) -> int:
    return next(n for n in itertools.count(start) if all(n % k for k in range(2, math.isqrt(n) + 1)))


def _used_variables(trace: _CallTrace, forward: ForwardPass, layer: Any, seeds: dict[int, Any]) -> list[Any]:
    """Return the variables of which devices get values; `seeds`: those from which the layer draws, by identity."""
    read = {id(handle) for handle in trace.concrete.captured_inputs}
    own = [*layer.variables, *(v for v in forward.variables if id(tf_variable(v).handle) in read)]
    # Values in place of these variables would have no gradient, or would not be read.
    lost = read_in_custom_gradients(trace.concrete) | _read_in_concrete_functions(trace.concrete)
    used = {id(variable) for variable in own if id(tf_variable(variable).handle) not in lost}
    known = [v for v in forward.variables if id(v) in (seeds if is_seed(v) else used)]
    return [*known, *map(seeds.get, seeds.keys() - map(id, known))]


def _check(concrete: Any, found: Audit, name: str) -> None:
    if found.ordered or op_types(concrete) & _ADDS:
        raise failure(
            f"a layer of {name} changes a tf.Variable or a table, and each device would change it for its rows only; "
            "create the variable by add_weight, or change it in a train_step of the model"
        )


def _read_in_concrete_functions(concrete: Any) -> set[int]:
    """Return the handles that functions read which are not traced for the call (test_trained_as_by_one_device)."""
    kept = {*graphs_within(concrete.graph)} - {*traced_graphs(concrete.graph)}
    return {id(handle) for graph in kept for handle, _ in graph.captures if handle.dtype == tf.resource}


def _check_draws(concrete: Any, name: str, seeds: Sequence[Any]) -> None:
    """Refuse a `tf.function` that draws from one of these seeds in several calls: its trace has the numbers of one draw."""
    keys = {id(seed) for seed in seeds}
    inner = {tensor.ref() for seed, tensor in concrete.graph.captures if id(seed) in keys}
    drawing = [
        op for op in concrete.graph.get_operations() if op.type in CALLS and inner & {each.ref() for each in op.inputs}
    ]
    names = [op.get_attr("f").name for op in drawing]
    if len({*names}) < len(names):
        raise failure(
            f"a layer of {name} draws random numbers in a tf.function that is called several times, which would draw the same "
            "numbers in each call; remove the tf.function, because Keras compiles the whole step"
        )


def _lookups(concrete: Any, sent: Sequence[Any], seeds: Sequence[Any], rows: int) -> dict[int, Lookups]:
    """Return the lookups in the trained variables of which values are sent, by identity. `seeds`: the handles of seeds."""
    known = lookups_in(concrete, seeds, rows)
    trained = {tf_variable(v).handle.ref(): v for v in sent if v.trainable}
    found = {id(variable): known.get(key, Lookups.NONE) for key, variable in trained.items()}
    mixed = [variable.path for variable in trained.values() if found[id(variable)] is Lookups.MIXED]
    if mixed:
        raise mixed_lookups(mixed[0])
    of_rows = Lookups.NONE, Lookups.OF_ROWS
    joined = [v.path for v in trained.values() if found[id(v)] not in of_rows]
    if joined and not can_redirect_gradients():
        raise failure(
            f"{joined[0]} is looked up by indices that are the same for all rows, and with this version of TensorFlow its "
            "gradient would have other slices than that of one device; look it up for each row"
        )
    for variable in concrete.graph.variables:  # of which each device looks up its own slices
        key = variable.handle.ref()
        if variable.trainable and key not in trained and known.get(key, Lookups.NONE) not in of_rows:
            raise failure(
                f"{variable.name} is looked up by indices that are the same for all rows, and its gradient would have slices "
                "of each device, because it is no variable of a layer of the model, or is read in a ConcreteFunction, "
                "tf.custom_gradient, tf.recompute_grad or keras.remat; create it by add_weight, look it up for each row, or "
                "use recompute="
            )
    return found
