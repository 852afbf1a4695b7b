"""Chunk sizes: whole schedules on a simulated clock. A new job is a line in `JOBS`."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from indices import IndexSource
from simulation import SimulatedCall, SimulatedDevice

from devicemap.data.sources import Chunk
from devicemap.run.chunk_sizes import Throughput, next_chunk_size, rows_are_free

speeds = st.floats(0.1, 1e5)
throughputs = st.builds(
    Throughput,
    rows_per_second=st.none() | speeds,
    rows_in_flight=st.integers(0, 500),
    limit=st.none() | st.integers(1, 100),
)


def simulate(
    costs: list[float],
    speeds: list[float],
    chunk_rows: int | None = None,
    in_flight: int = 2,
    per_call: float = 0.0,
    measured: dict[str, Throughput] | None = None,
    **options: Any,
) -> tuple[float, list[int], dict[str, Throughput]]:
    """Return the seconds of a job on devices of given speeds, the sizes of its chunks, and the measurements."""

    def seconds(speed: float, chunk: Chunk) -> float:
        return per_call + sum(costs[chunk.start : chunk.start + chunk.count]) / speed

    devices = {
        f"/device:CPU:{i}": SimulatedDevice(partial(seconds, speed), in_flight) for i, speed in enumerate(speeds)
    }
    call = SimulatedCall(devices, IndexSource(len(costs), chunk_rows, reads=False), measured, **options)
    call.scheduler.run()
    return call.time, call.sizes, call.scheduler.throughput()


COSTS = [0.004] * 2048
HOT = [0.0025] * 1500 + [0.0025 * 17] * 100
JOBS = {  # seconds of rows, speeds of devices, share of the ideal time
    "even": (COSTS, [1.0] * 8, 0.97),
    "hot block first": (HOT[::-1], [1.0] * 8, 0.96),
    "hot block last": (HOT, [1.0] * 8, 0.95),
    "ramp": ([0.008 * i / 2048 for i in range(2048)], [1.0] * 8, 0.95),
    "half four times slower": (COSTS, [1.0, 0.25] * 4, 0.95),
    "one ten times slower": (COSTS, [0.1] + [1.0] * 7, 0.93),
}


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(("calls", "in_flight"), [(1, 2), (3, 2), (3, 4)])
def test_share_of_the_ideal_time_in_the_last_call(job: str, calls: int, in_flight: int) -> None:
    costs, devices, share = JOBS[job]
    measured = None
    for _ in range(calls):
        seconds, _, measured = simulate(costs, devices, in_flight=in_flight, measured=measured)
    assert sum(costs) / sum(devices) / seconds >= share


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("chunk_rows", [8, 32])
def test_chunks_of_a_fixed_size_lose_at_most_one_chunk(job: str, chunk_rows: int) -> None:
    costs, devices, _ = JOBS[job]
    seconds, sizes, _ = simulate(costs, devices, chunk_rows)
    assert sizes == [chunk_rows] * (len(costs) // chunk_rows)
    dearest = max(sum(costs[i : i + chunk_rows]) for i in range(0, len(costs), chunk_rows))
    assert seconds <= sum(costs) / sum(devices) / 0.97 + 1.5 * dearest / max(devices)


def test_chunks_that_take_as_long_for_fewer_rows_are_not_cut_for_balance() -> None:
    """As on a GPU that is not full: 50 ms per call, whatever the rows."""
    seconds, sizes, _ = simulate([1e-6] * 10_000, [1.0] * 4, per_call=0.05)
    assert len(sizes) <= 84
    assert seconds <= 22 * 0.05


FAST = {"/device:CPU:0": Throughput(rows_per_second=1e5), "/device:CPU:1": Throughput(rows_per_second=10.0)}


def test_what_was_left_to_a_fast_device_goes_to_others_when_that_is_overdue() -> None:
    seconds, _, _ = simulate([1.0] * 6, [0.1, 10.0], chunk_rows=1, in_flight=1, measured=FAST)
    assert seconds == 10.0


def test_an_idle_device_takes_the_next_task_however_slow_it_was() -> None:
    measured = FAST | {"/device:CPU:1": Throughput(rows_per_second=1e-6)}
    seconds, _, _ = simulate([1.0] * 2, [1.0, 1.0], chunk_rows=1, in_flight=1, measured=measured, are_tasks=True)
    assert seconds == 1.0


@pytest.mark.parametrize("job", JOBS)
def test_sizes_are_powers_of_two(job: str) -> None:
    """Then ops that prepare for each new shape, as cuDNN's convolutions do, prepare for few."""
    costs, devices, _ = JOBS[job]
    _, sizes, _ = simulate(costs[:-100], devices, per_call=0.003)
    assert all(rows.bit_count() == 1 for rows in sizes)


@pytest.mark.parametrize(
    ("costs", "devices", "per_call", "free"),
    [
        *((*job[:2], per_call, False) for job in JOBS.values() for per_call in (0.0, 0.003)),
        ([1e-9] * 1600, [1.0] * 8, 0.02, True),
        ([1e-9] * 1000, [1.0] * 2, 0.2, True),
        ([1e-4] * 1000, [1.0] * 4, 0.02, True),
    ],
)
def test_whether_rows_are_free(costs: list[float], devices: list[float], per_call: float, free: bool) -> None:
    measured = None
    for _ in range(3):
        _, _, measured = simulate(costs, devices, per_call=per_call, measured=measured)
        assert rows_are_free(measured.values()) == free


@settings(deadline=None)
@given(
    st.lists(st.floats(1e-5, 0.01), max_size=300),
    st.lists(st.floats(0.05, 1.0), min_size=1, max_size=8),
    st.none() | st.integers(1, 64),
)
def test_every_row_is_taken_once(costs: list[float], devices: list[float], chunk_rows: int | None) -> None:
    _, sizes, _ = simulate(costs, devices, chunk_rows)
    assert sum(sizes) == len(costs)
    if chunk_rows:
        assert all(size == chunk_rows for size in sizes[:-1])


@given(st.lists(throughputs, min_size=1, max_size=8), st.integers(1, 10**6), st.none() | st.integers(1, 1000))
def test_some_device_takes_the_rest(devices: list[Throughput], rows_left: int, chunk_rows: int | None) -> None:
    sizes = [
        next_chunk_size(device, devices[:i] + devices[i + 1 :], rows_left, chunk_rows)
        for i, device in enumerate(devices)
    ]
    assert all(0 <= rows <= rows_left for rows in sizes)
    assert next_chunk_size(devices[0], devices[1:], 0, 8) == 0
    assert any(sizes) or any(device.rows_in_flight for device in devices)
    for device, rows in zip(devices, sizes):
        assert chunk_rows is not None or device.limit is None or rows <= device.limit
        assert chunk_rows is None or rows in (0, min(chunk_rows, rows_left))


def test_without_a_known_end_chunks_are_whole() -> None:
    assert next_chunk_size(Throughput(rows_per_second=10.0), [Throughput()], None, 32) == 32
    assert next_chunk_size(Throughput(rows_per_second=10.0, size=16, limit=5), [Throughput()], None) == 4


def _grow(fixed: float = 0.0, per_row: float = 0.0, memory_rows: float = math.inf) -> int:
    """Return the size after 60 chunks on a device whose memory holds a number of rows."""
    state = Throughput()
    for _ in range(60):
        rows, seconds = state.size, fixed + per_row * state.size
        state = state.taking(rows).finishing(rows, seconds, seconds, peak_share=rows / memory_rows)
    return state.size


def test_auto_grows_while_it_pays() -> None:
    # 30 ms per call and 0.1 ms per row: 1000 rows have 77% of the best possible speed
    assert 1000 <= _grow(fixed=0.030, per_row=0.0001) <= 5000
    # Nothing to gain: a chunk only needs to be long enough to hide the cost of sending it.
    assert _grow(per_row=0.010) <= 32
    assert 10_000 <= _grow(per_row=1e-6) <= 40_000


@pytest.mark.parametrize(("memory_rows", "size"), [(64, 64), (65, 64), (127, 64), (128, 128)])
def test_auto_stops_before_the_memory_is_full(memory_rows: int, size: int) -> None:
    assert _grow(per_row=1e-6, memory_rows=memory_rows) == size
