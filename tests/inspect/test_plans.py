"""Advice is a pure function of a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from devicemap.inspect.plan import Captured, DevicePlan, Handling, Plan
from devicemap.inspect.plan_advice import advise


def _plan(**facts: Any) -> Plan:
    devices = facts.pop("device_rows", [4, 4])
    usual = Plan(
        name="fn", engine="one graph", rows=8, batch_size=None,
        batched=False, vectorized=True, reason="it can", traces=1,
        devices=tuple(DevicePlan(f"/device:GPU:{i}", "GPU", n, 1, None, i) for i, n in enumerate(devices)),
        control_edges=(), ordered=(), captured=(), random_ops=(), python_ops=(),
        bytes_per_row=12, result_bytes_per_row=4,
    )  # fmt: skip
    return replace(usual, **facts)


ADVICE: list[tuple[dict[str, Any], str]] = [
    (
        {"ordered": ("total",)},
        "`total` is written in a way that depends on order (as in v.assign(g(v))), so the devices work one after another, "
        "in row order: if the order does not matter, use assign_add of a tf.Variable (not one of Keras's), and do not read its "
        "value; or return what changes it, and update it after the call",
    ),
    (
        {"vectorized": False, "reason": "Foo has no vectorised form"},
        "rows run one by one because Foo has no vectorised form: use another op there, or pass batched=True and a fn of a "
        "whole batch",
    ),
    (
        {"vectorized": False, "reason": "Foo has no tested vectorised form (`foo(x)`, line 12 of ode.py)"},
        "rows run one by one because Foo has no tested vectorised form (`foo(x)`, line 12 of ode.py): "
        "pass vectorize=True, and compare the results with DeviceMap.verify; or else use another op there, or pass "
        "batched=True and a fn of a whole batch",
    ),
    (
        {"python_ops": ("PyFunc",)},
        "PyFunc calls Python, where all devices take turns: use TensorFlow ops instead where it computes, or do it in the "
        "input pipeline",
    ),
    ({"rows": 3, "device_rows": [1, 1, 1, 0, 0, 0, 0, 0]}, "3 rows for 8 devices: 5 devices stay idle"),
    ({"rows": 1, "device_rows": [1, 0]}, "1 row for 2 devices: 1 device stays idle"),
    (
        {"engine": "chunks", "batch_size": 8},
        "8 rows in chunks of up to 8 are 1 for 2 devices: use a smaller batch_size",
    ),
    (
        {"devices": tuple(DevicePlan(f"/device:GPU:{i}", "GPU", 2, 1, None, g) for i, g in enumerate([0, 1, 1, 2]))},
        "GPU:1 and GPU:2 are parts of one GPU, where large kernels take turns: they may be no faster than one",
    ),
    (
        {"captured": (Captured("w", "variable", "float32", (2**20,), 2**22, "/device:CPU:0", Handling.COPIED),)},
        "each call copies 4.0 MiB of captured variables to each other device, more than the 128 B of its rows and results: "
        "pass more rows per call",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "sentence"), ADVICE)
def test_advice(facts: dict[str, Any], sentence: str) -> None:
    assert advise(_plan(**facts)) == (sentence,)


def test_no_advice_where_nothing_stands_in_the_way() -> None:
    assert _plan().advice == ()
    assert _plan(vectorized=False, reason="vectorize=False").advice == ()
