"""Writes and reductions in any order, with failing rows, interruptions, damage and changes of the data between them.

Results equal those of NumPy. In a directory each row is computed once, or listed as failed, and no row is lost. A new kind of
data is a line in `KINDS`, a new reducer one in `REDUCERS`, and a new event between calls a method in `STEPS`.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from stored import ComputedRows, damage, query, ranges, read_rows, rows_of, untouched

from devicemap import DeviceMap, Reducer
from devicemap.errors import JournalError
from devicemap.events import ChunkFinished, Event, RowFailed

KINDS: dict[str, list[dict[str, Any]]] = {  # kinds of data, and options of which a walk has some
    "memory": [{"batch_size": 2}, {}],
    "samples": [{"batch_size": 2}, {}],
    "batches": [{"batched": True}],
}
REDUCERS: list[tuple[Any, Callable[[list[int]], int]]] = [  # and what they make of numbers
    ("sum", sum),
    ("max", lambda numbers: max(numbers, default=tf.int64.min)),
    (Reducer(np.int64(0), tf.add, tf.add, tf.negative), lambda numbers: -sum(numbers)),
]
DEVICE_COUNTS = (3,)
SCALE = tf.Variable(1, dtype=tf.int64)
"""The variable that the mapped function reads."""


class Interrupt(Exception):
    """Raised by the observer of a call."""


class Observer:
    """Records which rows a call computes, failed ones included, and may end it after some chunks or failed rows."""

    def start(self, events: int | None = None) -> None:
        """Forget the rows of the last call. The next one ends after this number of events."""
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
def _mapper(devices: tuple[str, ...], skip: bool, **options: Any) -> DeviceMap:
    """A map of integers, which fails on negative ones."""

    def fn(rows: Any, *_: Any) -> Any:
        if "batched" in options:  # an op that one device runs at a time
            rows = tf.ensure_shape(tf.numpy_function(lambda rows: rows, [rows], tf.int64), rows.shape)
        with tf.control_dependencies([tf.debugging.assert_non_negative(rows)]):
            return 2 * rows * SCALE + 1

    on_error: Any = "skip" if skip else "raise"
    return DeviceMap(fn, devices=devices, on_error=on_error, progress=observer, **options)


def _wanted(values: Sequence[int]) -> dict[int, int]:
    """What the map makes of the rows that do not fail."""
    return {row: 2 * value + 1 for row, value in enumerate(values) if value >= 0}


def _read(values: Sequence[int], kind: str, fails_at: int | None = None) -> Any:
    """An array and a ragged tensor, or a dataset that may end with an error at a row."""
    values = np.array(values, np.int64)
    if kind == "memory":
        return values, tf.RaggedTensor.from_row_lengths(values, np.ones_like(values))

    def rows() -> Iterator[int]:
        for row, value in enumerate(values):
            if row == fails_at:
                raise OSError("the data")
            yield value

    dataset = tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([], tf.int64))
    return dataset.batch(3) if kind == "batches" else dataset


def _attempt(call: Callable[[], Any], interrupt: Any, refused: bool, fails: bool) -> tuple[Any, str]:
    """The result of a call and its warnings, or `None` if it raised the expected error, or perhaps one of an interruption."""
    observer.start(interrupt[1] if interrupt and interrupt[0] == "observer" else None)
    expected: tuple[type[Exception], ...] = (JournalError,) * refused + (tf.errors.InvalidArgumentError,) * fails
    allowed = (*expected, Interrupt, tf.errors.OpError) if interrupt else expected[:1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)  # all rows failed, or some failed in earlier runs
        try:
            result = call()
        except allowed:
            return None, ""
    assert interrupt or not expected
    return result, " ".join(str(warning.message) for warning in caught)


class Stored:
    """The rows that a directory holds."""

    def __init__(self, path: Path):
        self.path = path
        self.right = set[int]()
        self.failed = set[int]()

    def read(self, values: Sequence[int]) -> None:
        """Read the directory again, and compare each row with NumPy. No row may be lost. Partial sums cannot be read."""
        if not self.path.exists() or not query(self.path, "SELECT * FROM sqlite_master"):
            return
        failed = {row for (row,) in query(self.path, "SELECT start FROM chunks WHERE error IS NOT NULL")}
        right = rows_of(self.path) - failed
        if self.path.name == "written":
            found = read_rows(self.path)
            assert {row for row, result in found.items() if isinstance(result, str)} == failed
            right = found.keys() - failed
            assert all(found[row] == 2 * values[row] + 1 for row in right)
        assert self.right <= right
        assert self.failed <= right | failed
        assert all(values[row] < 0 for row in failed - self.failed)
        self.right, self.failed = right, failed

    def pick(self, draw: random.Random) -> int:
        """A row with a right result, 0 if there is none but the first."""
        return draw.choice(sorted(self.right - {0}) or [0])

    def damage(self, draw: random.Random) -> None:
        """Flip a bit of a chunk, if there is one with a right result."""
        if row := self.pick(draw):
            (start,) = [start for start, stop in ranges(self.path) if start <= row < stop]
            self.right -= {*damage(self.path, start)}

    def compute(
        self, call: Callable[[Path], Any], values: Sequence[int], skip: bool, keeps_failed: bool, interrupt: Any
    ) -> tuple[Any, str]:
        """Call a function of a directory, and compare the rows that it computes with those that are missing."""
        kept = self.failed if keeps_failed else set()
        todo = [row for row in range(len(values)) if row not in self.right | kept]
        changed = any(values[row] >= 0 for row in kept) or int(SCALE) != 1
        fails = not skip and any(values[row] < 0 for row in todo)
        result, warned = _attempt(lambda: call(self.path), interrupt, changed, fails)
        self.read(values)
        assert {*observer.computed} <= self.right | self.failed
        if result is not None:
            assert sorted(observer.computed) == todo
            assert self.right | self.failed == {*range(len(values))}
        return result, warned


class Directories:
    """A directory of results and one of partial sums, and calls on data that grows.

    A row with a negative value fails, until it is repaired. Before any step is drawn, a row fails and is repaired, rows are
    added, and a chunk is damaged.
    """

    def __init__(self, draw: random.Random, kind: str, devices: Sequence[str], path: Path):
        self.draw, self.kind, self.devices, self.options = draw, kind, tuple(devices), draw.choice(KINDS[kind])
        self.reducer, self.wanted = draw.choice(REDUCERS)
        path.mkdir()
        self.written, self.reduced = Stored(path / "written"), Stored(path / "reduced")
        SCALE.assign(1)
        self.values = [0, -2, 2, 3]
        self.write(completes=True)
        self.repair_a_row()
        self.add_rows()
        self.damage_results()
        self.write(completes=True, retry=True)

    def add_rows(self) -> None:
        first = len(self.values)
        self.values += [
            self.draw.choice([row, row, -1 - row]) for row in range(first, first + self.draw.randrange(1, 5))
        ]

    def repair_a_row(self) -> None:
        if failing := [row for row, value in enumerate(self.values) if value < 0]:
            row = self.draw.choice(failing)
            self.values[row] = abs(self.values[row])

    def _call(self, completes: bool = False) -> tuple[DeviceMap, Any, bool, Any]:
        """A map with its data, whether it skips rows, and where it is interrupted."""
        skip = completes or self.draw.random() < 0.8
        interrupt = None if completes else self.draw.choice([None, None, None, "observer", "data"])
        interrupt = interrupt and (interrupt, self.draw.randrange(5))
        data = _read(self.values, self.kind, interrupt[1] if interrupt and interrupt[0] == "data" else None)
        return _mapper(self.devices[: self.draw.choice([1, 3])], skip, **self.options), data, skip, interrupt

    def write(self, completes: bool = False, retry: bool = False) -> None:
        (mapper, data, skip, interrupt), retry = self._call(completes), retry or self.draw.random() < 0.3
        call = lambda path: mapper.write(data, path, retry_failed=retry)
        results, _ = self.written.compute(call, self.values, skip, skip and not retry, interrupt)
        if results is None:
            return
        wanted = _wanted(self.values)
        assert results.complete
        assert [row.row for row in results.failed_rows] == sorted({*range(len(self.values))} - wanted.keys())
        assert results.row_numbers().tolist() == [*wanted]
        assert results.load().tolist() == [row for chunk in results for row in chunk] == [*wanted.values()]
        assert results[1:-1].tolist() == [*wanted.values()][1:-1]
        assert [int(row) for row in results.as_dataset().unbatch()] == [*wanted.values()]

    def reduce(self, completes: bool = False) -> None:
        mapper, data, skip, interrupt = self._call(completes)
        left_out = len(self.reduced.failed) if skip else 0
        call = lambda path: mapper.reduce(data, self.reducer, path)
        total, warned = self.reduced.compute(call, self.values, skip, skip, interrupt)
        if total is not None:
            assert int(total) == self.wanted([*_wanted(self.values).values()])
            assert (f": {left_out} row(s) failed in earlier runs and are left out" in warned) == (left_out > 0)

    def change_the_variable(self) -> None:
        """Then other calls are refused."""
        if self.written.right and self.reduced.right:
            SCALE.assign(2)
            self.write()
            self.reduce()
            SCALE.assign(1)

    def damage_results(self) -> None:
        self.written.damage(self.draw)

    def damage_partial_sums(self) -> None:
        """A call that completes follows, because only it shows which rows are missing."""
        if all(self.values[row] < 0 for row in self.reduced.failed):
            self.reduced.damage(self.draw)
            self.reduce(completes=True)

    def write_other_data(self) -> None:
        if row := self.written.pick(self.draw):
            others = self.values[:row] + self.draw.choice([[], [-1000, *self.values[row + 1 :]]])
            write = lambda: _mapper(self.devices, True, **self.options).write(
                _read(others, self.kind), self.written.path
            )
            with untouched(self.written.path) if self.kind == "memory" else nullcontext():
                _attempt(write, None, True, False)
            self.written.read(self.values)


STEPS = [Directories.write] * 4 + [Directories.reduce] * 3
STEPS += [Directories.add_rows, Directories.repair_a_row, Directories.damage_results, Directories.damage_partial_sums]
STEPS += [Directories.write_other_data, Directories.change_the_variable]


@pytest.mark.parametrize("walks", [2, pytest.param(100, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("kind", KINDS)
def test_states(kind: str, walks: int, devices: list[str], tmp_path: Path) -> None:
    for walk in range(walks):
        directories = Directories(random.Random(f"{kind} {walk}"), kind, devices, tmp_path / str(walk))
        for _ in range(15):
            directories.draw.choice(STEPS)(directories)
