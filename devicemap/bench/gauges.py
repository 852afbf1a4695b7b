"""What mappers and devices tell about a call that has ended: how busy, how much memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from devicemap.base.devices import kind_of


def busy_shares(mapper: Any) -> dict[str, float] | None:
    """Per device, the share of the last call's time that it was busy; `None` where the mapper does not tell.

    What was sampled of a GPU counts for more than the time that chunks were under way there: that holds copying, and
    waiting for the host.
    """
    report = getattr(mapper, "report", None)
    if report is None or not report.wall_seconds:
        return None
    shares = {}
    for device in report.devices:
        if device.utilisation_percent is not None:
            shares[device.device] = device.utilisation_percent / 100
        elif device.busy_seconds is not None:
            shares[device.device] = device.busy_seconds / report.wall_seconds
    return shares or None


def reset_peak_memory(devices: Sequence[str]) -> None:
    """Let devices that count their peak memory start anew."""
    for name in _peaks(devices):
        tf.config.experimental.reset_memory_stats(name)


def read_peak_memory(devices: Sequence[str]) -> dict[str, int] | None:
    """Per device that counts it, the most bytes that TensorFlow held there since the last reset; `None` for no device."""
    return _peaks(devices) or None


def _peaks(devices: Sequence[str]) -> dict[str, int]:
    peaks = {}
    for name in devices:
        if kind_of(name) != "CPU":  # which says 0 for everything
            try:
                peaks[name] = int(tf.config.experimental.get_memory_info(name)["peak"])
            except (ValueError, tf.errors.OpError):  # its allocator does not count; ValueError is what is documented
                continue
    return peaks
