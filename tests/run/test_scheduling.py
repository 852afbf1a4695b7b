"""The number of rows that a device takes, simulated without TensorFlow."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devicemap.run.schedule import Pace, are_free, rows_to_take

speeds = st.floats(0.1, 1e5)
paces = st.builds(
    Pace, rows_per_second=st.none() | speeds, rows_in_flight=st.integers(0, 500), limit=st.none() | st.integers(1, 100)
)


def play(
    costs: list[float],
    devices: list[float],
    batch_size: int | None,
    in_flight: int = 2,
    per_call: float = 0.0,
    known: list[Pace] | None = None,
) -> tuple[float, list[int], list[Pace]]:
    """A job on devices of given speeds: its seconds, the sizes of its chunks as the policy cuts them, and the paces.

    A device works on its chunks one after another, and asks for the next one when it has fewer than `in_flight`.
    """
    state = known or [Pace() for _ in devices]
    busy_until = [0.0] * len(devices)
    done: list[tuple[float, int, int, float, float]] = []  # when, device, rows, started, handed out
    sizes, taken, now = [], 0, 0.0
    chunks_on = [0] * len(devices)
    while taken < len(costs) or done:
        for i in range(len(devices)):
            while chunks_on[i] < in_flight and taken < len(costs):
                others = [pace for j, pace in enumerate(state) if j != i]
                rows = rows_to_take(state[i], others, len(costs) - taken, batch_size)
                if not rows:
                    break
                start = max(now, busy_until[i])
                busy_until[i] = start + per_call + sum(costs[taken : taken + rows]) / devices[i]
                heapq.heappush(done, (busy_until[i], i, rows, start, now))
                state[i] = state[i].taking(rows)
                chunks_on[i] += 1
                sizes.append(rows)
                taken += rows
        assert done, "rows are left and nobody takes them"
        now, i, rows, start, handed = heapq.heappop(done)
        state[i] = state[i].finishing(rows, now - start, now - handed)
        chunks_on[i] -= 1
    return max(busy_until), sizes, state


COSTS = [0.004] * 2048
HOT = [0.004] * 1920 + [0.004 * 17] * 128
TARGETS = [
    ("even", COSTS, [1.0] * 8, 0.97),
    ("hot block first", HOT[::-1], [1.0] * 8, 0.96),
    ("hot block last", HOT, [1.0] * 8, 0.92),
    ("half four times slower", COSTS, [1.0, 0.25] * 4, 0.95),
    ("one ten times slower", COSTS, [0.1] + [1.0] * 7, 0.93),
]


@pytest.mark.parametrize(("name", "costs", "devices", "share"), TARGETS, ids=[t[0] for t in TARGETS])
@pytest.mark.parametrize("batch_size", [8, 32, 256, None])
def test_share_of_the_ideal_time(
    name: str, costs: list[float], devices: list[float], share: float, batch_size: int | None
) -> None:
    seconds, sizes, _ = play(costs, devices, batch_size)
    assert sum(sizes) == len(costs)
    assert batch_size is None or max(sizes) <= batch_size
    assert sum(costs) / sum(devices) / seconds >= share


def test_chunks_that_take_as_long_for_fewer_rows_are_not_cut_for_balance() -> None:
    """As on a GPU that is not full: 50 ms per call, whatever the rows."""
    seconds, sizes, _ = play([1e-6] * 10_000, [1.0] * 4, 250, per_call=0.05)
    assert len(sizes) <= 2.1 * 10_000 / 250
    assert seconds <= 2.1 * 0.05 * 10_000 / 250 / 4


@pytest.mark.parametrize(
    ("costs", "devices", "per_call", "free"),
    [
        *((costs, devices, 0.0, False) for _, costs, devices, _ in TARGETS),
        ([1e-9] * 1600, [1.0] * 8, 0.02, True),
        ([1e-9] * 1000, [1.0] * 2, 0.2, True),
        ([1e-4] * 1000, [1.0] * 4, 0.02, True),
    ],
)
def test_whether_rows_are_free(costs: list[float], devices: list[float], per_call: float, free: bool) -> None:
    known = None
    for _ in range(3):
        _, _, known = play(costs, devices, None, per_call=per_call, known=known)
        found = are_free(known)
        known = [pace.between_calls() for pace in known]
    assert found == free


@given(
    st.lists(st.floats(1e-4, 1.0), max_size=300),
    st.lists(st.floats(0.05, 1.0), min_size=1, max_size=8),
    st.none() | st.integers(1, 64),
)
def test_every_row_is_taken_once(costs: list[float], devices: list[float], batch_size: int | None) -> None:
    _, sizes, _ = play(costs, devices, batch_size)
    assert sum(sizes) == len(costs)
    assert all(sizes)


@given(st.lists(paces, min_size=1, max_size=8), st.integers(1, 10**6), st.none() | st.integers(1, 1000))
def test_somebody_takes_what_is_left(all_paces: list[Pace], rows_left: int, batch_size: int | None) -> None:
    asked = [
        rows_to_take(pace, all_paces[:i] + all_paces[i + 1 :], rows_left, batch_size)
        for i, pace in enumerate(all_paces)
    ]
    assert all(0 <= rows <= rows_left for rows in asked)
    assert rows_to_take(all_paces[0], all_paces[1:], 0, 8) == 0
    assert any(asked) or any(pace.rows_in_flight for pace in all_paces)
    for pace, rows in zip(all_paces, asked):
        assert pace.limit is None or rows <= pace.limit
        assert batch_size is None or rows <= batch_size


def test_without_an_end_in_sight_chunks_are_whole() -> None:
    assert rows_to_take(Pace(rows_per_second=10.0), [Pace()], None, 32) == 32
    assert rows_to_take(Pace(rows_per_second=10.0, limit=5), [Pace()], None, 32) == 5


def _grow(seconds_of: dict[int, float] | None = None, fixed: float = 0.0, per_row: float = 0.0) -> int:
    pace = Pace()
    for _ in range(60):
        rows = pace.size
        seconds = seconds_of[rows] if seconds_of else fixed + per_row * rows
        pace = pace.taking(rows).finishing(rows, seconds, seconds)
    return pace.size


def test_auto_grows_while_it_pays() -> None:
    # 30 ms per call and 0.1 ms per row: 1000 rows have 77% of the best speed there is
    assert 1000 <= _grow(fixed=0.030, per_row=0.0001) <= 5000
    # nothing to gain: a chunk needs to be long enough to hide what dispatching it takes, no longer
    assert _grow(per_row=0.010) <= 32
    assert 10_000 <= _grow(per_row=1e-6) <= 40_000


def test_memory_limits() -> None:
    pace = Pace(size=64).taking(64).giving_up(64).running_out_of_memory(64, alone=True)
    assert (pace.limit, pace.size, pace.rows_in_flight) == (32, 32, 0)
    assert pace.running_out_of_memory(32, alone=True).limit == 16
    assert pace.running_out_of_memory(64, alone=True).limit == 32  # another chunk of the old size was under way
    assert Pace().running_out_of_memory(1, alone=True).limit == 1
    for _ in range(20):
        pace = pace.taking(32).finishing(32, 0.001, 0.001)
    assert rows_to_take(pace, [], None, None) == 32


def test_fewer_chunks_in_flight_before_smaller_ones() -> None:
    pace = Pace(size=64).taking(64).taking(64).taking(64).taking(64)
    assert pace.may_take
    for left in (3, 2, 1, 0):
        pace = pace.giving_up(64).running_out_of_memory(64, alone=False)
        assert (pace.at_once, pace.limit, pace.size) == (max(left, 1), None, 64)
        assert pace.may_take == (not left)
    assert pace.taking(64).between_calls().at_once == 1


@given(paces, st.integers(1, 1000))
def test_a_device_that_is_idle_takes_any_chunk(pace: Pace, rows: int) -> None:
    assert pace.running_out_of_memory(rows, alone=True).running_out_of_memory(rows, alone=False).may_take


def test_what_the_next_call_knows() -> None:
    pace = Pace(5.0, 3, size=64, best_rows_per_second=4.0, largest=9, quickest_seconds=1.0, limit=100)
    assert pace.taking(3).between_calls() == Pace(5.0, size=64, best_rows_per_second=4.0, limit=100)
