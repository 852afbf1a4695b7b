"""The specs of the data of a call, from data or from specs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from devicemap.data.rows import any_rows, as_rows
from devicemap.data.sources import from_dataset
from devicemap.data.structure import freeze, map_nest
from devicemap.errors import DataError
from devicemap.options import Options

_SPECS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)


@dataclass(frozen=True)
class DataSpec:
    """Specs of data."""

    specs: Any
    """Nest of `tf.TypeSpec`s of shapes `[None, ...]`."""

    key: Any
    """As `Rows.key`: one trace serves one key."""

    rows: int | None
    """Number of rows, `None` if unknown."""

    chunks: bool
    """Whether a call uses chunks."""


def data_spec(data_or_spec: Any, options: Options) -> DataSpec:
    """Return the specs of data, or of a nest of specs. Nothing is read from a dataset.

    Raises:
        DataError: for other data and specs, and inside a `tf.function`.
    """
    if not tf.executing_eagerly():
        raise DataError(
            "a plan cannot be made inside a tf.function; call explain outside of it, with data or with specs"
        )
    if isinstance(data_or_spec, tf.data.Dataset):
        source = from_dataset(data_or_spec, options)
        source.close()
        return DataSpec(source.specs, source.key, source.rows, chunks=True)
    if _is_shape(data_or_spec):
        raise DataError(
            f"data_or_spec is {data_or_spec}, a shape; expected data, or a spec, such as "
            f"tf.TensorSpec({data_or_spec}, tf.float32)"
        )
    chunks = options.batch_size is not None
    leaves: list[tuple[str, Any]] = []
    map_nest(lambda leaf, path: leaves.append((path, leaf)), data_or_spec, "data_or_spec")
    if not any(isinstance(leaf, tf.TypeSpec) for _, leaf in leaves):
        rows = as_rows(data_or_spec)
        return DataSpec(rows.specs, rows.key, rows.count, chunks)
    count = _row_count(leaves)
    specs = map_nest(lambda leaf, _: any_rows(leaf), data_or_spec)
    return DataSpec(specs, freeze(specs), count, chunks)


def _is_shape(given: Any) -> bool:
    """Return whether this is a shape. A list of numbers may be rows, a tuple of numbers cannot."""
    if not isinstance(given, list | tuple) or not given:
        return isinstance(given, tf.TensorShape)
    return all(n is None or isinstance(n, int) for n in given) and (isinstance(given, tuple) or None in given)


def _row_count(leaves: Sequence[tuple[str, Any]]) -> int | None:
    """Check specs, and return their number of rows; `None` if no spec contains it."""
    for path, leaf in leaves:
        if not isinstance(leaf, _SPECS):
            raise DataError(
                f"{path} is a {type(leaf).__name__}; expected tf.TensorSpec, tf.RaggedTensorSpec or tf.SparseTensorSpec in "
                "every leaf, or data in every leaf, or a tf.data.Dataset"
            )
        if not leaf.shape.rank:
            raise DataError(
                f"{path} is {leaf}; every leaf needs rows as its first axis, of shape [rows, ...] or [None, ...]"
            )
    counts = {path: leaf.shape[0] for path, leaf in leaves if leaf.shape[0] is not None}
    if len(set(counts.values())) > 1:
        lengths = ", ".join(f"{path} has {count}" for path, count in counts.items())
        raise DataError(f"the leaves have different numbers of rows: {lengths}. They must share their first axis")
    return next(iter(counts.values()), None)
