"""The forward passes of a Keras model and its layers over devices, gathered into what they are on one."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.gradients import differentiate_in_place, fanned_out
from devicemap._tensorflow.keras import (
    batch_norms_of,
    is_seed,
    is_stateless,
    is_training,
    layers_of,
    moments_by,
    replacing,
    without_activity_regularizer,
)
from devicemap.compile.audit import audit, op_types
from devicemap.compile.gather import with_row_counts_checked
from devicemap.compile.graph_builder import sizes_in_graph
from devicemap.compile.program import Program
from devicemap.compile.reduction import JoinedShards, as_states
from devicemap.compile.replicas import split_seeds
from devicemap.data.join import join
from devicemap.data.rows import HOST, as_rows, count_rows, cut_rows, take_rows
from devicemap.data.shards import shard_sizes
from devicemap.devices import choose_devices
from devicemap.errors import failure
from devicemap.run.graph_engine import GraphEngine
from devicemap.run.in_function import call_inside
from devicemap.run.mapper import NullObserver
from devicemap.training.lockstep import Lockstep
from devicemap.training.recomputation import recomputed
from devicemap.training.stateless import Given, Passed, collecting, depends_on, meeting, pure, recomputing

_ADDS = frozenset(["AssignAddVariableOp", "AssignSubVariableOp"])
"""Ops that change a variable in any order, but once for each device."""


@dataclass(frozen=True)
class _Survey:
    """What one trace of a call shows."""

    rows: int
    """How many it was for: more than a shard has."""

    shapes: tuple[Any, ...]
    """The static shapes of outputs; none if those of rows are unknown."""

    meets: bool
    """Whether batch normalization takes statistics of all rows."""

    def check(self, layer: Any, shapes: Sequence[Any]) -> None:
        """Refuse outputs that are not one row for each row, by their static shapes for shards."""
        for known, shape in zip(shapes, self.shapes):
            if None in (known.rank, shape.rank):
                continue
            varying = [size for size, now in zip(shape[1:], known[1:]) if size != now]
            if not shape.rank or shape[0] not in (None, self.rows) or self.rows in varying:
                raise failure(
                    f"{layer.name} returns an output of shape {shape} for {self.rows} rows, and the outputs of devices are "
                    "joined as rows: expected one row for each row, whose shape does not depend on the other rows. Compute "
                    "what depends on several rows in compute_loss, or in a train_step of the model"
                )


class ForwardPass:
    """The forward pass of a model on a batch, on several devices: outputs, losses and new values are those of one device."""

    def __init__(self, model: Any, devices: Any, batch_norm: str, added_losses: str | None, recomputed: Sequence[Any]):
        """
        Args:
            devices, batch_norm, added_losses: as for `parallelize`.
            recomputed: layers that run again for their gradients.

        Raises:
            OptionError: for devices that do not exist.
        """
        self._model = model
        self._batch_norm, self._added_losses = batch_norm, added_losses
        self._recomputed = recomputed
        self._variables = [(variable, variable.value) for variable in model.variables]
        """With their values now, as in a forward pass these may be cast."""
        self._functions: dict[Any, Any] = {}
        self._engines: dict[Any, GraphEngine] = {}
        self._surveys: dict[Any, _Survey] = {}
        self._passes: dict[Any, Passed] = {}
        self._plain_calls: list[tuple[Any, Any]] = []
        """While calls are mapped: each layer, and its own attribute `call` if it has one."""
        self.calls = 0
        """How many calls of the model and of its layers were mapped."""
        held: Counter[str] = Counter()
        for _, variable in self._variables:
            held[variable.device] += variable.shape.num_elements() * variable.dtype.size
        self.home = held.most_common(1)[0][0] if held else "/CPU:0"
        """Where most bytes of the variables are: outputs go there."""
        self.devices = choose_devices(devices)

    def forget(self) -> None:
        """Forget traces: the model was compiled again, and its layers may have changed since."""
        for known in (self._functions, self._engines, self._surveys, self._passes):
            known.clear()

    @contextmanager
    def mapping(self, microbatches: int, losses: bool) -> Iterator[None]:
        """Map the outermost calls of the model and of its layers in this context.

        Args:
            microbatches: each device runs its rows in so many parts.
            losses: whether losses that layers add are collected.
        """
        layers = layers_of(self._model)
        self._plain_calls = [(layer, vars(layer).get("call")) for layer in layers]
        try:
            with ExitStack() as replaced:
                for layer in layers:
                    call = partial(self._mapped, layer, layer.call, microbatches, losses)
                    replaced.enter_context(replacing(layer, call=call))
                yield
        finally:
            self._plain_calls = []

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Let the model and its layers be called as outside of `mapping` in this context."""
        with ExitStack() as replaced:
            for layer, call in self._plain_calls:
                replaced.enter_context(replacing(layer, call=call))
            yield

    @tf.autograph.experimental.do_not_convert
    def outputs_in_training(self, inputs: Any) -> tuple[Any, ...]:
        """Return the outputs of the model in a training step on one device, in the graph that is being traced."""
        phase = {"training": True} if "training" in inspect.signature(self._model.call).parameters else {}
        given = Given.of((inputs,), phase)
        with self.plain():
            results, _ = self._forward(None, self._model, given, given.rows)
        return tuple(results)

    def _mapped(self, layer: Any, call: Any, microbatches: int, losses: bool, *args: Any, **kwargs: Any) -> Any:
        """Run a call of a layer with a shard of rows on each device; one that takes no rows, as it is."""
        given = Given.of(args, kwargs, losses, _phase_of(layer))
        if not given.has_rows or not layer.built or is_stateless():
            return call(*args, **kwargs)
        self.calls += 1
        key = id(layer), microbatches, self._trained, given.key
        devices, known, count, rows = len(self.devices), given.count, count_rows(given.rows[0], tf.int32), given.rows
        if known is None:
            with tf.device(HOST):
                few = count < devices
                rows = tf.cond(
                    few, lambda: [_with_copies(leaf, devices) for leaf in given.rows], lambda: list(given.rows)
                )
        with self.plain():
            survey = self._surveyed(key, layer, given)
            if survey.meets:
                results = self._together(key, layer, survey, given, count, rows)
            else:
                results = self._apart(key, layer, survey, given, microbatches, rows)
        what = self._passes[key]
        if known is None:
            of_rows = len(what.masked) + sum(what.masked)
            outputs, states, counts = results[:of_rows], results[of_rows:-1], results[-1]
            with tf.device(self.home):
                real = tf.cast(tf.range(devices) < count, counts.dtype)
                outputs, counts = tf.cond(
                    few, lambda: ([take_rows(leaf, 0, count) for leaf in outputs], real), lambda: (outputs, counts)
                )
            results = [*outputs, *states, counts]
        return self._collected(layer, what, results)

    def _apart(
        self, key: Any, layer: Any, survey: _Survey, given: Given, microbatches: int, rows: Sequence[Any]
    ) -> list[Any]:
        """Run a call in independent shards, each of them in so many microbatches."""
        if key not in self._engines:
            known = given.without_rows()

            @tf.autograph.experimental.do_not_convert
            def forward(*rows: Any) -> tuple[Any, ...]:
                with self.plain(), recomputing(self._recomputed):
                    if microbatches > 1 or self._recomputed:
                        results = self._in_microbatches(key, layer, known, microbatches, rows)
                    else:
                        results = [*itertools.chain(*self._forward(key, layer, known, rows))]
                return tuple(self._counted(key, layer, survey, [[leaf] for leaf in results], [count_rows(rows[0])]))

            options = {"devices": self.devices, "batched": True, "output_device": self.home, "name": layer.name}
            self._engines[key] = GraphEngine(Program(forward, options).reducing(JoinedShards()), NullObserver())
        engine, converted = self._engines[key], as_rows(tuple(rows))
        return list(
            engine.run(converted) if tf.executing_eagerly() else call_inside(engine.program, converted, filled=True)
        )

    def _in_microbatches(self, key: Any, layer: Any, given: Given, microbatches: int, rows: Sequence[Any]) -> list[Any]:
        """The forward pass on a device, in the graph that is traced for all, with each variable read once."""
        values = [self._drawn(*variable, microbatches) for variable in self._variables]

        def forward(number: Any, rows: Sequence[Any], weights: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            now = {i: value[number] if is_seed(self._variables[i][0]) else value for i, value in enumerate(values)}
            now.update(zip(self._trained, weights))
            held = [(variable, now[i]) for i, (variable, _) in enumerate(self._variables)]
            return self._forward(key, layer, given, rows, held)

        weights = [values[i] for i in self._trained]
        if microbatches > 1:
            return recomputed(forward, rows, weights, microbatches)
        return list(itertools.chain(*forward(0, rows, weights)))

    def _drawn(self, variable: Any, stored: Any, count: int) -> Any:
        """The value of a variable; of a seed, which advances, so many: `[count, 2]`."""
        value = stored.read_value()
        if not is_seed(variable):
            return value
        stored.assign(value + tf.constant([0, 1], value.dtype))
        return split_seeds(value, count) if count > 1 else value[None]

    def _together(
        self, key: Any, layer: Any, survey: _Survey, given: Given, count: Any, rows: Sequence[Any]
    ) -> list[Any]:
        """Run a call in one shard for each device, which meet where statistics of all rows are taken."""
        if (key, survey) not in self._functions:
            lockstep = partial(self._in_lockstep, key, layer, survey, given.without_rows())
            self._functions[key, survey] = tf.function(lockstep, autograph=False)
        concrete = self._functions[key, survey].get_concrete_function(count, *rows)
        return list(concrete(count, *rows))

    def _in_lockstep(self, key: Any, layer: Any, survey: _Survey, given: Given, rows: Any, *leaves: Any) -> list[Any]:
        """Trace a call for as many `rows`; of all devices that get none, each has a copy of one instead."""
        known, devices = _static_count(leaves), len(self.devices)
        with tf.device(HOST):
            sizes = sizes_in_graph(rows, devices) if known is None else tf.constant(shard_sizes(known, devices))
            filled, count = tf.maximum(sizes, 1), sizes.shape[0]
            shards = list(zip(*(cut_rows(leaf, filled, count) for leaf in leaves)))
        values: dict[int, list[Any]] = {}
        for variable, stored in self._variables:
            with tf.device(stored.device):
                value = self._drawn(variable, stored, count)
                values[id(variable)] = tf.unstack(value) if is_seed(variable) else fanned_out(value, count)

        def forward(place: int) -> list[Any]:
            with tf.device(self.devices[place]):
                shard = [tf.identity(leaf) for leaf in shards[place]]
                held = [(v, tf.identity(values[id(v)][place])) for v, _ in self._variables]
                return [tf.identity(leaf) for leaf in itertools.chain(*self._forward(key, layer, given, shard, held))]

        lockstep = Lockstep([partial(forward, place) for place in range(count)])
        with recomputing(self._recomputed), meeting(batch_norms_of(layer), lockstep, tf.minimum(sizes, 1)):
            results = lockstep.run()
        with tf.device(self.home):
            parts = [[tf.identity(part) for part in parts] for parts in zip(*results)]
            joined = self._counted(key, layer, survey, parts, filled)
        differentiate_in_place(tf.compat.v1.get_default_graph().get_operations())
        return joined

    def _forward(
        self, key: Any, layer: Any, given: Given, rows: Sequence[Any], held: Sequence[tuple[Any, Any]] = ()
    ) -> tuple[list[Any], list[Any]]:
        """Run a call on some rows.

        `held` pairs variables with values to use instead. All other variables are read, and seeds of random numbers advance.

        Returns:
            Outputs and masks; losses, new values of variables and the number of rows, as states.
        """
        args, kwargs = given.with_rows(rows)
        scope = collecting(held, given.losses)
        if held:  # perhaps in a thread of its own, in which Keras knows nothing of the call that it is a part of
            if given.phase is not None:
                kwargs = kwargs | {"training": given.phase}
            with without_activity_regularizer(layer):  # it is added outside
                tensors, others, what = pure(partial(layer, *args, **kwargs), scope, self._states, rows)
        else:
            tensors, others, what = pure(partial(layer.call, *args, **kwargs), scope, self._states, rows)
        losses = len(what.losses)
        if any(what.losses) and self._added_losses is None:
            raise failure(
                f"{layer.name} adds a loss that depends on the rows, by add_loss or an activity_regularizer, and each "
                "device sees some of the rows; give parallelize added_losses='sum' if such losses are sums over rows, or "
                "added_losses='mean' if they are means"
            )
        for i, value in zip(what.updated, others[losses:]):
            if id(self._states[i]) not in self._averaged and depends_on(value, rows):
                raise failure(
                    f"{self._states[i].path} gets a new value that depends on the rows, which only batch normalization may; "
                    "write the training loop yourself, with DeviceMap.reduce"
                )
        self._passes[key] = what
        for i in range(losses):
            others[i] = tf.cast(tf.reduce_sum(others[i]), tf.float32)
        return tensors, as_states([*others, count_rows(rows[0])], rows[0])

    def _surveyed(self, key: Any, layer: Any, given: Given) -> _Survey:
        """Trace a call for more rows than a shard has, once for each shape. Refuse changes of other state than Keras's."""
        shapes = tuple(str(leaf.shape) for leaf in given.rows)
        if (key, shapes) not in self._surveys:
            self._surveys[key, shapes] = self._survey(layer, given)
        return self._surveys[key, shapes]

    def _survey(self, layer: Any, given: Given) -> _Survey:
        import keras

        norms = batch_norms_of(layer) if self._batch_norm == "synchronized" and len(self.devices) > 1 else []
        dense, met = all(isinstance(leaf, tf.Tensor) for leaf in given.rows), []

        def moments(mean: Any, variance: Any, _: Any) -> tuple[Any, Any]:
            met.append(True)
            return mean, variance

        @tf.function(autograph=False)
        def outputs(*rows: Any) -> list[Any]:
            args, kwargs = given.with_rows(rows)
            with keras.StatelessScope(), moments_by(norms, moments):
                return list(tf.nest.flatten(layer.call(*args, **kwargs)))

        count = 83 + (given.count or 0)
        concrete = outputs.get_concrete_function(
            *(
                tf.TensorSpec([count, *leaf.shape[1:]], leaf.dtype) if dense else tf.type_spec_from_value(leaf)
                for leaf in given.rows
            )
        )
        if audit(concrete).ordered or op_types(concrete) & _ADDS:  # each device would do it
            raise failure(
                f"a layer of {layer.name} changes a tf.Variable or a table, which each device would do by its own rows; "
                "let it be a variable of Keras's, made by add_weight, or change it in a train_step of the model"
            )
        shapes = tuple(spec.shape for spec in concrete.structured_outputs) if dense else ()
        return _Survey(count, shapes, bool(met))

    def _counted(
        self, key: Any, layer: Any, survey: _Survey, results: Sequence[Sequence[Any]], sizes: Any
    ) -> list[Any]:
        """Join shards of results, once an assertion has found a row in outputs for each row of a shard."""
        survey.check(layer, self._passes[key].shapes)
        outputs = results[: len(self._passes[key].masked)]
        counts = [tf.stack([count_rows(part) for part in parts]) for parts in outputs]
        joined = [parts[0] if len(parts) == 1 else tf.concat(parts, 0) for parts in results]
        return with_row_counts_checked(joined, counts, sizes, layer.name)

    def _collected(self, layer: Any, what: Passed, results: Sequence[Any]) -> Any:
        """Return the outputs on all rows, add the losses to the layer and assign new values to its variables.

        Losses are added as a layer does: `add_loss` of a functional model is not implemented.
        """
        import keras

        outputs, losses, updates = what.unpacked(results[:-1])
        counts = tf.cast(results[-1], tf.float32)
        shares = counts / tf.reduce_sum(counts)
        weights = tf.minimum(counts, 1.0) if self._added_losses == "sum" else shares
        for loss, of_rows in zip(losses, what.losses):
            keras.layers.Layer.add_loss(layer, tf.reduce_sum(loss * weights) if of_rows else loss[0])
        for i, states in zip(what.updated, updates):
            variable = self._states[i]
            averaged = id(variable) in self._averaged
            variable.assign(tf.tensordot(tf.cast(shares, states.dtype), states, 1) if averaged else states[0])
        return outputs

    @property
    def _trained(self) -> tuple[int, ...]:
        return tuple(i for i, (variable, _) in enumerate(self._variables) if variable.trainable)

    @property
    def _states(self) -> list[Any]:
        """The variables that forward passes may give new values, besides seeds."""
        return [variable for variable, _ in self._variables if not is_seed(variable)]

    @cached_property
    def _averaged(self) -> set[int]:
        """Moving averages of what batch normalization sees, by identity."""
        return {id(v) for layer in batch_norms_of(self._model) for v in layer.non_trainable_variables}


def _phase_of(layer: Any) -> bool | None:
    """The phase that layers in a layer take from around it, if its `call` has no argument for it."""
    return None if "training" in inspect.signature(type(layer).call).parameters else is_training()


def _static_count(rows: Sequence[Any]) -> int | None:
    return next((leaf.shape[0] for leaf in rows if leaf.shape[0] is not None), None)


def _with_copies(leaf: Any, count: int) -> Any:
    """Fewer rows, but at least one, and copies of the first one: `count` in all."""
    return take_rows(join([leaf, *[take_rows(leaf, 0, 1)] * (count - 1)]), 0, count)
