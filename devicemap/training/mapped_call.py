"""One call of a Keras layer over devices. Its rows are cut into shards, and its outputs are gathered.

    rows ── shards ──> the layer, on each device <── its variables, sent along a tree
                       │
                       └── outputs, joined; losses and new values, reduced

Each call is retraced, as Keras does for one device, because a layer may depend on its Python attributes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from devicemap._tensorflow.calls import begin_backward_on
from devicemap._tensorflow.functions import (
    NO_AUTO_CONTROL_DEPS,
    exports_control_outputs,
    keep_alive,
    run_after,
    run_always,
    with_captures,
)
from devicemap._tensorflow.gradient_links import GradientPaths, Lookups
from devicemap._tensorflow.gradients import differentiate_in_place, unpin_gradients
from devicemap._tensorflow.keras import batch_norms_of, is_seed, tf_variable
from devicemap.compile.graph_builder import copy_leaves, sizes_in_graph
from devicemap.compile.random import Stream, drawing_from, streams_of_function
from devicemap.compile.reduction import as_states
from devicemap.compile.replicas import split_seeds
from devicemap.compile.returned import row_count_checks, with_equal_rows, with_static_rows
from devicemap.compile.transfers import send_along_tree, send_in_buckets
from devicemap.data.rows import HOST, count_rows, cut_rows, spec_of, take_rows
from devicemap.data.shards import join
from devicemap.errors import failure
from devicemap.pipelines.stages import check_added_loss
from devicemap.training.batch_norm import SharedMoments
from devicemap.training.call_analysis import OTHER_LENGTHS, CallAnalysis
from devicemap.training.forward import ForwardPass
from devicemap.training.padding import computed_in_step, drop_slices, have_rows, pad_shards
from devicemap.training.recomputation import recompute, recomputing
from devicemap.training.row_losses import RowLosses
from devicemap.training.stateless import CallArguments, CallScope, ResultSpec, call_stateless


class MappedCall:
    """A call of a layer that is mapped."""

    def __init__(
        self, forward: ForwardPass, layer: Any, given: CallArguments, microbatches: int, row_losses: RowLosses | None
    ):
        self._forward, self._layer, self._given, self._microbatches = forward, layer, given, microbatches
        dense = all(isinstance(leaf, tf.Tensor) for leaf in given.rows)
        self._row_losses = row_losses if row_losses is not None and dense and row_losses.fit(given.count) else None
        self._rows = (*given.rows, *(() if self._row_losses is None else self._row_losses.rows))
        """The tensors that are cut: the arguments of the layer, and targets."""
        self._state_variables = [variable for variable in forward.variables if not is_seed(variable)]
        """The variables, besides seeds, that may get new values."""
        self._cutting_device = forward.home if computed_in_step(given.rows) else HOST
        """The device on which the rows are cut."""
        if given.count is None and len(self._rows) > 1:  # in a graph
            with tf.device(self._cutting_device):
                self._rows = tuple(with_equal_rows(self._rows, layer.name, OTHER_LENGTHS))
        self._runs_again = microbatches > 1 or bool(forward.recomputed)
        """Whether layers run again for their gradients, which then go to values that are read before."""
        self._analysis = CallAnalysis(forward, layer, given, self._rows, self._row_losses, self._runs_again)
        self._devices = self._analysis.devices[: given.count]
        """The devices that the call uses."""
        sources = list(self._analysis.sources)
        if self._row_losses is not None:
            sources = (
                [] if self._row_losses.complete else [*sources, *(sources[key[2]] for key in self._row_losses.keys)]
            )
        self._sources = sources
        """The inputs on which each output depends."""
        self._paths = GradientPaths(sources)
        self._result_spec: ResultSpec

    def run(self) -> list[Any]:
        """Run the call, as part of the function that is being traced or in eager code.

        Return outputs and their attached tensors; then losses, new values and numbers of rows, by device or by microbatch.

        Raises:
            FunctionError: the layer needs rows or state of other devices.
        """
        forward, known = self._forward, self._given.count
        concrete, arguments = self._trace()
        if self._analysis.repeats_draws(concrete, len(self._devices)):
            self._devices = self._devices[:1]
            concrete, arguments = self._trace()
        keep_alive(concrete, forward)
        results = self._with_gradient_paths(concrete, arguments)
        self._given.calls.end()
        self._analysis.warn(forward.model.jit_compile and not tf.executing_eagerly())
        outputs, states = results[: self._result_spec.row_tensors], results[self._result_spec.row_tensors :]
        if known is not None:
            return [*(with_static_rows(leaf, known) for leaf in outputs), *states]
        with tf.device(forward.home):
            count, shards = count_rows(self._rows[0]), states[-1]
            real = tf.cast(have_rows(tf.size(shards, tf.int64), count, len(self._devices)), shards.dtype)
            return [*(take_rows(leaf, 0, count) for leaf in outputs), *states[:-1], shards * real]

    def _trace(self) -> tuple[Any, list[Any]]:
        """Return a function that calls the layer on each device, and its arguments."""
        rows: Sequence[Any] = self._rows
        if self._given.count is None:
            with tf.device(self._cutting_device):
                rows = pad_shards(rows, len(self._devices))
        inputs = self._paths.inputs if self._paths.differ else ()
        rows = [self._paths.track(leaf, i) if i in inputs else leaf for i, leaf in enumerate(rows)]
        arguments = [count_rows(self._rows[0]), *rows]
        # Automatic control dependencies would run the calls of all devices one after another if one has a stateful op.
        attributes = NO_AUTO_CONTROL_DEPS if exports_control_outputs() else None
        function = tf.function(self._call_on_devices, autograph=False, experimental_attributes=attributes)
        concrete = function.get_concrete_function(*arguments)
        self._analysis.check_compiled(concrete, self._devices)
        return concrete, arguments

    def _with_gradient_paths(self, concrete: Any, arguments: Sequence[Any]) -> list[Any]:
        """Call the function. Gradients reach the inputs on which the results that are used depend."""
        paths, spec = self._paths, self._result_spec
        if tf.executing_eagerly():
            handles = paths.handles(self._analysis.trained) if paths.differ else {}
            results = list(with_captures(concrete, handles)(*arguments))
        else:
            begin_backward_on("", concrete)
            results = list(concrete(*arguments))
            if paths.differ:
                paths.prune(concrete, results[0].op)
        if not paths.differ:
            return results
        attached = [self._sources[i] for i, names in enumerate(spec.attached) for _ in names]
        losses = self._analysis.sources_of_losses
        more = losses if len(losses) == len(spec.losses) else []
        return paths.track_results(results, [*self._sources, *attached, *more])

    def _call_on_devices(self, count: Any, *leaves: Any) -> list[Any]:
        """Run the call in the graph that is being traced. The first `count` rows of the leaves are real."""
        forward, devices = self._forward, self._devices
        with tf.device(self._cutting_device):
            # Not static, so that `depends_on` sees what uses the number (test_what_devices_cannot_do_apart_is_refused).
            sizes = sizes_in_graph(count_rows(leaves[0]) if self._given.count is None else count, len(devices))
            parts = [*zip(*(cut_rows(leaf, sizes, len(devices)) for leaf in leaves))]
            real = have_rows(len(devices), count, len(devices))
        values = self._send_variables(devices, real)
        with recomputing(forward.recomputed):
            calls = self._functions(leaves, values, len(devices))

            def on_device(slot: int) -> tuple[list[Any], list[Any]]:
                with tf.device(devices[slot]):
                    rows = [tf.identity(leaf) for leaf in parts[slot]]
                    results = copy_leaves(calls[slot](rows, [value[slot] for value in values]))
                    return results, [count_rows(leaf, tf.int32) for leaf in results[: len(self._result_spec.attached)]]

            functions = [partial(on_device, slot) for slot in range(len(devices))]
            if self._analysis.synchronizes:
                of_devices = SharedMoments(real).trace(batch_norms_of(forward.model), functions)
            else:
                of_devices = [function() for function in functions]
        results, counts = zip(*of_devices)
        graph = tf.compat.v1.get_default_graph()
        # Calls and assignments with effects, and reads before later assignments.
        run_always([op for op in graph.get_operations() if op.op_def.is_stateful and op.type != "Placeholder"])
        with tf.device(forward.home):  # automatic control dependencies would order assertions on several devices
            joined = self._join_shards(results)
            if counts[0]:
                checks = row_count_checks([*map(tf.stack, zip(*counts))], sizes, self._layer.name)
                joined = run_after(checks, joined)
        differentiate_in_place(graph.get_operations())
        return joined

    def _functions(self, leaves: Sequence[Any], values: Sequence[dict[int, Any]], count: int) -> list[Any]:
        """Return `_on_rows` for each device, inline or as a function. Devices share a trace unless ops keep state for it."""
        specs = [*map(spec_of, leaves)], [tf.TensorSpec(value[0].shape, value[0].dtype) for value in values]
        compiles = bool(self._forward.model.jit_compile) and self._analysis.not_for_xla is None

        def drawn_from(stream: Stream) -> Any:
            def on_rows(rows: Sequence[Any], values: Sequence[Any]) -> list[Any]:
                with drawing_from(stream):
                    return self._on_rows(rows, values)

            return on_rows

        def trace(function: Any) -> Any:
            traced = tf.function(function, autograph=False, jit_compile=compiles or None).get_concrete_function(*specs)
            unpin_gradients(traced.graph)
            return traced

        functions = [self._on_rows] * count
        if self._analysis.fixed_seeds:
            functions = [drawn_from(stream) for stream, _ in zip(streams_of_function(), range(count))]
        if self._analysis.inline:
            return functions
        return [*map(trace, functions)] if self._analysis.keeps_state else [trace(functions[0])] * count

    def _join_shards(self, results: Sequence[list[Any]]) -> list[Any]:
        """Join the results of devices. If devices compute the same new value, that of the first is taken."""
        spec = self._result_spec
        new = spec.row_tensors + len(spec.losses)
        joined: list[Any] = []
        for i, parts in enumerate(zip(*results)):
            updated = self._state_variables[spec.updated[i - new]] if 0 <= i - new < len(spec.updated) else None
            equal = updated is not None and not self._is_averaged(updated)
            joined.append(parts[0] if equal else join(copy_leaves(list(parts))))
        return joined

    def _is_averaged(self, variable: Any) -> bool:
        """Whether the new values of a variable on the devices differ, and their mean is taken."""
        return id(variable) in self._analysis.averaged and not self._analysis.synchronizes

    def _send_variables(self, devices: Sequence[str], real: Any) -> list[dict[int, Any]]:
        """Return the value of each variable on each device. A seed advances, and differs between devices.

        `real`: whether devices have rows; the gradients of lookups get no slices from the others.
        """
        found: dict[int, dict[int, Any]] = {}
        values: dict[bool, dict[int, tuple[Any, str, Lookups]]] = {True: {}, False: {}}
        for i, variable in enumerate(self._analysis.variables):
            stored = tf_variable(variable)
            home = stored.device
            with tf.device(home):
                value = stored.read_value()
                if is_seed(variable):
                    stored.assign(value + tf.constant([0, 1], value.dtype))
                    found[i] = dict(enumerate(tf.unstack(split_seeds(value, len(devices)))))
                else:
                    kind = self._analysis.lookups.get(id(variable), Lookups.NONE)
                    values[variable.trainable][i] = value, home, kind
        for each in values.values():  # the gradients of a whole bucket are sent, also those of frozen variables
            found |= send_in_buckets(each, devices, partial(send_along_tree, devices=devices))
        looked_up = [i for i, (_, _, kind) in values[True].items() if kind is not Lookups.NONE]
        for i, slot in itertools.product(looked_up if self._given.count is None else (), range(1, len(devices))):
            with tf.device(devices[slot]):
                found[i][slot] = drop_slices(found[i][slot], real[slot])
        return [found[i] for i in range(len(found))]

    def _on_rows(self, rows: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Run the call on some rows, with these values of the variables.

        Return outputs and their attached tensors; then losses, new values of variables and the number of rows, as states.
        """
        overrides = [*zip(self._analysis.variables, values)]
        if self._microbatches == 1:
            return [*itertools.chain(*self._call_layer(rows, overrides))]
        seeds = {
            id(variable): split_seeds(value, self._microbatches) for variable, value in overrides if is_seed(variable)
        }

        def run_microbatch(number: Any, rows: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            drawn = {seed: values[number] for seed, values in seeds.items()}
            return self._call_layer(rows, [(variable, drawn.get(id(variable), value)) for variable, value in overrides])

        trained = [value for variable, value in overrides if variable.trainable]
        return recompute(run_microbatch, rows, trained, self._microbatches)

    def _call_layer(self, rows: Sequence[Any], overrides: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
        """Call the layer on rows, with the values `overrides` of variables."""
        layer, given, row_losses = self._layer, self._given, self._row_losses
        args, kwargs = given.with_rows(rows)

        def call() -> Any:
            outputs = layer.call(*args, **kwargs)
            return outputs if row_losses is None else (outputs, row_losses.of_rows(outputs, rows[len(given.rows) :]))

        scope = CallScope(overrides, given.losses)
        with given.calls.continued():
            tensors, others, spec = call_stateless(call, scope, self._state_variables, rows)
        for i, (_, of_rows, _) in enumerate(spec.losses):
            advice = "each device sees some of the rows; give parallelize"
            check_added_loss(layer, of_rows, self._forward.added_losses, advice)
            if of_rows and others[i].shape.rank != 0:
                raise failure(f"{layer.name} adds a loss with a value for each row; add the sum or mean of the values")
            loss = tf.reduce_sum(others[i])
            others[i] = loss if loss.dtype == tf.float64 else tf.cast(loss, tf.float32)
        for i, number in enumerate(spec.updated, len(spec.losses)):
            self._analysis.check_new_value(self._state_variables[number], others[i], rows)
            others[i] = tf.stop_gradient(others[i])  # TensorFlow would trace gradients of new values
        self._result_spec = spec
        self._analysis.check_outputs(spec.shapes)
        if row_losses is not None and row_losses.complete:  # other outputs need no gradient
            values = range(len(spec.attached) - len(row_losses.keys), len(spec.attached))
            for i, tensor in enumerate(tensors):
                if i not in values:
                    tensors[i] = tf.nest.map_structure(tf.stop_gradient, tensor, expand_composites=True)
        states = [*others, count_rows(rows[0], tf.int32)]  # GPUs keep int32 on the host
        if self._microbatches == 1:
            return tensors, [tf.expand_dims(state, 0) for state in states]
        # In the loop over microbatches, Grappler infers the shape of all states from a static shape of the first
        # (test_trained_as_by_one_device on GPUs).
        return tensors, as_states(states, rows[0])

    def collect(self, results: Sequence[Any]) -> Any:
        """Return the outputs on all rows, add losses to the layers that add them, and assign new values to variables."""
        with tf.device(self._forward.home):
            outputs, losses, updates = self._result_spec.unpacked(results[:-1])
        if self._row_losses is not None:
            outputs, values = outputs
            self._row_losses.keep(outputs, values)
        counts = tf.cast(results[-1], tf.float64)
        shares = counts / tf.reduce_sum(counts)
        weights = tf.minimum(counts, 1.0) if self._forward.added_losses == "sum" else shares
        for loss, (layer, of_rows, dtype) in zip(losses, self._result_spec.losses):
            total = tf.reduce_sum(loss * tf.cast(weights, loss.dtype)) if of_rows else loss[0]
            keras.layers.Layer.add_loss(layer, tf.cast(total, dtype))  # which functional models do not implement
        for i, states in zip(self._result_spec.updated, updates):
            variable = self._state_variables[i]
            variable.assign(_mean(states, shares) if self._is_averaged(variable) else states[0])
        return outputs


def _mean(states: Any, shares: Any) -> Any:
    """Return the mean of states `[devices, ...]`, weighted by shares `[devices]`."""
    shares = tf.reshape(tf.cast(shares, states.dtype), [-1, *[1] * (states.shape.rank - 1)])
    return tf.reduce_sum(states * shares, 0)
