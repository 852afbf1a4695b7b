"""Keras models on several devices: their own steps, with the forward pass mapped over the devices.

    a batch ── shards ──> the model, on each device ── outputs, gathered ──> loss, metrics, optimizer: Keras's, once

So loss, metrics and optimizer see the whole batch, as on one device: reductions, weights, masks, clipping and whatever else is
done with outputs or gradients is what Keras does. Gradients are computed where the forward pass was.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap._tensorflow.gradients import differentiate_in_place
from devicemap.api import DeviceMap
from devicemap.base.devices import choose_devices
from devicemap.base.structure import freeze
from devicemap.compile.layout import sizes_in_graph
from devicemap.compile.lockstep import Lockstep
from devicemap.compile.mirrors import split_seeds
from devicemap.compile.program import Program
from devicemap.compile.reduction import Collection, as_states
from devicemap.data.rows import HOST, as_rows, count_rows, cut_rows
from devicemap.errors import OptionError, failure
from devicemap.run.calls import Nobody
from devicemap.run.clock import Clock
from devicemap.run.one_graph import OneGraph
from devicemap.tell.plan.plan import Plan
from devicemap.tell.plan.planner import explain_call
from devicemap.tell.plan.request import ask
from devicemap.tell.report.training import DeviceShare, TrainingReport
from devicemap.tell.verify.findings import Verification

_ROWS = object()
"""Stands for a tensor of rows."""

_STEPS = "train_step", "test_step", "predict_step"
_MAKERS = "make_train_function", "make_test_function", "make_predict_function"
_METHODS = "detach", "explain", "report", "verify"


def parallelize(model: Any, devices: Any = None, batch_norm: str = "synchronized") -> Any:
    """Let a Keras model fit, evaluate and predict on several devices.

    The weights after each step, losses and metrics are those of one device with the same batches, to rounding. The model stays
    the same object, with the same variables, files and callbacks; called directly, or saved, it is what it was. Each batch is
    cut into a shard of rows for each device; loss, metrics and the optimizer run once, on all rows, where the variables are.

    Args:
        model: a Keras 3 model with the TensorFlow backend: Sequential, functional or subclassed, compiled or not, built.
        devices: as for `parallel_map`.
        batch_norm: "synchronized": batch normalization takes mean and variance of the whole batch. "local": of a device's rows,
            as separate processes would; the moving averages take the mean over the devices.

    Returns:
        The model, which has a method `detach()` now that gives it back to one device.

    Raises:
        OptionError: for what is no such model, a model that was not built, has a `train_step` of its own or is parallelized
            already, and for devices that do not exist.

    Examples:
        >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> _ = parallelize(model).fit(tf.ones([8, 3]), tf.ones([8, 1]), verbose=0)
        >>> _ = model.detach()
    """
    _check(model, batch_norm)
    _Parallel(model, devices, batch_norm).attach()
    return model


@contextlib.contextmanager
def spread_variables(devices: Any = None) -> Iterator[None]:
    """Variables that are made here go, each, to the device that holds the fewest bytes of them.

    A model that is made here and parallelized needs on each device but a part of the memory of gradients and optimizer: the
    gradients of a variable are added, and its slots kept and updated, where it is (ZeRO, stages 1 and 2; Rajbhandari et
    al., 2020). Values go from there to each device once per step. Files are as ever.

    Args:
        devices: as for `parallel_map`.

    Raises:
        OptionError: for devices that do not exist.

    Examples:
        >>> with spread_variables(["CPU:0", "CPU:1"]):
        ...     a, b = tf.Variable(tf.zeros([4])), tf.Variable(tf.zeros([4]))
        >>> a.device == b.device
        False
    """
    held = dict.fromkeys(choose_devices(devices), 0)

    def create(next_creator: Any, **options: Any) -> Any:
        device = min(held, key=lambda name: held[name])
        with tf.device(device):
            variable = next_creator(**options)
        held[device] += (variable.shape.num_elements() or 0) * variable.dtype.size
        return variable

    with tf.variable_creator_scope(create):
        yield


def _check(model: Any, batch_norm: str) -> None:
    import keras

    if not isinstance(model, keras.Model):
        raise OptionError(f"model is a {type(model).__name__}; expected a keras.Model of Keras 3")
    if keras.backend.backend() != "tensorflow":
        raise OptionError(
            f"Keras runs on {keras.backend.backend()}; set KERAS_BACKEND=tensorflow before it is imported"
        )
    if batch_norm not in ("synchronized", "local"):
        raise OptionError(f"batch_norm={batch_norm!r}; expected 'synchronized' or 'local'")
    if "detach" in vars(model):
        raise OptionError(f"{model.name} is parallelized already; model.detach() gives it back to one device")
    if not model.built:
        raise OptionError(
            f"{model.name} was not built: its variables do not exist yet. Call it on a batch, give it a keras.Input, or "
            "use model.build(...)"
        )
    for step in _STEPS:
        if getattr(type(model), step) is not getattr(keras.Model, step):
            raise OptionError(
                f"{type(model).__name__} has a {step} of its own. In it, map the forward pass with a devicemap.DeviceMap, or "
                "reduce losses under a tape with DeviceMap.reduce, instead of parallelize"
            )


@dataclass(frozen=True)
class _Given:
    """The arguments of a forward pass: tensors of rows, and what is the same for all rows."""

    structure: Any
    static: tuple[Any, ...]
    rows: tuple[Any, ...]

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> _Given:
        leaves = tf.nest.flatten((args, kwargs))
        return cls(
            tf.nest.map_structure(lambda _: None, (args, kwargs)),
            tuple(_ROWS if tf.is_tensor(leaf) else leaf for leaf in leaves),
            tuple(leaf for leaf in leaves if tf.is_tensor(leaf)),
        )

    @property
    def key(self) -> Any:
        """Hashable: the same for what is to be traced once."""
        return freeze(self.structure), self.static

    def without_rows(self) -> _Given:
        return replace(self, rows=())

    def with_rows(self, rows: Sequence[Any]) -> Any:
        """The arguments, with other rows."""
        left = iter(rows)
        leaves = [next(left) if leaf is _ROWS else leaf for leaf in self.static]
        return tf.nest.pack_sequence_as(self.structure, leaves)


@dataclass(frozen=True)
class _Forward:
    """What one forward pass gives besides rows, and how that of devices becomes one."""

    outputs: Any
    """The structure of the model's outputs; leaves are their numbers."""

    masked: tuple[bool, ...]
    """Which outputs have a Keras mask."""

    losses: int
    """How many scalars `add_loss` got."""

    updated: tuple[int, ...]
    """Which of the model's non-trainable variables got new values."""


class _Parallel:
    """A parallelized model: what its steps do instead of calling it on one device."""

    def __init__(self, model: Any, devices: Any, batch_norm: str):
        self._model = model
        self._batch_norm = batch_norm
        self._devices = devices
        self._variables = [
            (variable, variable.value) for variable in model.variables
        ]  # a forward pass may see them cast
        self._graphs: dict[Any, OneGraph] = {}
        self._passes: dict[Any, _Forward] = {}
        self._lockstep: dict[Any, Any] = {}
        self._sums: dict[Any, list[bool]] = {}
        self._places = self._program(lambda x: x).devices
        self._clock = Clock(self._places)

    def attach(self) -> None:
        """Put the steps on the model."""
        own = vars(self._model)
        for name in _STEPS:
            own[name] = partial(self._step, name)
        for name in _MAKERS:
            own[name] = partial(self._make, name)
        own |= {name: getattr(self, name) for name in _METHODS}
        self._forget_functions()

    def detach(self) -> Any:
        """Give the model back to one device; returns it."""
        for name in (*_STEPS, *_MAKERS, *_METHODS):
            del vars(self._model)[name]
        self._forget_functions()
        return self._model

    def explain(self, data_or_spec: Any) -> Plan:
        """The plan of the forward pass of a training step, as `DeviceMap.explain` gives it.

        Besides what it tells, each device sends the gradients of the variables that it was sent.

        Args:
            data_or_spec: inputs of the model, or a nest of `tf.TensorSpec`s in their place.
        """
        structure = tf.nest.map_structure(lambda leaf: None, data_or_spec)
        leaves = tuple(tf.nest.flatten(data_or_spec))
        given = _Given(((structure,), {"training": True}), (*(_ROWS for _ in leaves), True), ())
        program = self._graph_of(given).program
        asked = ask(leaves, program.options)
        compiled = program.compiled_for(asked)
        return explain_call(
            asked, compiled, program.options, self._model.call, program.devices, program.output_device, program.name
        )

    def report(self) -> TrainingReport:
        """What the devices did since `fit` was called last: rows, and the time of forward passes."""
        return TrainingReport(self._model.name, tuple(DeviceShare(*known) for known in self._clock.known()))

    def verify(self, data: Any, rows: int | None = None, *, tolerance: float | None = None) -> Verification:
        """Run the model as in `predict` on some rows in several ways, and compare: which layer makes devices differ from one?

        Args:
            data: inputs of the model.
            rows, tolerance: as for `DeviceMap.verify`.

        Returns:
            The findings; outputs are named by the layer that gives them, in the order of layers, where the model is
            Sequential or functional.
        """
        import keras

        model, leaves = self._model, tuple(tf.nest.flatten(data))
        if isinstance(model, keras.Sequential | keras.src.models.Functional):
            layers = [layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]
            model = keras.Model(model.inputs, {f"{i}_{layer.name}": layer.output for i, layer in enumerate(layers)})

        def infer(*leaves: Any) -> Any:
            return model(tf.nest.pack_sequence_as(data, leaves), training=False)

        mapper = DeviceMap(infer, devices=self._devices, batched=True, name=self._model.name)
        return mapper.verify(leaves, rows, tolerance=tolerance)

    def _forget_functions(self) -> None:
        self._model.train_function = self._model.test_function = self._model.predict_function = None

    def _make(self, name: str, force: bool = False) -> Any:
        """Keras's functions without XLA, which compiles for one device."""
        if name == "make_train_function":
            self._clock.reset()
        model, jit_compile = self._model, self._model.jit_compile
        model.jit_compile = False
        try:
            return getattr(type(model), name)(model, force)
        finally:
            model.jit_compile = jit_compile

    def _step(self, name: str, data: Any) -> Any:
        """A step of Keras's on a batch."""
        step = partial(getattr(type(self._model), name), self._model, data)
        if name != "train_step":
            with self._mapped(self._mapped_call):
                return step()
        if not self._synchronized:
            with self._mapped(self._mapped_call), self._beside_variables():
                return step()
        leaf, places = tf.nest.flatten(data)[0], len(self._places)
        if leaf.shape[0] is not None:
            return self._step_on(min(leaf.shape[0], places), step)
        # The whole step, as what a branch keeps for gradients would not stay where it is.
        return tf.cond(tf.shape(leaf)[0] >= places, lambda: self._step_on(places, step), lambda: self._step_on(1, step))

    def _step_on(self, places: int, step: Any) -> Any:
        call = partial(self._synchronized_call, places) if places > 1 else None
        with self._mapped(call), self._beside_variables():
            return step()

    @contextlib.contextmanager
    def _beside_variables(self) -> Iterator[None]:
        """While it lasts, the optimizer keeps and updates its slots where the variables are that they are for, if these are on
        several devices."""
        if len({variable.value.device for variable in self._model.trainable_variables}) < 2:
            yield
            return
        optimizer = getattr(self._model.optimizer, "inner_optimizer", self._model.optimizer)
        own, apply, add = vars(optimizer), optimizer.apply, optimizer.add_variable_from_reference

        def apply_there(gradients: Any, variables: Any = None) -> Any:
            placed = []
            for gradient, variable in zip(gradients, variables or self._model.trainable_variables):
                with tf.device(_home_of(variable)):
                    placed.append(None if gradient is None else tf.identity(gradient))
            graph = tf.compat.v1.get_default_graph()
            with contextlib.nullcontext() if tf.executing_eagerly() else graph.device(partial(_home_of_inputs, graph)):
                return apply(placed, variables)

        def add_there(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
            with tf.device(_home_of(reference_variable)):
                return add(reference_variable, *args, **kwargs)

        # Keras adds gradients of replicas, of which it knows one, in an op for all of them, which is on one device.
        own.update(apply=apply_there, add_variable_from_reference=add_there, _all_reduce_sum_gradients=list)
        try:
            yield
        finally:
            del own["apply"], own["add_variable_from_reference"], own["_all_reduce_sum_gradients"]

    def _adding_up(self, given: _Given, losses: int) -> list[bool]:
        """Whether each loss that the model adds is a sum over rows; if not, it is a mean, or does not depend on them.

        Raises:
            FunctionError: it is neither: that of two rows is not the sum of theirs, nor the mean.
        """
        if losses and given.key not in self._sums:
            with tf.init_scope(), self._mapped(None):
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

    def _losses_of(self, given: _Given, rows: list[int], losses: int) -> list[float]:
        """What is added for these of two random rows."""
        random = np.random.default_rng(0)
        leaves = []
        for leaf in given.rows:
            two = random.normal(size=[2, *(size or 2 for size in leaf.shape[1:])])[rows]
            leaves.append(tf.cast(two if leaf.dtype.is_floating else two > 0, leaf.dtype))
        args, kwargs = given.with_rows(leaves)
        with _collecting() as scope:
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
    def _synchronized(self) -> list[Any]:
        """The layers that take statistics of all rows."""
        import keras

        layers = self._model._flatten_layers() if self._batch_norm == "synchronized" and len(self._places) > 1 else ()
        return [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]

    @contextlib.contextmanager
    def _mapped(self, call: Any) -> Iterator[None]:
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

    def _mapped_call(self, *args: Any, **kwargs: Any) -> Any:
        """A forward pass in a shard for each device, which do not know of each other."""
        given = _Given.of(args, kwargs)
        rows, graph = as_rows(given.rows), self._graph_of(given)
        if kwargs.get("training") and not tf.executing_eagerly() and len(self._places) > 1:
            return self._collected(given, graph.inside_function(rows, self._clock))
        return self._collected(given, graph.over(rows))

    def _graph_of(self, given: _Given) -> OneGraph:
        if given.key not in self._graphs:
            known = given.without_rows()

            @tf.autograph.experimental.do_not_convert
            def forward(*rows: Any) -> tuple[Any, ...]:
                with self._mapped(None):
                    return tuple(self._forward(known, rows))

            self._graphs[given.key] = OneGraph(self._program(forward), Nobody())
        return self._graphs[given.key]

    def _synchronized_call(self, places: int, *args: Any, **kwargs: Any) -> Any:
        """The same in devices that meet where statistics of all rows are taken."""
        given = _Given.of(args, kwargs)
        key = places, given.key
        if key not in self._lockstep:
            self._lockstep[key] = tf.function(partial(self._in_lockstep, places, given.without_rows()), autograph=False)
        return self._collected(given, self._lockstep[key](*given.rows))

    def _in_lockstep(self, places: int, given: _Given, *rows: Any) -> list[Any]:
        with tf.device(HOST):
            sizes = sizes_in_graph(count_rows(rows[0]), places)
            shards = list(zip(*(cut_rows(leaf, sizes, places) for leaf in rows)))
        values: dict[int, list[Any]] = {}
        for variable, stored in self._variables:
            with tf.device(stored.device):
                value = stored.read_value()
                values[id(variable)] = (
                    tf.unstack(split_seeds(value, places)) if _is_seed(variable) else [value] * places
                )
                if _is_seed(variable):
                    stored.assign(value + tf.constant([0, 1], value.dtype))

        def forward(place: int) -> list[Any]:
            with tf.device(self._places[place]):
                shard = [tf.identity(leaf) for leaf in shards[place]]
                held = [(v, tf.identity(values[id(v)][place])) for v, _ in self._variables]
                return [tf.identity(leaf) for leaf in self._forward(given, shard, held)]

        lockstep = Lockstep([partial(forward, place) for place in range(places)])
        with self._mapped(None), _moments_of_all(self._synchronized, lockstep):
            results = lockstep.run()
        graph = tf.compat.v1.get_default_graph()
        with tf.device(self._home):
            joined = [tf.concat([tf.identity(part) for part in parts], 0) for parts in zip(*results)]
        differentiate_in_place(graph.get_operations())
        return joined

    def _forward(self, given: _Given, rows: Sequence[Any], held: Sequence[tuple[Any, Any]] = ()) -> list[Any]:
        """The forward pass on some rows: outputs, masks, losses, new values of variables and the number of rows.

        `held`: pairs of variables and values to use instead; all others are read, and seeds of random numbers advance.
        """
        model = self._model
        args, kwargs = given.with_rows(rows)
        with _collecting(held) as scope:
            # In a thread of its own, Keras knows nothing of the call that it is a part of.
            outputs = model(*args, **kwargs) if held else model.call(*args, **kwargs)
        flat = tf.nest.flatten(outputs)
        masks = [getattr(leaf, "_keras_mask", None) for leaf in flat]
        updates = {}
        for i, variable in enumerate(model.non_trainable_variables):
            value = scope.get_current_value(variable)
            if value is not None and not _is_seed(variable) and not any(value is known for _, known in held):
                updates[i] = value
                if not self._is_averaged(variable) and depends_on(value, rows):
                    raise failure(
                        f"{variable.path} gets a new value that depends on the rows, which only batch normalization may; "
                        "write the training loop yourself, with DeviceMap.reduce"
                    )
        self._passes[given.key] = _Forward(
            tf.nest.map_structure(lambda _: None, outputs),
            tuple(mask is not None for mask in masks),
            len(scope.losses),
            tuple(updates),
        )
        losses = (tf.cast(tf.reduce_sum(loss), tf.float32) for loss in scope.losses)
        states = as_states([*losses, *updates.values(), count_rows(rows[0])], rows[0])
        return [*flat, *(mask for mask in masks if mask is not None), *states]

    def _collected(self, given: _Given, results: Sequence[Any]) -> Any:
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


def _collecting(held: Sequence[tuple[Any, Any]] = ()) -> Any:
    """A scope in which variables have these values, or are read as they are, and losses and new values are collected.

    Seeds of random numbers that are read do advance, as each device has to draw others.
    """
    import keras

    class Scope(keras.StatelessScope):
        def add_update(self, update: Any) -> None:
            variable, value = update
            if _is_seed(variable) and not held:
                variable.value.assign(tf.cast(value, variable.value.dtype))
            else:
                super().add_update(update)

    return Scope(held, collect_losses=True)


def _home_of(variable: Any) -> str:
    """The device of a variable, Keras's or TensorFlow's."""
    return str((variable if isinstance(variable, tf.Variable) else variable.value).device)


def _home_of_inputs(graph: Any, op: Any) -> str:
    """The device of what an op takes that is no scalar; none where nothing is known."""
    for tensor in op.inputs:
        if tensor.shape.rank != 0:
            if tensor.device:
                return str(tensor.device)
            if tensor.op.type == "ReadVariableOp":
                return _home_of_handle(graph, tensor.op.inputs[0])
    return ""


def _home_of_handle(graph: Any, handle: Any) -> str:
    """The device of a variable that a function, perhaps one around it, has captured."""
    while handle is not None and not hasattr(handle, "numpy"):
        handle = next((outside for outside, inside in graph.captures if inside is handle), None)
        graph = graph.outer_graph
    return "" if handle is None else str(handle.device)


def depends_on(tensor: Any, sources: Sequence[Any]) -> bool:
    """Whether a tensor of a graph is computed from one of these."""
    looked_at, left = set(), [tensor]
    while left:
        each = left.pop()
        if any(each is source for source in sources):
            return True
        if id(each.op) not in looked_at:
            looked_at.add(id(each.op))
            left += each.op.inputs
    return False


def _is_seed(variable: Any) -> bool:
    """Whether it is the state of a `keras.random.SeedGenerator`."""
    return variable.path.rpartition("/")[2] == "seed_generator_state"


@contextlib.contextmanager
def _moments_of_all(layers: Sequence[Any], lockstep: Lockstep) -> Iterator[None]:
    """While it lasts, layers of batch normalization take mean and variance of the rows of all devices."""
    for layer in layers:
        vars(layer)["_moments"] = partial(_moments, layer, lockstep)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["_moments"]


def _moments(layer: Any, lockstep: Lockstep, inputs: Any, mask: Any) -> Any:
    mean, variance = type(layer)._moments(layer, inputs, mask)
    counted = tf.ones_like(inputs[..., :1]) if mask is None else tf.cast(mask, inputs.dtype)
    return lockstep.meet((mean, variance, tf.reduce_sum(counted)), lambda own: [_merged(own)] * len(own))


def _merged(own: Sequence[tuple[Any, Any, Any]]) -> tuple[Any, Any]:
    """Mean and variance of all, of those of parts of so many values (Chan, Golub and LeVeque, 1983)."""
    means, variances, counts = (tf.stack(each) for each in zip(*own))
    shares = (counts / tf.reduce_sum(counts))[:, None]
    mean = tf.reduce_sum(means * shares, 0)
    return mean, tf.reduce_sum((variances + tf.square(means - mean)) * shares, 0)
