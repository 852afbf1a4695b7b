"""The exceptions of devicemap.

    DeviceMapError
    ├── OptionError (ValueError)             an option has an invalid value
    │   ├── UnknownOptionError (TypeError)   an option that does not exist
    │   └── DeviceError                      devices that do not exist, are repeated, or are requested too late
    ├── DataError (ValueError)               data without rows, or with different numbers of rows in its leaves
    ├── FunctionError                        the mapped function failed, or returned something that is not rows
    └── JournalError (OSError)               a directory of results that cannot be used, read or written
        └── MissingRowsError                 requested rows that are missing or damaged in the directory

A `FunctionError` with a cause is also an instance of the class of its cause, so that `except tf.errors.ResourceExhaustedError`
and `except ZeroDivisionError` keep working. The original error is its `__cause__`. Pickling keeps the message and the shards.
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

OTHER_ROW_COUNT = "returned another number of rows than it was given"
"""Part of the message of the assertion in graphs of functions of batches, by which their errors are recognised."""


class DeviceMapError(Exception):
    """The base class of all errors of devicemap."""

    # Autograph keeps the class of an error that it raises again only if the class has this constructor (test_messages).
    __init__ = Exception.__init__


class OptionError(DeviceMapError, ValueError):
    """An option has an invalid value."""


class UnknownOptionError(OptionError, TypeError):
    """An option that does not exist; the message holds the nearest name."""


class DeviceError(OptionError):
    """Devices that do not exist, are repeated, or are requested after TensorFlow was initialized."""


class DataError(DeviceMapError, ValueError):
    """Data without rows, or whose leaves do not share their first axis."""


class FunctionError(DeviceMapError):
    """The mapped function failed, or returned something that is not one result per row."""

    shards: tuple[Shard, ...] = ()
    """The shard that failed, or all shards that may have failed if it is unknown. Empty for errors of tracing."""

    def __str__(self) -> str:  # Keras raises errors of TensorFlow's classes again with (node_def, op, message, code)
        return next((text for text in self.args if isinstance(text, str)), "")

    def __reduce__(self) -> tuple[Any, ...]:  # the class that function_error made exists only in this process
        return failure, (str(self), self.shards)


class JournalError(DeviceMapError, OSError):
    """A directory of results holds other results or is in use, or the disk failed.

    `errno` is set if the operating system caused the error, for instance to `errno.ENOSPC` for a full disk.
    """


class MissingRowsError(JournalError):
    """Requested rows are missing in the results on disk, or damaged."""


def failure(message: str, shards: Sequence[Shard] = ()) -> FunctionError:
    """Return a `FunctionError` without a cause."""
    error = FunctionError(message)
    error.shards = tuple(shards)
    return error


def function_error(message: str, original: BaseException, shards: Sequence[Shard] = ()) -> FunctionError:
    """Return a `FunctionError` that is also an instance of the class of `original`, and has its attributes.

    The arguments of `original.__init__` are unknown. So `__init__` is not called, and the attributes are copied.
    """
    try:
        kind: Any = type("FunctionError", (FunctionError, type(original)), {"__module__": __name__})
        error: FunctionError = kind.__new__(kind, message)
        error.__dict__.update(vars(original))
        error.__dict__.pop("ag_error_metadata", None)  # autograph would restore the original message from it
    except Exception:  # a class that cannot be one of several bases
        return failure(message, shards)
    error.args = (message,)
    error.shards = tuple(shards)
    return error


def brief(error: BaseException) -> str:
    """Return the main line of an error message, without TensorFlow's stack traces and Keras's headings before it."""
    for line in without_escape_codes(str(error)).splitlines():
        if line.strip() and not _TRACE.match(line):
            return _CODE.sub("", line.strip())
    return str(error).strip() or type(error).__name__


def is_unknown_to_xla(error: BaseException) -> bool:
    """Return whether XLA could not compile a function, because it lacks an op or a dtype."""
    return "Detected unsupported operations when trying to compile" in str(error)


def add_note(error: Any, note: str) -> None:
    """Add a note to an error, which Python 3.11 and later print with it."""
    with contextlib.suppress(Exception):  # an error that refuses notes must still be raised
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:
            error.__notes__ = [*getattr(error, "__notes__", []), note]


def error_text(error: BaseException) -> str:
    """Return the class and the main line of an error, in one line."""
    return f"{type(error).__name__}: {brief(error)}"


_TRACE = re.compile(
    r"Graph execution error|Detected at node|Traceback|<stack traces|\d+ root error|\s(?! \(0\) )|Exception encountered when"
)
_CODE = re.compile(r"(\(0\) )?([A-Z_]+: +)?(\{\{function_node [^}]*\}\} ?)?( \[Op:(Iterator|Load)\w+\].*)?")
_ESCAPE_CODES = re.compile(r"\x1b\[[0-9;]*m")


def without_escape_codes(text: str) -> str:
    """Return text without the escape codes by which Keras's messages set colours."""
    return _ESCAPE_CODES.sub("", text)


def warn_user(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn at the line of the user's code that called devicemap."""
    modules = filter(None, map(sys.modules.get, ("devicemap", "tensorflow", "keras")))
    libraries = *(f"{Path(str(module.__file__)).parent}{os.sep}" for module in modules), contextlib.__file__
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(libraries):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
