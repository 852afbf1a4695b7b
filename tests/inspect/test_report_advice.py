"""Advice of reports: each case has its advice, and an even call has none."""

from __future__ import annotations

from typing import Any

import pytest
from histories import device, history, one_graph, report_of

LOOP = "Foo has no tested vectorised form (`foo(x)`, line 12 of ode.py)"

CASES: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "even": (history([(10, 1.0)] * 8, devices=4), {}, []),
    "no rows": (history([]), {}, []),
    "row by row": (history([(10, 1.1)] * 2), {"row_by_row": LOOP}, [f"{LOOP}: pass vectorize=True"]),
    "row by row, but short": (history([(10, 0.9)] * 2), {"row_by_row": LOOP}, []),
    "slow input": (history([(10, 0.5)] * 10, devices=1, input_seconds=1.0), {}, ["waited 52% of the time for input"]),
    "long last chunk": (
        history([(10, 1.0), (10, 1.0), (10, 0.8)]),
        {},
        ["0.8 s before the end: use a smaller batch_size"],
    ),
    "long last row": (history([(1, 1.0), (1, 1.0), (1, 1.9)]), {}, ["before the end: put the rows that take longest"]),
    "few chunks": (history([(10, 1.1)] * 2, devices=4), {}, ["1.1 s before the end: use a smaller batch_size"]),
    "few rows": (history([(1, 1.1)] * 2, devices=3), {}, ["1.1 s before the end: put the rows"]),
    "slow devices": (history([(10, 1.0)] * 6, devices=4, slowness=[4, 1, 4, 1]), {}, ["2 s before the end"]),
    "lost device": (history([(2, 1.0)] * 4, devices=3, lost=2), {}, []),
    "out of memory": (history([(2, 1.0)] * 4, devices=1, too_large={0}), {}, ["GPU:0 ran out of memory"]),
    "in turn": (one_graph([5, 5], 1.0), {"engine": "one graph", "in_turn": True}, ["depends on the order of rows"]),
}


@pytest.mark.parametrize("name", CASES)
def test_advice(name: str) -> None:
    events, facts, parts = CASES[name]
    report = report_of(events, **facts)
    assert len(report.advice) == len(parts), report.advice
    for sentence, part in zip(report.advice, parts):
        assert part in sentence
        assert f"* {sentence[:20]}" in str(report)
    lost = [each.device for each in report.devices if each.lost]
    assert lost == ([device(2)] if name == "lost device" else [])
    assert ("GPU:2 (lost)" in str(report)) == bool(lost)
