"""Calls of the layers of a Keras model, and of their copies, on random rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from timeit import repeat
from typing import Any

import keras
import tensorflow as tf

from devicemap._tensorflow.keras import replacing
from devicemap.errors import OptionError, brief
from devicemap.inspect.independence import dependence_on_rows, difference, random_tensors
from devicemap.pipelines.layers import LayerCall

_FEW_ROWS = 8
"""Rows that are compared with half of them. They may be images, and the function a network."""

_TIMES = 5
"""Number of timings of a layer."""


def check_copy(call: LayerCall, of_copy: LayerCall) -> None:
    """Raise `OptionError` if a copy has other outputs or losses than its layer, unless those change from call to call."""
    layer = call.layer
    modes = [{"training": False}, {"training": True}] if isinstance(layer, keras.Layer) else [{}]
    for largest, mode in product([1.0, 100.0], modes):
        tensors = random_tensors(call.inputs, largest)
        try:
            first, again, other = (_results(each, tensors, mode) for each in (call, call, of_copy))
        except tf.errors.InvalidArgumentError as error:
            if largest > 1:
                continue  # indices out of range
            raise OptionError(
                f"{layer.name} fails for random tensors of the shapes and dtypes that it takes: {brief(error)}"
            ) from error
        if found := difference("an output", other, first, again, 1e-3):
            raise OptionError(
                f"a copy of {layer.name} by get_config and variables of {type(layer).__name__} computes something else: "
                f"{found}. Let them return all variables and attributes that call() uses"
            )


def check_rows_are_independent(name: str, run: Callable[[list[Any]], Any], given: Sequence[Any], advice: str) -> None:
    """Compare the results of a function for some rows with those beside other rows, unless it raises an exception.

    `given`: symbolic tensors or specs of its list of arguments. `name` and `advice` are parts of the error message.

    Raises:
        OptionError: a row of a result depends on other rows of the arguments.
    """
    fixed = {tensor.shape[0] for tensor in given}
    if len(fixed) != 1:
        return

    def stateless(tensors: list[Any]) -> Any:
        with keras.StatelessScope():
            return run(tensors)

    if found := dependence_on_rows(stateless, given, min(fixed.pop() or _FEW_ROWS, _FEW_ROWS)):
        raise OptionError(
            f"{name}: {found}. Microbatches see some of the rows, so each row of a result must depend on one row; {advice}"
        )


def results_in_training(run: Callable[..., Any], tensors: list[Any]) -> Any:
    """Return the results of a stage in training. Raise `ValueError` if it changes variables: then rows may depend on others."""
    with keras.StatelessScope() as scope:
        results = run(tensors, training=True)
    if scope.state_mapping:
        raise ValueError(f"variables change: {len(scope.state_mapping)}")
    return results


def check_uses_own_variables(call: LayerCall, owners: dict[int, tuple[Any, Any]]) -> None:
    """Raise `OptionError` if a copy has or uses a variable of the model in training, as a `Lambda` may do.

    `owners`: each layer of the model and its variable, by the `id` of the variable's handle.
    """
    captured = [handle for handle, _ in _graph_of(call, training=True).get_concrete_function().graph.captures]
    for handle in [*captured, *(variable.value.handle for variable in call.variables)]:
        if id(handle) in owners:
            owner, variable = owners[id(handle)]
            raise OptionError(
                f"a copy of {call.layer.name} would use {variable.path} of {owner.name} in the model itself; variables must "
                "not come from a function, an argument or a layer in get_config. Call one layer twice, or give a Pipeline "
                "functions of your own as stages"
            )


def seconds_of(call: LayerCall) -> float:
    """Return the time of a call in a graph, on random rows."""
    run = _graph_of(call)

    def wait() -> None:
        tf.nest.map_structure(lambda leaf: leaf.numpy(), run())  # waits for kernels on accelerators

    wait()
    return min(repeat(wait, number=1, repeat=_TIMES))


def _graph_of(call: LayerCall, **options: Any) -> Any:
    """Return a `tf.function` of a call on random rows, with these options of the layer's `call`."""
    tensors = random_tensors(call.inputs)

    @tf.function(autograph=False)
    def run() -> Any:
        with _unchanged(call.layer):
            return call.run(tensors, **options)

    return run


@contextmanager
def _unchanged(layer: Any) -> Iterator[Any]:
    """Yield a scope in which calls of a layer do not change it. The scope has the `losses` of the calls."""
    with keras.StatelessScope(collect_losses=True) as scope, replacing(layer, _clear_losses=lambda: None):
        yield scope


def _results(call: LayerCall, tensors: dict[int, Any], mode: Any) -> list[Any]:
    with _unchanged(call.layer) as scope:
        return [*tf.nest.flatten(call.run(tensors, **mode)), *scope.losses]
