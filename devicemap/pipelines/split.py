"""Split Keras models into stages of a pipeline: copies of contiguous layers, of about equal time or size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, cycle, pairwise
from operator import itemgetter
from typing import Any, Literal

import tensorflow as tf

from devicemap._tensorflow.keras import overrides
from devicemap.devices import choose_devices
from devicemap.errors import OptionError, warn_user
from devicemap.options import check_choice, check_count

_STEPS = "train_step", "test_step", "predict_step", "compute_loss", "compute_metrics"
"""Methods of a model that its stages do not have."""


class Stages(list[Any]):
    """Keras models for the stages of a `Pipeline`. Their layers are copies of the layers of another model."""

    def __init__(self, models: Sequence[Any], copies: Sequence[Any]):
        """`copies`: the copies of the layers of the model, in the order of their first calls."""
        super().__init__(models)
        self._copies = list(copies)

    def copy_weights_to(self, model: Any) -> None:
        """Assign the variables of the stages to those of a model with the same layers, such as the model that was split.

        Raises:
            OptionError: the model has other layers.
        """
        from devicemap.pipelines.layers import copy_values, layer_calls

        layers = _layers_in(layer_calls(model)[0])
        if [type(layer) for layer in layers] != [type(copy) for copy in self._copies]:
            raise OptionError(f"{model.name} has other layers than the model that was split")
        try:
            copy_values([(copy, layer) for layer, copy in zip(layers, self._copies) if hasattr(layer, "variables")])
        except ValueError as error:
            raise OptionError(f"{model.name} has other layers than the model that was split: {error}") from error


def split(model: Any, n: int, by: Literal["time", "bytes"] = "time", devices: Any = None) -> Stages:
    """Copy a Keras model into `n` stages for a `Pipeline`.

    The stages are models of copies of the layers, with the values of the model's variables. Together they compute the same
    results as the model, which does not change. Layers keep their order, and are cut such that the largest stage is as small
    as possible. Layers of nested models are cut like those of the model. A layer is copied by its `get_config`, `build` and
    variables, so a custom layer must return all its arguments in `get_config`. `split` compares results with those of copies.

    Args:
        model: a Sequential or functional Keras model, built.
        n: number of stages; at most one for each call of a layer.
        by: "time": the time of a layer, measured on random rows in a forward pass. "bytes": the size of its variables.
        devices: as for `parallel_map`. The variables of each stage are created on another device. If there are fewer devices,
            stages are assigned to them in turn, as for the schedule "interleaved".

    Returns:
        A list of `keras.Model`s with the method `copy_weights_to(model)`. If several tensors cross a cut, as with a residual
        connection, the stage before it returns a tuple and the next stage takes several arguments. If several stages call a
        layer, its variables are in the first of these stages, and the others read them there.

    Raises:
        OptionError: for a subclassed or parallelized model, and for a model with a layer that cannot be copied.

    Warns:
        RuntimeWarning: the model overrides a method such as `train_step`, which the stages do not have.

    Examples:
        >>> import keras
        >>> model = keras.Sequential([keras.Input([4]), *(keras.layers.Dense(4) for _ in range(4))])
        >>> stages = split(model, 2, by="bytes", devices=["CPU:0", "CPU:1"])
        >>> [len(stage.trainable_variables) for stage in stages]
        [4, 4]

        After training the stages, write their weights back:

        >>> stages.copy_weights_to(model)
    """

    from devicemap.pipelines import comparisons
    from devicemap.pipelines.layers import StageModel, copied_layer, layer_calls, runner_of

    check_count("n", n)
    check_choice("by", by, "time", "bytes")
    calls, inputs, outputs = layer_calls(model)
    if "detach" in vars(model):
        raise OptionError(f"{model.name} is parallelized; model.detach() gives it back to one device first")
    if n > len(calls):
        raise OptionError(f"n={n} stages of a model of {len(calls)} layers; at most one for each")
    if overridden := [name for name in _STEPS if overrides(model, name)]:
        warn_user(
            f"{model.name} overrides {', '.join(overridden)}, and its stages do not. Give the loss to the Pipeline or to "
            "compile, and train with pipe.value_and_gradients in a loop if it needs another step",
        )
    layers = _layers_in(calls)
    owners = _owners_of_variables(layers)
    first_calls = {id(call.layer): call for call in reversed(calls)}
    accepted = [comparisons.accepted_size(call) for call in calls]
    weights: list[float] = [_bytes_of(call) * (first_calls[id(call.layer)] is call) for call in calls]
    if by == "time":
        weights = [comparisons.seconds_of(call, size) if size else 0.0 for call, size in zip(calls, accepted)]
    bounds = balanced_bounds(weights, n)
    made = tf.nest.flatten(outputs)
    edges = [tuple(inputs), *(_crossing_tensors(calls, stop, made) for stop in bounds[1:-1]), outputs]
    copies: dict[int, Any] = {}
    stages = []
    cycled = cycle(choose_devices(devices))
    for i, ((start, stop), (given, taken), device) in enumerate(zip(pairwise(bounds), pairwise(edges), cycled)):
        own, owned = list[Any](), list[Any]()
        for call, size in zip(calls[start:stop], accepted[start:stop]):
            if id(call.layer) not in copies:
                of_copy = copied_layer(call, device)
                if size:
                    comparisons.check_copy(call, of_copy, size, device)
                copies[id(call.layer)] = of_copy.layer
                owned.append(of_copy.layer)
            own.append(replace(call, layer=copies[id(call.layer)]))
            if size:
                comparisons.check_uses_own_variables(own[-1], owners, size)
        run = runner_of(own, given, taken)
        advice = "compute values of several rows outside of the pipeline"
        check_rows = comparisons.check_rows_are_independent
        with tf.device(device):
            check_rows(f"stage {i} of {n}", partial(run, training=False), given, advice)
            check_rows(f"stage {i} of {n} in training", partial(comparisons.results_in_training, run), given, advice)
        first_of = None if i else model
        stages.append(StageModel(run, owned, first_of, name=f"{model.name}_{i}", dtype=model.dtype_policy))
    if hasattr(model, "output_names"):
        stages[-1].output_names = model.output_names
    return Stages(stages, [copies[id(layer)] for layer in layers])


def balanced_bounds(weights: Sequence[float], n: int) -> list[int]:
    """Return the bounds of `n` non-empty parts, such that the largest sum of weights is as small as possible.

    >>> balanced_bounds([1, 1, 1, 3], 2)
    [0, 3, 4]
    """
    sums = [0, *accumulate(weights)]
    best = {stop: (largest, [0, stop]) for stop, largest in enumerate(sums)}  # of one part that ends at `stop`
    for parts in range(2, n + 1):
        best = {
            stop: min(
                ((max(best[cut][0], sums[stop] - sums[cut]), [*best[cut][1], stop]) for cut in range(parts - 1, stop)),
                key=itemgetter(0),
            )
            for stop in range(parts, len(sums))
        }
    return best[len(weights)][1]


def _layers_in(calls: Sequence[Any]) -> list[Any]:
    """Return the layers and other ops of calls, each once."""
    return list({id(call.layer): call.layer for call in calls}.values())


def _owners_of_variables(layers: Sequence[Any]) -> dict[int, tuple[Any, Any]]:
    """Return each layer and its variable, by the `id` of the variable's handle. Two layers must not share a variable."""
    owners: dict[int, tuple[Any, Any]] = {}
    for layer in layers:
        for variable in getattr(layer, "variables", ()):
            owner, _ = owners.setdefault(id(variable.value.handle), (layer, variable))
            if owner is not layer:
                raise OptionError(
                    f"{owner.name} and {layer.name} share {variable.path}, and their copies would not; call one layer twice"
                )
    return owners


def _crossing_tensors(calls: Sequence[Any], stop: int, outputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return the tensors that are computed before call `stop`, and used by it, by later calls, or as outputs."""
    after = calls[stop:]
    made_after = {id(tensor) for call in after for tensor in call.outputs}
    taken = [tensor for call in after for tensor in call.inputs] + list(outputs)
    return tuple({id(tensor): tensor for tensor in taken if id(tensor) not in made_after}.values())


def _bytes_of(call: Any) -> int:
    return sum(v.value.shape.num_elements() * v.value.dtype.size for v in call.variables)
