"""Keras models on several devices: their own steps, with the forward pass mapped over the devices.

    a batch ── shards ──> the model, on each device ── outputs, gathered ──> loss, metrics, optimizer: Keras's, once

So loss, metrics and optimizer see the whole batch, as on one device: reductions, weights, masks, clipping and whatever else is
done with outputs or gradients is what Keras does. Gradients are computed where the forward pass was.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap.base.structure import freeze
from devicemap.compile.program import Program
from devicemap.compile.reduction import Collection, as_states
from devicemap.data.rows import as_rows, count_rows
from devicemap.errors import OptionError, failure
from devicemap.run.calls import Nobody
from devicemap.run.one_graph import OneGraph

_STEPS = "train_step", "test_step", "predict_step"
_MAKERS = "make_train_function", "make_test_function", "make_predict_function"


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


def _check(model: Any, batch_norm: str) -> None:
    import keras

    if not isinstance(model, keras.Model):
        raise OptionError(f"model is a {type(model).__name__}; expected a keras.Model of Keras 3")
    if keras.backend.backend() != "tensorflow":
        raise OptionError(f"Keras runs on {keras.backend.backend()}; set KERAS_BACKEND=tensorflow before it is imported")
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
        self._graphs: dict[Any, OneGraph] = {}
        self._passes: dict[Any, _Forward] = {}
        self._losses_add_up: dict[Any, list[bool]] = {}
        self._program(lambda x: x)  # raises for devices that do not exist

    def attach(self) -> None:
        """Put the steps on the model."""
        own = vars(self._model)
        for name in _STEPS:
            own[name] = partial(self._step, name)
        for name in _MAKERS:
            own[name] = partial(self._make, name)
        own["detach"] = self.detach
        self._forget_functions()

    def detach(self) -> Any:
        """Give the model back to one device; returns it."""
        for name in (*_STEPS, *_MAKERS, "detach"):
            del vars(self._model)[name]
        self._forget_functions()
        return self._model

    def _forget_functions(self) -> None:
        self._model.train_function = self._model.test_function = self._model.predict_function = None

    def _make(self, name: str, force: bool = False) -> Any:
        """Keras's functions without XLA, which compiles for one device."""
        model, jit_compile = self._model, self._model.jit_compile
        model.jit_compile = False
        try:
            return getattr(type(model), name)(model, force)
        finally:
            model.jit_compile = jit_compile

    def _step(self, name: str, data: Any) -> Any:
        with self._mapped():
            return getattr(type(self._model), name)(self._model, data)

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        """While it lasts, calls of the model are mapped over the devices."""
        own = vars(self._model)
        own["call"] = self._call
        try:
            yield
        finally:
            own.pop("call", None)

    @contextlib.contextmanager
    def _unmapped(self) -> Iterator[None]:
        call = vars(self._model).pop("call", None)
        try:
            yield
        finally:
            if call is not None:
                vars(self._model)["call"] = call

    def _program(self, fn: Any) -> Program:
        options = {"devices": self._devices, "batched": True, "output_device": self._home, "report": False}
        return Program(fn, options | {"name": self._model.name}).reducing(Collection())

    @property
    def _home(self) -> str:
        """Where most bytes of the variables are: outputs go there."""
        held: Counter[str] = Counter()
        for variable in self._model.variables:
            held[variable.value.device] += variable.value.shape.num_elements() * variable.value.dtype.size
        return held.most_common(1)[0][0] if held else "/CPU:0"

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        leaves = tf.nest.flatten((args, kwargs))
        of_rows = [i for i, leaf in enumerate(leaves) if tf.is_tensor(leaf)]
        static = tuple(None if i in of_rows else leaf for i, leaf in enumerate(leaves))
        key = freeze(tf.nest.map_structure(lambda _: None, (args, kwargs))), static

        if key not in self._graphs:

            def forward(*rows: Any) -> Any:
                given = list(static)
                for i, leaf in zip(of_rows, rows):
                    given[i] = leaf
                return self._forward(key, *tf.nest.pack_sequence_as((args, kwargs), given))

            self._graphs[key] = OneGraph(self._program(forward), Nobody())
        rows = as_rows(tuple(leaves[i] for i in of_rows))
        return self._collected(key, self._graphs[key].over(rows))

    def _forward(self, key: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """The forward pass on some rows: outputs, masks, losses, new values of variables and the number of rows."""
        model = self._model
        with self._unmapped(), _Collecting() as scope:
            outputs = model.call(*args, **kwargs)
        flat = tf.nest.flatten(outputs)
        masks = [getattr(leaf, "_keras_mask", None) for leaf in flat]
        variables = model.non_trainable_variables
        updates = {i: scope.get_current_value(v) for i, v in enumerate(variables)}
        updates = {i: value for i, value in updates.items() if value is not None}
        self._passes[key] = _Forward(
            tf.nest.map_structure(lambda _: None, outputs),
            tuple(mask is not None for mask in masks),
            len(scope.losses),
            tuple(updates),
        )
        first = next(leaf for leaf in tf.nest.flatten((args, kwargs)) if tf.is_tensor(leaf))
        losses = (tf.cast(tf.reduce_sum(loss), tf.float32) for loss in scope.losses)
        states = [*losses, *updates.values(), count_rows(first)]
        return (*flat, *(mask for mask in masks if mask is not None), *as_states(states, first))

    def _collected(self, key: Any, results: Sequence[Any]) -> Any:
        """What the forward pass on all rows would have given, and done."""
        what, left = self._passes[key], list(results)
        outputs, left = left[: len(what.masked)], left[len(what.masked) :]
        for output in [output for output, masked in zip(outputs, what.masked) if masked]:
            output._keras_mask = left.pop(0)
        losses, updates, counts = left[: what.losses], left[what.losses : -1], left[-1]
        shares = tf.cast(counts, tf.float32) / tf.cast(tf.reduce_sum(counts), tf.float32)
        for loss in losses:
            self._model.add_loss(tf.reduce_sum(loss * shares))
        for i, states in zip(what.updated, updates):
            variable = self._model.non_trainable_variables[i]
            weights = tf.reshape(tf.cast(shares, states.dtype), [-1, *[1] * (states.shape.rank - 1)])
            variable.assign(tf.reduce_sum(states * weights, 0))
        return tf.nest.pack_sequence_as(what.outputs, outputs)


def _Collecting() -> Any:
    """A scope in which variables are read as they are, and losses and new values are collected; seeds of random numbers do
    advance, as each device has to draw others."""
    import keras

    class Scope(keras.StatelessScope):
        def add_update(self, update: Any) -> None:
            variable, value = update
            if "seed_generator_state" in variable.path:
                variable.value.assign(tf.cast(value, variable.value.dtype))
            else:
                super().add_update(update)

    return Scope(collect_losses=True)
