"""Check what the user's function returns."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from devicemap.data.structure import nodes_of, refused_by
from devicemap.errors import failure

_FLOAT8 = (tf.dtypes.experimental.float8_e4m3fn, tf.dtypes.experimental.float8_e5m2)
"""Dtypes without kernels for TensorLists."""


def as_result(value: Any, path: str, batched: bool) -> Any:
    """Return one leaf of the result of `fn` as a tensor. Lists are stacked, as in tf.data."""
    if value is None:
        raise failure(
            f"{path} of fn is None; expected a tensor for each row. If fn is called for its side effects, let it "
            "return a value of the row, for instance the row itself"
        )
    if isinstance(value, tf.Tensor) and value.dtype == tf.variant:
        raise failure(
            f"{path} of fn is a TensorArray or another object, not a tensor; return its .stack() or .concat()"
        )
    if not isinstance(value, tf.Tensor | tf.RaggedTensor | tf.SparseTensor):
        several = isinstance(value, list) and any(tf.is_tensor(entry) for entry in value)
        hint = "; a list is one tensor, as in tf.data: return a tuple for several results" if several else ""
        if several and batched:
            raise failure(f"{path} of fn is a list of {len(value)}{hint}")
        try:
            value = tf.convert_to_tensor(value)
        except (TypeError, ValueError) as error:
            raise failure(f"{path} of fn is a {type(value).__name__}, not a tensor: {error}{hint}") from error
    if value.dtype in _FLOAT8:
        raise failure(f"{path} of fn is of {value.dtype.name}, which TensorFlow cannot gather; cast it to tf.float16")
    if batched and value.shape.rank == 0:
        raise failure(
            f"{path} of fn is a scalar; with batched=True fn must return as many rows as it is given, of shape "
            "[rows, ...], for instance a loss for each row. Set batched=False for a fn of one row"
        )
    if batched and value.shape.rank and value.shape[0] is not None:
        raise failure(
            f"{path} of fn has {value.shape[0]} row(s), shape {value.shape}, whatever number it is given; with batched=True fn "
            "must return one row per input row, in order. Set batched=False for a fn of one row"
        )
    return value


def check_validity(structure: Any, specs: list[Any]) -> None:
    """Raise an error if an extension type refuses to hold rows, before the rows are computed."""
    refused: list[Any] = []
    if any(node.kind is not None for node in nodes_of(structure)):

        @tf.function(autograph=False)
        def validated(*leaves: Any) -> None:
            refused.append(refused_by(tf.nest.pack_sequence_as(structure, leaves)))

        validated.get_concrete_function(*specs)
    for node, error in filter(None, refused):
        shapes = ", ".join(f"{name}: {part.shape}" for name, part in zip(node.names, node.parts) if tf.is_tensor(part))
        raise failure(
            f"fn returns a {node.kind.__name__}, which cannot hold a result for each row: its __validate__ raises "
            f"{type(error).__name__}: {error} (with shapes {shapes}). Return its tensors in a tuple or a dict"
        ) from error
