"""The recommendation: a decision over measurements alone."""

from __future__ import annotations

from typing import Any

import pytest

from devicemap.bench.measurements import Measurement, Timing, compare_timings
from devicemap.bench.recommendation import recommend

GPUS = tuple(f"/job:localhost/replica:0/task:0/device:GPU:{i}" for i in range(4))


def _timing(rows_per_second: float, devices: int = 1, batch_size: int | None = None, **changes: Any) -> Timing:
    fields: dict[str, Any] = {
        "mode": "graph",
        "devices": GPUS[:devices],
        "batch_size": batch_size,
        "vectorize": None,
        "rows": 1000,
        "first_call_seconds": 1.0,
        "round_seconds": (1000 / rows_per_second,),
        "busy_shares": None,
        "peak_memory_bytes": None,
    }
    return Timing(**{**fields, **changes})


def _measure(*timings: Timing) -> tuple[Measurement, ...]:
    return compare_timings(timings)


def test_speedup_is_against_the_fastest_on_one_device_in_any_mode() -> None:
    measured = _measure(
        _timing(100),
        _timing(200, batch_size=8),
        _timing(600, 4),
        _timing(10, mode="eager"),
        _timing(20, 2, mode="eager"),
    )
    assert [m.speedup for m in measured] == pytest.approx([0.5, 1, 3, 0.05, 0.1])
    assert [m.efficiency for m in measured] == pytest.approx([0.5, 1, 0.75, 0.05, 0.05])
    assert [m.rows_per_second for m in measured] == pytest.approx([100, 200, 600, 10, 20])


def test_speedup_counts_the_rows_of_each() -> None:
    (all_rows, fewer) = _measure(_timing(100), _timing(1, rows=10, round_seconds=(0.05,)))
    assert fewer.rows_per_second == pytest.approx(200)
    assert all_rows.speedup == pytest.approx(0.5)


def test_speedup_is_unknown_without_one_device() -> None:
    (alone,) = _measure(_timing(100, 4))
    assert alone.speedup is alone.efficiency is None
    assert recommend([alone]) == "Use all 4 GPUs with batch_size=None: one device alone could not be measured."


@pytest.mark.parametrize(
    ("timings", "sentence"),
    [
        (
            [_timing(100), _timing(340, 4, 64), _timing(300, 4)],
            "Use all 4 GPUs with batch_size=64: 3.4 times the rows per second of one.",
        ),
        (  # as good as the fastest: the default is simpler
            [_timing(100), _timing(340, 4, 64), _timing(330, 4)],
            "Use all 4 GPUs with batch_size=None: 3.3 times the rows per second of one.",
        ),
        (  # of two sizes that are as good, the larger
            [_timing(100), _timing(340, 4, 8), _timing(339, 4, 64)],
            "Use all 4 GPUs with batch_size=64: 3.4 times the rows per second of one.",
        ),
        (
            [_timing(100, vectorize="auto"), _timing(200, 2, vectorize="auto"), _timing(400, 2, vectorize=False)],
            "Use all 2 GPUs with batch_size=None and vectorize=False: 4.0 times the rows per second of one.",
        ),
        (
            [_timing(100), _timing(105, 4)],
            "Use one device, devices='GPU:0' with batch_size=None: it is as fast as all 4 GPUs together.",
        ),
        (
            [_timing(150, batch_size=32), _timing(50, 4)],
            "Use one device, devices='GPU:0' with batch_size=32: it is 3.0 times as fast as all 4 GPUs together.",
        ),
        ([_timing(123.4)], "Use GPU:0 with batch_size=None: 123.4 rows per second."),
        (
            [_timing(100, busy_shares={GPUS[0]: 0.42}), _timing(180, 4)],
            "Use GPU:0 better before you use more devices, as it is busy only 42% of the time with batch_size=None: larger "
            "batches, batched=True, or faster input; all 4 GPUs give 1.8 times its rows per second.",
        ),
        (
            [_timing(100, busy_shares={GPUS[0]: 0.95}), _timing(380, 4)],
            "Use all 4 GPUs with batch_size=None: 3.8 times the rows per second of one.",
        ),
        (
            [_timing(100), _timing(50, mode="eager"), _timing(90, 4, mode="eager"), _timing(390, 4)],
            "Use all 4 GPUs with batch_size=None: 3.9 times the rows per second of one.",
        ),
        (
            [_timing(100), _timing(300, mode="eager"), _timing(120, 4, 16)],
            "Stay with eager code on GPU:0: it maps 2.5 times the rows per second of DeviceMap at its best "
            "(batch_size=16 on 4 GPUs).",
        ),
        (
            [_timing(100, mode="eager"), _timing(200, 4, mode="eager")],
            "In eager code, use all 4 GPUs with batch_size=None: 2.0 times the rows per second of one.",
        ),
    ],
)
def test_recommendations(timings: list[Timing], sentence: str) -> None:
    assert recommend(_measure(*timings)) == sentence


NOISE = (1.0, 1.4, 0.8, 2.0, 1.1)


def test_noise_that_meets_all_ways_cancels() -> None:
    one, many = (_timing(1, devices, round_seconds=tuple(n * s for n in NOISE)) for devices, s in ((1, 3.0), (4, 1.0)))
    measured = _measure(one, many)
    assert measured[1].speedup == pytest.approx(3.0)
    assert measured[1].speedup_interval == pytest.approx((3.0, 3.0))
    assert recommend(measured).startswith("Use all 4 GPUs")


@pytest.mark.parametrize(
    ("factor", "words"), [(1.0, "which does not tell"), (0.3, "Use all"), (4.0, "times as fast as")]
)
def test_what_an_interval_does_not_tell_is_not_recommended(factor: float, words: str) -> None:
    one, many = _timing(1, round_seconds=(1.0,) * 5), _timing(1, 4, round_seconds=tuple(factor * n for n in NOISE))
    measured = _measure(one, many)
    low, high = measured[1].speedup_interval or (0.0, 0.0)
    assert low < (measured[1].speedup or 0.0) < high
    assert words in recommend(measured)
    assert _measure(one, many) == measured  # drawn from a fixed seed


def test_an_idle_cpu_is_no_reason_to_wait() -> None:
    measured = _measure(_timing(100, busy_shares={"/device:CPU:0": 0.2}), _timing(190, 2))
    assert recommend(measured).startswith("Use all 2 GPUs with")
