"""Keras models on several devices. Calls of a model and of its layers in the steps of Keras are mapped over the devices.

    a batch ── shards ──> the model, on each device ── losses of rows, and outputs ──> loss, metrics, optimizer: once

Loss, metrics and optimizer see the whole batch, as on one device. So Keras itself computes reductions, weights, masks and
clipping. Outputs are gathered if a loss, metric or method needs all of them. Gradients run on the device of the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from devicemap._tensorflow.keras import batch_norms_of, layers_of, overrides, sublayers_of
from devicemap.devices import choose_devices
from devicemap.errors import OptionError
from devicemap.options import check_choice, check_count
from devicemap.pipelines.stages import check_layers
from devicemap.training.forward import ForwardPass
from devicemap.training.parallel_model import MAKERS, METHODS, ParallelModel
from devicemap.training.recomputation import without_state


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
    In a custom `train_step`, `test_step`, `predict_step` or `compute_loss`, each outermost call of the model, or of one of its
    layers or submodels, is cut in this way.

    Args:
        model: a Keras 3 model with the TensorFlow backend: Sequential, functional or subclassed, compiled or not. The first
            `fit`, `evaluate`, `predict` or `*_on_batch` builds a model that is not built, as in Keras.
        devices: as for `parallel_map`.
        batch_norm: "synchronized": batch normalization uses mean and variance of the whole batch. "local": it uses those of a
            device's rows. Moving averages get the mean over the devices.
        accumulate: number of microbatches in which each device runs its rows of a training step, one after another. Their
            gradients are added, so the step is the same. It needs the memory of one microbatch, and runs the forward pass
            twice. With `batch_norm="local"`, normalization uses the rows of one microbatch.
        recompute: True: the intermediate results of layers are not kept for gradients, but computed again. A list of names:
            only for these layers. That saves memory if a layer holds other layers. Layers that change their variables, such as
            batch normalization, are left out.
        added_losses: required to fit and evaluate if layers add losses that depend on the rows, by `add_loss` or an
            `activity_regularizer`. "sum": the losses are sums over rows, so the losses of the devices are added. "mean": they
            are means over rows, so the losses of the devices are weighted by their rows. Those of an `activity_regularizer` are
            means since Keras 3.14, and sums before. Regularizers of weights need no option, because they are counted once.

    Returns:
        The same model, with additional methods. `detach()` gives it back to one device.

    Raises:
        OptionError: for an object that is not such a model, and for a model that overrides `make_train_function`, has one of
            the additional methods, was created in a strategy's scope or is already parallelized. Also for devices or layers
            that do not exist, and for several microbatches with a custom `train_step` or synchronized batch normalization.
            Layers are checked when they are built.

    Warns:
        RuntimeWarning: a step calls neither the model nor one of its layers, so it runs on one device; or an output for a row
            depends on other rows.

    The first step raises a `FunctionError` while it is traced, if devices cannot run a layer independently, or if an output
    does not have one row for each row of the batch. If numbers of rows are known only when the step runs, it raises a
    `tf.errors.InvalidArgumentError`. It does so, too, if inputs and targets have different numbers of rows.

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
        return ForwardPass(model, chosen, batch_norm, added_losses, _recomputed(model, recompute))

    parallel = ParallelModel(model, list(chosen), forward, accumulate)
    if model.built:
        forward()  # checks the model
    parallel.attach()
    return model


def _check(model: Any, batch_norm: str, added_losses: str | None, accumulate: int) -> None:
    if not isinstance(model, keras.Model):
        raise OptionError(f"model is an instance of {type(model)}; expected a keras.Model of Keras 3")
    if keras.backend.backend() != "tensorflow":
        raise OptionError(
            f"Keras runs on {keras.backend.backend()}; set KERAS_BACKEND=tensorflow before it is imported"
        )
    check_choice("batch_norm", batch_norm, "synchronized", "local")
    check_choice("added_losses", added_losses, "sum", "mean", None)
    if "detach" in vars(model):
        raise OptionError(f"{model.name} is parallelized already; model.detach() gives it back to one device")
    for name in (*MAKERS, *METHODS):
        if name in vars(model) or overrides(model, name):
            advice = f"override {name.removeprefix('make_').replace('function', 'step')} instead"
            if hasattr(model, "stage_layers"):
                advice = "a Pipeline with replicas=2 trains two copies of its stages"
            elif name in METHODS:
                advice = "rename it"
            raise OptionError(f"{model.name} has a {name} of its own, which parallelize would replace; {advice}")
    if accumulate > 1 and ("train_step" in vars(model) or overrides(model, "train_step")):
        raise OptionError(
            f"accumulate={accumulate} with {model.name}, which has a train_step of its own; accumulate needs that of "
            "keras.Model. recompute=True saves memory in any step"
        )


def _check_variables(model: Any) -> None:
    check_layers(layers_of(model), "other devices")
    if any(isinstance(variable.value, tf.distribute.DistributedValues) for variable in model.variables):
        raise OptionError(
            f"{model.name} was made in the scope of a tf.distribute strategy, which spreads its variables itself; make it "
            "outside of the scope"
        )


def _recomputed(model: Any, recompute: bool | Sequence[str]) -> list[Any]:
    """Return the layers that run again for their gradients."""
    if isinstance(recompute, bool):
        return without_state(sublayers_of(model)) if recompute else []
    if isinstance(recompute, str) or not isinstance(recompute, Sequence):
        raise OptionError(f"recompute={recompute!r}; expected True, False, or a list of names of layers")
    layers, found = layers_of(model)[1:], list[Any]()
    for name in dict.fromkeys(recompute):
        named = [layer for layer in layers if layer.name == name]
        if not named:
            names = ", ".join(dict.fromkeys(layer.name for layer in layers))
            raise OptionError(f"recompute has {name!r}; the layers of {model.name} are {names}")
        stateless = without_state(named)
        if not stateless:
            raise OptionError(f"recompute has {name!r}, which has variables that it may change in a call; leave it out")
        found += stateless
    return found
