"""Losses and mean metrics of Keras with a value for each row, which are computed on the devices of the outputs.

    outputs on a device ── function of Keras <── rows of the targets
                           │
                           └── a value for each row, joined at home: weights, masks and reductions are Keras's

Outputs that nothing else needs stay on the devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from devicemap._tensorflow.gradients import tape_is_recording
from devicemap._tensorflow.keras import function_of_rows, losses_of, measure, metrics_of, overrides_call, replacing
from devicemap.errors import failure
from devicemap.pipelines.losses import is_of_one_row

_METRICS = (
    "binary_accuracy",
    "categorical_accuracy",
    "sparse_categorical_accuracy",
    "top_k_categorical_accuracy",
    "sparse_top_k_categorical_accuracy",
)

Key = tuple[int, int, int]
"""The identity of a loss or metric, and the indices of its target and its output."""


class RowLosses:
    """The values that losses and metrics of a compiled model have for each row of a batch."""

    def __init__(self, model: Any, targets: Any):
        """`model`: a compiled Keras model. `targets`: `y` of a batch, a nest."""
        self._model, self._targets = model, targets
        self.rows = tuple(tf.nest.flatten(targets))
        """The targets."""
        both = (*losses_of(model), *metrics_of(model))
        self._functions = {id(each): found for each in both if (found := _function_of(each)) is not None}
        """The functions of losses and metrics, by identity of the latter, before `used` replaces them."""
        self._calls = {id(each): each.call for each in losses_of(model)}
        """The `call` methods of losses."""
        self.keys: tuple[Key, ...] = ()
        """The losses and metrics with a value for each row."""
        self.complete = False
        """Whether `keys` has every loss, so that outputs need no gradient."""
        self._outputs: list[Any] = []
        self._values: dict[Key, Any] = {}

    def fit(self, count: int | None) -> bool:
        """Return whether there are losses, and the targets are dense tensors of a graph with `count` rows."""
        if tf.executing_eagerly() or not self._calls or not self.rows:  # eager tensors do not show the source of a cast
            return False
        if any(map(overrides_call, losses_of(self._model))):  # such a loss may use rows in any way
            return False
        return all(isinstance(leaf, tf.Tensor) and leaf.shape.rank and leaf.shape[0] == count for leaf in self.rows)

    def find(self, outputs: Any, rows: Sequence[Any], count: int) -> None:
        """Find the losses and metrics with a value for each row. Of all axes, only that of rows has length `count`."""
        self.keys, self.complete = (), False
        leaves = tf.nest.flatten(outputs)
        if len({*map(id, leaves)}) < len(leaves):  # equal outputs become different tensors when they are joined
            return
        if not all(isinstance(leaf, tf.Tensor) and leaf.shape.rank and leaf.shape[0] == count for leaf in leaves):
            return
        try:
            found, missed = self._measured(outputs, rows)
        except (TypeError, ValueError, tf.errors.InvalidArgumentError):  # the call for all rows raises the error
            return
        self.keys = tuple(
            key
            for key, value in found.items()
            if value.shape.rank and value.shape[0] == count and [*value.shape].count(count) == 1
        )
        # An activity regularizer of the model itself also needs the outputs.
        needed = missed or self._model.activity_regularizer is not None
        self.complete = not needed and all(key in self.keys for key in found if key[0] in self._calls)

    def of_rows(self, outputs: Any, rows: Sequence[Any]) -> list[Any]:
        """Return the values `[rows, ...]` of all `keys`, with their masks, in the graph that is being traced."""
        found = self._measured(outputs, rows)[0] if self.keys else {}
        return [found[key] for key in self.keys]

    def keep(self, outputs: Any, values: Sequence[Any]) -> None:
        """Store values of all rows, which Keras uses for these outputs."""
        self._outputs, self._values = tf.nest.flatten(outputs), dict(zip(self.keys, values))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Return a context in which losses and metrics use the values of `keep`."""
        with ExitStack() as replaced:
            for each in (*losses_of(self._model), *metrics_of(self._model)):
                if id(each) in self._functions:
                    name = "call" if hasattr(each, "call") else "_fn"
                    call = partial(self._used, id(each), getattr(each, name))
                    replaced.enter_context(replacing(each, **{name: call}))
            yield

    def _used(self, owner: int, call: Any, y_true: Any, y_pred: Any, **options: Any) -> Any:
        key = self._key(owner, y_true, y_pred, self.rows, self._outputs)
        if key in self._values:
            return self._values[key]
        # If `complete`, outputs have no gradient. Layers call losses before `keep`, and metrics run outside of the tape.
        if self.complete and owner in self._calls and self._values and tape_is_recording():
            raise failure(
                f"a loss of {self._model.name} takes a target that is not from the batch, or an output that is not from the "
                "call of the model; compute the loss in a train_step of the model"
            )
        return call(y_true, y_pred, **options)

    def _measured(self, outputs: Any, rows: Sequence[Any]) -> tuple[dict[Key, Any], bool]:
        """Return the values for some rows, and whether a loss has no value."""
        found, missed, leaves = dict[Key, Any](), list[Any](), tf.nest.flatten(outputs)

        def loss(each: Any, y_true: Any, y_pred: Any) -> Any:
            key = self._key(id(each), y_true, y_pred, rows, leaves)
            function, _ = self._functions.get(id(each), (None, {}))
            if key is None or function is None or not _is_aligned(function, y_true.shape, y_pred.shape, squeezed=True):
                missed.append(each)
                return tf.zeros([1])
            found[key] = self._calls[id(each)](y_true, y_pred)
            return found[key]

        def metric(each: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            key = self._key(id(each), y_true, y_pred, rows, leaves)
            function, options = self._functions.get(id(each), (None, {}))
            if key is not None and function is not None and _is_aligned(function, y_true.shape, y_pred.shape):
                # As in Keras, metrics have no gradient: it may be NaN, and stays so if it is multiplied by zero.
                found[key] = tf.stop_gradient(function(y_true, y_pred, **options))

        with ExitStack() as replaced:
            for each in losses_of(self._model):
                replaced.enter_context(replacing(each, call=partial(loss, each)))
            for each in metrics_of(self._model):
                replaced.enter_context(replacing(each, update_state=partial(metric, each)))
            measure(self._model, tf.nest.pack_sequence_as(self._targets, list(rows)), outputs)
        return found, bool(missed)

    @staticmethod
    def _key(owner: int, y_true: Any, y_pred: Any, targets: Sequence[Any], outputs: Sequence[Any]) -> Key | None:
        true, pred = _index_of(y_true, targets), _index_of(y_pred, outputs)
        return None if true is None or pred is None else (owner, true, pred)


def needing_all_rows(model: Any) -> list[Any]:
    """Return the losses and metrics of a compiled model that need outputs of all rows."""
    return [each for each in (*losses_of(model), *metrics_of(model)) if _function_of(each) is None]


def _function_of(each: Any) -> tuple[Any, dict[str, Any]] | None:
    """Return the function and options of a loss or metric whose value for a row depends on that row alone, or `None`."""
    found = function_of_rows(each)
    if found is None or found[1].get("axis", -1) != -1:
        return None
    is_metric = any(found[0] is getattr(keras.metrics, name) for name in _METRICS)
    return found if is_metric or is_of_one_row(found[0]) else None


def _is_aligned(function: Any, true: Any, pred: Any, squeezed: bool = False) -> bool:
    """Whether targets and outputs of these shapes have their rows at the same axis: some functions broadcast any ranks.

    `squeezed`: Keras's losses first squeeze or add a last axis of length 1.
    """
    longer, shorter = sorted((true, pred), key=len, reverse=True)
    if squeezed and len(longer) == len(shorter) + 1 and longer[-1] == 1:
        return True
    if function.__name__.startswith("sparse_"):
        return len(pred) > 1 and len(true) in (len(pred) - 1, len(pred))
    return len(true) == len(pred)


def _index_of(tensor: Any, tensors: Sequence[Any]) -> int | None:
    """Return the index of a tensor, or of the source of its cast, in `tensors`. Losses cast targets and outputs."""
    cast = isinstance(tensor, tf.Tensor) and not hasattr(tensor, "numpy") and tensor.op.type == "Cast"
    sources = [tensor, tensor.op.inputs[0]] if cast else [tensor]
    return next((i for source in sources for i, each in enumerate(tensors) if each is source), None)
