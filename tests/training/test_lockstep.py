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


def test_all_functions_receive_all_values() -> None:
    def one(lockstep: Lockstep, i: int) -> Any:
        with tf.device(f"CPU:{i}"):
            first = lockstep.meet(tf.constant(i), total)
            return lockstep.meet(first * i, total) + i

    results = traced(lambda lockstep: [lambda i=i: one(lockstep, i) for i in range(3)])
    assert [int(result) for result in results] == [9, 10, 11]


@pytest.mark.parametrize("meetings", [(1, 0, 1), (2, 1, 1), (1, 1, 2)])
def test_different_numbers_of_meetings_are_refused(meetings: tuple[int, ...]) -> None:
    def one(lockstep: Lockstep, count: int) -> Any:
        for _ in range(count):
            lockstep.meet(tf.constant(0), total)
        return tf.constant(0)

    before = threading.active_count()
    with pytest.raises(FunctionError, match="meets"):
        traced(lambda lockstep: [lambda count=count: one(lockstep, count) for count in meetings])
    assert threading.active_count() == before


def test_an_error_ends_all_functions() -> None:
    def fails(lockstep: Lockstep) -> Any:
        lockstep.meet(tf.constant(0), total)
        raise ZeroDivisionError("of mine")

    def waits(lockstep: Lockstep) -> Any:
        lockstep.meet(tf.constant(0), total)
        return lockstep.meet(tf.constant(0), total)

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="of mine"):
        traced(lambda lockstep: [lambda: waits(lockstep), lambda: fails(lockstep), lambda: waits(lockstep)])
    assert threading.active_count() == before
