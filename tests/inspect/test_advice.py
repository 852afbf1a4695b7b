"""Advice of plans and reports: each case has its advice; a plan without problems and an even call have none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from histories import device, history, one_graph, report_of

from devicemap.inspect.plan import CapturedValue, DevicePlan, Handling
from devicemap.types import CallFinished, CallStarted, Plan


def _devices(*rows: int, gpus: list[int] | None = None) -> tuple[DevicePlan, ...]:
    return tuple(
        DevicePlan(f"/device:GPU:{i}", n, 1, None, gpu)
        for i, (n, gpu) in enumerate(zip(rows, gpus or range(len(rows))))
    )


def _in_chunks(*in_flight: int) -> tuple[DevicePlan, ...]:
    return tuple(DevicePlan(f"/device:GPU:{i}", None, None, n, i) for i, n in enumerate(in_flight))


PLAN = Plan(
    name="fn", engine="one graph", rows=8, batch_size=None, devices=_devices(4, 4), batched=False, vectorized=True,
    reason="it can", remedy="", traces=1, captured=(), python_ops=(), fixed_seeds=(), bytes_per_row=12,
    result_bytes_per_row=4,
)  # fmt: skip


def _captured(name: str, handling: Handling, size: int = 4) -> dict[str, Any]:
    return {"captured": (CapturedValue(name, size, "/device:CPU:0", handling),)}


PLANS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({}, []),
    "asked for row by row": ({"vectorized": False, "reason": "vectorize=False"}, []),
    "order": (_captured("total", Handling.ORDERED), ["fn writes `total` in row order: use assign_add"]),
    "batch normalization": (_captured("norm/moving_mean", Handling.ORDERED), ["with training=False"]),
    "row by row": (
        {"vectorized": False, "reason": "Foo has no vectorised form", "remedy": "use another op there"},
        ["because Foo has no vectorised form: use another op there"],
    ),
    "row by row, in row order": ({**_captured("total", Handling.ORDERED), "remedy": "use another op there"}, ["in row order"]),
    "Python": ({"python_ops": ("PyFunc",)}, ["PyFunc calls Python"]),
    "seeds": ({"fixed_seeds": ("RandomUniform",)}, ["one device computes all rows, because the seeds of RandomUniform"]),
    "Python, with few threads": (
        {"python_ops": ("PyFunc",), "devices": _devices(4, 4, 0)},
        ["for all devices (2 devices: see tf.config.threading.set_inter_op_parallelism_threads)"],
    ),
    "few chunks": ({"engine": "chunks", "batch_size": 8}, ["8 rows make 1 chunk for 2 devices: use a smaller batch_size"]),
    "enough chunks": ({"engine": "chunks", "batch_size": 7}, []),
    "single rows": ({"rows": 3, "engine": "chunks", "batch_size": 1, "devices": _in_chunks(2, 2, 2, 2)}, []),
    "Python in chunks, with few threads": (
        {"python_ops": ("PyFunc",), "engine": "chunks", "rows": None, "devices": _in_chunks(1, 0, 0)},
        ["for all devices (1 device: see"],
    ),
    "parts of a GPU": ({"devices": _devices(2, 2, 2, 2, gpus=[0, 1, 1, 2])}, ["GPU:1 and GPU:2 are parts of one GPU"]),
    "large copies": (_captured("w", Handling.COPIED, 2**22), ["each call copies 4.0 MiB of variables to each other device"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_advice_of_plans(name: str) -> None:
    facts, parts = PLANS[name]
    advice = replace(PLAN, **facts).advice
    assert len(advice) == len(parts), advice
    assert all(part in sentence for part, sentence in zip(parts, advice)), advice


LOOP = "Foo has no tested vectorised form (`foo(x)`, line 12 of ode.py): pass vectorize=True"

REPORTS: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "even": (history([(10, 1.0)] * 8, devices=4), {}, []),
    "no rows": (history([]), {}, []),
    "row by row": (history([(10, 1.1)] * 2), {"row_by_row": LOOP}, [f"because {LOOP}"]),
    "row by row, but short": (history([(10, 0.9)] * 2), {"row_by_row": LOOP}, []),
    "slow input": (history([(10, 0.5)] * 10, devices=1, input_seconds=1.0), {}, ["waited 67% of the time for input"]),
    "long last chunk": (
        history([(10, 1.0), (10, 1.0), (10, 0.8)]),
        {},
        ["0.8 s before the end: use a smaller batch_size"],
    ),
    "long last row": (history([(1, 1.0), (1, 1.0), (1, 1.9)]), {}, ["before the end: put the rows that take longest"]),
    "few chunks": (history([(10, 1.1)] * 2, devices=4), {}, ["1.1 s before the end: use a smaller batch_size"]),
    "no devices": ([CallStarted(0.0, 0, ()), CallFinished(1.1, None)], {}, []),
    "slow devices": (history([(10, 1.0)] * 6, devices=4, slowness=[4, 1, 4, 1]), {}, ["2 s before the end"]),
    "lost device": (history([(2, 1.0)] * 8, devices=3, lost=2), {}, []),
    "out of memory": (history([(2, 1.0)] * 4, devices=1, too_large={0}), {}, ["GPU:0 ran out of memory"]),
    "in turn": (one_graph([5, 5], 1.0), {"engine": "one graph", "in_turn": True}, ["depends on the order of rows"]),
}


@pytest.mark.parametrize("name", REPORTS)
def test_advice_of_reports(name: str) -> None:
    events, facts, parts = REPORTS[name]
    report = report_of(events, **facts)
    assert len(report.advice) == len(parts), report.advice
    for sentence, part in zip(report.advice, parts):
        assert part in sentence
        assert f"* {sentence[:20]}" in str(report)
    lost = [each.device for each in report.devices if each.lost]
    assert lost == ([device(2)] if name == "lost device" else [])
    assert ("GPU:2 (lost)" in str(report)) == bool(lost)
