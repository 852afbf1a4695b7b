"""What travels between devices in a call, counted while it runs, and so in a loop for each of its turns.

In graphs, the ops that send are counted (`sends.cc`). TensorFlow's run metadata has the graphs of a call, and nothing of how
often what is in them ran, or how large it was. Eager ops fetch inputs from other devices by themselves; they are listened to.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context  # no public way to listen to eager ops
from tensorflow.python.framework import op_callbacks

from benchmarks.simulator.building import Unavailable, build

SOURCE = Path(__file__).with_name("sends.cc")

LIBRARIES = ("libtensorflow_cc.so.2",)
"""Where TensorFlow 2.16 keeps the kernels that send; 2.21 has them where libraries of ops look by themselves."""


@dataclass(frozen=True)
class Traffic:
    """What one call sent from device to device."""

    tensors: int
    """How many, those included that have no bytes and only say that something is done."""

    lists: int
    """How many of them are whole lists, as those of a `tf.TensorArray`."""

    bytes: int
    """Of all of them; of a list, those of the tensors in it. The characters of strings are not counted."""


class Meter:
    """Counts what is sent in this process. `load` gives it."""

    def __init__(self, control: ctypes.CDLL):
        self._control = control

    def measure(self, call: Callable[[], Any]) -> Traffic:
        """What a call sends while nothing else runs in this process.

        Call it once before: a first call traces, and may send more. Graphs that were made before the meter was loaded are
        not seen, nor eager ops of other threads.
        """
        self._take()
        with _eager_copies() as copies:
            call()
        sent = self._take()
        return Traffic(sent.tensors + len(copies), sent.lists, sent.bytes + sum(copies))

    def _take(self) -> Traffic:
        counts = (ctypes.c_int64 * 3)()
        self._control.sends_take(counts)
        return Traffic(*counts)


def compile_library() -> Path:
    """Compile the meter for the installed TensorFlow, unless that was done before; it takes about ten seconds.

    Raises:
        Unavailable: this machine cannot compile it; the message says why.
    """
    return build(source=SOURCE, libraries=LIBRARIES)


@functools.cache
def load() -> Meter:
    """The meter of this process, compiled if it was not yet; that takes about ten seconds.

    Raises:
        Unavailable: it cannot be compiled or loaded here; the message says why.
    """
    library = str(compile_library())
    try:
        tf.load_library(library)
        control = ctypes.CDLL(library)
    except (tf.errors.OpError, OSError) as error:
        raise Unavailable(f"{library} does not load into TensorFlow {tf.__version__}: {error}") from error
    control.sends_take.argtypes = [ctypes.POINTER(ctypes.c_int64)]
    control.sends_take.restype = None
    return Meter(control)


@contextlib.contextmanager
def _eager_copies() -> Iterator[list[int]]:
    """The bytes of each tensor that an eager op of this thread fetches from another device, as they come."""
    copies: list[int] = []

    def note(op: str, inputs: Any, _: Any, outputs: Any, op_name: str | None = None, graph: Any = None) -> None:
        if graph is not None or context.context().has_function(op):  # a function sends for itself
            return
        # an op runs where its variable is, else where its result comes to lie
        places = [tensor.device for tensor in (*inputs, *outputs) if tensor.dtype == tf.resource]
        places += [tensor.device for tensor in outputs]
        for tensor in inputs:
            if places and tensor.dtype != tf.resource and tensor.device != places[0]:
                copies.append(tensor.dtype.size * tensor.shape.num_elements())

    op_callbacks.add_op_callback(note)
    try:
        yield copies
    finally:
        op_callbacks.remove_op_callback(note)
