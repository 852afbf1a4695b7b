"""Keras models -> stages of a pipeline: copies of contiguous layers, of about equal time or size."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate, pairwise, product
from statistics import median
from typing import Any, Literal

import tensorflow as tf

from devicemap._tensorflow.keras import arguments_of, inputs_of, is_used_once, layers_of, mask_of, outputs_of
from devicemap.errors import OptionError
from devicemap.inspect.differences import find_difference
from devicemap.options import check_count
from devicemap.pipelines.stages import devices_of_stages

_ROWS, _TIMES = 32, 5
"""Rows of the batch that layers are timed on, which also replace unknown dimensions, and the number of timings."""


def split(model: Any, n: int, by: Literal["time", "bytes"] = "time", devices: Any = None) -> list[Any]:
    """Copy a Keras model into `n` stages for a `Pipeline`.

    The stages are models of copies of the layers, with the weights of the model: their composition computes the same. The model
    itself does not change. Of all ways to cut its layers, in their order, the one whose largest stage is smallest is taken.
    Layers are copied by their `get_config` and `get_weights`, as by `keras.models.clone_model`.

    Args:
        model: a Sequential or functional Keras model, built.
        n: how many stages; at most one for each layer.
        by: "time": what a layer takes, measured on random rows in a forward pass; "bytes": its variables.
        devices: as for `Pipeline`: the variables of each stage are created on its device.

    Returns:
        A list of `keras.Model`s. If several tensors cross a cut, as with a residual connection, the stage before it returns a
        tuple and the next one takes several arguments.

    Raises:
        OptionError: for a subclassed model, a parallelized one, and one with a layer that is used more than once, adds a loss
            or cannot be copied, or with a Keras mask where it would be cut.

    Examples:
        >>> import keras
        >>> model = keras.Sequential([keras.Input([4]), *(keras.layers.Dense(4) for _ in range(4))])
        >>> stages = split(model, 2, by="bytes", devices=["CPU:0", "CPU:1"])
        >>> [len(stage.trainable_variables) for stage in stages]
        [4, 4]

        After training the stages, write their weights back:

        >>> model.set_weights([weight for stage in stages for weight in stage.get_weights()])
    """
    import keras

    check_count("n", n)
    if by not in ("time", "bytes"):
        raise OptionError(f"by={by!r}; expected 'time' or 'bytes'")
    if not isinstance(model, keras.Model) or not getattr(model, "inputs", None):
        raise OptionError(
            f"model is a {type(model).__name__} whose layers are not known as a graph; expected a built Sequential or "
            "functional Keras model. Give a Pipeline functions of your own as stages"
        )
    if "detach" in vars(model):
        raise OptionError(f"{model.name} is parallelized; model.detach() gives it back to one device first")
    every = keras.Function(model.inputs, model.outputs).operations
    layers = [layer for layer in every if not isinstance(layer, keras.layers.InputLayer)]
    if n > len(layers):
        raise OptionError(f"n={n} stages of a model of {len(layers)} layers; at most one for each")
    for layer in layers:
        if not is_used_once(layer):
            raise OptionError(f"{layer.name} is used more than once, and a stage cannot share a layer with another one")
    places = devices_of_stages(n, devices)
    bounds = cuts([_bytes_of(layer) if by == "bytes" else _seconds_of(layer) for layer in layers], n)
    edges = [
        list(model.inputs),
        *(_crossing(layers, stop, model.outputs) for stop in bounds[1:-1]),
        list(model.outputs),
    ]
    for tensor in (tensor for edge in edges[1:-1] for tensor in edge):
        if mask_of(tensor) is not None:
            raise OptionError(
                f"{tensor.name} has a Keras mask, which does not go from stage to stage; use a smaller n, or give a Pipeline "
                "functions of your own as stages, which take the mask as a tensor"
            )
    parts = (layers[start:stop] for start, stop in pairwise(bounds))
    return [
        _stage(part, given, made, f"{model.name}_{i}", device)
        for i, (part, (given, made), device) in enumerate(zip(parts, pairwise(edges), places))
    ]


def cuts(weights: Sequence[float], n: int) -> list[int]:
    """Where to cut into `n` parts, none of them empty, such that the heaviest is as light as can be.

    >>> cuts([1, 1, 1, 3], 2)
    [0, 3, 4]
    """
    sums = [0, *accumulate(weights)]
    best = {(0, 0): (0.0, [0])}  # of the first so many weights in so many parts
    for parts in range(1, n + 1):
        for stop in range(parts, len(weights) + 1):
            ways = (
                (max(best[start, parts - 1][0], sums[stop] - sums[start]), [*best[start, parts - 1][1], stop])
                for start in range(parts - 1, stop)
                if (start, parts - 1) in best
            )
            best[stop, parts] = min(ways, key=lambda way: way[0])
    return best[len(weights), n][1]


def _copied(layer: Any, device: str) -> Any:
    """Return a copy of a layer, or of another op, with its variables on a device."""
    import keras

    if any(hasattr(each, "save_assets") for each in layers_of(layer)):
        raise OptionError(f"{layer.name} holds a vocabulary, which is not copied; apply it before the pipeline")
    try:
        with tf.device(device):
            copy = type(layer).from_config(layer.get_config())
            if isinstance(layer, keras.Layer):
                copy.build_from_config(layer.get_build_config())
                copy.set_weights(layer.get_weights())
            for each in layers_of(copy):
                if hasattr(each, "finalize_state"):  # computes what is used from the weights, as in Normalization
                    each.finalize_state()
    except (TypeError, ValueError, NotImplementedError) as error:
        raise OptionError(
            f"{layer.name} cannot be copied to its stage by get_config and get_weights of {type(layer).__name__}: {error}"
        ) from error
    _check_copy(layer, copy)
    return copy


def _check_copy(layer: Any, copy: Any) -> None:
    """Compare what a layer and its copy compute, unless it draws random numbers; refuse losses of their rows."""
    import keras

    modes = [{"training": False}, {"training": True}] if isinstance(layer, keras.Layer) else [{}]
    for largest, mode in product([1.0, 100.0], modes):
        args, kwargs = arguments_of(layer, _random_inputs(layer, largest))
        try:
            with keras.StatelessScope(collect_losses=True) as scope:
                first, again, copied = (tf.nest.flatten(each(*args, **kwargs | mode)) for each in (layer, layer, copy))
        except tf.errors.InvalidArgumentError:
            if largest > 1:
                continue  # indices out of range
            raise
        if scope.losses:
            raise OptionError(f"{layer.name} adds a loss, which a stage does not return; compute it in the last stage")
        difference = _difference(copied, first)
        if difference and not _difference(again, first):
            raise OptionError(
                f"a copy of {layer.name} by get_config and get_weights of {type(layer).__name__} computes something else: "
                f"{difference}. Let them return all variables and attributes that call() uses"
            )


def _difference(outputs: Sequence[Any], wanted: Sequence[Any]) -> str | None:
    found = (find_difference("an output", *pair, tolerance=1e-3) for pair in zip(outputs, wanted))
    return next(filter(None, found), None)


def _random_inputs(layer: Any, largest: float = 1.0) -> dict[int, Any]:
    """Return random rows for the symbolic inputs of a layer, by identity. Below 1, they are index 0 to layers that take one."""

    def random(tensor: Any) -> Any:
        dtype = tf.as_dtype(tensor.dtype)
        shape = [size or _ROWS for size in tensor.shape]
        if dtype == tf.string:
            return tf.zeros(shape, dtype)
        low, high, drawn = (-largest, largest, tf.float32) if dtype.is_floating else (0, 2, tf.int32)
        return tf.cast(tf.random.stateless_uniform(shape, [0, 0], low, high, drawn), dtype)

    return {id(tensor): random(tensor) for tensor in inputs_of(layer)}


def _stage(layers: Sequence[Any], given: Sequence[Any], made: Sequence[Any], name: str, device: str) -> Any:
    """Return copies of the layers between tensors of a model as a model of their own."""
    import keras

    inputs = [keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype) for tensor in given]
    tensors = {id(tensor): copy for tensor, copy in zip(given, inputs)}
    copies = [_copied(layer, device) for layer in layers]
    for layer, copy in zip(layers, copies):
        args, kwargs = arguments_of(layer, tensors)
        outputs = copy(*args, **kwargs)
        tensors.update(zip(map(id, outputs_of(layer)), tf.nest.flatten(outputs)))

    class Stage(keras.Model):
        def __init__(self) -> None:
            super().__init__(name=name)
            self.copies = copies  # first, so that weights have the order of the layers
            self.body = keras.Model(inputs, [tensors[id(tensor)] for tensor in made])
            self.built = True

        def call(self, *inputs: Any, training: bool | None = None) -> Any:
            outputs = self.body(tf.nest.flatten(inputs), training=training)
            return tuple(outputs) if len(made) > 1 else outputs

    return Stage()


def _crossing(layers: Sequence[Any], stop: int, outputs: Sequence[Any]) -> list[Any]:
    """What is made before layer `stop` and taken by it or later ones, or given by the model."""
    after = layers[stop:]
    made_after = {id(tensor) for layer in after for tensor in outputs_of(layer)}
    taken = [tensor for layer in after for tensor in inputs_of(layer)] + list(outputs)
    crossing = {id(tensor): tensor for tensor in taken if id(tensor) not in made_after}
    return list(crossing.values())


def _bytes_of(layer: Any) -> int:
    return sum(v.value.shape.num_elements() * v.value.dtype.size for v in getattr(layer, "variables", ()))


def _seconds_of(layer: Any) -> float:
    """What a call takes, in a graph, on random rows."""
    import keras

    args, kwargs = arguments_of(layer, _random_inputs(layer))

    @tf.function(autograph=False)
    def call() -> Any:
        with keras.StatelessScope():  # the model does not change
            return layer(*args, **kwargs)

    times = []
    for _ in range(1 + _TIMES):
        began = time.perf_counter()
        tf.nest.map_structure(lambda leaf: leaf.numpy(), call())  # on an accelerator, a call ends before its work
        times.append(time.perf_counter() - began)
    return median(times[1:])
