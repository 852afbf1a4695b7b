"""Hosts in the full names of devices, and a round trip to remote hosts."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf


def host_of(device: str) -> str:
    """Return the host in a device's full name.

    >>> host_of("/job:worker/replica:0/task:1/device:GPU:0")
    '/job:worker/replica:0/task:1'
    """
    return device.partition("/device:")[0]


def is_remote(device: str) -> bool:
    """Return whether a device belongs to another process.

    >>> is_remote("/job:worker/replica:0/task:1/device:GPU:0"), is_remote("/job:localhost/replica:0/task:0/device:CPU:0")
    (True, False)
    """
    return device.startswith("/job:") and not device.startswith("/job:localhost/")


def settle(devices: Iterable[str]) -> frozenset[str]:
    """Wait until remote hosts have run all ops that eager code has sent to them; return the hosts that do not answer.

    TensorFlow runs functions that span several hosts before pending ops, so they would read variables before an
    assignment (test_variables_are_current).
    """
    pending, lost = {}, set()
    for host in dict.fromkeys(host_of(device) for device in devices if is_remote(device)):
        try:
            with tf.device(f"{host}/device:CPU:0"):
                pending[host] = tf.timestamp()
        except tf.errors.OpError:
            lost.add(host)
    for host, answer in pending.items():
        try:
            answer.numpy()
        except tf.errors.OpError:
            lost.add(host)
    return frozenset(lost)
