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
from devicemap.inspect.verify import find_difference
from devicemap.pipelines.layers import LayerCall

_ROWS = 32
"""Rows of the batch on which layers are compared and timed. The number also replaces unknown dimensions."""

_FEW_ROWS = 8
"""Rows that are compared with half of them. They may be images, and the function a network."""

_TIMES = 5
"""Number of timings of a layer."""


def check_copy(call: LayerCall, of_copy: LayerCall) -> None:
    """Compare outputs and losses of a layer and its copy, unless those of the layer change from call to call.

    Raises:
        OptionError: the copy has other results.
    """
    layer = call.layer
    modes = [{"training": False}, {"training": True}] if isinstance(layer, keras.Layer) else [{}]
    for largest, mode in product([1.0, 100.0], modes):
        tensors = _random_tensors(call.inputs, largest)
        try:
            first, again, other = (_results(each, tensors, mode) for each in (call, call, of_copy))
        except tf.errors.InvalidArgumentError as error:
            if largest > 1:
                continue  # indices out of range
            raise OptionError(
                f"{layer.name} fails for random tensors of the shapes and dtypes that it takes: {brief(error)}"
            ) from error
        if difference := _difference("an output", other, first, again, 1e-3):
            raise OptionError(
                f"a copy of {layer.name} by get_config and variables of {type(layer).__name__} computes something else: "
                f"{difference}. Let them return all variables and attributes that call() uses"
            )


def check_rows_are_independent(name: str, run: Callable[[list[Any]], Any], given: Sequence[Any], advice: str) -> None:
    """Compare the results of a function for some rows with those for half of the rows, unless it raises an exception.

    Args:
        name: of the function.
        run: the function, of a list of tensors.
        given: symbolic tensors or specs of its arguments, perhaps with a fixed number of rows.
        advice: what to do if it mixes rows.

    Raises:
        OptionError: a row of a result depends on other rows of the arguments.
    """
    fixed = {tensor.shape[0] for tensor in given}
    if len(fixed) != 1:
        return
    count = min(fixed.pop() or _FEW_ROWS, _FEW_ROWS)
    whole = _random_tensors(given).values()

    def made(rows: int) -> list[Any]:
        with keras.StatelessScope():
            results = run([tensor[:rows] for tensor in whole])
        return [tensor[: count // 2] for tensor in tf.nest.flatten(results)]

    try:
        first, again, half = made(count), made(count), made(count // 2)
    except Exception:  # the function may refuse random arguments, such as indices out of range
        return
    if difference := _difference("a result", half, first, again, 0.03):  # more than rounding, also of 16-bit floats
        raise OptionError(
            f"{name}: {difference}, if half of the rows are left out. Microbatches see some of the rows, so each row of a "
            f"result must depend on one row; {advice}"
        )


def results_in_training(run: Callable[..., Any], tensors: list[Any]) -> Any:
    """Return the results of a stage in training, for a comparison of rows.

    Raises:
        ValueError: the stage changes variables. Its rows may depend on others, as in batch normalization.
    """
    with keras.StatelessScope() as scope:
        results = run(tensors, training=True)
    if scope.state_mapping:
        raise ValueError(f"variables change: {len(scope.state_mapping)}")
    return results


def check_uses_own_variables(call: LayerCall, owners: dict[int, tuple[Any, Any]]) -> None:
    """Check that a copy has or uses no variable of the model in training, as a `Lambda` may do.

    Args:
        call: a call of the copy.
        owners: each layer of the model and its variable, by the `id` of the variable's handle.

    Raises:
        OptionError: it does.
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
    tensors = _random_tensors(call.inputs)

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


def _difference(
    what: str, found: Sequence[Any], first: Sequence[Any], again: Sequence[Any], tolerance: float
) -> str | None:
    """Describe a difference between found and first results, unless that result changes from the first call to another."""
    if len(found) != len(first):
        return f"{len(found)} outputs and losses, not {len(first)}"
    for one, other, wanted in zip(first, again, found):
        same = find_difference(what, other, one, tolerance) is None
        if same and (difference := find_difference(what, wanted, one, tolerance)):
            return difference
    return None


def _random_tensors(symbolic: Sequence[Any], largest: float = 1.0) -> dict[int, Any]:
    """Return random rows for symbolic tensors, by `id`. Integers are 0 or 1, which are valid indices for most layers."""

    def random(i: int, tensor: Any) -> Any:
        dtype = tf.as_dtype(tensor.dtype)
        shape = [size or _ROWS for size in tensor.shape]
        if dtype == tf.string:
            return tf.zeros(shape, dtype)
        low, high, drawn = (-largest, largest, tf.float32) if dtype.is_floating else (0, 2, tf.int32)
        return tf.cast(tf.random.stateless_uniform(shape, [0, i], low, high, drawn), dtype)

    return {id(tensor): random(i, tensor) for i, tensor in enumerate(symbolic)}
