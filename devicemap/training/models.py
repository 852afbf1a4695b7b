"""Keras models on several devices: their own steps, with calls of the model and of its layers mapped over the devices.

    a batch ── shards ──> the model, on each device ── outputs, gathered ──> loss, metrics, optimizer: once

Loss, metrics and optimizer see the whole batch, as on one device. So Keras itself computes reductions, weights, masks and
clipping. Gradients are computed on the device of the forward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import tensorflow as tf

from devicemap._tensorflow.keras import batch_norms_of, forget_functions, layers_of, sublayers_of
from devicemap.api import DeviceMap
from devicemap.data.shards import shard_sizes
from devicemap.devices import choose_devices
from devicemap.errors import OptionError, warn_user
from devicemap.inspect.plan import Plan
from devicemap.inspect.training_report import DeviceShare, TrainingReport
from devicemap.inspect.verify import Verification
from devicemap.options import check_count
from devicemap.training.forward import ForwardPass
from devicemap.training.stateless import without_state
from devicemap.training.steps import Steps, count_of
from devicemap.training.variables import beside_variables

_STEPS = "train_step", "test_step", "predict_step"
_MAKERS = "make_train_function", "make_test_function", "make_predict_function"
_METHODS = "detach", "explain", "report", "verify"


def parallelize(
    model: Any,
    devices: Any = None,
    batch_norm: Literal["synchronized", "local"] = "synchronized",
    accumulate: int = 1,
    recompute: bool | Sequence[str] = False,
    added_losses: Literal["sum", "mean"] | None = None,
) -> Any:
    """Let a Keras model fit, evaluate and predict on several devices.

    The weights after each step, losses and metrics are those of one device with the same batches, up to rounding. The model
    stays the same object, with the same variables, files and callbacks. Direct calls and saved files do not change. Each batch
    is cut into one shard of rows for each device. Loss, metrics and optimizer run once, on all rows, where the variables are.
    In a `train_step`, `test_step`, `predict_step` or `compute_loss` of the model's own, each outermost call of the model, or
    of one of its layers or submodels, is cut in this way.

    Args:
        model: a Keras 3 model with the TensorFlow backend: Sequential, functional or subclassed, compiled or not. One that is
            not built is built by its first `fit`, `evaluate`, `predict` or `*_on_batch`, as Keras does.
        devices: as for `parallel_map`.
        batch_norm: "synchronized": batch normalization takes mean and variance of the whole batch. "local": of a device's rows,
            as separate processes would; the moving averages take the mean over the devices.
        accumulate: each device takes its rows of a training step in so many microbatches, one after another, and adds up
            their gradients: the step is the same, in the memory of one, for another run of the forward pass. With
            `batch_norm="local"` normalization sees one microbatch.
        recompute: True: what layers compute on the way to their outputs is not kept for gradients, but computed again; a list
            of names: for these layers. That saves memory if a layer holds other layers. Those that change variables of their
            own, such as batch normalization, are left out.
        added_losses: required to fit and evaluate if layers add losses that depend on the rows, by `add_loss` or an
            `activity_regularizer`. "sum": they are sums over rows, so those of the devices are added. "mean": they are means
            over rows, as Keras makes those of an `activity_regularizer`, so those of the devices are weighted by their rows.
            Regularizers of weights need no option: they are counted once.

    Returns:
        The model, which has a method `detach()` now that gives it back to one device.

    Raises:
        OptionError: for anything else, for a model that has a `make_train_function` of its own, was made in the scope of a
            strategy or is parallelized already, for devices or layers that do not exist, and for several microbatches with a
            `train_step` of the model's own or synchronized batch normalization. What depends on the layers of a model is
            checked when it is built.
        RuntimeWarning: a step calls neither the model nor one of its layers, so it runs on one device.

    The first step raises a `FunctionError` while it is traced, before anything runs, if a layer does what devices cannot do
    apart: if it changes a `tf.Variable` that is not one of Keras's, gives a variable a value that depends on the rows, adds a
    loss without `added_losses`, or if an output does not have one row for each row of the batch. If the number of an output's
    rows is known only when it is computed, the step raises a `tf.errors.InvalidArgumentError`.

    Examples:
        >>> import keras
        >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> _ = parallelize(model).fit(tf.ones([8, 3]), tf.ones([8, 1]), verbose=0)
        >>> _ = model.detach()
    """
    check_count("accumulate", accumulate)
    _check(model, batch_norm, added_losses, accumulate)
    chosen = choose_devices(devices)

    def forward() -> ForwardPass:
        _check_variables(model)
        if accumulate > 1 and batch_norm == "synchronized" and batch_norms_of(model):
            raise OptionError(
                f"accumulate={accumulate} with {batch_norms_of(model)[0].name}, which takes mean and variance of a whole "
                "batch; set batch_norm='local' for those of a device's microbatch, or recompute=True to save memory"
            )
        return ForwardPass(model, list(chosen), batch_norm, added_losses, _recomputed(model, recompute))

    parallel = _Parallel(model, list(chosen), forward, accumulate)
    if model.built:
        forward()  # checks the model
    parallel.attach()
    return model


def _check(model: Any, batch_norm: str, added_losses: str | None, accumulate: int) -> None:
    import keras

    if not isinstance(model, keras.Model):
        raise OptionError(f"model is a {type(model).__name__}; expected a keras.Model of Keras 3")
    if keras.backend.backend() != "tensorflow":
        raise OptionError(
            f"Keras runs on {keras.backend.backend()}; set KERAS_BACKEND=tensorflow before it is imported"
        )
    if batch_norm not in ("synchronized", "local"):
        raise OptionError(f"batch_norm={batch_norm!r}; expected 'synchronized' or 'local'")
    if added_losses not in (None, "sum", "mean"):
        raise OptionError(f"added_losses={added_losses!r}; expected 'sum', 'mean' or None")
    if "detach" in vars(model):
        raise OptionError(f"{model.name} is parallelized already; model.detach() gives it back to one device")
    for maker in _MAKERS:
        if maker in vars(model) or getattr(type(model), maker) is not getattr(keras.Model, maker):
            raise OptionError(
                f"{model.name} has a {maker} of its own, which parallelize would replace; override "
                f"{maker.removeprefix('make_').replace('function', 'step')} instead"
            )
    if accumulate > 1 and ("train_step" in vars(model) or _has_own(model, "train_step")):
        raise OptionError(
            f"accumulate={accumulate} with {model.name}, which has a train_step of its own; accumulate needs that of "
            "keras.Model. recompute=True saves memory in any step"
        )


def _has_own(model: Any, name: str) -> bool:
    """Whether a model overrides a method of `keras.Model`."""
    import keras

    return getattr(type(model), name) is not getattr(keras.Model, name)


def _check_variables(model: Any) -> None:
    for layer in layers_of(model):
        if getattr(layer, "stateful", False):
            raise OptionError(
                f"{layer.name} is stateful: it keeps a state for each row of a batch, which other devices would not see; "
                "give it the state as an input and an output"
            )
    if any(isinstance(variable.value, tf.distribute.DistributedValues) for variable in model.variables):
        raise OptionError(
            f"{model.name} was made in the scope of a tf.distribute strategy, which spreads its variables itself; make it "
            "outside of the scope"
        )


def _recomputed(model: Any, recompute: bool | Sequence[str]) -> list[Any]:
    """The layers that run again for their gradients."""
    if isinstance(recompute, bool):
        return without_state(sublayers_of(model)) if recompute else []
    if isinstance(recompute, str) or not isinstance(recompute, Sequence):
        raise OptionError(f"recompute={recompute!r}; expected True, False, or a list of names of layers")
    layers = {layer.name: layer for layer in layers_of(model)[1:]}
    for name in recompute:
        if name not in layers:
            raise OptionError(f"recompute has {name!r}; the layers of {model.name} are {', '.join(layers)}")
    return without_state([layers[name] for name in recompute])


class _Parallel:
    """A parallelized model: its steps, and the methods that are put on the model."""

    def __init__(self, model: Any, devices: list[str], make_forward: Callable[[], ForwardPass], accumulate: int):
        self._model, self._devices = model, devices
        self._make_forward, self._accumulate = make_forward, accumulate
        self._own_steps = {name: vars(model)[name] for name in _STEPS if name in vars(model)}
        self._eager_steps: dict[str, Any] = {}
        """Steps that are `tf.function`s, which keep traces in which calls are mapped."""
        self._traced: set[str] = set()
        self._builds: set[str] = set()
        """Steps whose next batch builds the model."""
        self._sizes: Counter[int] = Counter()
        """How many training steps had how many rows, since `fit` was called last."""

    def build(self, batch: Any = None, step: str = "predict_step") -> None:
        """Build what is not built: a step of the model's own is traced with a batch, otherwise the model is called on a row."""
        if step in self._own_steps or _has_own(self._model, step):
            if batch is not None and step not in self._traced:
                self._traced.add(step)
                self._trace(batch, step)
        elif not self._model.built:
            self._call_on_a_row(batch)

    def _trace(self, batch: Any, step: str) -> None:
        """Let a step build the layers that it calls. Steps that run eagerly do so for their first batch, on one device."""
        if all(layer.built for layer in layers_of(self._model)[1:]):
            return
        if self._model.run_eagerly:
            self._builds.add(step)
            return
        with beside_variables(self._model):
            tf.function(self._plain(step), autograph=False).get_concrete_function(batch)

    def _plain(self, name: str) -> Callable[[Any], Any]:
        """The model's own step."""
        step = self._own_steps.get(name, getattr(type(self._model), name))
        if hasattr(step, "python_function"):  # a tf.function, which keeps a trace in which nothing is mapped
            step = tf.function(step.python_function)
        return step if name in self._own_steps else partial(step, self._model)

    def _call_on_a_row(self, batch: Any) -> None:
        import keras

        if batch is None:
            raise OptionError(
                f"{self._model.name} is not built yet: its variables do not exist. Fit it, call it on a batch, or use "
                "model.build(...) first"
            )
        inputs = keras.utils.unpack_x_y_sample_weight(batch)[0]
        self._model(tf.nest.map_structure(lambda leaf: leaf[:1], inputs), training=False)

    def attach(self) -> None:
        """Put the steps on the model."""
        own = vars(self._model)
        own |= {name: partial(self._step, name) for name in _STEPS}
        own |= {name: partial(self._make, name) for name in _MAKERS}
        own |= {name: getattr(self, name) for name in _METHODS}
        forget_functions(self._model)

    def detach(self) -> Any:
        """Give the model back to one device and return it."""
        for name in (*_STEPS, *_MAKERS, *_METHODS):
            vars(self._model).pop(name, None)
        vars(self._model).update(self._own_steps)
        forget_functions(self._model)
        return self._model

    def explain(self, data_or_spec: Any) -> Plan:
        """Return the plan of the forward pass of a training step, as `DeviceMap.explain` does.

        Args:
            data_or_spec: inputs of the model, or a nest of `tf.TensorSpec`s in their place.
        """
        if not _has_own(self._model, "call"):
            raise OptionError(
                f"{self._model.name} has no call; explain a layer that its steps call, by devicemap.DeviceMap(layer, "
                "batched=True)"
            )
        self.build()
        forward, structure = self._make_forward(), tf.nest.map_structure(lambda leaf: None, data_or_spec)
        mapper = DeviceMap(
            lambda *leaves: forward.outputs_in_training(tf.nest.pack_sequence_as(structure, leaves)),
            devices=forward.devices,
            batched=True,
            output_device=forward.home,
            name=self._model.name,
        )
        return replace(mapper.explain(tuple(tf.nest.flatten(data_or_spec))), microbatches=self._accumulate)

    def report(self) -> TrainingReport:
        """Return how many rows each device computed in training steps since `fit` was called last."""
        devices = self._devices
        rows = Counter(dict.fromkeys(devices, 0))
        for size, steps in self._sizes.items():
            for device, shard in zip(devices, shard_sizes(size, len(devices))):
                rows[device] += shard * steps
        shares = tuple(DeviceShare(*each) for each in rows.items())
        return TrainingReport(self._model.name, self._sizes.total(), shares, self._accumulate)

    def verify(
        self, data: Any, rows: int | None = None, *, tolerance: float | None = None, seconds: float | None = 30.0
    ) -> Verification:
        """Run the model as in `predict` on some rows, and compare each layer's output, as `DeviceMap.verify` does.

        Args:
            data: inputs of the model.
            rows, tolerance, seconds: as for `DeviceMap.verify`.

        Returns:
            The findings; outputs are named by the layer that gives them, in the order of layers, where the model is
            Sequential or functional.
        """
        import keras

        model, leaves = self._model, tuple(tf.nest.flatten(data))
        if getattr(model, "inputs", None):
            layers = [layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]
            model = keras.Model(model.inputs, {f"{i}_{layer.name}": layer.output for i, layer in enumerate(layers)})

        def infer(*leaves: Any) -> Any:
            return model(tf.nest.pack_sequence_as(data, leaves), training=False)

        mapper = DeviceMap(infer, devices=self._devices, batched=True, name=self._model.name)
        return mapper.verify(leaves, rows, tolerance=tolerance, seconds=seconds)

    def _make(self, name: str, force: bool = False) -> Any:
        """Make the function of a loop, instead of Keras, which would compile it by XLA for one device."""
        if name == "make_train_function":
            self._sizes.clear()
        made = name.removeprefix("make_")
        if force or getattr(self._model, made) is None:
            step = made.replace("function", "step")
            self._eager_steps.pop(step, None)
            sizes: Counter[int] = self._sizes if step == "train_step" else Counter()
            steps = Steps(self._model, partial(self.build, step=step), partial(self._step, step), sizes)
            setattr(self._model, made, partial(_joined if step == "predict_step" else _last, steps))
        return getattr(self._model, made)

    def _step(self, name: str, data: Any) -> Any:
        """Run a step of the model on a batch, with calls of the model and its layers on all devices."""
        self.build(data, name)
        step = self._plain(name)
        if name in self._builds:
            self._builds.remove(name)
            return step(data)
        known = name in self._eager_steps
        if tf.executing_eagerly():
            step = self._eager_steps.setdefault(name, step)
        forward = self._make_forward()
        microbatches = self._accumulate if name == "train_step" else 1
        with forward.mapping(count_of(data), microbatches, name != "predict_step"), beside_variables(self._model):
            results = step(data)
        if not forward.calls and not known and len(self._devices) > 1:
            warn_user(
                f"{name} of {self._model.name} calls neither the model nor one of its layers on rows, so it runs on one "
                "device. Let the model have the layers that it calls as attributes",
                RuntimeWarning,
            )
        return results


def _last(steps: Steps, batches: Any) -> Any:
    return steps(batches)[-1]


def _joined(steps: Steps, batches: Any) -> Any:
    return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *steps(batches))
