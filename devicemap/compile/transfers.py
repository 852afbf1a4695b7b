"""Values that are sent from one device to others along a tree, and gradients that come back the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.gradient_links import Lookups, fan_out, gradients_through
from devicemap._tensorflow.gradients import can_redirect_gradients

_CHILDREN = 2
"""The largest number of devices to which a device sends a value, and from which it receives gradients."""

_SMALL_BYTES = 2**16
"""Values of at most this size are sent in buckets."""

_BUCKET_BYTES = 2**20
"""Buckets have at most this size."""


def send_along_tree(value: Any, home: str, kind: Lookups, devices: Sequence[str]) -> dict[int, Any]:
    """Return a value on each of the devices, by index, in the graph that is being traced.

    Each device that has received the value sends it to two others. So no device sends or receives more than twice its bytes,
    and the last device has it after `log2(len(devices))` copies. Gradients are added on the way back.

    Args:
        value: a dense tensor.
        home: the device of the value.
        kind: the lookups in the value, by which gradients are added.
        devices: the devices.
    """
    first = devices.index(home) if home in devices else 0
    slots = [*range(first, len(devices)), *range(first)]  # variables of other homes have other devices in the middle
    nodes: list[int | None] = [*slots] if home in devices else [None, *slots]
    found, arriving = dict[int, Any](), [value] * len(nodes)
    for node, slot in enumerate(nodes):
        children = range(_CHILDREN * node + 1, min(_CHILDREN * node + _CHILDREN + 1, len(nodes)))
        with tf.device(home if slot is None else devices[slot]):
            count = len(children) + (slot is not None)
            copies = iter(fan_out(arriving[node], count, kind) if count > 1 else [tf.identity(arriving[node])])
            if slot is not None:
                found[slot] = next(copies)
        for child in children:
            arriving[child] = next(copies)
    return found


def send_in_buckets(
    values: Mapping[Any, tuple[Any, str, Lookups]],
    devices: Sequence[str],
    send: Callable[[Any, str, Lookups], Mapping[int, Any]],
) -> dict[Any, dict[int, Any]]:
    """Return copies of values on devices, by key and by the index of the device. Small values are sent in buckets.

    Args:
        values: each value, its device, and the lookups in it, by key.
        devices: all devices.
        send: sends a value, and returns its copies by index.
    """
    found: dict[Any, dict[int, Any]] = {key: {} for key in values}
    for keys in _buckets(values):
        _, home, kind = values[keys[0]]
        with tf.device(home):
            bucket, unpack = _pack_bucket([values[key][0] for key in keys])
        for i, copy in send(bucket, home, kind).items():
            with tf.device(devices[i]):
                for key, value in zip(keys, unpack(copy)):
                    found[key][i] = value
    return found


def _buckets(values: Mapping[Any, tuple[Any, str, Lookups]]) -> list[list[Any]]:
    """Return the keys of values that are sent together. The gradient of a lookup has slices, which buckets cannot hold."""
    found: list[list[Any]] = []
    last: dict[Any, tuple[list[Any], int]] = {}
    for key, (value, home, kind) in values.items():
        size = (value.shape.num_elements() or _BUCKET_BYTES) * value.dtype.size
        fits = size <= _SMALL_BYTES and value.dtype.is_floating and kind is Lookups.NONE
        if not fits or tf.executing_eagerly() or not can_redirect_gradients():
            found.append([key])
            continue
        keys, known = last.get((home, value.dtype), ([], _BUCKET_BYTES))
        if known + size > _BUCKET_BYTES:
            keys, known = [], 0
            found.append(keys)
        keys.append(key)
        last[home, value.dtype] = keys, known + size
    return found


def _pack_bucket(values: Sequence[Any]) -> tuple[Any, Callable[[Any], list[Any]]]:
    """Concatenate values. Return the bucket, and a function that splits a copy of it into the values.

    Only values that have a gradient in some copy get one. TensorFlow would give zeros to the others.
    """
    if len(values) == 1:
        return values[0], lambda copy: [copy]
    used: set[int] = set()

    def gradients_in_use(*upstream: Any) -> list[Any]:
        gradients = [gradient if i in used else None for i, gradient in enumerate(upstream)]
        used.clear()
        return gradients

    def record_use(i: int, upstream: Any) -> list[Any]:
        used.add(i)
        return [upstream]

    def unpack(copy: Any) -> list[Any]:
        parts = tf.split(copy, [value.shape.num_elements() for value in values])
        return [
            gradients_through([tf.reshape(part, value.shape)], partial(record_use, i))[0]
            for i, (part, value) in enumerate(zip(parts, values))
        ]

    flat = [tf.reshape(value, [-1]) for value in gradients_through(values, gradients_in_use)]
    return tf.concat(flat, 0), unpack
