"""What devicemap raises.

    DeviceMapError
    ├── OptionError (ValueError)             an option has a value it cannot have
    │   ├── UnknownOptionError (TypeError)   an option that does not exist
    │   └── DeviceError                      devices that do not exist, repeat, or come too late
    ├── DataError (ValueError)               data that has no rows, or not the same number in every leaf
    └── FunctionError                        the mapped function failed, or returned something that is not rows

A `FunctionError` that was caused by another error is also an instance of that error's class, so that
`except tf.errors.ResourceExhaustedError` and `except ZeroDivisionError` keep working; the original is its `__cause__`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from devicemap.types import Shard


class DeviceMapError(Exception):
    """The base of everything that devicemap raises."""


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

    def __init__(self, message: str, shards: Sequence[Shard] = ()):
        super().__init__(message)
        self.shards = tuple(shards)

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


def function_error(message: str, original: BaseException, shards: Sequence[Shard] = ()) -> FunctionError:
    """A `FunctionError` that is also an instance of `original`'s class and carries its attributes.

    `original.__init__` is not called: its arguments are not known here, its attributes are copied instead.
    """
    if isinstance(original, FunctionError):
        return FunctionError(message, shards)
    try:
        kind: Any = type("FunctionError", (FunctionError, type(original)), {"__module__": __name__})
        error: FunctionError = kind.__new__(kind, message)
        error.__dict__.update(vars(original))
    except TypeError:  # a class that cannot be a base beside another one: its layout conflicts, or it is final
        return FunctionError(message, shards)
    error.args = (message,)
    error.shards = tuple(shards)
    return error


def brief(error: BaseException) -> str:
    """The line of an error's message that says what happened: TensorFlow puts where it was traced in front of it."""
    for line in str(error).splitlines():
        header = line.startswith(("Graph execution error", "Detected at node", "Traceback")) or line.endswith("found.")
        if line.strip() and not header and (not line.startswith((" ", "\t")) or line.startswith("  (0) ")):
            return line.strip().removeprefix("(0) ")
    return str(error).strip() or type(error).__name__
