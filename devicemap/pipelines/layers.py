"""The calls of layers in a Keras model, copies of layers on other devices, and models of such copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from tempfile import TemporaryDirectory
from typing import Any

import keras
import tensorflow as tf

from devicemap._tensorflow.keras import arguments_of_lambda, layers_of, mask_of
from devicemap._tensorflow.keras_calls import graph_of, nodes_of
from devicemap.errors import OptionError


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
        return [leaf for leaf in keras.tree.flatten((self.args, self.kwargs)) if isinstance(leaf, keras.KerasTensor)]

    @property
    def variables(self) -> list[Any]:
        """The variables of the layer."""
        return self.layer.variables if isinstance(self.layer, keras.Layer) else []

    def run(self, tensors: dict[int, Any], **options: Any) -> Any:
        """Call the layer. `tensors` are by the `id` of the symbolic tensors."""
        args, kwargs = keras.tree.map_structure(lambda leaf: tensors.get(id(leaf), leaf), (self.args, self.kwargs))
        return self.layer(*args, **(kwargs | options if isinstance(self.layer, keras.Layer) else kwargs))


def runner_of(calls: Sequence[LayerCall], given: Sequence[Any], taken: Any) -> Callable[..., Any]:
    """Return a function of a list of inputs that runs calls, with options such as `training` for layers.

    `given`: the symbolic inputs. `taken`: the nest of symbolic outputs.
    """

    def run(inputs: Sequence[Any], **options: Any) -> Any:
        tensors = dict(zip(map(id, given), inputs))
        for call in calls:
            tensors.update(zip(map(id, call.outputs), keras.tree.flatten(call.run(tensors, **options))))
        return keras.tree.map_structure(lambda tensor: tensors[id(tensor)], taken)

    return run


def layer_calls(model: Any) -> tuple[list[LayerCall], list[Any], Any]:
    """Return the calls of layers in a Sequential or functional model, its inputs, and the nest of its outputs.

    Calls of nested models become calls of their layers, if the arguments are only tensors of the model's dtypes and ranks.

    Raises:
        OptionError: for other models, and for a model that is not trainable and has trainable layers.
    """
    graph = graph_of(model)
    if graph is None:
        raise OptionError(
            f"model is an instance of {type(model)} whose layers are not known as a graph; expected a built Sequential or "
            "functional model of Keras 3. Give a Pipeline functions of your own as stages"
        )
    inputs = [keras.KerasTensor(tensor.shape, tensor.dtype) for tensor in graph.inputs]
    calls, outputs = _calls_in(model, inputs, None)
    return calls, inputs, outputs


def _calls_in(model: Any, inputs: Sequence[Any], training: Any) -> tuple[list[LayerCall], Any]:
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
    return calls, keras.tree.map_structure(lambda tensor: tensors[id(tensor)], graph.output)


def _is_transparent(layer: Any, given: Sequence[Any], kwargs: Any) -> bool:
    """Whether a call of a nested model equals calls of its layers. Keras converts tensors of other dtypes and ranks."""
    graph = graph_of(layer)
    others = {name for name, value in kwargs.items() if value is not None} - {"training"}
    if graph is None or others or isinstance(graph.input, dict):
        return False
    return len(given) == len(graph.inputs) and all(
        isinstance(tensor, keras.KerasTensor)
        and (tensor.dtype, len(tensor.shape)) == (expected.dtype, len(expected.shape))
        for tensor, expected in zip(given, graph.inputs)
    )


def copied_layer(call: LayerCall, device: str) -> LayerCall:
    """Return a call with a copy of the layer on a device, with equal variables. Raise `OptionError` if that is impossible."""
    layer = call.layer
    if not isinstance(layer, keras.Layer):  # an op, which has no variables
        return call
    state = random.getstate()  # Keras draws seeds for the copy, which then gets the values of the layer
    try:
        with tf.device(device):
            if type(layer) is keras.layers.Lambda:  # Keras refuses to load the code of its function
                copy = keras.layers.Lambda(**layer.get_config() | arguments_of_lambda(layer))
            else:
                copy = type(layer).from_config(layer.get_config())
            if type(layer).build is keras.Layer.build and not all(each.built for each in layers_of(copy)[1:]):
                replace(call, layer=copy).run({})  # a call with symbolic tensors builds its layers
            elif layer.built and not copy.built:
                copy.build_from_config(layer.get_build_config())
            for own, other in zip(layers_of(layer), layers_of(copy)):
                if hasattr(own, "save_assets"):  # for instance a vocabulary
                    store: dict[str, Any] = {}  # weights of TF-IDF, which are no variables
                    own.save_own_variables(store)
                    other.load_own_variables(store)
                    with TemporaryDirectory() as folder:
                        own.save_assets(folder)
                        other.load_assets(folder)
            copy_values([(layer, copy)])
            _copy_settings(layer, copy)
    except (TypeError, ValueError, NotImplementedError, AttributeError) as error:
        raise OptionError(
            f"{layer.name} cannot be copied to its stage by get_config and build of {type(layer).__name__}. Correct these, or "
            f"give a Pipeline layers of your own as stages: {error}"
        ) from error
    finally:
        random.setstate(state)
    return replace(call, layer=copy)


def copy_values(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Assign the values of a layer's variables to those of another layer, for each pair of layers.

    Raises:
        ValueError: the variables of two layers differ in number, shape or dtype. Then nothing is assigned.
    """
    for source, target in pairs:
        for own, other in zip_longest(source.variables, target.variables):
            found, expected = (None if v is None else (tuple(v.shape), v.dtype) for v in (other, own))
            if found != expected:
                raise ValueError(f"{source.name} has a variable {expected} where {target.name} has {found}")
    for source, target in pairs:
        for own, other in zip(source.variables, target.variables):
            other.assign(own)
        for each in layers_of(target):
            if isinstance(each, keras.layers.Normalization):  # computes its mean and variance from its weights
                each.finalize_state()


def _copy_settings(source: Any, target: Any) -> None:
    """Copy settings that users change after they have created a layer."""
    for own, other in zip(layers_of(source), layers_of(target), strict=True):
        other.trainable = own.trainable
        other.activity_regularizer = own.activity_regularizer
        other.autocast = own.autocast  # not in get_config
        if hasattr(own, "use_cudnn"):  # neither
            other.use_cudnn = own.use_cudnn
    for own, other in zip(source.variables, target.variables):
        other.trainable, other.regularizer, other.constraint = own.trainable, own.regularizer, own.constraint


class StageModel(keras.Model):
    """A model that runs calls of layers. A tuple of inputs is passed as several arguments."""

    def __init__(self, run: Callable[..., Any], owned: Sequence[Any], first_of: Any = None, **options: Any):
        """`run`: a result of `runner_of`. `owned`: the layers whose variables belong to the model.

        `first_of`: a model that converts inputs in the same way. `options`: `name` and `dtype`.
        """
        super().__init__(autocast=False, **options)  # each layer converts its inputs itself
        self.copies = [layer for layer in owned if isinstance(layer, keras.Layer)]
        self._run_calls, self._convert = run, tuple if first_of is None else _converter(first_of)
        self.supports_masking = self.built = True

    def get_config(self) -> Any:
        """Raise an error: the calls of layers have no configuration."""
        raise OptionError(
            f"the stage {self.name} cannot be copied or saved as a whole; use its save_weights(), or copy_weights_to(model) of "
            "the stages, and save that model"
        )

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        """Leave masks to the layers."""

    def call(self, *inputs: Any, training: bool | None = None) -> Any:
        """Run the calls."""
        options = {} if training is None else {"training": training}
        results = self._run_calls(keras.tree.flatten(self._convert(inputs)), **options)
        return results[0] if isinstance(results, list | tuple) and len(results) == 1 else results


def _converter(model: Any) -> Callable[[Any], Any]:
    """Return a function that converts arguments like `model`, by name, dtype and rank."""
    structure = graph_of(model).input
    symbolic = keras.tree.map_structure(
        lambda tensor: keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype, name=tensor.name), structure
    )
    keras.tree.map_structure(keras.layers.Identity(), symbolic)  # Keras 3.12 refuses inputs that no layer takes
    converting, count = keras.Model(symbolic, symbolic), len(keras.tree.flatten(symbolic))

    def convert(arguments: tuple[Any, ...]) -> Any:
        if len(arguments) > max(count, 1):
            raise ValueError(f"{model.name} takes {count} inputs, not {len(arguments)}")
        inputs = arguments[0] if len(arguments) == 1 else list(arguments)
        return converting.call(inputs, mask=keras.tree.map_structure(mask_of, inputs))

    return convert
