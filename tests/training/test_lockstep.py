"""Functions that are traced together exchange values, or raise an error that says why they cannot."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import tensorflow as tf

from devicemap.errors import FunctionError
from devicemap.training.lockstep import Lockstep


def traced(make: Any) -> Any:
    """Run the functions that `make` returns for a `Lockstep`, in a graph."""

    @tf.function(autograph=False)
    def together() -> Any:
        functions: list[Any] = []
        lockstep = Lockstep([lambda i=i: functions[i]() for i in range(3)])
        functions += make(lockstep)
        return lockstep.run()

    return together()


def total(brought: list[Any]) -> list[Any]:
    return [tf.add_n(brought)] * len(brought)


def test_different_numbers_of_meetings_and_errors_end_all_functions() -> None:
    def one(lockstep: Lockstep, count: int, fails: bool = False) -> Any:
        for _ in range(count):
            lockstep.exchange(tf.constant(0), total)
        if fails:
            raise ZeroDivisionError("of mine")
        return tf.constant(0)

    before = threading.active_count()
    for meetings in ((1, 0, 1), (2, 1, 1), (1, 1, 2)):
        with pytest.raises(FunctionError, match="exchanges values"):
            traced(lambda lockstep, meetings=meetings: [lambda n=n: one(lockstep, n) for n in meetings])
    with pytest.raises(ZeroDivisionError, match="of mine"):
        traced(lambda lockstep: [lambda i=i: one(lockstep, 1 + (i != 1), fails=i == 1) for i in range(3)])
    assert threading.active_count() == before
