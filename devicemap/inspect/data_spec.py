"""What a call is asked to do, before any of it runs: data, or the specs of data, as specs and a number of rows."""

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
class Asked:
    """The data of a call as far as its plan depends on it."""

    specs: Any
    """Nest of `tf.TypeSpec`s of the data, of shapes `[None, ...]`."""

    key: Any
    """As `Rows.key`: one trace serves one key."""

    rows: int | None
    """How many rows, `None` where nobody knows."""

    chunks: bool
    """Whether they go in chunks, or in one graph."""


def ask(data_or_spec: Any, options: Options) -> Asked:
    """What a call on this data, or on data of these specs, asks for. Nothing is read from a dataset.

    Raises:
        DataError: for data and specs that cannot be, and inside a `tf.function`, which has no data to speak of.
    """
    if not tf.executing_eagerly():
        raise DataError(
            "a plan cannot be made inside a tf.function; call explain outside of it, with data or with specs"
        )
    if isinstance(data_or_spec, tf.data.Dataset):
        source = from_dataset(data_or_spec, options)
        source.close()
        return Asked(source.specs, source.key, source.rows, chunks=True)
    if _is_shape(data_or_spec):
        raise DataError(
            f"data_or_spec is {data_or_spec}, a shape; expected data, or a spec, such as "
            f"tf.TensorSpec({data_or_spec}, tf.float32)"
        )
    chunks = options.batch_size is not None
    leaves: list[tuple[str, Any]] = []
    map_nest(lambda leaf, path: leaves.append((path, leaf)), data_or_spec, "data_or_spec")
    if any(isinstance(leaf, tf.TypeSpec) for _, leaf in leaves):
        count = _count(leaves)
        specs = map_nest(lambda leaf, _: any_rows(leaf), data_or_spec)
        return Asked(specs, freeze(specs), count, chunks)
    rows = as_rows(data_or_spec)
    return Asked(rows.specs, rows.key, rows.count, chunks)


def _is_shape(given: Any) -> bool:
    """Whether that is a shape and not data: a list of numbers may be rows, a tuple of them cannot."""
    if not isinstance(given, list | tuple) or not given:
        return isinstance(given, tf.TensorShape)
    return all(n is None or isinstance(n, int) for n in given) and (isinstance(given, tuple) or None in given)


def _count(leaves: Sequence[tuple[str, Any]]) -> int | None:
    """How many rows specs have, checked to be specs that agree; `None` where none of them knows."""
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
