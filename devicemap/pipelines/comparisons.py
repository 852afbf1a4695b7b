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
from devicemap.errors import OptionError, brief, error_text, warn_user
from devicemap.inspect.independence import UNKNOWN_SIZE, dependence_on_rows, difference, random_tensors
from devicemap.pipelines.layers import LayerCall

_FEW_ROWS = 8
"""Rows that are compared with half of them. They may be images, and the function a network."""

_TIMES = 5
"""Number of timings of a layer."""

_UNKNOWN_SIZES = UNKNOWN_SIZE, 12
"""Numbers that replace unknown dimensions. The second is for layers that take short sequences, or several rows as one."""

_LARGEST = 0.01, 1.0, 100.0
"""Largest magnitudes of random numbers: small ones show another epsilon, and large ones another limit."""


def accepted_size(call: LayerCall) -> int | None:
    """Return the number of `_UNKNOWN_SIZES` with which a call accepts random tensors. Warn and return `None` if it has none."""
    for size in _UNKNOWN_SIZES:
        try:
            for mode in _modes(call.layer):
                _results(call, random_tensors(call.inputs, unknown_size=size), mode)
            return size
        except Exception as error:  # of the user's layers
            reason = error_text(error)
    warn_user(
        f"{call.layer.name} fails for random tensors of the shapes and dtypes that it takes, so its copy is not compared with "
        f"it, and it counts as fast. Compare the outputs of the stages with those of the model. {reason}"
    )
    return None


def check_copy(call: LayerCall, of_copy: LayerCall, size: int, device: str) -> None:
    """Raise `OptionError` if a copy has other outputs, losses or new values than its layer, unless they change in each call.

    `device`: that of the copy, because XLA, which Keras uses for some convolutions, reads no variables of other devices.
    """
    layer = call.layer
    for largest, mode in product(_LARGEST, _modes(layer)):
        tensors = random_tensors(call.inputs, largest, unknown_size=size)
        try:
            first, again = (_results(call, tensors, mode) for _ in range(2))
        except tf.errors.InvalidArgumentError:  # indices out of range
            continue
        try:
            with tf.device(device):
                results = _results(of_copy, tensors, mode)
            found = difference("a result", results, first, again, 1e-3)
        except tf.errors.InvalidArgumentError as error:
            found = brief(error)
        if found:
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

    draws = False

    def stateless(tensors: list[Any]) -> Any:
        nonlocal draws
        with keras.StatelessScope() as scope:
            results = run(tensors)
        draws |= bool(scope.state_mapping)
        return results

    rows = min(fixed.pop() or _FEW_ROWS, _FEW_ROWS)
    if found := dependence_on_rows(stateless, given, rows, draws=lambda: draws):
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


def check_uses_own_variables(call: LayerCall, owners: dict[int, tuple[Any, Any]], size: int) -> None:
    """Raise `OptionError` if a copy has or uses a variable of the model in training, as a `Lambda` may do.

    `owners`: each layer of the model and its variable, by the `id` of the variable's handle.
    """
    captured = [handle for handle, _ in _graph_of(call, size, training=True).get_concrete_function().graph.captures]
    for handle in [*captured, *(variable.value.handle for variable in call.variables)]:
        if id(handle) in owners:
            owner, variable = owners[id(handle)]
            raise OptionError(
                f"a copy of {call.layer.name} would use {variable.path} of {owner.name} in the model itself; variables must "
                "not come from a function, an argument or a layer in get_config. Call one layer twice, or give a Pipeline "
                "functions of your own as stages"
            )


def seconds_of(call: LayerCall, size: int) -> float:
    """Return the time of a call in a graph, on random rows."""
    run = _graph_of(call, size)

    def wait() -> None:
        tf.nest.map_structure(lambda leaf: leaf.numpy(), run())  # waits for kernels on accelerators

    wait()
    return min(repeat(wait, number=1, repeat=_TIMES))


def _graph_of(call: LayerCall, size: int, **options: Any) -> Any:
    """Return a `tf.function` of a call on random rows, with these options of the layer's `call`."""
    tensors = random_tensors(call.inputs, unknown_size=size)

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


def _modes(layer: Any) -> list[dict[str, bool]]:
    """Return the options of calls in which a layer is compared."""
    return [{"training": False}, {"training": True}] if isinstance(layer, keras.Layer) else [{}]


def _results(call: LayerCall, tensors: dict[int, Any], mode: Any) -> list[Any]:
    """Return the outputs of a call, the losses that it adds, and the new values of variables."""
    with _unchanged(call.layer) as scope:
        outputs = tf.nest.flatten(call.run(tensors, **mode))
        values = map(scope.get_current_value, call.variables)
        return [*outputs, *scope.losses, *(value for value in values if value is not None)]
