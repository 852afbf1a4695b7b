"""Maps, streams, writes, reductions and tasks in any order, with interruptions, damage and changes between them.

Results equal those of NumPy. In a directory each row is computed once, or listed as failed, and no row is lost.
"""

from __future__ import annotations

import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import tensorflow as tf
from directories import (
    FAILS,
    KINDS,
    LOST,
    SCALE,
    Stored,
    attempt,
    mapper_of,
    observer,
    read_data,
    simulator,
    wanted,
    write_and_die,
)
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from stored import damage, ranges, untouched

import devicemap

DEVICES = st.sampled_from([("CPU:1",), ("CPU:2", "CPU:0", "CPU:1")])
INTERRUPTS = st.tuples(st.sampled_from(["observer", "data"]), st.integers(0, 4))


class Directories(RuleBasedStateMachine):
    """Calls on data that grows. A row with a negative value fails, until it is repaired."""

    @initialize(kind=st.sampled_from([*KINDS]), fails=st.lists(st.booleans(), min_size=3, max_size=9))
    def begin(self, kind: str, fails: list[bool]) -> None:
        self.kind, self.mapper, self.values = kind, partial(mapper_of, kind), list[int]()
        self.add_rows(fails)
        self.folder = tempfile.TemporaryDirectory()
        self.written, self.reduced = (Stored(Path(self.folder.name, name)) for name in ("written", "reduced"))
        SCALE.assign(1)
        self.lost = set[str]()
        simulator().reset()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()
            simulator().reset()

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

    @rule(device=st.sampled_from(["CPU:0", "CPU:2"]))
    def lose_a_device(self, device: str) -> None:
        self.lost.add(device)
        simulator().configure(device, fails_from_call=0, error_code=LOST(None, None, "").error_code)

    @rule()
    def repair_devices(self) -> None:
        self.lost.clear()
        simulator().reset()

    def lost_of(self, devices: tuple[str, ...]) -> bool:
        """Return whether one of these devices is lost. CPU:1 never is."""
        return bool({*devices} & self.lost)

    @rule()
    def change_the_variable(self) -> None:
        SCALE.assign(3 - SCALE)

    @rule(devices=DEVICES, skip=st.booleans(), interrupt=st.none() | INTERRUPTS)
    def map_rows(self, devices: tuple[str, ...], skip: bool, interrupt: Any) -> None:
        mapper, fails = self.mapper(devices, skip), not skip and min(self.values) < 0
        result = attempt(lambda: mapper(self.data(interrupt)), interrupt, False, fails, self.lost_of(devices))
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

    def write_rows(self, devices: tuple[str, ...], skip: bool, interrupt: Any = None, retry: bool = False) -> None:
        call = partial(self.mapper(devices, skip).write, retry_failed=retry)
        results = self.written.compute(
            call, self.values, self.data(interrupt), skip, skip and not retry, interrupt, self.lost_of(devices)
        )
        if results is not None:
            assert results.complete
            assert results.load().tolist() == wanted(self.values)

    @rule(devices=DEVICES, skip=st.booleans())
    def write(self, devices: tuple[str, ...], skip: bool) -> None:
        self.write_rows(devices, skip)

    @rule(devices=DEVICES, skip=st.booleans(), interrupt=INTERRUPTS)
    def interrupt_a_write(self, devices: tuple[str, ...], skip: bool, interrupt: Any) -> None:
        self.write_rows(devices, skip, interrupt)

    @rule(devices=DEVICES)
    def retry_failed_rows(self, devices: tuple[str, ...]) -> None:
        self.write_rows(devices, skip=True, retry=True)

    @precondition(lambda self: max(self.values) >= 0 and not self.lost)  # otherwise there are warnings
    @rule(devices=DEVICES, skip=st.booleans())
    def write_while_another_thread_maps(self, devices: tuple[str, ...], skip: bool) -> None:
        with ThreadPoolExecutor() as threads:
            mapped = threads.submit(self.mapper(devices, True, observed=False), self.data())
            self.write_rows(devices, skip)
        assert mapped.result().numpy().tolist() == wanted(self.values)

    @rule(devices=DEVICES, skip=st.booleans(), interrupt=st.none() | INTERRUPTS)
    def reduce(self, devices: tuple[str, ...], skip: bool, interrupt: Any) -> None:
        call = lambda data, path: self.mapper(devices, skip).reduce(data, "sum", path)
        total = self.reduced.compute(
            call, self.values, self.data(interrupt), skip, skip, interrupt, self.lost_of(devices)
        )
        assert total is None or int(total) == sum(wanted(self.values))

    @rule(number=st.integers(0, 9))
    def damage_a_chunk(self, number: int) -> None:
        if row := self.written.pick(number):
            (start,) = [start for start, stop in ranges(self.written.path) if start <= row < stop]
            self.written.right -= {*damage(self.written.path, start)}

    @rule(devices=DEVICES, number=st.integers(0, 9), shorter=st.booleans())
    def write_other_data(self, devices: tuple[str, ...], number: int, shorter: bool) -> None:
        if row := self.written.pick(number):
            others = self.values[:row] if shorter else [*self.values[:row], -1000, *self.values[row + 1 :]]
            with untouched(self.written.path) if self.kind.startswith("memory") else nullcontext():
                write = lambda: self.mapper(devices, True).write(read_data(others, self.kind), self.written.path)
                attempt(write, None, True, False)
            self.written.read(self.values)

    @precondition(lambda self: not self.lost)
    @rule(devices=DEVICES, skip=st.booleans())
    def run_tasks(self, devices: tuple[str, ...], skip: bool) -> None:
        """Each task maps the rows before its own, and fails as its row does."""
        data, mapper = np.array(self.values), self.mapper(devices, True, observed=False)

        def task(row: int) -> list[int]:
            tf.debugging.assert_non_negative(data[row])
            return mapper(np.abs(data[:row])).numpy().tolist()

        options: dict[str, Any] = {"devices": devices, "on_error": "skip" if skip else "raise"}
        call = lambda: devicemap.parallel_tasks(task, range(len(data)), **options)
        results = attempt(call, None, False, not skip and min(self.values) < 0)
        for row, result in enumerate(results or ()):
            assert isinstance(result, FAILS) if data[row] < 0 else result == wanted([*map(abs, self.values[:row])])


class KilledDirectories(Directories):
    """Processes that write are killed, too."""

    @precondition(lambda self: self.written.scale in (None, int(SCALE)))
    @rule(events=st.integers(0, 4))
    def kill_a_write(self, events: int) -> None:
        arguments = self.kind, self.values, int(SCALE), str(self.written.path), events
        process = processes.forks.Process(target=write_and_die, args=arguments)
        process.start()
        process.join()
        repaired = any(self.values[row] >= 0 for row in self.written.failed)  # such a write is refused
        assert process.exitcode in (int(repaired), -signal.SIGKILL)
        self.written.read(self.values)


# No shrinking, which would take longer than the timeout of a test.
CI = settings(max_examples=7, stateful_step_count=20, deadline=None, derandomize=True, phases=[Phase.generate])
AT_RANDOM = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_states() -> None:
    run_state_machine_as_test(Directories, settings=CI)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_states() -> None:
    run_state_machine_as_test(KilledDirectories, settings=AT_RANDOM)
