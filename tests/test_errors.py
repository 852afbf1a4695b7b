"""Errors that fn raises: they name the device and rows, keep their class, and leave other calls alone."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import threads
from ways import ONE, SEVERAL, WAYS, Options, X, ways

import devicemap
from devicemap.errors import FunctionError


class CustomError(Exception):
    """An error whose constructor takes more than a message."""

    def __init__(self, code: int, *, detail: str):
        super().__init__(f"code {code}: {detail}")
        self.code, self.detail = code, detail


def _python(fn: Callable[[Any], Any], row: Any) -> Any:
    return tf.ensure_shape(tf.py_function(fn, [row], tf.float32), row.shape)


def _raising(error: Exception) -> Callable[..., Any]:
    """A function of a row (of two numbers) that raises in row 5 of `X`."""

    def python(row: Any) -> Any:
        if row[0] == 10:
            raise error
        return row

    return lambda row: _python(python, row)


def _asserting(row: Any) -> Any:
    tf.debugging.assert_less(row[0], 10.0, message="too large")
    return row


RAISED: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "an assertion": (_asserting, tf.errors.InvalidArgumentError, "too large"),
    "a TypeError": (_raising(TypeError("odd type")), tf.errors.InvalidArgumentError, "TypeError: odd type"),
    "no memory": (_raising(MemoryError("too much")), tf.errors.ResourceExhaustedError, "MemoryError: too much"),
    "a custom error": (_raising(CustomError(7, detail="hot")), tf.errors.UnknownError, "CustomError: code 7: hot"),
}
LAST_SHARD = {
    "one device": "(rows 0 to|row) 5 on CPU:1",
    "several devices": "(rows 4 to|row) 5 on CPU:5",
    "one device, chunks": "rows? .*5 on CPU:1(, then CPU:1)*",
    "several devices, chunks": "rows? .*5 on CPU:[205](, then CPU:[205])*",
}


@pytest.mark.parametrize("vectorize", ["auto", False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RAISED)
def test_an_error_inside_fn(name: str, way: str, vectorize: Any) -> None:
    fn, error, message = RAISED[name]
    mapper = devicemap.DeviceMap(fn, **WAYS[way], name="mine", vectorize=vectorize, max_retries=0)
    where = LAST_SHARD[way]
    with pytest.raises(FunctionError, match=f"^mine failed on {where}: {error.__name__}: ") as caught:
        mapper(X)
    assert isinstance(caught.value, error)
    assert type(caught.value.__cause__) is error
    for said in (str(caught.value), caught.value.message, str(caught.value.__cause__)):
        assert message in said
    for shard in caught.value.shards:  # more than one where it was tried again
        assert re.fullmatch(where, str(shard))
    if fn is _asserting:  # without side effects, the row is located
        assert [(shard.start, shard.stop) for shard in caught.value.shards] == [(5, 6)]


@pytest.mark.parametrize("main_thread", [True, False])
def test_the_whole_message_and_a_pickled_error(main_thread: bool) -> None:
    """A call in the main thread runs in its own thread, unlike a call in another thread."""
    mapper = devicemap.DeviceMap(_raising(ZeroDivisionError("by zero")), **ONE, name="mine")
    with ThreadPoolExecutor() as pool, pytest.raises(FunctionError) as caught:
        mapper(X) if main_thread else pool.submit(mapper, X).result()
    assert str(caught.value) == "mine failed on rows 0 to 5 on CPU:1: UnknownError: ZeroDivisionError: by zero"
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, FunctionError)
    assert (str(again), again.args, again.shards) == (str(caught.value), caught.value.args, caught.value.shards)
    assert again.shards


@ways
@pytest.mark.parametrize("fails_in_main_thread", [True, False])
def test_a_call_that_fails_leaves_another_alone(fails_in_main_thread: bool, way: Options) -> None:
    """One call starts fn before the other one fails, and finishes it afterwards."""
    inside, failed = threading.Event(), threading.Event()

    def python(row: Any) -> Any:
        if row[0] < 0:
            assert inside.wait(60)
            raise TypeError("odd type")
        inside.set()
        assert failed.wait(60)
        return row

    mapper = devicemap.DeviceMap(lambda row: _python(python, row), **way)

    def fail() -> None:
        with pytest.raises(FunctionError, match="InvalidArgumentError: TypeError: odd type"):
            mapper(-X - 1)
        failed.set()

    def succeed() -> None:
        np.testing.assert_array_equal(mapper(X + 1), X + 1)

    here, there = (fail, succeed) if fails_in_main_thread else (succeed, fail)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(there)
        here()
        other.result()


@pytest.mark.parametrize("why", ["it writes", "it took long"])
def test_an_error_that_is_not_located(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locating it would run the write a second time, or take as long again."""
    counter = tf.Variable(0)
    python_calls = []
    if why == "it took long":
        monkeypatch.setattr("devicemap.run.graph_engine.AGAIN_SECONDS", 0.0)

    def python(batch: Any) -> Any:
        python_calls.append(float(batch[0, 0]))
        if batch[0, 0] == 0:
            raise ZeroDivisionError
        return batch

    def fn(batch: Any) -> Any:
        if why == "it writes":
            counter.assign(counter + 1)
        return _python(python, batch)

    with pytest.raises(FunctionError, match="rows 0 to 2 on CPU:0, or rows 3 to 5 on CPU:1: UnknownError") as caught:
        devicemap.DeviceMap(fn, devices=["CPU:0", "CPU:1"], batched=True)(X)
    assert [len(shard) for shard in caught.value.shards] == [3, 3]
    assert python_calls.count(0.0) == 1


def _endless(row: Any) -> Any:
    while tf.reduce_sum(row) >= 0.0:
        row = row + 1e-9
    return row


def _fail_once(calls: list[float], row: Any) -> Any:
    calls.append(float(row[0]))
    if len(calls) == 1:
        raise ZeroDivisionError
    return row


def test_an_error_that_does_not_occur_again_names_all_shards() -> None:
    calls: list[float] = []
    python = partial(_fail_once, calls)
    message = "^mine failed on rows 0 to 1 on CPU:2, or rows 2 to 3 on CPU:0, or rows 4 to 5 on CPU:5: "
    with pytest.raises(FunctionError, match=message):
        devicemap.DeviceMap(lambda row: _python(python, row), **SEVERAL, name="mine")(X)
    assert len(calls) >= 6


def test_locating_an_error_takes_at_most_two_seconds() -> None:
    """The function raises the first time, and never returns afterwards."""
    calls: list[float] = []
    python = partial(_fail_once, calls)
    message = r"^mine failed on rows .* on CPU:2, or rows .*, or rows .* on CPU:5: "
    with pytest.raises(FunctionError, match=message) as caught:
        devicemap.DeviceMap(lambda row: _endless(_python(python, row)), **SEVERAL, name="mine")(X)
    assert len(caught.value.shards) == 3
    assert isinstance(caught.value, tf.errors.UnknownError)
    assert len(calls) > 1
    assert threads.running() == []


@pytest.mark.parametrize("error", [StopIteration("over"), CustomError(7, detail="hot")], ids=repr)
def test_an_error_while_tracing_keeps_its_class_and_attributes(error: Exception) -> None:
    def fn(row: Any) -> Any:
        raise error

    with pytest.raises(FunctionError, match=rf"^fn could not be traced .*: {type(error).__name__}: ") as caught:
        devicemap.parallel_map(tf.autograph.experimental.do_not_convert(fn), X, **SEVERAL)
    assert isinstance(caught.value, type(error))
    assert vars(caught.value).items() >= vars(error).items()
    assert (caught.value.__cause__, caught.value.args) == (error, (str(caught.value),))
