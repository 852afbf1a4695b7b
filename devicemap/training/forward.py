"""The forward pass of a Keras model over devices, gathered into what it is on one."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap._tensorflow.gradients import differentiate_in_place
from devicemap._tensorflow.keras import batch_norms_of, replacing
from devicemap.compile.compiled import has_clock
from devicemap.compile.layout import arrivals_of, ended_on, sizes_in_graph
from devicemap.compile.lockstep import Lockstep
from devicemap.compile.mirrors import split_seeds
from devicemap.compile.program import Program
from devicemap.compile.reduction import Collection, as_states
from devicemap.data.rows import HOST, as_rows, count_rows, cut_rows
from devicemap.errors import failure
from devicemap.run.calls import Nobody
from devicemap.run.clock import Clock
from devicemap.run.embedded import call_inside
from devicemap.run.one_graph import OneGraph
from devicemap.training.calls import Given, Passed, collecting, depends_on, is_seed, meeting, pure, recomputing
from devicemap.training.recomputation import recomputed

_MANY = 64
"""Of so many rows and of twice as many, losses that draw random numbers are compared."""


class ForwardPass:
    """The forward pass of a model on a batch, on several devices: outputs, losses and new values are those of one device."""

    def __init__(self, model: Any, devices: Any, batch_norm: str, recomputed: Sequence[Any]):
        """
        Args:
            recomputed: layers that run again for their gradients.

        Raises:
            OptionError: for devices that do not exist.
        """
        self._model = model
        self._batch_norm = batch_norm
        self._recomputed = recomputed
        self._devices = devices
        self._variables = [(variable, variable.value) for variable in model.variables]
        """With their values now, as in a forward pass these may be cast."""
        self._graphs: dict[Any, OneGraph] = {}
        self._passes: dict[Any, Passed] = {}
        self._lockstep: dict[Any, Any] = {}
        self._sums: dict[Any, list[bool]] = {}
        self.devices = self._program(lambda x: x).devices
        # What a normalization sees is not to depend on how fast devices happen to be.
        self.clock = Clock(self.devices, even=bool(batch_norms_of(model)))

    def forget(self) -> None:
        """What was traced: the model is compiled anew, and its layers may have changed since."""
        for known in (self._graphs, self._passes, self._lockstep, self._sums):
            known.clear()

    def calling(self, call: Any) -> AbstractContextManager[None]:
        """While it lasts, this is how the model is called; `None`: as it is."""
        return replacing(self._model, call=call)

    def _program(self, fn: Any) -> Program:
        options = {"devices": self._devices, "batched": True, "output_device": self.home}
        return Program(fn, options | {"name": self._model.name}).reducing(Collection())

    @property
    def home(self) -> str:
        """Where most bytes of the variables are: outputs go there."""
        held: Counter[str] = Counter()
        for _, variable in self._variables:
            held[variable.device] += variable.shape.num_elements() * variable.dtype.size
        return held.most_common(1)[0][0] if held else "/CPU:0"

    def mapped(self, microbatches: int, *args: Any, **kwargs: Any) -> Any:
        """A forward pass in a shard for each device, which do not know of each other; each in so many microbatches.

        In a graph there are as many rows as devices, or it is known how many there are.
        """
        given = Given.of(args, kwargs)
        rows, graph = as_rows(given.rows), self.graph_of(given, microbatches)
        if graph.program.compiled_for(rows).traced.audit.ordered:
            raise failure(
                f"a layer of {self._model.name} changes a tf.Variable or a table, which each device would do by its own rows; "
                "let it be a variable of Keras's, made by add_weight, or write the training loop yourself"
            )
        if tf.executing_eagerly():
            return self._collected(given, graph.over(rows))
        clock = self.clock if kwargs.get("training") and len(self.devices) > 1 else None
        return self._collected(given, call_inside(graph.program, rows, clock, filled=True))

    def graph_of(self, given: Given, microbatches: int) -> OneGraph:
        """What maps a forward pass."""
        trained = tuple(i for i, (variable, _) in enumerate(self._variables) if variable.trainable)
        key = microbatches, trained, given.key
        if key not in self._graphs:
            known = given.without_rows()

            @tf.autograph.experimental.do_not_convert
            def forward(*rows: Any) -> tuple[Any, ...]:
                with self.calling(None), recomputing(self._recomputed):
                    if microbatches > 1 or self._recomputed:
                        return tuple(self._in_microbatches(known, microbatches, trained, rows))
                    return tuple(itertools.chain(*self._forward(known, rows)))

            self._graphs[key] = OneGraph(self._program(forward), Nobody())
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

    def synchronized(self, places: int, *args: Any, **kwargs: Any) -> Any:
        """The same in devices that meet where statistics of all rows are taken."""
        given = Given.of(args, kwargs)
        key = places, given.key
        if key not in self._lockstep:
            self._lockstep[key] = tf.function(partial(self._in_lockstep, places, given.without_rows()), autograph=False)
        return self._collected(given, self._lockstep[key](*given.rows))

    def _in_lockstep(self, places: int, given: Given, *rows: Any) -> list[Any]:
        timed = places == len(self.devices) and has_clock()
        with tf.device(HOST):
            began = tf.timestamp() if timed else tf.constant(0.0)
            with tf.control_dependencies([began]):
                sizes = sizes_in_graph(count_rows(rows[0]), places)
            shards = list(zip(*(cut_rows(leaf, sizes, places) for leaf in rows)))
        values: dict[int, list[Any]] = {}
        for variable, stored in self._variables:
            with tf.device(stored.device):
                value = self._drawn(variable, stored, places)
                values[id(variable)] = tf.unstack(value) if is_seed(variable) else [value] * places

        def forward(place: int) -> list[Any]:
            with tf.device(self.devices[place]):
                shard = [tf.identity(leaf) for leaf in shards[place]]
                held = [(v, tf.identity(values[id(v)][place])) for v, _ in self._variables]
                return [tf.identity(leaf) for leaf in itertools.chain(*self._forward(given, shard, held))]

        lockstep = Lockstep([partial(forward, place) for place in range(places)])
        with self.calling(None), recomputing(self._recomputed), meeting(self.meeting, lockstep):
            results = lockstep.run()
        if timed:
            arrivals = arrivals_of([ended_on(device, part) for device, part in zip(self.devices, results)])
            with tf.device(HOST):
                self.clock.note(sizes, began, [arrivals])
        graph = tf.compat.v1.get_default_graph()
        with tf.device(self.home):
            joined = [tf.concat([tf.identity(part) for part in parts], 0) for parts in zip(*results)]
        differentiate_in_place(graph.get_operations())
        return joined

    def _forward(
        self, given: Given, rows: Sequence[Any], held: Sequence[tuple[Any, Any]] = ()
    ) -> tuple[list[Any], list[Any]]:
        """The forward pass on some rows: outputs and masks; losses, new values of variables and the number of rows, as states.

        `held`: pairs of variables and values to use instead; all others are read, and seeds of random numbers advance.
        """
        args, kwargs = given.with_rows(rows)
        scope = collecting(held)
        # In a thread or a function of its own, Keras knows nothing of the call that it is a part of.
        call = partial(self._model if held else self._model.call, *args, **kwargs)
        tensors, others, what = pure(call, scope, self._states)
        for i, value in zip(what.updated, others[what.losses :]):
            if id(self._states[i]) not in self._averaged and depends_on(value, rows):
                raise failure(
                    f"{self._states[i].path} gets a new value that depends on the rows, which only batch normalization may; "
                    "write the training loop yourself, with DeviceMap.reduce"
                )
        self._passes[given.key] = what
        for i in range(what.losses):
            others[i] = tf.cast(tf.reduce_sum(others[i]), tf.float32)
        return tensors, as_states([*others, count_rows(rows[0])], rows[0])

    def _collected(self, given: Given, results: Sequence[Any]) -> Any:
        """What the forward pass on all rows would have given, and done.

        Losses are added as a layer does: `add_loss` of a functional model is not implemented.
        """
        import keras

        what, counts = self._passes[given.key], results[-1]
        outputs, losses, updates = what.unpacked(results[:-1])
        shares = tf.cast(counts / tf.reduce_sum(counts), tf.float32)
        for loss, adds_up in zip(losses, self._adding_up(given, what.losses)):
            keras.layers.Layer.add_loss(self._model, tf.reduce_sum(loss if adds_up else loss * shares))
        for i, states in zip(what.updated, updates):
            variable = self._states[i]
            mean = (
                tf.tensordot(tf.cast(shares, states.dtype), states, 1) if id(variable) in self._averaged else states[0]
            )
            variable.assign(mean)
        return outputs

    def _adding_up(self, given: Given, losses: int) -> list[bool]:
        """Whether each loss that the model adds is a sum over rows; if not, it is a mean, or does not depend on them.

        Raises:
            FunctionError: it is neither: that of two rows is not the sum of theirs, nor the mean.
        """
        if losses and given.key not in self._sums:
            with tf.init_scope(), self.calling(None):
                find = partial(self._losses_of, given, losses=losses)
                both = find(range(2))
                if not all(both):  # of a weight that has not begun to grow, of a layer that begins with zeros
                    find = partial(find, held=self._random_values())
                    both = find(range(2))
                drawn = [not math.isclose(a, b, rel_tol=1e-4) for a, b in zip(both, find(range(2)))]
                several = [find(range(_MANY)), find(range(2 * _MANY))] if any(drawn) else [both, both]
                found = zip(find([0]), find([1]), both, drawn, *several)
            self._sums[given.key] = [self._adds_up(*each) for each in found]
        return self._sums.get(given.key, [])

    def _adds_up(self, one: float, other: float, both: float, drawn: bool, many: float, more: float) -> bool:
        """Whether a loss is a sum, by what it is of one row, another one, and both; if random numbers are drawn for it, by what
        it is of many rows, and of twice as many."""
        if not both:
            raise failure(
                f"{self._model.name} adds a loss that is 0 for random rows and weights, so nobody can tell whether it is a sum "
                "over rows or a mean. Add such a loss in compute_loss"
            )
        if drawn and 0.5 < more / (many or math.inf) < 3:
            return more / many > math.sqrt(2)
        if drawn or not any(math.isclose(both, whole, rel_tol=0.01) for whole in (one + other, (one + other) / 2)):
            raise failure(
                f"{self._model.name} adds a loss that is neither a sum over rows nor a mean: of two rows it is {both:g}, of "
                f"each alone {one:g} and {other:g}. Add such a loss in compute_loss"
            )
        return abs(both) > 0.75 * abs(one + other)

    def _random_values(self) -> list[tuple[Any, Any]]:
        """Variables, but those of random numbers, with other values than they have."""
        random = np.random.default_rng(0)
        return [
            (variable, stored + tf.cast(random.uniform(0.1, 1.0, stored.shape), stored.dtype))
            for variable, stored in self._variables
            if not is_seed(variable) and stored.dtype.is_floating
        ]

    def _losses_of(
        self, given: Given, rows: Sequence[int], losses: int, held: Sequence[tuple[Any, Any]] = ()
    ) -> list[float]:
        """What is added for these of some random rows; `held`: as for `collecting`."""
        random = np.random.default_rng(0)
        leaves = []
        for leaf in given.rows:
            some = random.normal(size=[max(rows) + 1, *(size or 2 for size in leaf.shape[1:])])
            if some.ndim > 1:  # as masks may have it
                some[1::2, some.shape[1] // 2 :] = 0.0
            some = some[rows]
            leaves.append(tf.cast(some if leaf.dtype.is_floating else some > 0, leaf.dtype))
        args, kwargs = given.with_rows(leaves)
        with collecting(held) as scope:
            self._model(*args, **{**kwargs, "training": False})
        if len(scope.losses) != losses:
            raise failure(
                f"{self._model.name} adds {losses} losses in training and {len(scope.losses)} else; expected the same"
            )
        return [float(tf.reduce_sum(loss)) for loss in scope.losses]

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
