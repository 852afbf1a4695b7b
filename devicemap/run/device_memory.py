"""The memory use of devices."""

from __future__ import annotations

from functools import cache

import tensorflow as tf

from devicemap._tensorflow.memory import allocator_bytes
from devicemap.devices import kind_of
from devicemap.hosts import is_remote


def peak_share(device: str) -> float | None:
    """Return the peak memory use of a device divided by its memory, or `None` if it does not report both, like CPUs.

    >>> peak_share("/device:CPU:0")
    """
    memory = None if kind_of(device) == "CPU" or is_remote(device) else _memory_bytes().get(device)
    if not memory:
        return None
    try:
        return float(tf.config.experimental.get_memory_info(device)["peak"] / memory)
    except (ValueError, tf.errors.OpError):  # this kind of device keeps no statistics
        return None


@cache
def _memory_bytes() -> dict[str, int]:
    return allocator_bytes()
