"""The forward pass of a Keras model over devices, gathered into what it is on one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.gradients import differentiate_in_place, fanned_out
from devicemap._tensorflow.keras import batch_norms_of, is_seed, replacing
from devicemap.compile.audit import Audit, audit, op_types
from devicemap.compile.gather import with_row_counts_checked
from devicemap.compile.graph_builder import sizes_in_graph
from devicemap.compile.program import Program
from devicemap.compile.reduction import JoinedShards, as_states
from devicemap.compile.replicas import split_seeds
from devicemap.data.rows import HOST, as_rows, count_rows, cut_rows
from devicemap.errors import failure
from devicemap.run.graph_engine import GraphEngine
from devicemap.run.in_function import call_inside
from devicemap.run.mapper import NullObserver
from devicemap.training.lockstep import Lockstep
from devicemap.training.recomputation import recomputed
from devicemap.training.stateless import Given, Passed, collecting, depends_on, meeting, pure, recomputing

_ADDS = frozenset(["AssignAddVariableOp", "AssignSubVariableOp"])
"""Ops that change a variable in any order, but once for each device."""


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
        self._recomputed, self._devices = recomputed, devices
        self._variables = [(variable, variable.value) for variable in model.variables]
        """With their values now, as in a forward pass these may be cast."""
        self._graphs: dict[Any, GraphEngine] = {}
        self._passes: dict[Any, Passed] = {}
        self._lockstep: dict[Any, Any] = {}
        held: Counter[str] = Counter()
        for _, variable in self._variables:
            held[variable.device] += variable.shape.num_elements() * variable.dtype.size
        self.home = held.most_common(1)[0][0] if held else "/CPU:0"
        """Where most bytes of the variables are: outputs go there."""
        self.devices = self._program(lambda x: x).devices

    def forget(self) -> None:
        """Forget traces: the model was compiled again, and its layers may have changed since."""
        for known in (self._graphs, self._passes, self._lockstep):
            known.clear()

    def calling(self, call: Any) -> AbstractContextManager[None]:
        """Return a context in which `call` replaces the model's own; `None`: the model's own."""
        return replacing(self._model, call=call)

    def _program(self, fn: Any) -> Program:
        options = {"devices": self._devices, "batched": True, "output_device": self.home}
        return Program(fn, options | {"name": self._model.name}).reducing(JoinedShards())

    def mapped(self, microbatches: int, losses: bool, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass in independent shards, one for each device, and each in so many microbatches.

        In a graph with an unknown number of rows, there is at least one row for each device. `losses=False` drops losses.
        """
        given = Given.of(args, kwargs, losses)
        rows, graph = as_rows(given.rows), self.graph_of(given, microbatches)
        traced = graph.program.compiled_for(rows).traced
        self._check_state(traced.concrete, traced.audit)
        results = graph.run(rows) if tf.executing_eagerly() else call_inside(graph.program, rows, filled=True)
        return self._collected(given, results)

    def graph_of(self, given: Given, microbatches: int) -> GraphEngine:
        """What maps a forward pass."""
        trained = tuple(i for i, (variable, _) in enumerate(self._variables) if variable.trainable)
        key = microbatches, trained, given.key
        if key not in self._graphs:
            known = given.without_rows()

            @tf.autograph.experimental.do_not_convert
            def forward(*rows: Any) -> tuple[Any, ...]:
                with self.calling(None), recomputing(self._recomputed):
                    if microbatches > 1 or self._recomputed:
                        results = self._in_microbatches(known, microbatches, trained, rows)
                    else:
                        results = [*itertools.chain(*self._forward(known, rows))]
                self._check_outputs(known, rows)
                return tuple(self._counted(known, [[leaf] for leaf in results], [count_rows(rows[0])]))

            self._graphs[key] = GraphEngine(self._program(forward), NullObserver())
        return self._graphs[key]

    def _in_microbatches(
        self, given: Given, microbatches: int, trained: Sequence[int], rows: Sequence[Any]
    ) -> list[Any]:
        """The forward pass on a device, in the graph that is traced for all, with each variable read once."""
        values = [self._drawn(*variable, microbatches) for variable in self._variables]

        def forward(number: Any, rows: Sequence[Any], weights: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            now = {i: value[number] if is_seed(self._variables[i][0]) else value for i, value in enumerate(values)}
            now.update(zip(trained, weights))
            return self._forward(given, rows, [(variable, now[i]) for i, (variable, _) in enumerate(self._variables)])

        weights = [values[i] for i in trained]
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

    def synchronized(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass in one shard for each device, which meet where statistics of all rows are taken."""
        given = Given.of(args, kwargs)
        if given.key not in self._lockstep:
            self._lockstep[given.key] = tf.function(partial(self._in_lockstep, given.without_rows()), autograph=False)
        concrete = self._lockstep[given.key].get_concrete_function(*given.rows)
        self._check_state(concrete, audit(concrete))
        return self._collected(given, concrete(*given.rows))

    def _in_lockstep(self, given: Given, *rows: Any) -> list[Any]:
        count = len(self.devices)
        with tf.device(HOST):
            sizes = sizes_in_graph(count_rows(rows[0]), count)
            shards = list(zip(*(cut_rows(leaf, sizes, count) for leaf in rows)))
        values: dict[int, list[Any]] = {}
        for variable, stored in self._variables:
            with tf.device(stored.device):
                value = self._drawn(variable, stored, count)
                values[id(variable)] = tf.unstack(value) if is_seed(variable) else fanned_out(value, count)

        def forward(place: int) -> list[Any]:
            with tf.device(self.devices[place]):
                shard = [tf.identity(leaf) for leaf in shards[place]]
                held = [(v, tf.identity(values[id(v)][place])) for v, _ in self._variables]
                return [tf.identity(leaf) for leaf in itertools.chain(*self._forward(given, shard, held))]

        lockstep = Lockstep([partial(forward, place) for place in range(count)])
        with self.calling(None), recomputing(self._recomputed), meeting(self.meeting, lockstep):
            results = lockstep.run()
        self._check_outputs(given, rows)
        with tf.device(self.home):
            joined = self._counted(given, [[tf.identity(part) for part in parts] for parts in zip(*results)], sizes)
        differentiate_in_place(tf.compat.v1.get_default_graph().get_operations())
        return joined

    def _forward(
        self, given: Given, rows: Sequence[Any], held: Sequence[tuple[Any, Any]] = ()
    ) -> tuple[list[Any], list[Any]]:
        """Run the forward pass on some rows.

        `held` pairs variables with values to use instead. All other variables are read, and seeds of random numbers advance.

        Returns:
            Outputs and masks; losses, new values of variables and the number of rows, as states.
        """
        args, kwargs = given.with_rows(rows)
        scope = collecting(held, given.losses)
        # In a thread or a function of its own, Keras knows nothing of the call that it is a part of.
        call = partial(self._model if held else self._model.call, *args, **kwargs)
        tensors, others, what = pure(call, scope, self._states, rows)
        losses = len(what.losses)
        if any(what.losses) and self._added_losses is None:
            raise failure(
                f"{self._model.name} adds a loss that depends on the rows, by add_loss or an activity_regularizer, and each "
                "device sees some of the rows; give parallelize added_losses='sum' if such losses are sums over rows, or "
                "added_losses='mean' if they are means"
            )
        for i, value in zip(what.updated, others[losses:]):
            if id(self._states[i]) not in self._averaged and depends_on(value, rows):
                raise failure(
                    f"{self._states[i].path} gets a new value that depends on the rows, which only batch normalization may; "
                    "write the training loop yourself, with DeviceMap.reduce"
                )
        self._passes[given.key] = what
        for i in range(losses):
            others[i] = tf.cast(tf.reduce_sum(others[i]), tf.float32)
        return tensors, as_states([*others, count_rows(rows[0])], rows[0])

    def _check_state(self, concrete: Any, found: Audit) -> None:
        """Refuse a forward pass that changes state which is not Keras's: each device would change it once."""
        if found.ordered or op_types(concrete) & _ADDS:
            raise failure(
                f"a layer of {self._model.name} changes a tf.Variable or a table, which each device would do by its own rows; "
                "let it be a variable of Keras's, made by add_weight, or write the training loop yourself"
            )

    def _check_outputs(self, given: Given, rows: Sequence[Any]) -> None:
        """Refuse outputs that are not one row for each row, by their static shapes for a number of rows that no shard has."""
        import keras

        if not all(isinstance(leaf, tf.Tensor) for leaf in rows):
            return
        count = 83 + (rows[0].shape[0] or 0)

        @tf.function(autograph=False)
        def outputs(*rows: Any) -> list[Any]:
            args, kwargs = given.with_rows(rows)
            with self.calling(None), keras.StatelessScope():
                return list(tf.nest.flatten(self._model.call(*args, **kwargs)))

        specs = [tf.TensorSpec([count, *leaf.shape[1:]], leaf.dtype) for leaf in rows]
        traced = outputs.get_concrete_function(*specs).structured_outputs
        for known, shape in zip(self._passes[given.key].shapes, (spec.shape for spec in traced)):
            if None in (known.rank, shape.rank):
                continue
            varying = [size for size, now in zip(shape[1:], known[1:]) if size != now]
            if not shape.rank or shape[0] not in (None, count) or count in varying:
                raise failure(
                    f"{self._model.name} returns an output of shape {shape} for {count} rows, and the outputs of devices "
                    "are joined as rows: expected one row for each row, whose shape does not depend on the other rows. Compute "
                    "what depends on several rows in compute_loss, or write the training loop yourself"
                )

    def _counted(self, given: Given, results: Sequence[Sequence[Any]], sizes: Any) -> list[Any]:
        """Join shards of results, once an assertion has found a row in outputs for each row of a shard."""
        outputs = results[: len(self._passes[given.key].masked)]
        counts = [tf.stack([count_rows(part) for part in parts]) for parts in outputs]
        joined = [parts[0] if len(parts) == 1 else tf.concat(parts, 0) for parts in results]
        return with_row_counts_checked(joined, counts, sizes, self._model.name)

    def _collected(self, given: Given, results: Sequence[Any]) -> Any:
        """Return the outputs on all rows, add the losses to the model and assign new values to its variables.

        Losses are added as a layer does: `add_loss` of a functional model is not implemented.
        """
        import keras

        what, counts = self._passes[given.key], results[-1]
        outputs, losses, updates = what.unpacked(results[:-1])
        shares = tf.cast(counts / tf.reduce_sum(counts), tf.float32)
        for loss, of_rows in zip(losses, what.losses):
            parts = loss if self._added_losses == "sum" else loss * shares
            keras.layers.Layer.add_loss(self._model, tf.reduce_sum(parts) if of_rows else loss[0])
        for i, states in zip(what.updated, updates):
            variable = self._states[i]
            averaged = id(variable) in self._averaged
            variable.assign(tf.tensordot(tf.cast(shares, states.dtype), states, 1) if averaged else states[0])
        return outputs

    @property
    def _states(self) -> list[Any]:
        """The variables that forward passes may give new values, besides seeds."""
        return [variable for variable, _ in self._variables if not is_seed(variable)]

    @cached_property
    def _averaged(self) -> set[int]:
        """Moving averages of what batch normalization sees, by identity."""
        return {id(v) for layer in batch_norms_of(self._model) for v in layer.non_trainable_variables}

    @cached_property
    def meeting(self) -> list[Any]:
        """The layers that take statistics of all rows."""
        meets = self._batch_norm == "synchronized" and len(self.devices) > 1
        return batch_norms_of(self._model) if meets else []
