"""Result leaves as plain arrays, and specs as JSON.

| leaf | arrays |
| --- | --- |
| dense | the values |
| ragged | the flat values, and the row splits from the outermost on |
| sparse | the indices, the values and the shape |
| strings | in place of the values: the lengths of the strings, and their bytes |

The bytes of a chunk are the bytes of all arrays of its leaves, one after another.
"""

from __future__ import annotations

import hashlib
import math
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.data.rows import HOST
from devicemap.data.structure import Node
from devicemap.errors import JournalError

START_AGAIN = "Write to another directory, or delete this one to start again"
"""Advice for a directory that is refused."""

WRONG_VALUES = ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError
"""Errors of Python, NumPy and TensorFlow for values that devicemap never writes."""

Array = np.ndarray[Any, Any]

_KINDS = {"dense": tf.TensorSpec, "ragged": tf.RaggedTensorSpec, "sparse": tf.SparseTensorSpec}


def describe_nest(specs: Any) -> Any:
    """Return a nest of specs as JSON. Raise `JournalError` if it has other structure or other leaves than can be stored.

    >>> describe_nest({"x": tf.TensorSpec([None, 3], tf.float32)})
    {'dict': [['x', {'dense': 'float32', 'shape': [None, 3]}]]}
    """
    if isinstance(specs, Node):
        if specs.kind is None:
            return {"value": repr(specs.static)}
        if specs.kind is list:
            return describe_nest(specs.parts)
        if not issubclass(specs.kind, Mapping):
            fields = [[str(name), describe_nest(part)] for name, part in zip(specs.names, specs.parts)]
            return {"namedtuple": specs.kind.__name__, "fields": fields, "metadata": repr(specs.static)}
        specs = dict(zip(specs.names, specs.parts))
    if isinstance(specs, Mapping):
        for key in specs:
            if not isinstance(key, str | int):
                raise JournalError(f"a dict has the key {key!r}; only keys that are str or int can be written to disk")
        return {"dict": [[key, describe_nest(specs[key])] for key in sorted(specs)]}
    if isinstance(specs, tuple) and hasattr(specs, "_fields"):
        fields = [[field, describe_nest(value)] for field, value in zip(specs._fields, specs)]
        return {"namedtuple": type(specs).__name__, "fields": fields}
    if isinstance(specs, tuple):
        return {"tuple": [describe_nest(spec) for spec in specs]}
    kind = next((name for name, spec_type in _KINDS.items() if type(specs) is spec_type), None)
    if kind is None or specs.dtype in (tf.resource, tf.variant):
        raise JournalError(
            f"{specs} cannot be written to disk; expected tuples, named tuples and dicts of dense, ragged and sparse "
            "tensors of numbers or strings"
        )
    described = {kind: specs.dtype.name, "shape": None if specs.shape.rank is None else specs.shape.as_list()}
    if kind == "ragged":
        described |= {"ragged_rank": specs.ragged_rank, "row_splits": specs.row_splits_dtype.name}
    return described


def structure_of(described: Any) -> Any:
    """Return the nest of specs that JSON describes, with named tuples for objects. Other JSON raises an error."""
    structure = _specs_of(described)
    describe_nest(structure)  # checks dtypes and keys
    return structure


def _specs_of(described: Any) -> Any:
    def inner(entries: Any) -> dict[Any, Any]:
        return {key: _specs_of(value) for key, value in entries if "value" not in value}

    if "dict" in described:
        return inner(described["dict"])
    if "tuple" in described:
        return tuple(inner(enumerate(described["tuple"])).values())
    if "namedtuple" in described:
        fields = inner(described["fields"])
        kind: Any = namedtuple(described["namedtuple"], [*fields], rename=True)  # type: ignore[misc]
        return kind(*fields.values())
    shape = described["shape"]
    if shape is not None:  # NumPy refuses an invalid or too large shape
        np.broadcast_to(0, [1 if size is None else size for size in shape[1:]])
    (name,) = {*_KINDS} & {*described}
    more = [described["ragged_rank"], tf.as_dtype(described["row_splits"])] if name == "ragged" else []
    return _KINDS[name](shape and [None, *shape[1:]], tf.as_dtype(described[name]), *more)


def encode_leaves(leaves: Sequence[Any]) -> list[Array]:
    """Return the arrays of eager leaves."""
    arrays: list[Array] = []
    for tensor in tf.nest.flatten(list(leaves), expand_composites=True):
        array = np.asarray(tensor, order="C")
        if array.dtype.hasobject:
            strings = array.ravel().tolist()
            arrays.append(np.fromiter(map(len, strings), np.int64, len(strings)).reshape(array.shape))
            array = np.frombuffer(b"".join(strings), np.uint8)
        arrays.append(array)
    return arrays


def bytes_of(array: Array) -> memoryview:
    """Return the bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def digest(leaves: Sequence[Any]) -> str:
    """Return a digest of the shapes and values of leaves, without their dtypes."""
    hashed = hashlib.blake2b(digest_size=16)
    for array in encode_leaves(leaves):
        hashed.update(f"{array.shape} ".encode())
        hashed.update(bytes_of(array))
    return hashed.hexdigest()


def decode_leaves(data: bytearray, shapes: Sequence[Any], specs: Sequence[Any], rows: int) -> list[Any]:
    """Return leaves from the bytes of their arrays. Raise `ValueError`, or an error of TensorFlow, if they do not fit."""
    dtypes: list[Any] = []
    for part in tf.nest.flatten(list(specs), expand_composites=True):
        dtypes += [np.int64, np.uint8] if part.dtype == tf.string else [part.dtype.as_numpy_dtype]
    sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in zip(shapes, dtypes)]
    _require(len(shapes) == len(dtypes) and sum(sizes) == len(data))
    layout = zip(sizes, accumulate(sizes), dtypes, shapes)
    every = np.frombuffer(data, np.uint8)
    arrays = (np.require(every[b - size : b].view(dtype).reshape(shape), None, "A") for size, b, dtype, shape in layout)
    with tf.device(HOST):
        return [_decode_leaf(arrays, spec, rows) for spec in specs]


def _decode_leaf(arrays: Iterator[Array], spec: Any, rows: int) -> Any:
    specs = tf.nest.flatten(spec, expand_composites=True)
    parts = [_strings(next(arrays), next(arrays)) if part.dtype == tf.string else next(arrays) for part in specs]
    leaf = parts[0]
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.convert_to_tensor(parts[0], spec.dtype)
        leaf = tf.RaggedTensor.from_nested_row_splits(values, parts[1:], validate=True)
    elif isinstance(spec, tf.SparseTensorSpec):
        indices, values, sizes = parts
        _require(np.all(sizes >= 0) and math.prod(max(n, 1) for n in sizes.tolist()) < 2**62)
        _require(np.all((indices >= 0) & (indices < sizes)))
        leaf = tf.SparseTensor(indices, tf.convert_to_tensor(values, spec.dtype), sizes)
    _require(leaf.shape[0] == rows and spec.shape.is_compatible_with(leaf.shape))
    return leaf


def _strings(lengths: Array, every: Array) -> Array:
    data = every.tobytes()
    _require(not np.any((lengths < 0) | (lengths > len(data))) and int(lengths.sum()) == len(data))
    stops = np.cumsum(lengths).tolist()
    strings = np.empty(len(stops), object)
    strings[:] = [data[start:stop] for start, stop in zip([0, *stops], stops)]
    return strings.reshape(lengths.shape)


def _require(condition: Any) -> None:
    if not condition:
        raise ValueError("their arrays do not fit the description of the results")
