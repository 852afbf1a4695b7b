"""A model of a directory of results, for calls in any order on devices that may be lost: a growing list of integers."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from stored import ComputedRows, query, read_rows, rows_of

from benchmarks.simulator import Simulator, load
from devicemap import DeviceMap
from devicemap.errors import JournalError
from devicemap.events import ChunkFinished, Event, RowFailed

KINDS: dict[str, dict[str, Any]] = {
    "memory": {"batch_size": 2},
    "memory, chunks of any size": {},
    "samples": {"batch_size": 2},
    "batches": {"batched": True},
}
"""Kinds of data, and options of their maps."""

SCALE = tf.Variable(1, dtype=tf.int64)
"""The variable that the mapped function reads."""


FAILS = tf.errors.InvalidArgumentError
"""The error of a row that fails."""

LOST = tf.errors.InternalError
"""The error of a lost device. TensorFlow turns an `UnavailableError` of an op in a function into it."""


@cache
def simulator() -> Simulator:
    """Return the simulator of devices that can be lost."""
    return load()


class Interrupt(Exception):
    """Raised by the observer of a call."""


class Observer:
    """Records which rows a call computes, failed ones included, and may end it after some chunks or failed rows."""

    def start(self, events: int | None = None) -> None:
        """Forget the rows of the last call. The next one ends after so many events."""
        self.computed = ComputedRows()
        self._events_left = events

    def __call__(self, event: Event) -> None:
        self.computed.observe(event)
        if isinstance(event, ChunkFinished | RowFailed) and self._events_left is not None:
            self._events_left -= 1
            if self._events_left < 0:
                raise Interrupt


observer = Observer()


@cache
def function_of(kind: str) -> Callable[[Any], Any]:
    """Return a function of integers that fails on negative ones."""

    def fn(rows: Any) -> Any:
        if kind == "batches":  # an op that one device runs at a time
            rows = tf.ensure_shape(tf.numpy_function(lambda rows: rows, [rows], tf.int64), rows.shape)
        with tf.control_dependencies([tf.debugging.assert_non_negative(rows)]):
            return simulator().work(rows * SCALE, tf.zeros(tf.shape(rows)[:1]))

    return fn


@cache
def mapper_of(kind: str, devices: tuple[str, ...], skip: bool, observed: bool = True) -> DeviceMap:
    """Return a map of integers."""
    options = {"on_error": "skip" if skip else "raise", "progress": observer if observed else False}
    return DeviceMap(function_of(kind), devices=devices, **options, **KINDS[kind])


def write_and_die(kind: str, values: Sequence[int], scale: int, directory: str, events: int) -> None:
    """Write in a new process, which is killed after some chunks or failed rows."""
    SCALE.assign(scale)
    finished = count(1)

    def observe(event: Event) -> None:
        if isinstance(event, ChunkFinished | RowFailed) and next(finished) > events:
            os.kill(os.getpid(), signal.SIGKILL)

    options = {"on_error": "skip", "progress": observe, **KINDS[kind]}
    DeviceMap(function_of(kind), devices=["CPU:0"], **options).write(read_data(values, kind), directory)


def wanted(values: Sequence[int]) -> list[int]:
    """Return what the map makes of the rows that do not fail."""
    return [2 * value * int(SCALE) + 1 for value in values if value >= 0]


def read_data(values: Sequence[int], kind: str, fails_at: int | None = None) -> Any:
    """Return an array, or a dataset that may end with an error at a row."""
    values = np.array(values, np.int64)
    if kind.startswith("memory"):
        return values

    def rows() -> Iterator[int]:
        for row, value in enumerate(values):
            if row == fails_at:
                raise OSError("the data")
            yield value

    dataset = tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([], tf.int64))
    return dataset.batch(3) if kind == "batches" else dataset


def attempt(call: Callable[[], Any], interrupt: Any, refused: bool, fails: bool, lost: bool = False) -> Any:
    """Return the result of a call, or `None` if it raised the error that is expected, or perhaps one of an interruption.

    `lost` says whether one of its devices is lost, but not all.
    """
    observer.start(interrupt[1] if interrupt and interrupt[0] == "observer" else None)
    expected: tuple[type[Exception], ...] = (JournalError,) * refused + (FAILS,) * fails
    allowed = (*expected, Interrupt, tf.errors.OpError) if interrupt else expected[:1] if refused else expected
    if lost:  # calls in one graph fail, calls in chunks continue
        allowed = (*allowed, LOST)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all rows failed, or some failed in earlier runs
        try:
            result = call()
        except allowed:
            return None
    assert interrupt or not expected
    return result


class Stored:
    """The rows that a directory holds."""

    def __init__(self, path: Path):
        self.path = path
        self.right = set[int]()
        self.failed = set[int]()
        self.scale: int | None = None
        """The value of the variable when the first row was stored."""

    def read(self, values: Sequence[int]) -> None:
        """Read the directory again, and compare each row with NumPy. No row may be lost. Partial sums cannot be read."""
        if not self.path.exists() or not query(self.path, "SELECT * FROM sqlite_master"):
            return
        failed = {row for (row,) in query(self.path, "SELECT start FROM chunks WHERE error IS NOT NULL")}
        right = rows_of(self.path) - failed
        if self.scale is None and right | failed:
            self.scale = int(SCALE)
        if self.path.name == "written":
            found = read_rows(self.path)
            assert {row for row, result in found.items() if isinstance(result, str)} == failed
            right = found.keys() - failed
            assert all(found[row] == 2 * values[row] * self.scale + 1 for row in right)
        assert self.right <= right
        assert self.failed <= right | failed
        assert all(values[row] < 0 for row in failed - self.failed)
        self.right, self.failed = right, failed

    def pick(self, number: int) -> int | None:
        """Return one of the rows with a right result after the first row, if there is one."""
        rows = sorted(self.right - {0})
        return rows[number % len(rows)] if rows else None

    def compute(
        self,
        call: Callable[[Any, Path], Any],
        values: Sequence[int],
        data: Any,
        skip: bool,
        keeps_failed: bool,
        interrupt: Any,
        lost: bool,
    ) -> Any:
        """Call a function of data and a directory, and compare the rows that it computes with those that are missing."""
        kept = self.failed if keeps_failed else set()
        todo = [row for row in range(len(values)) if row not in self.right | kept]
        changed = any(values[row] >= 0 for row in kept) or self.scale not in (None, int(SCALE))
        fails = not skip and any(values[row] < 0 for row in todo)
        result = attempt(lambda: call(data, self.path), interrupt, changed, fails, lost)
        self.read(values)
        assert {*observer.computed} <= self.right | self.failed
        if result is not None:
            assert sorted(observer.computed) == todo
            assert self.right | self.failed == {*range(len(values))}
        return result
