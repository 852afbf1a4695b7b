"""Keras models on several devices: their own steps, with the forward pass mapped over the devices.

    a batch ── shards ──> the model, on each device ── outputs, gathered ──> loss, metrics, optimizer: Keras's, once

So loss, metrics and optimizer see the whole batch, as on one device: reductions, weights, masks, clipping and whatever else is
done with outputs or gradients is what Keras does. Gradients are computed where the forward pass was.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap.api import DeviceMap
from devicemap.base.devices import is_out_of_memory
from devicemap.errors import OptionError, brief, function_error
from devicemap.tell.plan.plan import Plan
from devicemap.tell.plan.planner import explain_call
from devicemap.tell.plan.request import ask
from devicemap.tell.report.training import DeviceShare, TrainingReport
from devicemap.tell.verify.findings import Verification
from devicemap.training.calls import ROWS, Given
from devicemap.training.forward import ForwardPass
from devicemap.training.variables import beside_variables

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
        >>> import keras
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


class _Parallel:
    """A parallelized model: what its steps do instead of calling it on one device."""

    def __init__(self, model: Any, devices: Any, batch_norm: str):
        self._model = model
        self._devices = devices
        self._forward = ForwardPass(model, devices, batch_norm)

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
        given = Given(((structure,), {"training": True}), (*(ROWS for _ in leaves), True), ())
        program = self._forward.graph_of(given).program
        asked = ask(leaves, program.options)
        compiled = program.compiled_for(asked)
        return explain_call(
            asked, compiled, program.options, self._model.call, program.devices, program.output_device, program.name
        )

    def report(self) -> TrainingReport:
        """What the devices did since `fit` was called last: rows, and the time of forward passes."""
        return TrainingReport(self._model.name, tuple(DeviceShare(*known) for known in self._forward.clock.known()))

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
            self._forward.clock.reset()
        model, jit_compile = self._model, self._model.jit_compile
        made = name.removeprefix("make_")
        before = getattr(model, made)
        model.jit_compile = False
        try:
            getattr(type(model), name)(model, force)
        finally:
            model.jit_compile = jit_compile
        if getattr(model, made) is not before:
            setattr(model, made, partial(self._told, getattr(model, made)))
        return getattr(model, made)

    def _told(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call one of Keras's functions, and say what to do where memory is short."""
        try:
            return function(*arguments)
        except tf.errors.OpError as error:
            if not is_out_of_memory(error):
                raise
            raise function_error(
                f"{self._model.name} ran out of memory: {brief(error)}. A smaller batch_size needs less on each device; "
                "gradient_accumulation_steps of the optimizer keeps the steps as they are, devicemap.spread_variables() what "
                "the optimizer keeps apart, and a devicemap.Pipeline the layers",
                error,
            ) from error

    def _step(self, name: str, data: Any) -> Any:
        """A step of Keras's on a batch."""
        step = partial(getattr(type(self._model), name), self._model, data)
        if name != "train_step":
            with self._forward.calling(self._forward.mapped):
                return step()
        if not self._forward.meeting:
            with self._forward.calling(self._forward.mapped), beside_variables(self._model):
                return step()
        leaf, places = tf.nest.flatten(data)[0], len(self._forward.devices)
        if leaf.shape[0] is not None:
            return self._step_on(min(leaf.shape[0], places), step)
        # The whole step, as what a branch keeps for gradients would not stay where it is.
        return tf.cond(tf.shape(leaf)[0] >= places, lambda: self._step_on(places, step), lambda: self._step_on(1, step))

    def _step_on(self, places: int, step: Any) -> Any:
        call = partial(self._forward.synchronized, places) if places > 1 else None
        with self._forward.calling(call), beside_variables(self._model):
            return step()
