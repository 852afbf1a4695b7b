"""Chunks as bytes: a line of JSON with the shapes of some arrays, and behind it the arrays, one after another.

Nothing is packed, so nothing unpacks to more than there is; and which arrays there are, their dtypes, and what is known of
their shapes, is told by the header of the folder alone. Bytes that do not fit it are no chunk.

| leaf | arrays |
| --- | --- |
| dense | `values` |
| ragged | `values`, flat, and `splits0`, `splits1`, ... |
| sparse | `values`, `indices` and `shape` |
| any of strings | `bytes`, of all of them, and `lengths`, in the place of `values` |
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_Shape = list[Any]
"""A shape as far as it is known: `None` for a dimension, and at its end `...` for any number of them."""

_Part = tuple["np.dtype[Any]", _Shape]
_Place = tuple["np.dtype[Any]", list[int], int]
"""An array as far as it is known; and one in a chunk, with where it begins."""

_MOST_DIMENSIONS = 32
"""NumPy's, before its second version."""

_ALIGNED_BYTES = 16


def pack_arrays(arrays: Mapping[str, Array]) -> bytes:
    """The bytes of a chunk; none of the arrays may be of dtype object."""
    assert all(not array.dtype.hasobject for array in arrays.values())
    plain = [np.asarray(array, array.dtype.newbyteorder("<"), order="C") for array in arrays.values()]
    contents = [array.reshape(-1).view("u1").data for array in plain]
    return b"".join([_first_line([array.shape for array in plain]), *contents])


def leaves_of(described: Any) -> list[Any]:
    """The leaves of a nest as `encoding.describe_nest` writes it, in order."""
    for kind, entries in described.items():
        if kind in ("dict", "fields"):
            return [leaf for _, part in entries for leaf in leaves_of(part)]
        if kind == "tuple":
            return [leaf for part in entries for leaf in leaves_of(part)]
    return [] if "value" in described else [described]


class Layout:
    """What the chunks of a folder hold, by the description of its results."""

    def __init__(self, described: Any, states: bool = False):
        """`described`: as `encoding.describe_nest` writes it. `states`: whether each chunk is one row, whatever it is of."""
        self._leaves = leaves_of(described)
        self._states = states
        self._size_bytes = lru_cache(64)(self._size_bytes_of)  # chunks are alike
        self._places = lru_cache(64)(self._places_by)

    def allows(self, rows: int, size_bytes: int) -> bool:
        """Whether a chunk of so many rows of data may have that size: where all shapes are known, there is but one."""
        return self._size_bytes(1 if self._states else rows) in (None, size_bytes)

    def unpack(self, data: bytearray, rows: int) -> list[dict[str, Array]]:
        """The arrays of each leaf of a chunk of so many rows of data; they share its memory.

        Raises:
            ValueError: it is no chunk of so many rows.
        """
        rows = 1 if self._states else rows
        first_line = data[: data.find(b"\n") + 1]
        layout, size_bytes = self._places(bytes(first_line), rows)
        if len(data) != size_bytes:
            raise ValueError(f"{len(data)} bytes are there, where by their shapes {size_bytes} were expected")
        leaves = [{name: _array(data, *place) for name, place in places.items()} for places in layout]
        for leaf, arrays in zip(self._leaves, leaves):
            _check_contents(leaf, arrays, rows)
        return leaves

    def _places_by(self, first_line: bytes, rows: int) -> tuple[list[dict[str, _Place]], int]:
        """Where the arrays of each leaf are, and where they end."""
        try:
            shapes = json.loads(first_line.decode())
        except RecursionError as error:
            raise ValueError("its shapes are lists of lists of lists") from error
        layout = [_parts_of(leaf, rows) for leaf in self._leaves]
        _require(isinstance(shapes, list) and len(shapes) == sum(map(len, layout)), "it has other arrays")
        rest, start, placed = iter(shapes), len(first_line), []
        for parts in layout:
            places = {}
            for (name, (dtype, expected)), shape in zip(parts.items(), rest):
                _require(
                    _fits(shape, expected), f"its {name} are of shape {shape!s:.80}, where {expected} was expected"
                )
                places[name] = dtype, shape, start
                start += dtype.itemsize * math.prod(shape)
            placed.append(places)
        return placed, start

    def _size_bytes_of(self, rows: int) -> int | None:
        parts = [part for leaf in self._leaves for part in _parts_of(leaf, rows).values()]
        if any(size in (None, ...) for _, shape in parts for size in shape):
            return None
        first_line = _first_line([shape for _, shape in parts])
        return len(first_line) + sum(dtype.itemsize * math.prod(shape) for dtype, shape in parts)


def _array(data: bytearray, dtype: np.dtype[Any], shape: list[int], start: int) -> Array:
    array: Array = np.ndarray(shape, dtype, data, start)
    return array if array.flags.aligned else array.copy()


def _first_line(shapes: Sequence[Any]) -> bytes:
    line = json.dumps([list(shape) for shape in shapes]).encode()
    return line + b" " * (-(len(line) + 1) % _ALIGNED_BYTES) + b"\n"


def _fits(shape: Any, expected: _Shape) -> bool:
    if not (isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS):
        return False
    if not all(type(size) is int and 0 <= size < 2**48 for size in shape):
        return False
    if expected[-1:] == [...]:
        expected = [*expected[:-1], *[None] * (len(shape) - len(expected) + 1)]
    return len(shape) == len(expected) and all(e in (None, size) for e, size in zip(expected, shape))


def _parts_of(leaf: Mapping[str, Any], rows: int) -> dict[str, _Part]:
    """The arrays of a leaf, in the order in which they are written."""
    shape, long = leaf["shape"], np.dtype("<i8")
    places: dict[str, _Part] = {}
    if "ragged" in leaf:
        depth = leaf["ragged_rank"]
        values = [None, ...] if shape is None else [None, *shape[depth + 1 :]]
        splits = np.dtype(leaf["row_splits"]).newbyteorder("<")
        places = {f"splits{i}": (splits, [None] if i else [rows + 1]) for i in range(depth)}
    elif "sparse" in leaf:
        rank = None if shape is None else len(shape)
        values, places = [None], {"indices": (long, [None, rank]), "shape": (long, [rank])}
    else:
        values = _with_rows(shape, rows)
    if leaf["stored"] == "strings":
        return {"bytes": (np.dtype("u1"), [None]), "lengths": (long, values), **places}
    return {"values": (np.dtype(leaf["stored"]).newbyteorder("<"), values), **places}


def _with_rows(shape: Any, rows: int) -> _Shape:
    return [rows, ...] if shape is None else [rows, *shape[1:]]


def _check_contents(leaf: Mapping[str, Any], parts: Mapping[str, Array], rows: int) -> None:
    """Raise where arrays of the right shapes do not make a leaf together."""
    if "lengths" in parts:
        values, room = parts["lengths"], len(parts["bytes"])
        _require(not np.any((values < 0) | (values > room)), "a string in it has no length")
        _require(int(values.sum()) == room, "its strings are not as long as their bytes")
    else:
        values = parts["values"]
        _require(values.dtype != bool or not np.any(values.view("u1") > 1), "a truth value in it is neither")
    if "ragged" in leaf:
        sizes = [len(parts[f"splits{i}"]) - 1 for i in range(1, leaf["ragged_rank"])]
        for i, room in enumerate([*sizes, len(values)]):
            splits = parts[f"splits{i}"]
            _require(
                len(splits) and splits[0] == 0 and splits[-1] == room, "its row splits are not those of its values"
            )
            _require(not np.any(splits[1:] < splits[:-1]), "a row in it has no length")
            length = leaf["shape"] and leaf["shape"][i + 1]
            _require(
                length is None or not np.any(np.diff(splits) != length), f"its rows are not of {length} entries each"
            )
    elif "sparse" in leaf:
        indices, sizes = parts["indices"], parts["shape"].tolist()
        _require(_fits(sizes, _with_rows(leaf["shape"], rows)), f"it is of shape {sizes!s:.80}")
        _require(math.prod(max(size, 1) for size in sizes) < 2**62, "TensorFlow cannot number its places")
        _require(indices.shape == (len(values), len(sizes)), "its indices are not those of its values")
        _require(not np.any((indices < 0) | (indices >= sizes)), "an entry of it lies outside")


def _require(condition: Any, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
