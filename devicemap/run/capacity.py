"""How many chunks devices have at once, and what their memory tells of chunks before any has run.

Running out of memory takes TensorFlow ten seconds each time.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from devicemap.base.devices import kind_of, list_devices
from devicemap.compile.compiled import Compiled
from devicemap.compile.cost.memory import memory_bytes_per_row
from devicemap.compile.cost.walk import row_size
from devicemap.compile.trace import Traced
from devicemap.run.schedule import Pace, chunks_in_flight


def in_flight(compiled: Compiled, prefetch: int | None) -> dict[str, int]:
    """How many chunks may be under way on each device; one in all where `fn` depends on their order."""
    audit = compiled.traced.audit
    if audit.ordered:
        return {compiled.places[0]: 1}
    # Two at once on a device would draw from one seed; each call of Python holds a thread.
    if audit.advances_seed or audit.python:
        return dict.fromkeys(compiled.places, 1)
    return {
        device: max(prefetch or chunks_in_flight(kind_of(device)), compiled.places.count(device))
        for device in compiled.devices
    }


def first_paces(traced: Traced, devices: Sequence[str]) -> dict[str, Pace]:
    """What is known of those devices that have memory of their own, where the bytes of a row can be told."""
    if all(kind_of(device) == "CPU" for device in devices):
        return {}
    row_bytes = memory_bytes_per_row(traced, "GPU", {}) or row_ends_bytes(traced)
    if row_bytes is None:
        return {}
    return {
        device.name: Pace.with_memory(device.memory - _in_use(device.name), row_bytes)
        for device in list_devices()
        if device.name in devices and device.memory is not None
    }


def _in_use(device: str) -> int:
    """Bytes that are taken on a device now, as far as TensorFlow tells."""
    try:
        return int(tf.config.experimental.get_memory_info(device)["current"])
    except (ValueError, tf.errors.OpError):  # it is another host's, or of a kind that does not count
        return 0


def row_ends_bytes(traced: Traced) -> int | None:
    """Bytes of a row and its result; `None` where it cannot be told."""
    leaves = [*traced.concrete.structured_input_signature[0], *traced.specs]
    sizes = [row_size(leaf.shape, leaf.dtype) if isinstance(leaf, tf.TensorSpec) else None for leaf in leaves]
    return None if None in sizes else sum(size or 0 for size in sizes)
