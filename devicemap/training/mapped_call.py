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
from devicemap._tensorflow.functions import keep_alive, run_after, with_captures
from devicemap._tensorflow.gradient_links import GradientPaths, Lookups
from devicemap._tensorflow.gradients import differentiate_in_place
from devicemap._tensorflow.keras import batch_norms_of, is_seed, tf_variable
from devicemap.compile.graph_builder import copy_leaves, sizes_in_graph
from devicemap.compile.program import Program
from devicemap.compile.reduction import as_states
from devicemap.compile.replicas import split_seeds
from devicemap.compile.returned import row_count_checks, with_equal_rows, with_static_rows
from devicemap.compile.transfers import send_along_tree, send_in_buckets
from devicemap.data.rows import HOST, as_rows, count_rows, cut_rows, take_rows
from devicemap.data.shards import join
from devicemap.errors import failure
from devicemap.pipelines.stages import check_added_loss
from devicemap.run.graph_engine import CallObservers, call_in_function, run_graph
from devicemap.training.batch_norm import SharedMoments
from devicemap.training.call_analysis import OTHER_LENGTHS, CallAnalysis
from devicemap.training.forward import ForwardPass
from devicemap.training.padding import computed_in_step, have_rows, pad_shards
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
        self._result_spec: ResultSpec

    def run(self) -> list[Any]:
        """Run the call, as part of the function that is being traced or in eager code.

        Return outputs and their attached tensors; then losses, new values and numbers of rows, by device or by microbatch.

        Raises:
            FunctionError: the layer needs rows or state of other devices.
        """
        forward, known = self._forward, self._given.count
        with tf.device(self._cutting_device):
            rows = self._rows if known is not None else pad_shards(self._rows, len(forward.devices))
        results = self._on_devices(rows)
        self._given.calls.end()
        self._analysis.warn(forward.model.jit_compile and not tf.executing_eagerly())
        outputs, states = results[: self._result_spec.row_tensors], results[self._result_spec.row_tensors :]
        if known is not None:
            return [*(with_static_rows(leaf, known) for leaf in outputs), *states]
        with tf.device(forward.home):
            count, shards = count_rows(self._rows[0]), states[-1]
            real = tf.cast(have_rows(tf.size(shards, tf.int64), count, len(forward.devices)), shards.dtype)
            return [*(take_rows(leaf, 0, count) for leaf in outputs), *states[:-1], shards * real]

    def _on_devices(self, rows: Sequence[Any]) -> list[Any]:
        """Run the call. Rows of unknown number are those of `pad_shards`."""
        on_devices = self._in_lockstep if self._analysis.in_lockstep else self._in_shards
        sources = list(self._analysis.sources)
        if self._row_losses is not None:
            sources = (
                [] if self._row_losses.complete else [*sources, *(sources[key[2]] for key in self._row_losses.keys)]
            )
        paths = GradientPaths(sources)
        if not paths.differ:
            return on_devices(rows, None)
        rows = [paths.track(leaf, i) if i in paths.inputs else leaf for i, leaf in enumerate(rows)]
        results = on_devices(rows, paths)
        attached = [sources[i] for i, names in enumerate(self._result_spec.attached) for _ in names]
        losses = self._analysis.sources_of_losses
        more = losses if len(losses) == len(self._result_spec.losses) else []
        return paths.track_results(results, [*sources, *attached, *more])

    def _in_shards(self, rows: Sequence[Any], paths: GradientPaths | None) -> list[Any]:
        """Run the call in independent shards."""
        forward = self._forward

        @tf.autograph.experimental.do_not_convert
        def of_rows(*rows: Any) -> tuple[Any, ...]:
            with forward.plain(), recomputing(forward.recomputed):
                values = [*map(_read, self._analysis.variables)] if self._runs_again else None
                results = self._on_rows(rows, values)
            return tuple(self._with_checks(results, [[each] for each in self._counts(results)], [count_rows(rows[0])]))

        options = {"devices": forward.devices, "batched": True, "output_device": forward.home, "name": self._layer.name}
        options["jit_compile"] = bool(forward.model.jit_compile) and self._analysis.not_for_xla is None
        program = Program(of_rows, options, own_rows=True)
        keep_alive(program, forward)
        if tf.executing_eagerly() and paths is None:  # whose errors name devices and rows
            data = as_rows(tuple(rows))
            compiled = program.compiled_for(data)
            gradients = compiled.order_of_gradients(data.leaves)
            return list(run_graph(program, compiled, data, gradients, CallObservers()))
        if tf.executing_eagerly():
            function = tf.function(lambda *rows: call_in_function(program, as_rows(rows), padded=True), autograph=False)
            return self._call_eagerly(function.get_concrete_function(*rows), rows, paths)
        return list(call_in_function(program, as_rows(tuple(rows)), True, None if paths is None else paths.prune))

    def _in_lockstep(self, rows: Sequence[Any], paths: GradientPaths | None) -> list[Any]:
        """Run the call in one function, in shards that may exchange statistics."""
        function = tf.function(self._shards_in_lockstep, autograph=False)
        count = count_rows(self._rows[0])
        concrete = function.get_concrete_function(count, *rows)
        keep_alive(concrete, self._forward)
        self._analysis.check_draws(concrete, len(self._forward.devices[: self._given.count]))
        if tf.executing_eagerly():
            return self._call_eagerly(concrete, [count, *rows], paths)
        begin_backward_on("", concrete)
        results = list(concrete(count, *rows))
        if paths is not None:
            paths.prune(concrete, results[0].op)
        return results

    def _call_eagerly(self, concrete: Any, arguments: Sequence[Any], paths: GradientPaths | None) -> list[Any]:
        handles = {} if paths is None else paths.handles(self._analysis.trained)
        return list(with_captures(concrete, handles)(*arguments))

    def _shards_in_lockstep(self, count: Any, *leaves: Any) -> list[Any]:
        """Run shards of the leaves, of which the first `count` rows are real, in the graph that is being traced."""
        forward, known = self._forward, self._given.count
        devices = forward.devices if known is None else forward.devices[:known]
        with tf.device(self._cutting_device):
            # Not static, so that `depends_on` sees what uses the number (test_what_devices_cannot_do_apart_is_refused).
            sizes = sizes_in_graph(count if known is not None else count_rows(leaves[0]), len(devices))
            parts = [*zip(*(cut_rows(leaf, sizes, len(devices)) for leaf in leaves))]
            real = have_rows(len(devices), count, len(devices))
        values = self._send_variables(devices)

        def on_device(slot: int) -> tuple[list[Any], list[Any]]:
            with tf.device(devices[slot]):
                shard = [tf.identity(leaf) for leaf in parts[slot]]
                results = copy_leaves(self._on_rows(shard, [value[slot] for value in values]))
                return results, self._counts(results)

        functions = [partial(on_device, slot) for slot in range(len(devices))]
        with recomputing(forward.recomputed):
            if self._analysis.synchronizes:
                traced = SharedMoments(real).trace(batch_norms_of(forward.model), functions)
            else:
                traced = [function() for function in functions]
        results, counts = zip(*traced)
        with tf.device(forward.home):  # automatic control dependencies would order assertions on several devices
            joined = self._join_shards(results)
            joined = self._with_checks(joined, [*zip(*counts)], sizes)
        differentiate_in_place(tf.compat.v1.get_default_graph().get_operations())
        return joined

    def _join_shards(self, results: Sequence[list[Any]]) -> list[Any]:
        """Join the results of devices that compute the same new values, of which those of the first are taken."""
        new = self._result_spec.row_tensors + len(self._result_spec.losses)
        updates = [tf.stop_gradient(value) for value in results[0][new:-1]]  # TensorFlow would trace their gradients
        *joined, counts = (join(parts) for parts in zip(*(copy_leaves([*each[:new], each[-1]]) for each in results)))
        return [*joined, *updates, counts]

    def _send_variables(self, devices: Sequence[str]) -> list[dict[int, Any]]:
        """Return the value of each variable on each device. A seed advances, and differs between devices."""
        found: dict[int, dict[int, Any]] = {}
        values: dict[int, tuple[Any, str, Lookups]] = {}
        for i, variable in enumerate(self._analysis.variables):
            home = tf_variable(variable).device
            with tf.device(home):
                value = _read(variable)
                if is_seed(variable):
                    found[i] = dict(enumerate(tf.unstack(split_seeds(value, len(devices)))))
                else:
                    values[i] = value, home, self._analysis.lookups.get(id(variable), Lookups.NONE)
        found |= send_in_buckets(values, devices, partial(send_along_tree, devices=devices))
        return [found[i] for i in range(len(found))]

    def _on_rows(self, rows: Sequence[Any], values: Sequence[Any] | None) -> list[Any]:
        """Run the call on some rows, with these values of the variables. With `None`, variables are read.

        Return outputs and their attached tensors; then losses, new values of variables and the number of rows, as states.
        """
        overrides = None if values is None else [*zip(self._analysis.variables, values)]
        if overrides is None or self._microbatches == 1:
            return [*itertools.chain(*self._call_layer(rows, overrides))]
        seeds = {
            id(variable): split_seeds(value, self._microbatches) for variable, value in overrides if is_seed(variable)
        }

        def run_microbatch(number: Any, rows: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            drawn = {seed: values[number] for seed, values in seeds.items()}
            return self._call_layer(rows, [(variable, drawn.get(id(variable), value)) for variable, value in overrides])

        trained = [value for variable, value in overrides if variable.trainable]
        return recompute(run_microbatch, rows, trained, self._microbatches)

    def _counts(self, results: Sequence[Any]) -> list[Any]:
        """Return the numbers of rows of the outputs among these results."""
        return [count_rows(leaf) for leaf in results[: len(self._result_spec.attached)]]

    def _with_checks(self, results: Sequence[Any], counts: Sequence[Sequence[Any]], sizes: Any) -> list[Any]:
        """Return results, with an assertion that each output, if there is one, has these numbers of rows on the devices."""
        of_leaves = [*map(tf.stack, counts)]
        return run_after(row_count_checks(of_leaves, sizes, self._layer.name), results) if of_leaves else list(results)

    def _call_layer(
        self, rows: Sequence[Any], overrides: Sequence[tuple[Any, Any]] | None
    ) -> tuple[list[Any], list[Any]]:
        """Call the layer on rows, with the values `overrides` of variables. With `None`, variables are read."""
        layer, given, row_losses = self._layer, self._given, self._row_losses
        args, kwargs = given.with_rows(rows)

        def call() -> Any:
            outputs = layer.call(*args, **kwargs)
            return outputs if row_losses is None else (outputs, row_losses.of_rows(outputs, rows[len(given.rows) :]))

        scope = CallScope(overrides or (), given.losses, advance=overrides is None)
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
        states = [*others, count_rows(rows[0])]
        if self._analysis.in_lockstep and self._microbatches == 1:  # each device has rows
            return tensors, [tf.expand_dims(state, 0) for state in states]
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
            differ = id(variable) in self._analysis.averaged and not self._analysis.in_lockstep
            variable.assign(_mean(states, shares) if differ else states[0])
        return outputs


def _mean(states: Any, shares: Any) -> Any:
    """Return the mean of states `[devices, ...]`, weighted by shares `[devices]`."""
    shares = tf.reshape(tf.cast(shares, states.dtype), [-1, *[1] * (states.shape.rank - 1)])
    return tf.reduce_sum(states * shares, 0)


def _read(variable: Any) -> Any:
    """Return the value of a variable on the current device. A seed advances."""
    stored = tf_variable(variable)
    value = stored.read_value()
    if is_seed(variable):
        stored.assign(value + tf.constant([0, 1], value.dtype))
    return value
