"""Keras models on several devices: their own steps, with the forward pass mapped over the devices.

    a batch ── shards ──> the model, on each device ── outputs, gathered ──> loss, metrics, optimizer: Keras's, once

So loss, metrics and optimizer see the whole batch, as on one device: reductions, weights, masks, clipping and whatever else is
done with outputs or gradients is what Keras does. Gradients are computed where the forward pass was.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.keras import batch_norms_of, forget_functions, layers_of, sublayers_of
from devicemap.api import DeviceMap
from devicemap.base.options import check_count, check_progress
from devicemap.data.shards import shard_sizes
from devicemap.errors import OptionError
from devicemap.events import Event
from devicemap.tell.plan.plan import Plan
from devicemap.tell.plan.planner import explain_call
from devicemap.tell.plan.request import ask
from devicemap.tell.report.training import DeviceShare, TrainingReport
from devicemap.tell.verify import Verification
from devicemap.training.calls import ROWS, Given, without_state
from devicemap.training.forward import ForwardPass
from devicemap.training.loops import Loops
from devicemap.training.steps import Steps, Updates
from devicemap.training.variables import beside_variables

_STEPS = "train_step", "test_step", "predict_step"
_MAKERS = "make_train_function", "make_test_function", "make_predict_function"
_LOOPS = "fit", "evaluate", "predict"
_METHODS = "detach", "explain", "report", "verify"


def parallelize(
    model: Any,
    devices: Any = None,
    batch_norm: str = "synchronized",
    accumulate: int = 1,
    recompute: bool | Sequence[str] = False,
    progress: bool | Callable[[Event], Any] = False,
) -> Any:
    """Let a Keras model fit, evaluate and predict on several devices.

    The weights after each step, losses and metrics are those of one device with the same batches, to rounding. The model stays
    the same object, with the same variables, files and callbacks; called directly, or saved, it is what it was. Each batch is
    cut into a shard of rows for each device; loss, metrics and optimizer run once, on all rows, where the variables are.

    Args:
        model: a Keras 3 model with the TensorFlow backend: Sequential, functional or subclassed, compiled or not, built.
        devices: as for `parallel_map`.
        batch_norm: "synchronized": batch normalization takes mean and variance of the whole batch. "local": of a device's rows,
            as separate processes would; the moving averages take the mean over the devices.
        accumulate: each device takes its rows of a training step in so many microbatches, one after another, and adds up
            their gradients: the step is the same, in the memory of one, for another run of the forward pass. A step that
            runs out of memory is cut in the same way, with a warning. With `batch_norm="local"` normalization sees one
            microbatch.
        recompute: True: what layers compute on the way to their outputs is not kept for gradients, but computed again; a list
            of names: for these layers. That saves memory if a layer holds other layers. Those that change variables of their
            own, such as batch normalization, are left out.
        progress: as for `parallel_map`, of `fit`, `evaluate` and `predict`: a step is a chunk for each device.

    Returns:
        The model, which has a method `detach()` now that gives it back to one device.

    Raises:
        OptionError: for anything else, for a model that was not built, has a `train_step` of its own, was made in the scope
            of a strategy or is parallelized already, for devices or layers that do not exist, and for several microbatches
            with batch normalization that is synchronized.

    Examples:
        >>> import keras
        >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> _ = parallelize(model).fit(tf.ones([8, 3]), tf.ones([8, 1]), verbose=0)
        >>> _ = model.detach()
    """
    _check(model, batch_norm)
    check_count("accumulate", accumulate)
    if accumulate > 1 and batch_norm == "synchronized" and batch_norms_of(model):
        raise OptionError(
            f"accumulate={accumulate} with {batch_norms_of(model)[0].name}, which takes mean and variance of a whole batch; "
            "set batch_norm='local' for those of a device's microbatch, or recompute=True to save memory"
        )
    recomputed = _recomputed(model, recompute)
    _Parallel(model, devices, batch_norm, accumulate, recomputed, check_progress(progress)).attach()
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
    if any(isinstance(variable.value, tf.distribute.DistributedValues) for variable in model.variables):
        raise OptionError(
            f"{model.name} was made in the scope of a tf.distribute strategy, which spreads its variables itself; make it "
            "outside of the scope"
        )
    for step in (*_STEPS, *_MAKERS):
        if step in vars(model) or getattr(type(model), step) is not getattr(keras.Model, step):
            raise OptionError(
                f"{model.name} has a {step} of its own. In it, map the forward pass with a devicemap.DeviceMap, or reduce "
                "losses under a tape with DeviceMap.reduce, instead of parallelize"
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
    """A parallelized model: what its steps do instead of calling it on one device."""

    def __init__(
        self, model: Any, devices: Any, batch_norm: str, accumulate: int, recomputed: Sequence[Any], progress: Any
    ):
        self._model = model
        self._devices = devices
        self._forward = ForwardPass(model, devices, batch_norm, recomputed)
        self._heard = bool(progress)
        self._loops = Loops(model.name, self._forward.devices, progress)
        self._rows: list[int] = []
        """Of each device in training, when the last step ended."""
        places = len(self._forward.devices)
        self._updates = {name: Updates(self._forward.home) for name in _STEPS}
        whole = batch_norm == "synchronized" and batch_norms_of(model)
        self._steps = {
            name: Steps(
                model,
                partial(self._step, name),
                self._updates[name],
                accumulate if name == "train_step" else 1,
                None if whole and name == "train_step" else places,
                self._made if progress else None,
                None,
            )
            for name in _STEPS
        }

    def attach(self) -> None:
        """Put the steps on the model."""
        own = vars(self._model)
        for name in _STEPS:
            own[name] = partial(self._step, name, self._steps[name].microbatches)
        for name in _MAKERS:
            own[name] = partial(self._make, name)
        own |= {name: getattr(self, name) for name in _METHODS}
        if self._heard:
            own |= {name: partial(self._loop, name) for name in _LOOPS}
        forget_functions(self._model)

    def detach(self) -> Any:
        """Give the model back to one device; returns it."""
        for name in (*_STEPS, *_MAKERS, *_METHODS, *(_LOOPS if self._heard else ())):
            vars(self._model).pop(name, None)
        forget_functions(self._model)
        return self._model

    def explain(self, data_or_spec: Any) -> Plan:
        """Return the plan of the forward pass of a training step, as `DeviceMap.explain` does.

        Args:
            data_or_spec: inputs of the model, or a nest of `tf.TensorSpec`s in their place.
        """
        structure = tf.nest.map_structure(lambda leaf: None, data_or_spec)
        leaves = tuple(tf.nest.flatten(data_or_spec))
        training = {"training": True} if "training" in inspect.signature(self._model.call).parameters else {}
        given = Given(((structure,), training), (*(ROWS for _ in leaves), *training.values()), ())
        microbatches = self._steps["train_step"].microbatches
        program = self._forward.graph_of(given, microbatches).program
        asked = ask(leaves, program.options)
        compiled = program.compiled_for(asked)
        plan = explain_call(asked, compiled, program.options, self._model.call, program.devices, program.name)
        return replace(plan, microbatches=microbatches)

    def report(self) -> TrainingReport:
        """What the devices did since `fit` was called last: rows, and busy and idle seconds in forward passes."""
        shares = tuple(DeviceShare(*known) for known in self._forward.clock.known())
        return TrainingReport(self._model.name, shares, self._steps["train_step"].microbatches)

    def verify(self, data: Any, rows: int | None = None, *, tolerance: float | None = None) -> Verification:
        """Run the model as in `predict` on some rows, and compare each layer's output, as `DeviceMap.verify` does.

        Args:
            data: inputs of the model.
            rows, tolerance: as for `DeviceMap.verify`.

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
        return mapper.verify(leaves, rows, tolerance=tolerance)

    def _loop(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """One of Keras's loops, of which somebody hears."""
        with self._loops.call():
            return getattr(type(self._model), name)(self._model, *args, **kwargs)

    def _made(self, rows: int, seconds: float) -> None:
        """A step has been made: in training, the clock knows which device had how many rows."""
        before, self._rows = self._rows, [count for _, count, *_ in self._forward.clock.known()]
        sizes = [after - before for after, before in zip(self._rows, before)]
        self._loops.made(sizes if sum(sizes) == rows else shard_sizes(rows, len(sizes)), seconds)

    def _make(self, name: str, force: bool = False) -> Any:
        """In place of Keras's functions: without XLA, which compiles for one device, and a step at a time, to be made again."""
        if not any(getattr(self._model, each.removeprefix("make_")) for each in _MAKERS):  # as `compile` leaves it
            self._forward.forget()
        if name == "make_train_function":
            self._forward.clock.reset()
            self._rows = [0] * len(self._forward.devices)
        made = name.removeprefix("make_")
        if force or getattr(self._model, made) is None:
            step = made.replace("function", "step")
            setattr(self._model, made, partial(_joined if step == "predict_step" else _last, self._steps[step].begin()))
        return getattr(self._model, made)

    def _step(self, name: str, microbatches: int, data: Any) -> Any:
        """A step of Keras's on a batch."""
        rows = next(leaf for leaf in tf.nest.flatten(data) if leaf is not None)
        places = len(self._forward.devices)
        over = partial(self._step_over, name, microbatches, data)
        if places == 1 or rows.shape[0] is not None:
            return over(min(rows.shape[0] or 1, places))
        # The whole step, as what a branch keeps for gradients would not stay where it is: and a branch on each device, for
        # shards without rows, takes as long as all ops of a small layer.
        return tf.cond(tf.shape(rows)[0] >= places, lambda: over(places), lambda: over(1))

    def _step_over(self, name: str, microbatches: int, data: Any, places: int) -> Any:
        """The same over so many devices, in the graph that is being built; none of them is without rows."""
        step, outputs = partial(getattr(type(self._model), name), self._model, data), list[Any]()
        if name == "train_step" and self._forward.meeting:
            call = partial(self._forward.synchronized, places) if places > 1 else None
            with self._forward.calling(call), beside_variables(self._model):
                return step()

        def mapped(*args: Any, **kwargs: Any) -> Any:
            results = self._forward.mapped(microbatches, *args, **kwargs)
            outputs.extend(tf.nest.flatten(results, expand_composites=True))
            return results

        alone = places < len(self._forward.devices)
        eager = tf.executing_eagerly()
        updates_last = contextlib.nullcontext() if eager else self._updates[name].last(self._model, outputs)
        with self._forward.calling(None if alone else mapped), updates_last, beside_variables(self._model):
            return step()


def _last(steps: Steps, batches: Any) -> Any:
    return steps(batches)[-1]


def _joined(steps: Steps, batches: Any) -> Any:
    return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *steps(batches))
