"""The steps of Keras's loops: one call of a `tf.function` for each batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.keras import losses_of
from devicemap.data.structure import freeze
from devicemap.devices import is_out_of_memory
from devicemap.errors import brief, function_error

_ADVICE = (
    "A smaller batch_size needs less memory on each device. accumulate= and recompute= of devicemap.parallelize need less for "
    "the same step, devicemap.spread_variables() distributes the optimizer's slots, and a devicemap.Pipeline the layers"
)


class Steps:
    """A train, test or predict function of a Keras model."""

    def __init__(self, model: Any, build: Callable[[Any], object], step: Callable[[Any], Any], sizes: Counter[int]):
        """
        Args:
            model: the Keras model.
            build: called with a batch before the first step, to build a model that is not built.
            step: maps a batch to its results. It is traced unless the model runs eagerly.
            sizes: counts steps by their number of rows.
        """
        self._model, self._build, self._step, self._sizes = model, build, step, sizes
        self._functions: dict[Any, Any] = {}

    def __call__(self, batches: Iterable[Any]) -> list[Any]:
        """Run `steps_per_execution` steps and return the results of each.

        Raises:
            StopIteration: there are no more batches.
            FunctionError: a step ran out of memory.
        """
        specs = getattr(batches, "element_spec", None)  # Keras weights some means by static numbers of rows
        if any(isinstance(spec, tf.OptionalSpec) for spec in tf.nest.flatten(specs)):
            specs = None
        results = [self._run(batch, specs) for batch in islice(iter(batches), self._model.steps_per_execution)]
        if not results:
            raise StopIteration
        return results

    def _run(self, batch: Any, specs: Any) -> Any:
        batch = _without_optionals(batch)
        self._build(batch)
        try:
            results = self._function(specs)(batch)
        except tf.errors.OpError as error:
            if not is_out_of_memory(error):
                raise
            message = f"{self._model.name} ran out of memory: {brief(error)}. {_ADVICE}"
            raise function_error(message, error) from error
        self._sizes[count_of(batch) or 0] += 1
        return results

    def _function(self, specs: Any) -> Any:
        if self._model.run_eagerly:
            return self._step
        # Keras builds its losses in the first step. If an optimizer creates no variable, that step is traced only once.
        key = freeze(specs), bool(losses_of(self._model))
        if key not in self._functions:
            signature = None if specs is None else [specs]
            self._functions[key] = tf.function(self._step, signature, autograph=False, reduce_retracing=True)
        return self._functions[key]


def count_of(batch: Any) -> int | None:
    """Return the number of rows of a batch, `None` if it is unknown."""
    shapes = [tf.TensorShape(leaf.shape) for leaf in tf.nest.flatten(batch) if leaf is not None]
    return next((shape[0] for shape in shapes if shape.rank), None)


def _without_optionals(batch: Any) -> Any:
    """Replace empty optionals by `None`, as Keras does."""
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch)
