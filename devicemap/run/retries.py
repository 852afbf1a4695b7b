"""Choose the action after a chunk failed, by the class of its error, and find the row that failed."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from enum import Enum

import tensorflow as tf

from devicemap.devices import is_out_of_memory
from devicemap.errors import OTHER_ROW_COUNT, DeviceMapError, brief, is_unknown_to_xla
from devicemap.events import Shard

_TRANSIENT = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnknownError,
)
"""Errors of devices and networks that may not occur again, or not on another device. Other errors are not retried."""

AGAIN_SECONDS = 1.0
"""Rows that failed after a longer time do not run again to find the failing row."""

FAILURES_IN_A_ROW = 3
"""A device that fails so often without a success in between gets no more chunks."""


class RetryAction(Enum):
    """The action after a chunk failed."""

    HALVE = "it is computed in halves, and the device that failed runs nothing else beside a chunk"
    RETRY = "another device computes it, if there is one"
    SPLIT = "devices compute its halves, to find the rows that fail"
    LEAVE_OUT = "its row is left out"
    RAISE = "its error is raised at once"


def action_after(
    error: BaseException, rows: int, attempts: int, max_retries: int, alone: bool = False, skips: bool = False
) -> RetryAction:
    """Return the action after the `attempts`-th failure of `rows` rows, which may have run `alone` on their device.

    `skips`: whether rows that fail by themselves are left out.

    >>> full = tf.errors.ResourceExhaustedError(None, None, "")
    >>> [action_after(full, rows, 1, 2, alone).name for rows, alone in ((64, True), (1, False), (1, True))]
    ['HALVE', 'HALVE', 'RAISE']
    >>> [action_after(tf.errors.UnavailableError(None, None, ""), 64, n, 2).name for n in (2, 3)]
    ['RETRY', 'RAISE']
    >>> bad = tf.errors.InvalidArgumentError(None, None, "")
    >>> action_after(bad, 64, 1, 2).name, [action_after(bad, rows, 1, 2, skips=True).name for rows in (8, 1)]
    ('RAISE', ['SPLIT', 'LEAVE_OUT'])
    """
    if max_retries and is_out_of_memory(error):
        if rows > 1 or not alone:
            return RetryAction.HALVE
    elif isinstance(error, _TRANSIENT) and not is_python_bug(error) and attempts <= max_retries:
        return RetryAction.RETRY
    if not skips or not is_row_error(error):
        return RetryAction.RAISE
    return RetryAction.SPLIT if rows > 1 else RetryAction.LEAVE_OUT


def is_row_error(error: BaseException) -> bool:
    """Return whether a row may be the cause of this error, so that it may be left out, and no device is at fault.

    Other causes are an unavailable device, a signal, an op that XLA lacks, and a batch whose results have another number of
    rows.

    >>> is_row_error(tf.errors.InvalidArgumentError(None, None, "")), is_row_error(tf.errors.UnavailableError(None, None, ""))
    (True, False)
    """
    of_device = isinstance(error, tf.errors.UnavailableError | DeviceMapError) or is_unknown_to_xla(error)
    return isinstance(error, Exception) and not of_device and OTHER_ROW_COUNT not in str(error)


def failing_row(run: Callable[[int, int], object], shard: Shard, error: BaseException) -> Shard:
    """Find the row for which `run(start, stop)` raises this class of error, by halving.

    Returns `shard` if there is none, and for errors that do not depend on one row.

    >>> rows = Shard("CPU:0", 0, 100)
    >>> failing_row(lambda start, stop: [1 / (6 - row) for row in range(start, stop)], rows, ZeroDivisionError())
    Shard(device='CPU:0', start=6, stop=7)
    """

    def fails(start: int, stop: int) -> bool:
        try:
            run(start, stop)
        except type(error):
            return True
        return False

    if is_out_of_memory(error) or not is_row_error(error):
        return shard
    start, stop = shard.start, shard.stop
    try:
        while stop - start > 1:
            middle = (start + stop) // 2
            start, stop = (start, middle) if fails(start, middle) else (middle, stop)
        return Shard(shard.device, start, stop) if len(shard) == 1 or fails(start, stop) else shard
    except Exception:  # another error, for instance of a cancelled call
        return shard


def is_python_bug(error: BaseException) -> bool:
    """Return whether an error is a built-in exception that Python code in `fn` raised, other than an `OSError`.

    `tf.py_function` turns most exceptions into an `UnknownError` whose message has the name of the class and the traceback
    (test_a_row_that_fails_everywhere). Network errors are subclasses of `OSError` and may be transient. So may exceptions of
    other libraries.

    >>> is_python_bug(tf.errors.UnknownError(None, None, "KeyError: 'a'\\nTraceback (most recent call last): ..."))
    True
    >>> is_python_bug(tf.errors.UnknownError(None, None, "TimeoutError: \\nTraceback (most recent call last): ..."))
    False
    """
    if not isinstance(error, tf.errors.UnknownError) or "Traceback (most recent call last)" not in str(error):
        return False
    kind = getattr(builtins, brief(error).partition(":")[0], None)
    return isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, OSError)
