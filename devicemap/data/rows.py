"""Convert the user's data to leaves that share their first axis; count and cut their rows.

The conventions are `tf.data`'s: tuples and dicts are structure, lists become tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, is_dataclass
from datetime import date, timedelta
from functools import cached_property
from os import PathLike
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.data.structure import freeze, map_nest
from devicemap.errors import DataError

HOST = "/device:CPU:0"
"""The device on which data is converted and cut. By default, the placer would copy all data to the first GPU."""

_SPECS = tf.TensorSpec | tf.RaggedTensorSpec | tf.SparseTensorSpec


@dataclass(frozen=True)
class Rows:
    """A nest whose leaves are dense, ragged or sparse tensors with the same number of rows."""

    structure: Any
    """The nest itself."""

    leaves: tuple[Any, ...]
    """Its leaves in `tf.nest`'s order, each of shape `[count, ...]`."""

    count: int | None
    """The number of rows; `None` if it is unknown inside a `tf.function`."""

    @cached_property
    def key(self) -> Any:
        """A hashable value of the structure, and the dtype and shape of a row of each leaf. Each key needs one trace."""
        return structure_key(self.structure)

    @property
    def specs(self) -> Any:
        """The nest of `tf.TypeSpec`s of the leaves, for any number of rows."""
        return tf.nest.map_structure(spec_of, self.structure)


def as_rows(data: Any, or_specs: bool = False) -> Rows:
    """Convert `data` to rows.

    Args:
        data: a nest of tensors, NumPy arrays, lists, `RaggedTensor`s and `SparseTensor`s.
        or_specs: whether leaves may also be the specs of tensors.

    Raises:
        DataError: for a leaf that is not a tensor or has no row axis, and for an empty nest. Also for leaves with different
            numbers of rows, which the message lists.
    """
    if isinstance(data, tf.Tensor) and data.shape.rank:  # fast for small calls
        return Rows(data, (data,), data.shape[0])
    counts: dict[str, int | None] = {}

    def converted(value: Any, path: str) -> Any:
        leaf = value if or_specs and isinstance(value, _SPECS) else _convert(value, path)
        counts[path] = _count(leaf, path)
        return leaf

    with tf.device(HOST):
        structure = map_nest(converted, data, "data")
    known = {count for count in counts.values() if count is not None}
    try:
        rows = Rows(structure, tuple(tf.nest.flatten(structure)), next(iter(known), None))
        hash(rows.key)
    except TypeError as error:
        raise DataError(
            f"data is a nest that TensorFlow cannot sort or compare ({error}); use keys of one type in dicts, and hashable "
            "metadata in __tf_flatten__"
        ) from error
    if not rows.leaves:
        raise DataError(f"data is {data!r}, a nest without leaves; expected at least one tensor to map over")
    if len(known) > 1:
        lengths = ", ".join(f"{path} has {count}" for path, count in counts.items())
        raise DataError(
            f"the leaves of data have different numbers of rows: {lengths}. They must share their first axis"
        )
    return rows


def structure_key(nest: Any) -> Any:
    """Return the hashable value of a nest of tensors or their `tf.TypeSpec`s that `Rows.key` describes."""
    return freeze(nest, _key)


def _key(leaf: Any) -> Any:
    """Return the key of a leaf or its spec. Specs of dense tensors would take longer to make and to compare."""
    if isinstance(leaf, tf.Tensor | tf.TensorSpec):
        return leaf.dtype, leaf.shape[1:]
    return spec_of(leaf)


def spec_of(leaf: Any) -> Any:
    """Return the spec of a leaf or of a spec for any number of rows, without a name.

    >>> spec_of(tf.zeros([4, 3])).shape.as_list()
    [None, 3]
    """
    spec = tf.type_spec_from_value(leaf) if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor) else leaf
    shape = tf.TensorShape([None]).concatenate(spec.shape[1:])
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return (tf.SparseTensorSpec if isinstance(spec, tf.SparseTensorSpec) else tf.TensorSpec)(shape, spec.dtype)


def row_spec(spec: Any) -> Any:
    """Return the spec of one row. A ragged tensor with one ragged dimension has dense rows."""
    if isinstance(spec, tf.RaggedTensorSpec):
        if spec.ragged_rank > 1:
            return tf.RaggedTensorSpec(spec.shape[1:], spec.dtype, spec.ragged_rank - 1, spec.row_splits_dtype)
        return tf.TensorSpec(spec.shape[1:], spec.dtype)
    return type(spec)(spec.shape[1:], spec.dtype)


def empty_rows(spec: Any) -> Any:
    """Return a leaf of this spec without rows. Unknown inner dimensions are 0. An unknown rank gives no inner dimensions."""
    inner = [] if spec.shape.rank is None else [d or 0 for d in spec.shape[1:].as_list()]
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.constant([], spec.dtype, [0, *inner[spec.ragged_rank :]])
        splits = [tf.zeros([1], spec.row_splits_dtype)] * spec.ragged_rank
        return tf.RaggedTensor.from_nested_row_splits(values, splits, validate=False)
    if isinstance(spec, tf.SparseTensorSpec):
        dense_shape = tf.constant([0, *inner], tf.int64)
        return tf.SparseTensor(tf.zeros([0, len(inner) + 1], tf.int64), tf.constant([], spec.dtype, [0]), dense_shape)
    return tf.constant([], spec.dtype, [0, *inner])


def cut_rows(leaf: Any, sizes: Any, shards: int) -> list[Any]:
    """Split a leaf `[rows, ...]` into `shards` leaves with these numbers of rows, int32 `[shards]`."""
    if shards == 1:
        return [leaf]
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        stops = tf.cumsum(sizes)
        return [take_rows(leaf, stops[i] - sizes[i], stops[i]) for i in range(shards)]
    return list(tf.split(leaf, sizes, num=shards))


def take_rows(leaf: Any, start: Any, stop: Any) -> Any:
    """Return rows `start` to `stop - 1` of a dense, ragged or sparse leaf."""
    if isinstance(leaf, tf.SparseTensor):
        head = tf.cast(tf.stack([start]), tf.int64)
        size = tf.concat([tf.cast(tf.stack([stop - start]), tf.int64), leaf.dense_shape[1:]], 0)
        start_of_slice = tf.concat([head, tf.zeros_like(leaf.dense_shape[1:])], 0)
        return tf.sparse.slice(leaf, start_of_slice, size)
    return leaf[start:stop]


def first_rows(rows: Rows, most: int) -> Rows:
    """Return at most `most` rows from the start."""
    if rows.count is not None and rows.count <= most:
        return rows
    with tf.device(HOST):
        return as_rows(tf.nest.map_structure(lambda leaf: take_rows(leaf, 0, most), rows.structure))


def count_rows(leaf: Any, dtype: Any = tf.int64) -> Any:
    """Return the number of rows of a leaf as a scalar. On GPUs, kernels compute int32 on the host, where loops need it."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(dtype)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], dtype)
    return tf.shape(leaf, dtype)[0]


def _convert(value: Any, path: str) -> Any:
    if isinstance(value, tf.Tensor | tf.RaggedTensor | tf.SparseTensor):
        return value
    if value is None or isinstance(value, str | bytes) or callable(value):
        raise DataError(f"{path} is {value!r}; expected a tensor, an array or a list with rows as its first axis")
    if isinstance(value, Iterator) or hasattr(value, "__next__"):
        raise DataError(
            f"{path} is a {type(value).__name__}, which can be read only once and has no length; pass "
            "list(...) of it, or tf.data.Dataset.from_generator(...) to read it while mapping"
        )
    entries = value if isinstance(value, list) else [value]
    masking = any(issubclass(kind, np.ma.MaskedArray) for kind in set(map(type, entries)))  # fast for long lists
    if masking and any(map(np.ma.is_masked, entries)):
        holding = f"{path} {'holds' if entries is value else 'is'}"
        raise DataError(
            f"{holding} a masked array, whose mask TensorFlow would drop; pass array.filled(...), or its mask beside it: "
            "{'values': array.data, 'mask': array.mask}"
        )
    if isinstance(value, tf.data.Dataset):
        raise DataError(f"{path} is a Dataset inside a nest; zip datasets with tf.data.Dataset.zip and pass the result")
    if hasattr(value, "toarray") and not hasattr(value, "__array__"):
        raise DataError(
            f"{path} is a {type(value).__name__}, a sparse matrix; pass its .toarray(), or a tf.SparseTensor"
        )
    if hasattr(value, "__getitem__") and not isinstance(value, Sequence) and not _is_array(value):
        raise DataError(
            f"{path} is a {type(value).__name__}, whose items may be rows or batches; pass tf.data.Dataset.from_generator("
            "lambda: (data[i] for i in range(len(data))), output_signature=...), with batched=True if they are batches"
        )
    of_objects = getattr(getattr(value, "dtype", None), "kind", None) == "O"
    try:
        # In a graph, TensorFlow 2.22 takes the memory of arrays inside an array for text (test_messages).
        with tf.init_scope() if of_objects else nullcontext():
            return tf.convert_to_tensor(value)
    except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
        shape = f" of shape {np.shape(value)}" if isinstance(value, np.ndarray) else ""
        raise DataError(
            f"{path} is a {type(value).__name__}{shape} that does not convert to a tensor ({error!s:.500}){_hint(value)}"
        ) from error


def _is_array(value: Any) -> bool:
    """Return whether an object has a protocol with which TensorFlow reads it as a whole."""
    return any(hasattr(value, name) for name in ("__array__", "__array_interface__", "__tf_tensor__"))


def _hint(value: Any) -> str:
    """Return advice for data that does not convert to a tensor."""
    if hasattr(value, "columns"):
        return "; columns of different dtypes are a dict: dict(frame)"
    if is_dataclass(value):
        return "; pass a dict of its fields, such as vars(data), or define __tf_flatten__ and __tf_unflatten__"
    if isinstance(value, set | frozenset):
        return "; a set has no order: pass sorted(data)"
    kind = getattr(getattr(value, "dtype", None), "kind", None)
    if kind == "V":
        return "; the fields of a structured array are a dict: {name: array[name] for name in array.dtype.names}"
    entries = list(value) if isinstance(value, list) or (kind == "O" and np.ndim(value)) else []
    if kind == "m" or (entries and isinstance(entries[0], timedelta)):
        return "; TensorFlow has no dtype for times: pass np.asarray(times, 'timedelta64[ns]').astype('int64')"
    if kind == "M" or (entries and isinstance(entries[0], date)):
        return "; TensorFlow has no dtype for times: pass np.asarray(times, 'datetime64[ns]').astype('int64')"
    if entries and isinstance(entries[0], PathLike):
        return "; make text of paths: [str(path) for path in paths]"
    if entries and isinstance(entries[0], Mapping):
        return "; a dict of columns has rows: {key: [row[key] for row in rows] for key in rows[0]}"
    if any(isinstance(entry, tf.RaggedTensor) for entry in entries):
        return "; tf.ragged.stack makes one ragged tensor of several"
    if entries and all(isinstance(entry, tf.Tensor) or _is_array(entry) for entry in entries):
        shapes = sorted({tuple(np.shape(entry)) for entry in entries}, key=repr)
        if len(shapes) == 1:
            return "; make one array of its entries: np.stack([np.asarray(entry) for entry in entries])"
        return (
            f"; its entries have {len(shapes)} shapes, such as {[*shapes[0]]} and {[*shapes[-1]]}: give rows one shape, make "
            "them ragged (tf.ragged.stack), or pass tf.data.Dataset.from_generator. Several arguments are a tuple, not a list"
        )
    if any(isinstance(entry, list | tuple) for entry in entries):
        return "; tf.ragged.constant makes rows of different lengths"
    if 0 < sum(isinstance(entry, str) for entry in entries) < len(entries):
        return (
            "; some entries are text and others are not, such as NaN for missing text: series.fillna('') replaces them"
        )
    return "; give it a dtype with .astype" if kind == "O" else ""


def _count(leaf: Any, path: str) -> int | None:
    """Return the number of rows, which tensors in eager code know."""
    if not leaf.shape.rank:
        what, advice = "a scalar", "Close over values that are the same for every row instead of passing them as data"
        if leaf.shape.rank is None:
            what, advice = "of unknown rank", "Set its shape with tf.ensure_shape(x, [None, ...])"
        raise DataError(
            f"{path} is {what} ({leaf.dtype.name}); every leaf needs rows as its first axis, of shape [rows, ...]. {advice}"
        )
    if leaf.shape[0] is not None:
        return int(leaf.shape[0])
    return int(count_rows(leaf)) if tf.executing_eagerly() and not isinstance(leaf, _SPECS) else None
