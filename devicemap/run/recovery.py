"""What to do about a chunk that failed: decided by the class of its error."""

from __future__ import annotations

from enum import Enum

import tensorflow as tf

from devicemap.base.devices import is_out_of_memory

_TRANSIENT = (
    tf.errors.UnavailableError,
    tf.errors.InternalError,
    tf.errors.AbortedError,
    tf.errors.UnknownError,
    tf.errors.DeadlineExceededError,
    tf.errors.DataLossError,
    ConnectionError,
    TimeoutError,
)
"""Errors that may not come again, or not on another device. Bad input (`InvalidArgumentError`, `NotFoundError`, Python's
own errors) fails in the same way everywhere, and is not among them."""

FAILURES_IN_A_ROW = 3
"""A device that fails so often, without a success between, gets no more chunks."""


class Remedy(Enum):
    """What happens to a chunk that failed."""

    SPLIT = "its device ran out of memory for it alone: smaller parts of it go to the same device"
    FEWER = "its device ran out of memory for it and others: it goes there again, with fewer at a time"
    RETRY = "it is tried again, on another device if there is one"
    GIVE_UP = "its error is raised"


def remedy(error: BaseException, rows: int, attempts: int, max_retries: int, alone: bool) -> Remedy:
    """What to do about a chunk of `rows` rows that failed for the `attempts`-th time, `alone` on its device or beside others.

    >>> full = tf.errors.ResourceExhaustedError(None, None, "")
    >>> remedy(full, 64, 1, 2, alone=True).name, remedy(full, 64, 1, 2, alone=False).name
    ('SPLIT', 'FEWER')
    >>> remedy(tf.errors.UnavailableError(None, None, ""), 64, 2, 2, alone=True).name
    'RETRY'
    >>> remedy(tf.errors.InvalidArgumentError(None, None, ""), 64, 1, 2, alone=True).name
    'GIVE_UP'
    """
    if max_retries == 0:
        return Remedy.GIVE_UP
    if is_out_of_memory(error):
        if not alone:
            return Remedy.FEWER
        return Remedy.SPLIT if rows > 1 else Remedy.GIVE_UP
    if isinstance(error, _TRANSIENT) and attempts <= max_retries:
        return Remedy.RETRY
    return Remedy.GIVE_UP
