"""Advice of plans: each case has its advice, and a plan without problems has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from devicemap.inspect.plan import Captured, DevicePlan, Handling
from devicemap.types import Plan


def _devices(*rows: int, gpus: list[int] | None = None) -> tuple[DevicePlan, ...]:
    return tuple(
        DevicePlan(f"/device:GPU:{i}", n, 1, None, gpu)
        for i, (n, gpu) in enumerate(zip(rows, gpus or range(len(rows))))
    )


PLAN = Plan(
    name="fn", engine="one graph", rows=8, batch_size=None, devices=_devices(4, 4), batched=False, vectorized=True,
    reason="it can", traces=1, captured=(), python_ops=(), fixed_seeds=(), bytes_per_row=12,
    result_bytes_per_row=4,
)  # fmt: skip


def _captured(name: str, handling: Handling, size: int = 4) -> dict[str, Any]:
    return {"captured": (Captured(name, size, "/device:CPU:0", handling),)}


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({}, []),
    "asked for row by row": ({"vectorized": False, "reason": "vectorize=False"}, []),
    "order": (_captured("total", Handling.ORDERED), ["fn writes `total` in row order: use assign_add"]),
    "order on one device": ({**_captured("total", Handling.ORDERED), "devices": _devices(8)}, []),
    "batch normalization": (_captured("norm/moving_mean", Handling.ORDERED), ["with training=False"]),
    "row by row": ({"vectorized": False, "reason": "Foo has no vectorised form"}, ["form: use another op there"]),
    "row by row, untested": (
        {"vectorized": False, "reason": "Foo has no tested vectorised form (`foo(x)`, line 12 of ode.py)"},
        ["(`foo(x)`, line 12 of ode.py): pass vectorize=True, and compare the results with DeviceMap.verify; or else use"],
    ),
    "Python": ({"python_ops": ("PyFunc",)}, ["PyFunc calls Python"]),
    "seeds": ({"fixed_seeds": ("RandomUniform",)}, ["one device computes all rows, because the seeds of RandomUniform"]),
    "Python, with few threads": (
        {"python_ops": ("PyFunc",), "devices": _devices(4, 4, 0)},
        ["for all devices (2 devices: see tf.config.threading.set_inter_op_parallelism_threads)"],
    ),
    "few rows": ({"rows": 3, "devices": _devices(1, 1, 1, 0, 0, 0, 0, 0)}, []),
    "few chunks": ({"engine": "chunks", "batch_size": 8}, ["8 rows make 1 chunk for 2 devices: use a smaller batch_size"]),
    "enough chunks": ({"engine": "chunks", "batch_size": 7}, []),
    "parts of a GPU": ({"devices": _devices(2, 2, 2, 2, gpus=[0, 1, 1, 2])}, ["GPU:1 and GPU:2 are parts of one GPU"]),
    "large copies": (_captured("w", Handling.COPIED, 2**22), ["each call copies 4.0 MiB of variables to each other device"]),
    "small copies": (_captured("w", Handling.COPIED, 2**19), []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_advice(name: str) -> None:
    facts, parts = CASES[name]
    advice = replace(PLAN, **facts).advice
    assert len(advice) == len(parts), advice
    assert all(part in sentence for part, sentence in zip(parts, advice)), advice
