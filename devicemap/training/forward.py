"""The forward pass of a Keras model over devices, gathered into what it is on one."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap._tensorflow.gradients import differentiate_in_place
from devicemap.compile.layout import sizes_in_graph
from devicemap.compile.lockstep import Lockstep
from devicemap.compile.mirrors import split_seeds
from devicemap.compile.program import Program
from devicemap.compile.reduction import Collection, as_states
from devicemap.data.rows import HOST, as_rows, count_rows, cut_rows
from devicemap.errors import failure
from devicemap.run.calls import Nobody
from devicemap.run.clock import Clock
from devicemap.run.one_graph import OneGraph
from devicemap.training.calls import Given, Passed, collecting, depends_on, is_seed, moments_of_all


class ForwardPass:
    """The forward pass of a model on a batch, on several devices: outputs, losses and new values are those of one device."""

    def __init__(self, model: Any, devices: Any, batch_norm: str):
        """Raises `OptionError` for devices that do not exist."""
        self._model = model
        self._batch_norm = batch_norm
        self._devices = devices
        self._variables = [(variable, variable.value) for variable in model.variables]
        """With their values now, as in a forward pass these may be cast."""
        self._graphs: dict[Any, OneGraph] = {}
        self._passes: dict[Any, Passed] = {}
        self._lockstep: dict[Any, Any] = {}
        self._sums: dict[Any, list[bool]] = {}
        self.devices = self._program(lambda x: x).devices
        self.clock = Clock(self.devices)

    @contextlib.contextmanager
    def calling(self, call: Any) -> Iterator[None]:
        """While it lasts, this is how the model is called."""
        own = vars(self._model)
        before = own.pop("call", None)
        if call is not None:
            own["call"] = call
        try:
            yield
        finally:
            own.pop("call", None)
            if before is not None:
                own["call"] = before

    def _program(self, fn: Any) -> Program:
        options = {"devices": self._devices, "batched": True, "output_device": self._home, "report": False}
        return Program(fn, options | {"name": self._model.name}).reducing(Collection())

    @property
    def _home(self) -> str:
        """Where most bytes of the variables are: outputs go there."""
        held: Counter[str] = Counter()
        for _, variable in self._variables:
            held[variable.device] += variable.shape.num_elements() * variable.dtype.size
        return held.most_common(1)[0][0] if held else "/CPU:0"

    def mapped(self, *args: Any, **kwargs: Any) -> Any:
        """A forward pass in a shard for each device, which do not know of each other."""
        given = Given.of(args, kwargs)
        rows, graph = as_rows(given.rows), self.graph_of(given)
        if kwargs.get("training") and not tf.executing_eagerly() and len(self.devices) > 1:
            return self._collected(given, graph.inside_function(rows, self.clock))
        return self._collected(given, graph.over(rows))

    def graph_of(self, given: Given) -> OneGraph:
        if given.key not in self._graphs:
            known = given.without_rows()

            @tf.autograph.experimental.do_not_convert
            def forward(*rows: Any) -> tuple[Any, ...]:
                with self.calling(None):
                    return tuple(self._forward(known, rows))

            self._graphs[given.key] = OneGraph(self._program(forward), Nobody())
        return self._graphs[given.key]

    def synchronized(self, places: int, *args: Any, **kwargs: Any) -> Any:
        """The same in devices that meet where statistics of all rows are taken."""
        given = Given.of(args, kwargs)
        key = places, given.key
        if key not in self._lockstep:
            self._lockstep[key] = tf.function(partial(self._in_lockstep, places, given.without_rows()), autograph=False)
        return self._collected(given, self._lockstep[key](*given.rows))

    def _in_lockstep(self, places: int, given: Given, *rows: Any) -> list[Any]:
        with tf.device(HOST):
            sizes = sizes_in_graph(count_rows(rows[0]), places)
            shards = list(zip(*(cut_rows(leaf, sizes, places) for leaf in rows)))
        values: dict[int, list[Any]] = {}
        for variable, stored in self._variables:
            with tf.device(stored.device):
                value = stored.read_value()
                values[id(variable)] = tf.unstack(split_seeds(value, places)) if is_seed(variable) else [value] * places
                if is_seed(variable):
                    stored.assign(value + tf.constant([0, 1], value.dtype))

        def forward(place: int) -> list[Any]:
            with tf.device(self.devices[place]):
                shard = [tf.identity(leaf) for leaf in shards[place]]
                held = [(v, tf.identity(values[id(v)][place])) for v, _ in self._variables]
                return [tf.identity(leaf) for leaf in self._forward(given, shard, held)]

        lockstep = Lockstep([partial(forward, place) for place in range(places)])
        with self.calling(None), moments_of_all(self.meeting, lockstep):
            results = lockstep.run()
        graph = tf.compat.v1.get_default_graph()
        with tf.device(self._home):
            joined = [tf.concat([tf.identity(part) for part in parts], 0) for parts in zip(*results)]
        differentiate_in_place(graph.get_operations())
        return joined

    def _forward(self, given: Given, rows: Sequence[Any], held: Sequence[tuple[Any, Any]] = ()) -> list[Any]:
        """The forward pass on some rows: outputs, masks, losses, new values of variables and the number of rows.

        `held`: pairs of variables and values to use instead; all others are read, and seeds of random numbers advance.
        """
        model = self._model
        args, kwargs = given.with_rows(rows)
        with collecting(held) as scope:
            # In a thread of its own, Keras knows nothing of the call that it is a part of.
            outputs = model(*args, **kwargs) if held else model.call(*args, **kwargs)
        flat = tf.nest.flatten(outputs)
        masks = [getattr(leaf, "_keras_mask", None) for leaf in flat]
        updates = {}
        for i, variable in enumerate(model.non_trainable_variables):
            value = scope.get_current_value(variable)
            if value is not None and not is_seed(variable) and not any(value is known for _, known in held):
                updates[i] = value
                if not self._is_averaged(variable) and depends_on(value, rows):
                    raise failure(
                        f"{variable.path} gets a new value that depends on the rows, which only batch normalization may; "
                        "write the training loop yourself, with DeviceMap.reduce"
                    )
        self._passes[given.key] = Passed(
            tf.nest.map_structure(lambda _: None, outputs),
            tuple(mask is not None for mask in masks),
            len(scope.losses),
            tuple(updates),
        )
        losses = (tf.cast(tf.reduce_sum(loss), tf.float32) for loss in scope.losses)
        states = as_states([*losses, *updates.values(), count_rows(rows[0])], rows[0])
        return [*flat, *(mask for mask in masks if mask is not None), *states]

    def _collected(self, given: Given, results: Sequence[Any]) -> Any:
        """What the forward pass on all rows would have given, and done."""
        what, left = self._passes[given.key], list(results)
        outputs, left = left[: len(what.masked)], left[len(what.masked) :]
        for output in [output for output, masked in zip(outputs, what.masked) if masked]:
            output._keras_mask = left.pop(0)
        losses, updates, counts = left[: what.losses], left[what.losses : -1], left[-1]
        shares = tf.cast(counts / tf.reduce_sum(counts), tf.float32)
        for loss, adds_up in zip(losses, self._adding_up(given, what.losses)):
            self._model.add_loss(tf.reduce_sum(loss if adds_up else loss * shares))
        for i, states in zip(what.updated, updates):
            variable = self._model.non_trainable_variables[i]
            mean = tf.tensordot(tf.cast(shares, states.dtype), states, 1) if self._is_averaged(variable) else states[0]
            variable.assign(mean)
        return tf.nest.pack_sequence_as(what.outputs, outputs)

    def _adding_up(self, given: Given, losses: int) -> list[bool]:
        """Whether each loss that the model adds is a sum over rows; if not, it is a mean, or does not depend on them.

        Raises:
            FunctionError: it is neither: that of two rows is not the sum of theirs, nor the mean.
        """
        if losses and given.key not in self._sums:
            with tf.init_scope(), self.calling(None):
                one, other, both = (self._losses_of(given, rows, losses) for rows in ([0], [1], [0, 1]))
            self._sums[given.key] = []
            for a, b, loss in zip(one, other, both):
                if not any(math.isclose(loss, whole, rel_tol=0.01) for whole in (a + b, (a + b) / 2)) or not loss:
                    raise failure(
                        f"{self._model.name} adds a loss that is neither a sum over rows nor a mean: of two rows it is "
                        f"{loss:g}, of each alone {a:g} and {b:g}. Add such a loss in compute_loss"
                    )
                self._sums[given.key].append(abs(loss) > 0.75 * abs(a + b))
        return self._sums.get(given.key, [])

    def _losses_of(self, given: Given, rows: list[int], losses: int) -> list[float]:
        """What is added for these of two random rows."""
        random = np.random.default_rng(0)
        leaves = []
        for leaf in given.rows:
            two = random.normal(size=[2, *(size or 2 for size in leaf.shape[1:])])[rows]
            leaves.append(tf.cast(two if leaf.dtype.is_floating else two > 0, leaf.dtype))
        args, kwargs = given.with_rows(leaves)
        with collecting() as scope:
            self._model(*args, **{**kwargs, "training": False})
        if len(scope.losses) != losses:
            raise failure(
                f"{self._model.name} adds {losses} losses in training and {len(scope.losses)} else; expected the same"
            )
        return [float(tf.reduce_sum(loss)) for loss in scope.losses]

    @cached_property
    def _averaged(self) -> list[Any]:
        """Moving averages of what batch normalization sees."""
        import keras

        layers = (
            layer for layer in self._model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)
        )
        return [variable for layer in layers for variable in layer.non_trainable_variables]

    def _is_averaged(self, variable: Any) -> bool:
        return any(variable is each for each in self._averaged)

    @cached_property
    def meeting(self) -> list[Any]:
        """The layers that take statistics of all rows."""
        import keras

        layers = self._model._flatten_layers() if self._batch_norm == "synchronized" and len(self.devices) > 1 else ()
        return [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]
