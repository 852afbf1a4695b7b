"""Writes and reductions in any order, with interruptions, damage and changes between them.

Results equal those of NumPy. In a directory each row is computed once, or listed as failed, and no row is lost.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from stored import ComputedRows, damage, query, ranges, read_rows, rows_of, untouched

from devicemap import DeviceMap
from devicemap.errors import JournalError
from devicemap.events import ChunkFinished, Event, RowFailed

KINDS: dict[str, dict[str, Any]] = {  # kinds of data, and options of their maps
    "memory": {"batch_size": 2},
    "memory, chunks of any size": {},
    "samples": {"batch_size": 2},
    "batches": {"batched": True},
}
SCALE = tf.Variable(1, dtype=tf.int64)
"""The variable that the mapped function reads."""


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
def _mapper(kind: str, devices: tuple[str, ...], skip: bool) -> DeviceMap:
    """A map of integers, which fails on negative ones."""

    def fn(rows: Any) -> Any:
        if kind == "batches":  # an op that one device runs at a time
            rows = tf.ensure_shape(tf.numpy_function(lambda rows: rows, [rows], tf.int64), rows.shape)
        with tf.control_dependencies([tf.debugging.assert_non_negative(rows)]):
            return 2 * rows * SCALE + 1

    on_error: Any = "skip" if skip else "raise"
    return DeviceMap(fn, devices=devices, on_error=on_error, progress=observer, **KINDS[kind])


def _wanted(values: Sequence[int]) -> list[int]:
    """What the map makes of the rows that do not fail."""
    return [2 * value * int(SCALE) + 1 for value in values if value >= 0]


def _read(values: Sequence[int], kind: str, fails_at: int | None = None) -> Any:
    """An array, or a dataset that may end with an error at a row."""
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


def _attempt(call: Callable[[], Any], interrupt: Any, refused: bool, fails: bool) -> Any:
    """The result of a call, or `None` if it raised the error that is expected, or perhaps one of an interruption."""
    observer.start(interrupt[1] if interrupt and interrupt[0] == "observer" else None)
    expected: tuple[type[Exception], ...] = (JournalError,) * refused + (tf.errors.InvalidArgumentError,) * fails
    allowed = (*expected, Interrupt, tf.errors.OpError) if interrupt else expected[:1]
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
        """One of the rows with a right result after the first row, if there is one."""
        rows = sorted(self.right - {0})
        return rows[number % len(rows)] if rows else None

    def compute(
        self, call: Callable[[Path], Any], values: Sequence[int], skip: bool, keeps_failed: bool, interrupt: Any
    ) -> Any:
        """Call a function of a directory, and compare the rows that it computes with those that are missing."""
        kept = self.failed if keeps_failed else set()
        todo = [row for row in range(len(values)) if row not in self.right | kept]
        changed = any(values[row] >= 0 for row in kept) or self.scale not in (None, int(SCALE))
        fails = not skip and any(values[row] < 0 for row in todo)
        result = _attempt(lambda: call(self.path), interrupt, changed, fails)
        self.read(values)
        assert {*observer.computed} <= self.right | self.failed
        if result is not None:
            assert sorted(observer.computed) == todo
            assert self.right | self.failed == {*range(len(values))}
        return result


DEVICES = st.sampled_from([("CPU:1",), ("CPU:2", "CPU:0", "CPU:1")])
INTERRUPTS = st.none() | st.tuples(st.sampled_from(["observer", "data"]), st.integers(0, 4))


class Directories(RuleBasedStateMachine):
    """Calls on data that grows. A row with a negative value fails, until it is repaired."""

    @initialize(kind=st.sampled_from([*KINDS]), fails=st.lists(st.booleans(), min_size=3, max_size=9))
    def begin(self, kind: str, fails: list[bool]) -> None:
        self.kind, self.values = kind, list[int]()
        self.add_rows(fails)
        self.folder = tempfile.TemporaryDirectory()
        self.written, self.reduced = (Stored(Path(self.folder.name, name)) for name in ("written", "reduced"))
        SCALE.assign(1)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    def data(self, interrupt: Any = None) -> Any:
        return _read(self.values, self.kind, interrupt[1] if interrupt and interrupt[0] == "data" else None)

    @rule(fails=st.lists(st.sampled_from([False, False, True]), min_size=1, max_size=4))
    def add_rows(self, fails: list[bool]) -> None:
        first = len(self.values)
        self.values += [-1 - row if fail else row for row, fail in enumerate(fails, first)]

    @rule(data=st.data())
    def repair_a_row(self, data: Any) -> None:
        row = data.draw(st.integers(0, len(self.values) - 1))
        self.values[row] = abs(self.values[row])

    @rule()
    def change_the_variable(self) -> None:
        SCALE.assign(3 - SCALE)

    @rule(devices=DEVICES, skip=st.booleans(), interrupt=INTERRUPTS, retry=st.booleans())
    def write(self, devices: tuple[str, ...], skip: bool, interrupt: Any, retry: bool) -> None:
        data, mapper = self.data(interrupt), _mapper(self.kind, devices, skip)
        call = lambda path: mapper.write(data, path, retry_failed=retry)
        results = self.written.compute(call, self.values, skip, skip and not retry, interrupt)
        if results is not None:
            assert results.complete
            assert results.load().tolist() == _wanted(self.values)

    @rule(devices=DEVICES, skip=st.booleans(), interrupt=INTERRUPTS)
    def reduce(self, devices: tuple[str, ...], skip: bool, interrupt: Any) -> None:
        data, mapper = self.data(interrupt), _mapper(self.kind, devices, skip)
        call = lambda path: mapper.reduce(data, "sum", path)
        total = self.reduced.compute(call, self.values, skip, skip, interrupt)
        assert total is None or int(total) == sum(_wanted(self.values))

    @rule(number=st.integers(0, 9))
    def damage_a_chunk(self, number: int) -> None:
        if row := self.written.pick(number):
            (start,) = [start for start, stop in ranges(self.written.path) if start <= row < stop]
            self.written.right -= {*damage(self.written.path, start)}

    @rule(devices=DEVICES, number=st.integers(0, 9), shorter=st.booleans())
    def write_other_data(self, devices: tuple[str, ...], number: int, shorter: bool) -> None:
        if row := self.written.pick(number):
            others = self.values[:row] if shorter else [*self.values[:row], -1000, *self.values[row + 1 :]]
            write = lambda: _mapper(self.kind, devices, True).write(_read(others, self.kind), self.written.path)
            with untouched(self.written.path) if self.kind.startswith("memory") else nullcontext():
                _attempt(write, None, True, False)
            self.written.read(self.values)


# No shrinking, which would take longer than the timeout of a test.
CI = settings(max_examples=7, stateful_step_count=20, deadline=None, derandomize=True, phases=[Phase.generate])
AT_RANDOM = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_states() -> None:
    run_state_machine_as_test(Directories, settings=CI)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_states() -> None:
    run_state_machine_as_test(Directories, settings=AT_RANDOM)
