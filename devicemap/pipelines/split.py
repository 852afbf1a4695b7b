"""Split Keras models into stages of a pipeline: copies of contiguous layers, of about equal time or size."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate, cycle, pairwise
from statistics import median
from typing import Any, Literal

import tensorflow as tf

from devicemap._tensorflow.keras import mask_of
from devicemap._tensorflow.keras_graphs import graph_of, structures_of
from devicemap.devices import choose_devices
from devicemap.errors import OptionError
from devicemap.options import check_count
from devicemap.pipelines.layers import (
    LayerCall,
    check_rows_are_independent,
    copied,
    copy_values,
    handles_used_by,
    layer_calls,
    random_tensors,
    run_calls,
    unchanged,
)

_TIMES = 5
"""Number of timings of a layer."""


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
        layers = _layers_in(layer_calls(model)[0])
        if [type(layer) for layer in layers] != [type(copy) for copy in self._copies]:
            raise OptionError(f"{model.name} has other layers than the model that was split")
        try:
            for layer, copy in zip(layers, self._copies):
                if hasattr(layer, "variables"):
                    copy_values(copy, layer)
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

    Examples:
        >>> import keras
        >>> model = keras.Sequential([keras.Input([4]), *(keras.layers.Dense(4) for _ in range(4))])
        >>> stages = split(model, 2, by="bytes", devices=["CPU:0", "CPU:1"])
        >>> [len(stage.trainable_variables) for stage in stages]
        [4, 4]

        After training the stages, write their weights back:

        >>> stages.copy_weights_to(model)
    """
    check_count("n", n)
    if by not in ("time", "bytes"):
        raise OptionError(f"by={by!r}; expected 'time' or 'bytes'")
    calls, inputs, outputs = layer_calls(model)
    if "detach" in vars(model):
        raise OptionError(f"{model.name} is parallelized; model.detach() gives it back to one device first")
    if n > len(calls):
        raise OptionError(f"n={n} stages of a model of {len(calls)} layers; at most one for each")
    layers = _layers_in(calls)
    owners = _owners_of_variables(layers)
    places = choose_devices(devices)
    first_calls = {id(call.layer): call for call in reversed(calls)}
    sizes = [
        _seconds_of(call) if by == "time" else _bytes_of(call.layer) * (first_calls[id(call.layer)] is call)
        for call in calls
    ]
    bounds = cuts(sizes, n)
    made = tf.nest.flatten(outputs)
    edges = [inputs, *(_crossing(calls, stop, made) for stop in bounds[1:-1]), outputs]
    copies: dict[int, Any] = {}
    stages = []
    for i, ((start, stop), (given, taken), device) in enumerate(zip(pairwise(bounds), pairwise(edges), cycle(places))):
        own = [call for call in calls[start:stop] if first_calls[id(call.layer)] is call]
        copies |= {id(call.layer): copied(call, device) for call in own}
        owned = [copies[id(call.layer)] for call in own]
        entry = None if i else _entry_of(model)
        result = taken if i == n - 1 else taken[0] if len(taken) == 1 else tuple(taken)
        pairs = [(call, copies[id(call.layer)]) for call in calls[start:stop]]
        for call, copy in pairs:
            _check_uses_none_of(owners, call, copy)
        check_rows_are_independent(f"stage {i} of {n}", pairs, given, result)
        stages.append(_stage(f"{model.name}_{i}", model.dtype_policy, pairs, owned, given, result, entry))
    return Stages(stages, [copies[id(layer)] for layer in layers])


def cuts(weights: Sequence[float], n: int) -> list[int]:
    """Return the bounds of `n` non-empty parts, such that the largest sum of weights is as small as possible.

    >>> cuts([1, 1, 1, 3], 2)
    [0, 3, 4]
    """
    sums = [0, *accumulate(weights)]
    best = {(0, 0): (0.0, [0])}  # (number of weights, parts) -> (largest sum, bounds)
    for parts in range(1, n + 1):
        for stop in range(parts, len(weights) + 1):
            ways = (
                (max(best[start, parts - 1][0], sums[stop] - sums[start]), [*best[start, parts - 1][1], stop])
                for start in range(parts - 1, stop)
                if (start, parts - 1) in best
            )
            best[stop, parts] = min(ways, key=lambda way: way[0])
    return best[len(weights), n][1]


def _layers_in(calls: Sequence[LayerCall]) -> list[Any]:
    """Return the layers and other ops of calls, each once."""
    return list({id(call.layer): call.layer for call in calls}.values())


def _owners_of_variables(layers: Sequence[Any]) -> dict[int, tuple[Any, Any]]:
    """Return each layer and its variable, by the `id` of the variable's handle.

    Raises:
        OptionError: two layers have the same variable.
    """
    owners: dict[int, tuple[Any, Any]] = {}
    for layer in layers:
        for variable in getattr(layer, "variables", ()):
            owner, _ = owners.setdefault(id(variable.value.handle), (layer, variable))
            if owner is not layer:
                raise OptionError(
                    f"{owner.name} and {layer.name} share {variable.path}, and their copies would not; call one layer twice"
                )
    return owners


def _check_uses_none_of(owners: dict[int, tuple[Any, Any]], call: LayerCall, copy: Any) -> None:
    """Raise an error if a copy uses variables of the model, as a `Lambda` may do."""
    for handle in handles_used_by(call, copy) & {*owners}:
        owner, variable = owners[handle]
        raise OptionError(
            f"a copy of {call.layer.name} would use {variable.path} of {owner.name} in the model itself; variables must not "
            "come from a function, an argument or a layer in get_config. Call one layer twice, or give a Pipeline functions of "
            "your own as stages"
        )


def _entry_of(model: Any) -> Any:
    """Return a model that only converts inputs like `model`, by name, dtype and rank."""
    import keras

    structure, _ = structures_of(graph_of(model))
    inputs = keras.tree.map_structure(
        lambda tensor: keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype, name=tensor.name), structure
    )
    keras.tree.map_structure(keras.layers.Identity(), inputs)  # Keras 3.12 refuses inputs that no layer takes
    return keras.Model(inputs, inputs)


def _stage(
    name: str,
    policy: Any,
    calls: Sequence[tuple[LayerCall, Any]],
    owned: Sequence[Any],
    given: Sequence[Any],
    result: Any,
    entry: Any,
) -> Any:
    """Return a model that runs calls of copies of layers.

    `owned`: the copies whose variables belong to the model. `given` and `result`: symbolic inputs and outputs.
    """
    import keras

    class Stage(keras.Model):
        def __init__(self) -> None:
            super().__init__(name=name, autocast=False, dtype=policy)  # each layer converts its inputs itself
            self.copies = [copy for copy in owned if isinstance(copy, keras.Layer)]
            self.supports_masking = self.built = True

        def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
            """Leave masks to the layers."""

        def call(self, *inputs: Any, training: bool | None = None) -> Any:
            if entry is not None:
                arguments = inputs[0] if len(inputs) == 1 else list(inputs)
                inputs = entry.call(arguments, mask=keras.tree.map_structure(mask_of, arguments))
            tensors = dict(zip(map(id, given), keras.tree.flatten(inputs)))
            options = {} if training is None else {"training": training}
            tensors = run_calls(calls, tensors, **options)
            results = keras.tree.map_structure(lambda tensor: tensors[id(tensor)], result)
            return results[0] if isinstance(results, list | tuple) and len(results) == 1 else results

    return Stage()


def _crossing(calls: Sequence[LayerCall], stop: int, outputs: Sequence[Any]) -> list[Any]:
    """Return the tensors that are computed before call `stop`, and used by it, by later calls, or as outputs."""
    after = calls[stop:]
    made_after = {id(tensor) for call in after for tensor in call.outputs}
    taken = [tensor for call in after for tensor in call.inputs] + list(outputs)
    crossing = {id(tensor): tensor for tensor in taken if id(tensor) not in made_after}
    return list(crossing.values())


def _bytes_of(layer: Any) -> int:
    return sum(v.value.shape.num_elements() * v.value.dtype.size for v in getattr(layer, "variables", ()))


def _seconds_of(call: LayerCall) -> float:
    """Return the time of a call in a graph, on random rows."""
    tensors = random_tensors(call.inputs)

    @tf.function(autograph=False)
    def run() -> Any:
        with unchanged(call.layer):
            return call.run(call.layer, tensors)

    times = []
    for _ in range(1 + _TIMES):
        began = time.perf_counter()
        tf.nest.map_structure(lambda leaf: leaf.numpy(), run())  # waits for kernels on accelerators
        times.append(time.perf_counter() - began)
    return median(times[1:])
