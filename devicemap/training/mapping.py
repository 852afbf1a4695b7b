"""Map the calls of a Keras model and its layers in a step, with the outputs, losses and new values of one device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import in_vectorized_map
from devicemap._tensorflow.gradients import have_tangents
from devicemap._tensorflow.keras import replacing, tf_variable
from devicemap._tensorflow.keras_calls import is_stateless
from devicemap.errors import DataError
from devicemap.training.forward import ForwardPass
from devicemap.training.mapped_call import MappedCall
from devicemap.training.row_losses import RowLosses
from devicemap.training.stateless import CallArguments


@contextmanager
def mapping(
    forward: ForwardPass, rows: int | None, microbatches: int, losses: bool, row_losses: RowLosses | None
) -> Iterator[None]:
    """Map the outermost calls of the model and of its layers by this thread in this context.

    Args:
        rows: the number of rows of the batch, `None` if it is unknown.
        microbatches: number of parts in which each device runs its rows, in the first call of the model.
        losses: whether losses that layers add are collected.
        row_losses: losses of the only call of the model.
    """
    thread = threading.get_ident()

    def mapped(layer: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a call of a layer with a shard of rows on each device. A call without rows runs unmapped.

        So does a call in `tf.vectorized_map`, which would drop the gradients of a function.
        """
        if threading.get_ident() != thread:
            return call(*args, **kwargs)
        given = CallArguments.of(args, kwargs, losses)
        if not given.has_rows(rows) or not layer.built or is_stateless() or in_vectorized_map():
            return call(*args, **kwargs)
        handles = [tf_variable(variable).handle for variable in forward.variables]
        if have_tangents([*tf.nest.flatten(given.rows, expand_composites=True), *handles]):
            raise DataError(
                f"a tf.autodiff.ForwardAccumulator follows what {layer.name} takes, and gathering rows has no forward mode; "
                "use a tf.GradientTape"
            )
        of_model = layer is forward.model
        parts = microbatches if of_model and not forward.calls else 1  # microbatches have no gradients to their inputs
        forward.calls += 1
        with forward.plain():
            mapped_call = MappedCall(forward, layer, given, parts, row_losses if of_model else None)
            with replacing(layer, activity_regularizer=None):  # Keras adds its loss for the mapped call
                results = mapped_call.run()
        return mapped_call.collect(results)

    with ExitStack() as replaced:
        for layer, _ in forward.layers:
            replaced.enter_context(replacing(layer, call=partial(mapped, layer, layer.call)))
        if row_losses is not None:
            replaced.enter_context(row_losses.used())
        yield
