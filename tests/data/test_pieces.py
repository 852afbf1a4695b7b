"""Balance, played through with numbers alone: jobs of a second on eight devices, and the share of the ideal time they reach."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from devicemap.data.pieces import first_piece, next_piece, seconds_too_late

ROWS, PLACES = 2048, 8
OVERHEAD_SECONDS = 2e-4


def played(costs: np.ndarray, speeds: list[float], known: list[float] | None = None) -> float:
    """Share of the ideal time that a job of rows of these costs reaches on devices of these speeds."""
    costs_before = np.concatenate([[0], np.cumsum(costs)])
    seconds_per_row, taken, end, leavers = [0.0] * len(speeds) if known is None else [1 / s for s in known], 0, 0.0, 0
    idle = [(0.0, place, 0, 0.0) for place in range(len(speeds))]
    while idle:
        now, place, rows, seconds = heapq.heappop(idle)
        if rows:
            before = seconds_per_row[place]
            seconds_per_row[place] = (before + seconds / rows) / 2 if before else seconds / rows
            end = max(end, now)
        left = len(costs) - taken
        if not left:
            continue
        if not seconds_per_row[place]:
            size = first_piece(len(costs), len(speeds))
        else:
            seen = [1 / s for s in seconds_per_row if s]
            usual = sum(seen) / len(seen)
            others = [1 / s if s else usual for i, s in enumerate(seconds_per_row) if i != place]
            speed = 1 / seconds_per_row[place]
            if seconds_too_late(left, speed, sum(others), max(others)) > 0 and leavers < len(speeds) - 1:
                leavers += 1
                continue
            size = next_piece(left, speed, speed + sum(others), now)
        size = min(max(1, int(size)), left)
        seconds = (costs_before[taken + size] - costs_before[taken]) / speeds[place] + OVERHEAD_SECONDS
        taken += size
        heapq.heappush(idle, (now + seconds, place, size, seconds))
    assert taken == len(costs)
    return float(costs.sum() / sum(speeds) / end)


def _costs() -> dict[str, np.ndarray]:
    hot, spikes = np.full(ROWS, 2e-3), np.full(ROWS, 3e-3)
    hot[: ROWS // 16] = 34e-3
    spikes[np.random.default_rng(0).choice(ROWS, 40, replace=False)] = 55e-3
    ramp = np.linspace(0.5e-3, 7.5e-3, ROWS)
    return {"even": np.full(ROWS, 4e-3), "hot first": hot, "hot last": hot[::-1], "ramp": ramp, "spikes": spikes}


EVEN, HALF, ONE = [1.0] * PLACES, [1.0] * 4 + [0.25] * 4, [1.0] * 7 + [0.1]
MIXED = np.linspace(1, 0.3, PLACES).tolist()


@pytest.mark.parametrize("known", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize(
    ("costs", "speeds", "least"),
    [
        ("even", EVEN, 0.98),
        ("hot first", EVEN, 0.98),
        ("hot last", EVEN, 0.98),
        ("ramp", EVEN, 0.98),
        ("spikes", EVEN, 0.94),
        ("even", HALF, 0.98),
        ("even", ONE, 0.98),
        ("even", ONE[::-1], 0.98),
        ("even", MIXED, 0.98),
        ("hot first", HALF, 0.97),
    ],
)
def test_jobs(costs: str, speeds: list[float], least: float, known: bool) -> None:
    rows = _costs()[costs]
    assert played(rows, speeds, [speed / rows.mean() for speed in speeds] if known else None) > least


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 64])
@pytest.mark.parametrize("speeds", [EVEN, HALF, ONE])
def test_few_dear_rows(rows: int, speeds: list[float]) -> None:
    """No device takes a row that makes all wait for it, beyond what patience allows; and all rows are taken."""
    costs = np.full(rows, 0.1)
    known = [speed / 0.1 for speed in speeds]
    best = max(costs.sum() / sum(speeds), 0.1)
    assert costs.sum() / sum(speeds) / played(costs, speeds, known) < 2.6 * best
