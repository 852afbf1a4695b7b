"""The line of the user's code that created an op."""

from __future__ import annotations

import importlib.util
import linecache
import os
import sysconfig
from pathlib import Path
from typing import Any

_LONGEST = 60
"""Characters of a quoted line."""


def _directory(package: str) -> str:
    spec = importlib.util.find_spec(package)
    return os.path.join(os.path.dirname(spec.origin), "") if spec and spec.origin else "<none>"


_DEVICEMAP = _directory("devicemap")
_INSTALLED = {os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib")}
_LIBRARIES = _DEVICEMAP, *map(_directory, ("tensorflow", "keras", "tf_keras"))
_STANDARD = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))


def source_line(op: Any) -> str | None:
    """Describe the line of the user's code that created `op`, a `tf.Operation` of a traced function.

    It is the innermost line outside of TensorFlow, Keras and other installed packages: the line that calls `tf.nn.moments`,
    not the line of TensorFlow that adds the op. Lines that autograph converted have their numbers in the original file.

    Returns:
        For instance "`y[:3]`, line 12 of ode.py", or "line 12 of ode.py" if the source text is not available. `None` if all
        lines are those of libraries, as for a Keras model.

    Examples:
        >>> import tensorflow as tf
        >>> graph = tf.function(lambda x: tf.sin(x)).get_concrete_function(tf.TensorSpec([])).graph
        >>> source_line(next(op for op in graph.get_operations() if op.type == "Sin")).split(", line")[0]
        '`graph = tf.function(lambda x: tf.sin(x)).get_concrete_fun...`'
    """
    lines: list[tuple[str, int]] = []
    for frame in op.traceback or ():
        if frame.filename.startswith(_DEVICEMAP):
            lines = []  # the lines so far belong to the caller of devicemap
        elif not _is_library(frame.filename):
            lines.append((frame.filename, frame.lineno))
    if not lines:
        return None
    own = [line for line in lines if not line[0].startswith(tuple(_INSTALLED))]
    name, number = (own or lines)[-1]
    text = linecache.getline(name, number).strip()
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
    # Cells of notebooks and lines of the REPL have no file that users know.
    where = f"line {number}" + ("" if name.startswith("<") or "ipykernel_" in name else f" of {Path(name).name}")
    return f"`{text}`, {where}" if text else where


def _is_library(name: str) -> bool:
    standard = name.startswith(_STANDARD) and not name.startswith(tuple(_INSTALLED))
    return standard or name.startswith(("<frozen", *_LIBRARIES))
