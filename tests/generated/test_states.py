"""Maps, streams, writes, reductions and tasks in any order, with interruptions, damage and changes between them.

Results equal those of NumPy. In a directory each row is computed once, or listed as failed, and no row is lost.
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from directories import FAILS, KINDS, SCALE, Stored, attempt, mapper_of, observer, read_data, wanted
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from stored import damage, ranges, untouched

import devicemap

DEVICES = st.sampled_from([("CPU:1",), ("CPU:2", "CPU:1"), ("CPU:2", "CPU:0", "CPU:1")])
INTERRUPTS = st.none() | st.tuples(st.sampled_from(["observer", "data"]), st.integers(0, 4))


class Directories(RuleBasedStateMachine):
    """Calls on data that grows. A row with a negative value fails, until it is repaired."""

    @initialize(kind=st.sampled_from([*KINDS]), python=st.booleans(), rows=st.integers(3, 9))
    def begin(self, kind: str, python: bool, rows: int) -> None:
        self.kind, self.mapper, self.values = kind, partial(mapper_of, kind, python), [*range(rows)]
        self.folder = tempfile.TemporaryDirectory()
        self.written, self.reduced = (Stored(Path(self.folder.name, name)) for name in ("written", "reduced"))
        SCALE.assign(1)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    def data(self, interrupt: Any = None) -> Any:
        return read_data(self.values, self.kind, interrupt[1] if interrupt and interrupt[0] == "data" else None)

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

    @rule(devices=DEVICES, skip=st.booleans(), interrupt=INTERRUPTS)
    def map_rows(self, devices: tuple[str, ...], skip: bool, interrupt: Any) -> None:
        mapper, fails = self.mapper(devices, skip, observed=True), not skip and min(self.values) < 0
        result = attempt(lambda: mapper(self.data(interrupt)), interrupt, False, fails)
        if result is not None:
            assert result.numpy().tolist() == wanted(self.values)
            assert sorted(observer.computed) == [*range(len(self.values))]
            assert [failed.row for failed in mapper.report.failed_rows] == [-1 - v for v in self.values if v < 0]

    @rule(devices=DEVICES, skip=st.booleans(), chunks=st.integers(0, 4))
    def stream_some_chunks(self, devices: tuple[str, ...], skip: bool, chunks: int) -> None:
        found: list[int] = []

        def stream() -> list[int]:
            for chunk in islice(self.mapper(devices, skip).stream(self.data()), chunks):
                found.extend(chunk.numpy().tolist())

        attempt(stream, "stops", False, not skip and min(self.values) < 0)
        assert found == wanted(self.values)[: len(found)]

    @rule(devices=DEVICES, skip=st.booleans(), retry=st.booleans(), interrupt=INTERRUPTS, beside=st.booleans())
    def write(self, devices: tuple[str, ...], skip: bool, retry: bool, interrupt: Any, beside: bool) -> None:
        """Perhaps while another thread maps the same rows."""
        mapper, other = self.mapper(devices, skip, observed=True), self.mapper(devices, True)
        with ThreadPoolExecutor() as threads:
            mapped = threads.submit(other, self.data()) if beside and max(self.values) >= 0 else None
            call = lambda data, path: mapper.write(data, path, retry_failed=retry)
            results = self.store(self.written, call, skip and not retry, skip, interrupt)
        assert mapped is None or mapped.result().numpy().tolist() == wanted(self.values)
        if results is not None:
            assert results.complete
            assert results.load().tolist() == wanted(self.values)

    @rule(devices=DEVICES, skip=st.booleans(), interrupt=INTERRUPTS)
    def reduce(self, devices: tuple[str, ...], skip: bool, interrupt: Any) -> None:
        mapper = self.mapper(devices, skip, observed=True)
        total = self.store(self.reduced, lambda data, path: mapper.reduce(data, "sum", path), skip, skip, interrupt)
        assert total is None or int(total) == sum(wanted(self.values))

    def store(self, stored: Stored, call: Any, keeps_failed: bool, skip: bool, interrupt: Any) -> Any:
        """Call a function of data and a directory, and compare the rows that it computes with those that are missing."""
        kept = stored.failed if keeps_failed else set()
        todo = [row for row in range(len(self.values)) if row not in stored.right | kept]
        changed = any(self.values[row] >= 0 for row in kept) or stored.scale not in (None, int(SCALE))
        fails = not skip and any(self.values[row] < 0 for row in todo)
        result = attempt(lambda: call(self.data(interrupt), stored.path), interrupt, changed, fails)
        stored.read(self.values)
        assert {*observer.computed} <= stored.right | stored.failed
        if result is not None:
            assert sorted(observer.computed) == todo
            assert stored.right | stored.failed == {*range(len(self.values))}
        return result

    @precondition(lambda self: self.written.right)
    @rule(data=st.data())
    def damage_a_chunk(self, data: Any) -> None:
        row = data.draw(st.sampled_from(sorted(self.written.right)))
        (start,) = [start for start, stop in ranges(self.written.path) if start <= row < stop]
        self.written.right -= {*damage(self.written.path, start)}

    @precondition(lambda self: self.written.right)
    @rule(devices=DEVICES, data=st.data(), shorter=st.booleans())
    def write_other_data(self, devices: tuple[str, ...], data: Any, shorter: bool) -> None:
        row, values = data.draw(st.sampled_from(sorted(self.written.right))), self.values
        self.values = values[:row] if shorter else [*values[:row], values[row] + 1000, *values[row + 1 :]]
        with untouched(self.written.path) if self.kind.startswith("memory") else nullcontext():
            write = lambda: self.mapper(devices, True).write(self.data(), self.written.path)
            attempt(write, None, True, False)
        self.values = values
        self.written.read(values)

    @rule(devices=DEVICES, skip=st.booleans())
    def run_tasks(self, devices: tuple[str, ...], skip: bool) -> None:
        """Each task maps the rows before its own, and fails as its row does."""
        data, mapper = np.array(self.values), self.mapper(devices, True)

        def task(row: int) -> list[int]:
            tf.debugging.assert_non_negative(data[row])
            return mapper(np.abs(data[:row])).numpy().tolist()

        options: dict[str, Any] = {"devices": devices, "on_error": "skip" if skip else "raise"}
        call = lambda: devicemap.parallel_tasks(task, range(len(data)), **options)
        results = attempt(call, None, False, not skip and min(self.values) < 0)
        for row, result in enumerate(results or ()):
            assert isinstance(result, FAILS) if data[row] < 0 else result == wanted([*map(abs, self.values[:row])])


CI = settings(max_examples=10, stateful_step_count=15, deadline=None, derandomize=True, database=None)
AT_RANDOM = settings(CI, max_examples=int(os.environ.get("DEVICEMAP_EXAMPLES", "300")), derandomize=False)


def test_states() -> None:
    run_state_machine_as_test(Directories, settings=CI)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_states() -> None:
    run_state_machine_as_test(Directories, settings=settings(AT_RANDOM, stateful_step_count=40))
