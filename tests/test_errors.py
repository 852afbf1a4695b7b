"""Errors that fn raises: they name the device and rows, keep their class, and leave other calls alone."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from ways import ONE, SEVERAL, WAYS, Options, X, ways

import devicemap
from devicemap.errors import DataError, DeviceError, FunctionError, OptionError, UnknownOptionError


class CustomError(Exception):
    """An error whose constructor takes more than a message."""

    def __init__(self, code: int, *, detail: str):
        super().__init__(f"code {code}: {detail}")
        self.code, self.detail = code, detail


def _raising(error: Exception) -> Callable[..., Any]:
    """A function of a row (of two numbers) that raises in row 5 of `X`."""

    def python(row: Any) -> Any:
        if row[0] == 10:
            raise error
        return row

    return lambda row: tf.ensure_shape(tf.py_function(python, [row], tf.float32), [2])


def _asserting(row: Any) -> Any:
    tf.debugging.assert_less(row[0], 10.0, message="too large")
    return row


RAISED: list[tuple[str, Callable[..., Any], type[Exception], str]] = [
    ("an assertion", _asserting, tf.errors.InvalidArgumentError, "too large"),
    ("a TypeError", _raising(TypeError("odd type")), tf.errors.InvalidArgumentError, "TypeError: odd type"),
    ("no memory", _raising(MemoryError("too much")), tf.errors.ResourceExhaustedError, "MemoryError: too much"),
    ("a custom error", _raising(CustomError(7, detail="hot")), tf.errors.UnknownError, "CustomError: code 7: hot"),
]
LAST_SHARD = {
    "one device": "(rows 0 to|row) 5 on CPU:1",
    "several devices": "(rows 4 to|row) 5 on CPU:5",
    "one device, chunks": "rows? .*5 on CPU:1(, then CPU:1)*",
    "several devices, chunks": "rows? .*5 on CPU:[205](, then CPU:[205])*",
}


@pytest.mark.parametrize(("way", "where"), [(WAYS[name], where) for name, where in LAST_SHARD.items()], ids=LAST_SHARD)
@pytest.mark.parametrize(("fn", "error", "message"), [case[1:] for case in RAISED], ids=[case[0] for case in RAISED])
def test_an_error_inside_fn(
    fn: Callable[..., Any], error: type[Exception], message: str, way: Options, where: str
) -> None:
    if error is tf.errors.ResourceExhaustedError:  # without retries in smaller chunks
        way = {**way, "max_retries": 0}
    mapper = devicemap.DeviceMap(fn, **way, name="mine")
    with pytest.raises(FunctionError, match=f"^mine failed on {where}: {error.__name__}: ") as caught:
        mapper(X)
    assert isinstance(caught.value, error)
    assert type(caught.value.__cause__) is error
    assert message in str(caught.value)
    assert message in caught.value.message
    assert message in str(caught.value.__cause__)
    for shard in caught.value.shards:  # more than one where it was tried again
        assert re.fullmatch(where, str(shard))


@pytest.mark.parametrize("way", [WAYS[name] for name in LAST_SHARD], ids=LAST_SHARD)
@pytest.mark.parametrize("vectorize", ["auto", False])
def test_an_error_of_a_fn_without_side_effects_names_the_row(way: Options, vectorize: Any) -> None:
    mapper = devicemap.DeviceMap(_asserting, **way, vectorize=vectorize, max_retries=0)
    with pytest.raises(
        FunctionError, match=r"^_asserting failed on row 5 on CPU:\d: InvalidArgumentError: .*too large"
    ) as caught:
        mapper(X)
    assert [(shard.start, shard.stop) for shard in caught.value.shards] == [(5, 6)]


@pytest.mark.parametrize("main_thread", [True, False])
def test_the_whole_message(main_thread: bool) -> None:
    """A call in the main thread runs in its own thread, unlike a call in another thread."""
    mapper = devicemap.DeviceMap(_raising(ZeroDivisionError("by zero")), **ONE, name="mine")
    with ThreadPoolExecutor() as pool, pytest.raises(FunctionError) as caught:
        mapper(X) if main_thread else pool.submit(mapper, X).result()
    assert str(caught.value) == "mine failed on rows 0 to 5 on CPU:1: UnknownError: ZeroDivisionError: by zero"


@ways
def test_a_pickled_error(way: Options) -> None:
    with pytest.raises(FunctionError) as caught:
        devicemap.parallel_map(_raising(ZeroDivisionError("by zero")), X, **way)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is FunctionError
    assert str(again) == str(caught.value)
    assert again.args == caught.value.args
    assert again.shards
    assert again.shards == caught.value.shards


def _odd_at_nine(row: Any) -> Any:
    """A function of a number that raises for 9."""

    def python(value: Any) -> Any:
        if value == 9:
            raise TypeError("odd type")
        return value

    return tf.ensure_shape(tf.py_function(python, [row], tf.float32), [])


@pytest.mark.parametrize("way", [ONE, SEVERAL], ids=["one device", "several devices"])
@pytest.mark.parametrize(
    "data", [tf.range(12.0), tf.data.Dataset.from_tensor_slices(tf.range(12.0))], ids=["in memory", "dataset"]
)
def test_a_chunk_that_fails_names_its_own_rows(data: Any, way: Options) -> None:
    """Not those of the chunks that are cancelled because of it."""
    mapper = devicemap.DeviceMap(_odd_at_nine, **way, batch_size=4, name="mine")
    for _ in range(20):
        with pytest.raises(FunctionError) as caught:
            mapper(data)
        (shard,) = caught.value.shards
        assert 8 <= shard.start <= 9 < shard.stop <= 12
        assert str(caught.value) == f"mine failed on {shard}: InvalidArgumentError: TypeError: odd type"
        assert type(caught.value.__cause__) is tf.errors.InvalidArgumentError


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

    mapper = devicemap.DeviceMap(lambda row: tf.ensure_shape(tf.py_function(python, [row], tf.float32), [2]), **way)

    def fail() -> None:
        with pytest.raises(FunctionError, match="InvalidArgumentError: TypeError: odd type"):
            mapper(-X - 1)
        failed.set()

    with ThreadPoolExecutor() as pool:
        if fails_in_main_thread:
            other = pool.submit(mapper, X + 1)
            fail()
            result = other.result()
        else:
            other = pool.submit(fail)
            result = mapper(X + 1)
            other.result()
    np.testing.assert_array_equal(result, X + 1)


def test_an_error_inside_fn_that_writes_is_not_located() -> None:
    """Locating the error would run the write a second time."""
    counter = tf.Variable(0)
    python_calls = []

    def python(batch: Any) -> Any:
        python_calls.append(float(batch[0, 0]))
        raise ZeroDivisionError

    def fn(batch: Any) -> Any:
        counter.assign(counter + 1)
        return tf.ensure_shape(tf.py_function(python, [batch], tf.float32), [None, 2])

    with pytest.raises(FunctionError, match="rows 0 to 2 on CPU:0, or rows 3 to 5 on CPU:1: UnknownError") as caught:
        devicemap.DeviceMap(fn, devices=["CPU:0", "CPU:1"], batched=True)(X)
    assert [len(shard) for shard in caught.value.shards] == [3, 3]
    assert python_calls == [0.0]


def _failing_once(calls: list[float]) -> Callable[..., Any]:
    """A function of a row that raises the first time, and never returns afterwards."""

    def python(row: Any) -> Any:
        calls.append(float(row[0]))
        if len(calls) == 1:
            raise ZeroDivisionError
        return row

    def fn(row: Any) -> Any:
        row = tf.ensure_shape(tf.py_function(python, [row], tf.float32), [2])
        while tf.reduce_sum(row) >= 0.0:
            row = row + 1e-9
        return row

    return fn


def test_locating_an_error_takes_at_most_a_second() -> None:
    calls: list[float] = []
    mapper = devicemap.DeviceMap(_failing_once(calls), **SEVERAL, name="mine")
    message = r"^mine failed on rows .* on CPU:2, or rows .*, or rows .* on CPU:5: "
    with pytest.raises(FunctionError, match=message) as caught:
        mapper(X)
    assert len(caught.value.shards) == 3
    assert isinstance(caught.value, tf.errors.UnknownError)
    assert len(calls) > 1
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("devicemap")] == []


def test_an_error_of_a_long_call_is_not_located(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("devicemap.run.graph_engine.AGAIN_SECONDS", 0.0)
    calls: list[float] = []

    def python(batch: Any) -> Any:
        calls.append(float(batch[0, 0]))
        if batch[0, 0] == 0:
            raise ZeroDivisionError
        return batch

    def fn(batch: Any) -> Any:
        return tf.ensure_shape(tf.py_function(python, [batch], tf.float32), [None, 2])

    with pytest.raises(FunctionError, match="rows 0 to 2 on CPU:0, or rows 3 to 5 on CPU:1: UnknownError"):
        devicemap.DeviceMap(fn, devices=["CPU:0", "CPU:1"], batched=True)(X)
    assert calls.count(0.0) == 1


def test_a_bad_row_beside_rows_that_never_end() -> None:
    """The failure cancels them, in the call and while it is located."""

    def fn(row: Any) -> Any:
        if row[0] == 10.0:
            return tf.debugging.check_numerics(row / 0.0, "bad row")
        while tf.reduce_sum(row) >= 0.0:
            row = row + 1e-9
        return row

    with pytest.raises(FunctionError, match="mine failed on rows 4 to 5 on CPU:5: InvalidArgumentError: bad row"):
        devicemap.DeviceMap(fn, **SEVERAL, name="mine", vectorize=False)(X)


def test_an_error_inside_fn_under_a_tape() -> None:
    mapper = devicemap.DeviceMap(_asserting, **SEVERAL)
    with (
        tf.GradientTape(),
        pytest.raises(FunctionError, match=r" row 5 on CPU:5: InvalidArgumentError: .*too large"),
    ):
        mapper(X)


WHILE_TRACING: list[Exception] = [
    ZeroDivisionError("by zero"),
    StopIteration("over"),
    tf.errors.NotFoundError(None, None, "no such file"),
    CustomError(7, detail="hot"),
]


@ways
@pytest.mark.parametrize("error", WHILE_TRACING, ids=lambda error: type(error).__name__)
def test_an_error_while_tracing(error: Exception, way: Options) -> None:
    def fn(row: Any) -> Any:
        raise error

    mapper = devicemap.DeviceMap(tf.autograph.experimental.do_not_convert(fn), **way)
    name = type(error).__name__
    with pytest.raises(
        FunctionError, match=rf"^fn could not be traced for one row \(batched=False\) .*: {name}: "
    ) as caught:
        mapper(X)
    assert isinstance(caught.value, type(error))
    assert vars(caught.value).items() >= vars(error).items()  # its attributes
    assert caught.value.__cause__ is error
    assert caught.value.shards == ()
    assert str(error) in str(caught.value)
    assert caught.value.args == (str(caught.value),)


INSIDE: list[tuple[str, Any, Any, Options, type[Exception], str]] = [
    ("data", tf.identity, (X, X[:2]), {}, DataError, "DataError: the leaves of data have different numbers of rows: "),
    ("fn's result", lambda row: None, X, {}, FunctionError, "FunctionError: the result of fn is None; "),
    ("an option", tf.identity, X, {"batched": 3}, OptionError, "OptionError: batched=3; expected True or False"),
    ("no option", tf.identity, X, {"batch_sise": 3}, UnknownOptionError, "'batch_sise' is not an option; did you "),
    ("devices", tf.identity, X, {"devices": "CPU:9"}, DeviceError, "DeviceError: devices has 'CPU:9', which is not "),
]


@pytest.mark.parametrize(
    ("fn", "data", "options", "error", "message"), [case[1:] for case in INSIDE], ids=[case[0] for case in INSIDE]
)
def test_errors_keep_their_class_inside_a_function(
    fn: Any, data: Any, options: Options, error: type[Exception], message: str
) -> None:
    @tf.function
    def function() -> Any:
        return devicemap.parallel_map(fn, data, **{**SEVERAL, **options})

    with pytest.raises(error, match=message) as caught:
        function()
    assert type(caught.value) is error


def test_an_error_while_tracing_keeps_both_classes_inside_a_function() -> None:
    def fn(row: Any) -> Any:
        raise ValueError("odd value")

    with pytest.raises(FunctionError, match="ValueError: odd value") as caught:
        tf.function(lambda: devicemap.parallel_map(fn, X, **SEVERAL))()
    assert isinstance(caught.value, ValueError)


MODEL = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
PREDICT = "Keras's predict is for eager code: pass the model itself, with batched=True"
MISFITS: list[tuple[str, Any, Any, Options, str, str]] = [
    ("too few arguments", lambda a, b: a, X, {}, "", "fn takes 2 arguments: pass a tuple of 2 as data; "),
    ("too many arguments", lambda a: a, (X, X), {}, ", as 2 arguments,", "A tuple is passed as several arguments: "),
    ("no seed", lambda a: a, X, {"seed": 1}, " and the keyword seed", "With the option seed, fn gets"),
    ("a bad addition", lambda a: a + "text", X, {}, "", ""),
    ("a method of NumPy", lambda a: a.numpy(), X, {}, "", "fn is traced as by tf.function, and its tensors have no "),
    ("a function of NumPy", lambda a: np.sin(a), X, {}, "", "use TensorFlow's functions (tf.sin for np.sin, "),
    ("a model", MODEL, X, {}, "", "A Keras layer or model takes batches: set batched=True"),
    ("a model in a function", lambda a: MODEL(a), X, {}, "", "A Keras layer or model takes batches: set batched=True"),
    ("predict", MODEL.predict, X, {}, "", PREDICT),
    ("predict in a function", lambda a: MODEL.predict(a[None]), X, {}, "", PREDICT),
    ("fit", MODEL.fit, X, {}, "", "Keras's fit is for eager code: devicemap.parallelize(model) runs it on all devices"),
    ("columns of a tensor", lambda a: a["x"] + a["y"], X, {}, "", "A tensor has no names: pass a dict of columns"),
]


@pytest.mark.parametrize(
    ("fn", "data", "options", "given", "hint"), [case[1:] for case in MISFITS], ids=[case[0] for case in MISFITS]
)
def test_fn_does_not_fit_the_data(fn: Any, data: Any, options: Options, given: str, hint: str) -> None:
    message = rf"^fn could not be traced for one row \(batched=False\){given} of TensorSpec\("
    with pytest.raises(FunctionError, match=message) as caught:
        devicemap.parallel_map(fn, data, **SEVERAL, **options)
    assert "TensorSpec(shape=(None" not in str(caught.value)  # the specs are of one row
    said = str(caught.value).partition("name=None)")[2]
    assert hint in said if hint else said.startswith(f": {type(caught.value.__cause__).__name__}")
    assert isinstance(caught.value, TypeError | ValueError | AttributeError | NotImplementedError)
    assert type(caught.value.__cause__) in type(caught.value).__mro__


def test_a_warning_names_the_line_that_called_devicemap() -> None:
    """Also from a package whose path begins with that of devicemap."""
    path = f"{Path(devicemap.__file__).parent}_user/program.py"
    stage = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.BatchNormalization()])
    call = compile('Pipeline([stage], ["CPU:0"])', path, "eval")
    with pytest.warns(RuntimeWarning, match="batch normalization sees a microbatch at a time") as caught:
        eval(call, {"Pipeline": devicemap.Pipeline, "stage": stage})
    assert caught[0].filename == path


def test_samples_as_batches_of_a_model() -> None:
    samples = tf.data.Dataset.from_tensor_slices(X)
    with pytest.raises(FunctionError, match=r"each element of a dataset is a batch: dataset\.batch\(n\): ValueError"):
        devicemap.parallel_map(MODEL, samples, **SEVERAL, batched=True)
