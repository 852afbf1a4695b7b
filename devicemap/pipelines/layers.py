"""The calls of layers in a Keras model, and copies of layers on other devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product, zip_longest
from tempfile import TemporaryDirectory
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.keras import layers_of, replacing
from devicemap._tensorflow.keras_graphs import graph_of, nodes_of, structures_of
from devicemap.errors import OptionError, brief
from devicemap.inspect.differences import find_difference

ROWS = 32
"""Rows of the batch on which layers are compared and timed. The number also replaces unknown dimensions."""

_TOLERANCE = 0.03
"""Larger relative differences of results are not due to rounding, also for 16-bit floats."""


@dataclass(frozen=True)
class LayerCall:
    """A call of a layer, or of another op, in a model. Tensors are symbolic (`keras.KerasTensor`)."""

    layer: Any
    args: Any
    kwargs: Any
    outputs: list[Any]

    @property
    def inputs(self) -> list[Any]:
        """The symbolic tensors among its arguments."""
        import keras

        return [leaf for leaf in keras.tree.flatten((self.args, self.kwargs)) if isinstance(leaf, keras.KerasTensor)]

    def run(self, layer: Any, tensors: dict[int, Any], **options: Any) -> Any:
        """Call the layer, or its copy. `tensors` are by the `id` of the symbolic tensors."""
        import keras

        args, kwargs = keras.tree.map_structure(lambda leaf: tensors.get(id(leaf), leaf), (self.args, self.kwargs))
        return layer(*args, **(kwargs | options if isinstance(layer, keras.Layer) else kwargs))


def layer_calls(model: Any) -> tuple[list[LayerCall], list[Any], Any]:
    """Return the calls of layers in a Sequential or functional model, its inputs, and the nest of its outputs.

    Calls of nested models become calls of their layers, if the arguments are only tensors of the model's dtypes and ranks.

    Raises:
        OptionError: for other models, and for a model that is not trainable and has trainable layers.
    """
    import keras

    graph = graph_of(model)
    if graph is None:
        raise OptionError(
            f"model is a {type(model).__name__} whose layers are not known as a graph; expected a built Sequential or "
            "functional Keras model. Give a Pipeline functions of your own as stages"
        )
    inputs = [keras.KerasTensor(tensor.shape, tensor.dtype) for tensor in graph.inputs]
    calls, outputs = _calls_in(model, inputs, None)
    return calls, inputs, outputs


def _calls_in(model: Any, inputs: Sequence[Any], training: Any) -> tuple[list[LayerCall], Any]:
    import keras

    if not model.trainable and any(layer.trainable_weights for layer in layers_of(model)):
        raise OptionError(f"{model.name} is not trainable and has layers that are; set their `trainable` to False")
    graph: Any = graph_of(model)
    tensors, calls = dict(zip(map(id, graph.inputs), inputs)), []
    for node in nodes_of(graph):
        args, kwargs = node.arguments.fill_in(tensors)
        if training is not None and isinstance(node.operation, keras.Layer):
            kwargs = {**kwargs, "training": training}
        given = list(args[0]) if len(args) == 1 and isinstance(args[0], list | tuple) else list(args)
        if _is_transparent(node.operation, given, kwargs):
            inner, results = _calls_in(node.operation, given, kwargs.get("training"))
            calls += inner
            outputs = keras.tree.flatten(results)
        else:
            outputs = [keras.KerasTensor(tensor.shape, tensor.dtype) for tensor in node.outputs]
            calls.append(LayerCall(node.operation, args, kwargs, outputs))
        tensors.update(zip(map(id, node.outputs), outputs))
    return calls, keras.tree.map_structure(lambda tensor: tensors[id(tensor)], structures_of(graph)[1])


def _is_transparent(layer: Any, given: Sequence[Any], kwargs: Any) -> bool:
    """Whether a call of a nested model equals calls of its layers. Keras converts tensors of other dtypes and ranks."""
    import keras

    graph = graph_of(layer)
    others = {name for name, value in kwargs.items() if value is not None} - {"training"}
    if graph is None or others or isinstance(structures_of(graph)[0], dict):
        return False
    return len(given) == len(graph.inputs) and all(
        isinstance(tensor, keras.KerasTensor)
        and (tensor.dtype, len(tensor.shape)) == (expected.dtype, len(expected.shape))
        for tensor, expected in zip(given, graph.inputs)
    )


def copied(call: LayerCall, device: str) -> Any:
    """Return a copy of the layer of a call, with equal values of its variables, which are on a device.

    Raises:
        OptionError: the layer cannot be copied, or the copy has other results.
    """
    import keras

    layer = call.layer
    try:
        with tf.device(device):
            copy = _from_config(layer)
            if isinstance(layer, keras.Layer):
                if layer.built:
                    copy.build_from_config(layer.get_build_config())
                for own, other in zip(layers_of(layer), layers_of(copy)):
                    if hasattr(own, "save_assets"):  # for instance a vocabulary
                        with TemporaryDirectory() as folder:
                            own.save_assets(folder)
                            other.load_assets(folder)
                copy_values(layer, copy)
                _copy_settings(layer, copy)
    except (TypeError, ValueError, NotImplementedError, AttributeError) as error:
        raise OptionError(
            f"{layer.name} cannot be copied to its stage by get_config and build of {type(layer).__name__}: {error}"
        ) from error
    _check_copy(call, copy)
    return copy


def _from_config(layer: Any) -> Any:
    import keras

    config = layer.get_config()
    if type(layer) is keras.layers.Lambda:  # Keras refuses to load the code of its function
        config |= {"function": layer.function, "mask": layer.mask, "output_shape": layer._output_shape}
        return keras.layers.Lambda(**config | {"dtype": layer.dtype_policy})
    return type(layer).from_config(config)


def copy_values(source: Any, target: Any) -> None:
    """Assign the values of a layer's variables to those of another layer.

    Raises:
        ValueError: the variables of the two differ in number, shape or dtype.
    """
    import keras

    for own, other in zip_longest(source.variables, target.variables):
        found, expected = (None if v is None else (tuple(v.shape), v.dtype) for v in (other, own))
        if found != expected:
            raise ValueError(f"{source.name} has a variable {expected} where {target.name} has {found}")
        other.assign(own)
    for each in layers_of(target):
        if isinstance(each, keras.layers.Normalization):  # computes its mean and variance from its weights
            each.finalize_state()


def _copy_settings(source: Any, target: Any) -> None:
    """Copy settings that users change after they have created a layer."""
    for own, other in zip(layers_of(source), layers_of(target), strict=True):
        other.trainable = own.trainable
        other.activity_regularizer = own.activity_regularizer
        if hasattr(own, "use_cudnn"):  # not in get_config
            other.use_cudnn = own.use_cudnn
    for own, other in zip(source.variables, target.variables):
        other.trainable, other.regularizer, other.constraint = own.trainable, own.regularizer, own.constraint


def _check_copy(call: LayerCall, copy: Any) -> None:
    """Compare outputs and losses of a layer and its copy, unless those of the layer change from call to call."""
    import keras

    modes = [{"training": False}, {"training": True}] if isinstance(call.layer, keras.Layer) else [{}]
    for largest, mode in product([1.0, 100.0], modes):
        tensors = random_tensors(call.inputs, largest)
        try:
            first, again, other = (list(_results(call, each, tensors, mode)) for each in (call.layer, call.layer, copy))
        except tf.errors.InvalidArgumentError as error:
            if largest > 1:
                continue  # indices out of range
            raise OptionError(
                f"{call.layer.name} fails for random tensors of the shapes and dtypes that it takes: {brief(error)}"
            ) from error
        difference = _difference(other, first)
        if difference and not _difference(again, first):
            raise OptionError(
                f"a copy of {call.layer.name} by get_config and variables of {type(call.layer).__name__} computes something "
                f"else: {difference}. Let them return all variables and attributes that call() uses"
            )


def handles_used_by(call: LayerCall, layer: Any) -> set[int]:
    """Return the `id` of the handle of each variable that a layer has or uses in a call in training."""
    import keras

    tensors, is_layer = random_tensors(call.inputs), isinstance(layer, keras.Layer)

    @tf.function(autograph=False)
    def run() -> None:
        with unchanged(layer):
            call.run(layer, tensors, training=True)

    captured = [handle for handle, _ in run.get_concrete_function().graph.captures]
    return {*map(id, captured), *(id(v.value.handle) for v in (layer.variables if is_layer else ()))}


def run_calls(pairs: Sequence[tuple[LayerCall, Any]], tensors: dict[int, Any], **options: Any) -> dict[int, Any]:
    """Run calls, each with a copy of its layer. Return `tensors` and the outputs, by the `id` of the symbolic tensors."""
    import keras

    tensors = dict(tensors)
    for call, copy in pairs:
        outputs = call.run(copy, tensors, **options)
        tensors.update(zip(map(id, call.outputs), keras.tree.flatten(outputs)))
    return tensors


def check_rows_are_independent(
    name: str, pairs: Sequence[tuple[LayerCall, Any]], given: Sequence[Any], taken: Any
) -> None:
    """Compare the results of calls for some rows with those for half of the rows, in inference.

    Raises:
        OptionError: a row of `taken` depends on other rows of `given`.
    """
    import keras

    if any(tensor.shape[0] is not None for tensor in given):
        return

    def made(rows: int) -> list[Any]:
        with keras.StatelessScope():
            tensors = run_calls(pairs, {key: rows_of[:rows] for key, rows_of in whole.items()}, training=False)
        return [tensors[id(tensor)] for tensor in tf.nest.flatten(taken)]

    whole, half = random_tensors(given), ROWS // 2
    try:
        first, again, part = made(ROWS), made(ROWS), made(half)
    except tf.errors.InvalidArgumentError:  # indices out of range, if the stage before computes the input
        return
    for one, other, of_half in zip(first, again, part):
        same = find_difference("a result", other, one, _TOLERANCE) is None
        difference = same and find_difference("a result", of_half[:half], one[:half], _TOLERANCE)
        if difference:
            raise OptionError(
                f"{name}: {difference}, if half of the rows are left out. Microbatches see some of the rows, so each row of a "
                "result must depend on one row; compute values of several rows outside of the pipeline"
            )


@contextmanager
def unchanged(layer: Any) -> Iterator[Any]:
    """Yield a scope in which calls of a layer do not change it. The scope has the `losses` of the calls."""
    import keras

    with keras.StatelessScope(collect_losses=True) as scope, replacing(layer, _clear_losses=lambda: None):
        yield scope


def _results(call: LayerCall, layer: Any, tensors: dict[int, Any], mode: Any) -> Iterator[Any]:
    with unchanged(layer) as scope:
        yield from tf.nest.flatten(call.run(layer, tensors, **mode))
        yield from scope.losses


def _difference(outputs: Sequence[Any], wanted: Sequence[Any]) -> str | None:
    if len(outputs) != len(wanted):
        return f"{len(outputs)} outputs and losses, not {len(wanted)}"
    found = (find_difference("an output", *pair, tolerance=1e-3) for pair in zip(outputs, wanted))
    return next(filter(None, found), None)


def random_tensors(symbolic: Sequence[Any], largest: float = 1.0) -> dict[int, Any]:
    """Return random rows for symbolic tensors, by `id`. Integers are 0 or 1, which are valid indices for most layers."""

    def random(tensor: Any) -> Any:
        dtype = tf.as_dtype(tensor.dtype)
        shape = [size or ROWS for size in tensor.shape]
        if dtype == tf.string:
            return tf.zeros(shape, dtype)
        low, high, drawn = (-largest, largest, tf.float32) if dtype.is_floating else (0, 2, tf.int32)
        return tf.cast(tf.random.stateless_uniform(shape, [0, 0], low, high, drawn), dtype)

    return {id(tensor): random(tensor) for tensor in symbolic}
