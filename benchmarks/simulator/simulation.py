"""The simulator from Python: its two ops, how its devices are set up, and what happened on them."""

from __future__ import annotations

import ctypes
import functools
import math
import re
from typing import Any

import tensorflow as tf

from .accounting import OUTCOMES, Call, Usage, account
from .building import Unavailable, build


class Simulator:
    """The simulated accelerators of this process: one for each logical CPU device. `load` gives it.

    The devices belong to the process, so that everyone in it who loads the simulator sees the same ones.
    """

    def __init__(self, ops: Any, control: ctypes.CDLL):
        self._ops = ops
        self._control = control

    def work(self, rows: Any, seconds: Any) -> Any:
        """Keep the device that this runs on busy, and nothing else, as a stateless op.

        Args:
            rows: float32, float64, int32 or int64 of shape `[n, ...]`; or one row of any shape, if `seconds` is a number.
            seconds: float32 `[n]`, or one number: what each row takes at speed 1. A row that is to poison its call has
                a negative one, or NaN; infinity is a call that hangs until it is cancelled.

        Returns:
            `2 * rows + 1`, after the sum of `seconds` by the device's speed, its overhead, and the calls before.

        Raises:
            tf.errors.ResourceExhaustedError: more rows than the device's `memory_rows`.
            tf.errors.InvalidArgumentError: a poisoned row; the message says which of the call.
            tf.errors.CancelledError: the step was cancelled while it ran.
            tf.errors.OpError: of the device's `error_code`, in a breakdown.
        """
        return self._ops.simulated_work(rows, seconds)

    def stateful_work(self, rows: Any, seconds: Any) -> Any:
        """As `work`, by an op that TensorFlow takes for stateful: a `tf.function` runs such ops one after another."""
        return self._ops.simulated_stateful_work(rows, seconds)

    def configure(
        self,
        device: int | str,
        *,
        speed: float = 1.0,
        overhead_seconds: float = 0.0,
        memory_rows: int | None = None,
        fails_from_call: int | None = None,
        fails_for_calls: int | None = None,
        error_code: int = tf.errors.UNAVAILABLE,
    ) -> None:
        """Set a device up, for calls that come from now on. What is not given is as in a fresh one.

        Args:
            device: `3`, `"CPU:3"`, or a full name.
            speed: work seconds per second, above 0.
            overhead_seconds: what each call takes besides, whatever the speed.
            memory_rows: the most rows in one call; `None`: no limit.
            fails_from_call: the first call that fails, counted from 0 and from now; `None`: none does.
            fails_for_calls: how many fail from there on; `None`: all.
            error_code: with what, one of TensorFlow's codes, as `tf.errors.INTERNAL`.

        Raises:
            ValueError: no such device, or a value out of its range.
        """
        counts = {"memory_rows": memory_rows, "fails_from_call": fails_from_call, "fails_for_calls": fails_for_calls}
        for name, count in counts.items():
            if count is not None and count < 0:
                raise ValueError(f"{name} is {count!r}; expected an int of at least 0, or None")
        if not 0 < speed < math.inf:
            raise ValueError(f"speed is {speed!r}; expected a number above 0")
        if not 0 <= overhead_seconds < math.inf:
            raise ValueError(f"overhead_seconds is {overhead_seconds!r}; expected a number of at least 0")
        if not 1 <= error_code <= 16:
            raise ValueError(f"error_code is {error_code!r}; expected one of tf.errors, such as tf.errors.UNAVAILABLE")
        limits = [_NONE if count is None else count for count in counts.values()]
        settings = _Settings(speed, overhead_seconds, *limits, error_code)
        self._control.simulator_configure(_index_of(device), ctypes.byref(settings))

    def reset(self) -> None:
        """Make all devices fresh ones, and forget the calls so far. Calls that still run go on, and are not logged."""
        self._control.simulator_reset()

    def calls(self, device: int | str | None = None) -> list[Call]:
        """The calls that are over, since the last `reset`, in the order in which they ended; those of one device or all.

        A call is listed before its result can be seen.
        """
        records = (_Record * self._control.simulator_log(None, 0))()
        count = self._control.simulator_log(records, len(records))
        wanted = None if device is None else _index_of(device)
        return [record.call() for record in records[:count] if wanted in (None, record.device)]

    def usage(self, device: int | str) -> Usage:
        """What a device did since the last `reset`, in calls that are over."""
        return account(self.calls(device))


@functools.cache
def load() -> Simulator:
    """The simulator of this process, compiled if it was not yet; that takes about ten seconds.

    Raises:
        Unavailable: it cannot be compiled or loaded here; the message says why.
    """
    library = str(build())
    try:
        ops, control = tf.load_op_library(library), ctypes.CDLL(library)
    except (tf.errors.OpError, OSError) as error:
        raise Unavailable(f"{library} does not load into TensorFlow {tf.__version__}: {error}") from error
    control.simulator_configure.argtypes = [ctypes.c_int32, ctypes.POINTER(_Settings)]
    control.simulator_configure.restype = None
    control.simulator_reset.argtypes = []
    control.simulator_reset.restype = None
    control.simulator_log.argtypes = [ctypes.POINTER(_Record), ctypes.c_int64]
    control.simulator_log.restype = ctypes.c_int64
    return Simulator(ops, control)


_NONE = 2**63 - 1
_DEVICE = re.compile(r"(?:/?job:localhost)?(?:/replica:0)?(?:/task:0)?/?(?:device:)?CPU:(\d+)", re.IGNORECASE)


class _Settings(ctypes.Structure):
    """The layout of `Settings` in accelerator.cc."""

    _fields_ = (
        ("speed", ctypes.c_double),
        ("overhead_seconds", ctypes.c_double),
        ("memory_rows", ctypes.c_int64),
        ("fails_from_call", ctypes.c_int64),
        ("fails_for_calls", ctypes.c_int64),
        ("error_code", ctypes.c_int32),
    )


class _Record(ctypes.Structure):
    """The layout of `Record` in accelerator.cc."""

    _fields_ = (
        ("device", ctypes.c_int32),
        ("outcome", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("arrived_seconds", ctypes.c_double),
        ("start_seconds", ctypes.c_double),
        ("end_seconds", ctypes.c_double),
    )

    def call(self) -> Call:
        times = (self.arrived_seconds, self.start_seconds, self.end_seconds)
        return Call(f"CPU:{self.device}", self.rows, *times, OUTCOMES[self.outcome])


def _index_of(device: int | str) -> int:
    """Which logical CPU device is meant."""
    there = len(tf.config.list_logical_devices("CPU"))
    match = _DEVICE.fullmatch(device if isinstance(device, str) else f"CPU:{device}")
    if match is None or int(match[1]) >= there:
        raise ValueError(f"device is {device!r}; expected one of the logical CPU devices, CPU:0 to CPU:{there - 1}")
    return int(match[1])
