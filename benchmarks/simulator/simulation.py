"""The simulator from Python: its two ops, how its devices are set up, and what happened on them."""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import tensorflow as tf

from .building import Unavailable, build

Outcome: TypeAlias = Literal["finished", "refused", "cancelled"]
"""In the order of `Outcome` in accelerator.cc."""


@dataclass(frozen=True)
class Call:
    """One call of a device that is over. Seconds are those of a steady clock, on Linux `time.monotonic()`'s."""

    device: str
    """`"CPU:3"`."""

    rows: int
    """How many rows it had."""

    arrived_seconds: float
    """When it came."""

    start_seconds: float
    """When the device began with it; the time before that it stood in the queue."""

    end_seconds: float
    """When it was over, by the device's schedule; a waiting thread is notified some microseconds later."""

    outcome: Outcome
    """`"refused"`: it failed as it came, for want of memory, a poisoned row or a breakdown, and took no time."""


@dataclass(frozen=True)
class Usage:
    """What a device did."""

    calls: int
    """How many calls finished."""

    rows: int
    """How many rows those had."""

    refused: int
    """How many calls the device did not take."""

    cancelled: int
    """How many calls were cancelled, in the queue or running."""


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
        """
        counts = memory_rows, fails_from_call, fails_for_calls
        limits = [_NONE if count is None else count for count in counts]
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
        calls = self.calls(device)
        outcomes = Counter(call.outcome for call in calls)
        rows = sum(call.rows for call in calls if call.outcome == "finished")
        return Usage(outcomes["finished"], rows, outcomes["refused"], outcomes["cancelled"])


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
        return Call(f"CPU:{self.device}", self.rows, *times, get_args(Outcome)[self.outcome])


def _index_of(device: int | str) -> int:
    """Which logical CPU device is meant."""
    return int(str(device).rpartition(":")[2])
