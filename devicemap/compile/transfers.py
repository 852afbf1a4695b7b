"""Send a value to devices along a tree, and its gradients back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.gradients import fanned_out

_CHILDREN = 2
"""The largest number of devices to which a device sends a value, and from which it receives gradients."""


def send_along_tree(value: Any, home: str, devices: Sequence[str]) -> list[Any]:
    """Return a value on each of the devices, in the graph that is being traced.

    Each device that has received the value sends it to two others. So no device sends or receives more than twice its bytes,
    and the last device has it after `log2(len(devices))` copies. Gradients are added on the way back.

    Args:
        value: a dense tensor.
        home: the device of the value.
    """
    first = devices.index(home) if home in devices else 0
    places = [*range(first, len(devices)), *range(first)]  # variables of other homes have other devices in the middle
    nodes: list[int | None] = [*places] if home in devices else [None, *places]
    found, arriving = [value] * len(devices), [value] * len(nodes)
    for node, place in enumerate(nodes):
        children = range(_CHILDREN * node + 1, min(_CHILDREN * node + _CHILDREN + 1, len(nodes)))
        with tf.device(home if place is None else devices[place]):
            copies = iter(fanned_out(tf.identity(arriving[node]), len(children) + (place is not None)))
            if place is not None:
                found[place] = next(copies)
        for child in children:
            arriving[child] = next(copies)
    return found
