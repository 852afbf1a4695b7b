"""What devicemap raises.

    DeviceMapError
    ├── OptionError (ValueError)             an option has a value it cannot have
    │   ├── UnknownOptionError (TypeError)   an option that does not exist
    │   └── DeviceError                      devices that do not exist, repeat, or come too late
    ├── DataError (ValueError)               data that has no rows, or not the same number in every leaf
    ├── FunctionError                        the mapped function failed, or returned something that is not rows
    └── JournalError (OSError)               a folder of results that cannot be used, read or written
        └── MissingRowsError                 rows that are asked for, and not in the folder or damaged there

A `FunctionError` that was caused by another error is also an instance of that error's class, so that
`except tf.errors.ResourceExhaustedError` and `except ZeroDivisionError` keep working; the original is its `__cause__`.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from devicemap.events import Shard


class DeviceMapError(Exception):
    """The base of everything that devicemap raises."""

    # Autograph keeps the class of an error raised while it traces only where the constructor is this one.
    __init__ = Exception.__init__


class OptionError(DeviceMapError, ValueError):
    """An option has a value it cannot have."""


class UnknownOptionError(OptionError, TypeError):
    """An option that does not exist; the message holds the nearest name."""


class DeviceError(OptionError):
    """Devices that do not exist, are repeated, or were asked for too late."""


class DataError(DeviceMapError, ValueError):
    """Data without rows, or whose leaves do not share their first axis."""


class FunctionError(DeviceMapError):
    """The mapped function failed, or returned something that is not one result per row."""

    shards: tuple[Shard, ...] = ()
    """Where it failed: one shard, or all that may have, where it cannot be told; empty while tracing."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:  # pickled, it is a plain FunctionError: the class may be made for it
        return failure, (str(self), self.shards)


class JournalError(DeviceMapError, OSError):
    """A folder of results that cannot be used (it holds something else, or is in use), or that the disk failed on.

    `errno` is that of the operating system, where it was the cause: `errno.ENOSPC` for a full disk.
    """


class MissingRowsError(JournalError):
    """Rows that are asked for, and are not among the results on disk, or damaged there."""


def failure(message: str, shards: Sequence[Shard] = ()) -> FunctionError:
    """A `FunctionError` of its own, not caused by another one."""
    error = FunctionError(message)
    error.shards = tuple(shards)
    return error


def function_error(message: str, original: BaseException, shards: Sequence[Shard] = ()) -> FunctionError:
    """A `FunctionError` that is also an instance of `original`'s class and carries its attributes.

    `original.__init__` is not called: its arguments are not known here, its attributes are copied instead.
    """
    if isinstance(original, FunctionError):
        return failure(message, shards)
    try:
        kind: Any = type("FunctionError", (FunctionError, type(original)), {"__module__": __name__})
        error: FunctionError = kind.__new__(kind, message)
        error.__dict__.update(vars(original))
        error.__dict__.pop("ag_error_metadata", None)  # autograph would make the original's message of it again
    except Exception:  # a class that cannot be a base beside another one: its layout conflicts, it is final, or objects
        return failure(message, shards)
    error.args = (message,)
    error.shards = tuple(shards)
    return error


def brief(error: BaseException) -> str:
    """The line of an error's message that says what happened: TensorFlow puts where it was traced in front of it."""
    for line in str(error).splitlines():
        if line.strip() and not _TRACE.match(line):
            return _CODE.sub("", line.strip())
    return str(error).strip() or type(error).__name__


_TRACE = re.compile(r"Graph execution error|Detected at node|Traceback|<stack traces|\d+ root error|\s(?! \(0\) )")
_CODE = re.compile(r"(\(0\) )?([A-Z_]+: +)?")


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the line of the user's code that called devicemap."""
    package = f"{Path(__file__).parent}{os.sep}", contextlib.__file__
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
