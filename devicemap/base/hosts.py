"""Hosts in the full names of devices, and the round trip that makes assignments on remote hosts visible."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

_LOCAL_JOB = "/job:localhost/"
"""The job of this process, connected or not."""


def host_of(device: str) -> str:
    """The host in a device's full name.

    >>> host_of("/job:worker/replica:0/task:1/device:GPU:0")
    '/job:worker/replica:0/task:1'
    """
    return device.partition("/device:")[0]


def is_remote(device: str) -> bool:
    """Whether a device, given by its full name, belongs to another process.

    >>> is_remote("/job:worker/replica:0/task:1/device:GPU:0"), is_remote("/job:localhost/replica:0/task:0/device:CPU:0")
    (True, False)
    """
    return device.startswith("/job:") and not device.startswith(_LOCAL_JOB)


def settle(devices: Iterable[str]) -> frozenset[str]:
    """Wait until remote hosts have run all ops that eager code has sent to them.

    A function that spans several hosts overtakes these ops and reads variables before they are assigned (TensorFlow 2.21,
    test_variables_are_current).

    Returns:
        The hosts that do not answer. Their devices fail when they are called.
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
