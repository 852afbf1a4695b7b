"""The messages that new users see first, in full: `messages.txt`, which `pytest --update-messages` writes.

TensorFlow's own words in them differ between its versions and are left out.
"""

from __future__ import annotations

import datetime
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from processes import run
from ways import ONE, Options

import devicemap
from devicemap.compile.random import random_states
from devicemap.errors import DeviceMapError

GOLDEN = Path(__file__).parent / "messages.txt"
IMAGES = np.zeros([2, 8, 8, 3], np.float32)
MODEL = tf.keras.Sequential([tf.keras.Input([8, 8, 3]), tf.keras.layers.Conv2D(1, 3)])
WEIGHTS = tf.ones([5, 2])
NUMBERS, WORDS = np.arange(4), tf.constant(["a", "b"])
SQUARES, NAMES = [0, 1, 4, 9], {0: 1.0, 1: 2.0}
GENERATOR = np.random.default_rng(0)


class Batches(tf.keras.utils.PyDataset):  # type: ignore[misc]
    """Three batches of four rows."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> Any:
        return np.zeros([4, 2])


async def _waiting(row: Any) -> Any:
    return row


def _yielding(row: Any) -> Any:
    yield row


def _opening(path: Any) -> Any:
    with open(path) as file:
        return file.read()


MESSAGES: dict[str, tuple[Callable[..., Any], Any, Options]] = {
    "a model without batched": (lambda image: MODEL(image), IMAGES, {}),
    "pooling without batched": (lambda image: tf.nn.max_pool2d(image, 2, 2, "VALID"), IMAGES, {}),
    "float64 and float32": (lambda row: tf.linalg.matvec(WEIGHTS, row, transpose_a=True), np.ones([4, 5]), {}),
    "float64 in a model": (lambda rows: tf.matmul(rows, WEIGHTS), np.ones([4, 5]), {"batched": True}),
    "int64 and float32": (lambda n: n * tf.constant(2.0), NUMBERS, {}),
    "int64 and int32": (lambda n: n * tf.constant(2), np.arange(4), {}),
    "the root of an integer": (lambda n: tf.sqrt(n), NUMBERS, {}),
    "opening a file": (_opening, WORDS, {}),
    "a method of str": (lambda word: word.upper(), WORDS, {}),
    "indexing a list": (lambda n: SQUARES[n], NUMBERS, {}),
    "indexing a dict": (lambda n: NAMES[n], NUMBERS, {}),
    "indexing an array": (lambda n: np.arange(4)[n], NUMBERS, {}),
    "looking into a list": (lambda n: n if n in SQUARES else -n, NUMBERS, {}),
    "an async function": (_waiting, NUMBERS, {}),
    "a generator function": (_yielding, NUMBERS, {}),
    "printing": (lambda n: tf.print(n), NUMBERS, {}),
    "a dict as a row": (lambda row: row * 2, tf.data.Dataset.from_tensor_slices({"a": [1, 2]}), {}),
    "creating a variable": (lambda n: tf.Variable(1.0) * tf.cast(n, tf.float32), NUMBERS, {}),
    "images of different sizes": (lambda image: image, [np.zeros([3, 4, 3]), np.zeros([5, 4, 3])], {}),
    "an array of images of different sizes": (
        lambda image: image,
        np.array([np.zeros([3, 4, 3]), np.zeros([5, 4, 3])], object),
        {},
    ),
    "dates": (lambda time: time, [datetime.date(2024, 1, 1)], {}),
    "an array of dates": (lambda time: time, np.array(["2024-01-01"], "datetime64[D]"), {}),
    "names of devices in one text": (lambda n: n, NUMBERS, {"devices": "CPU:0,CPU:1"}),
    "a Keras PyDataset": (lambda rows: rows, Batches(), {"batched": True}),
    "random numbers of NumPy": (lambda n: n + np.random.randint(10), NUMBERS, {}),
    "random numbers of Python": (lambda n: n + random.randrange(10), NUMBERS, {}),
    "a random generator": (lambda n: n + GENERATOR.integers(10), NUMBERS, {}),
    "a row without memory": (
        lambda n: tf.py_function(_exhausted, [n], tf.int64),
        NUMBERS,
        {"batch_size": 2},
    ),
}


def _exhausted(n: Any) -> Any:
    raise MemoryError("no memory left")


def _message(fn: Callable[..., Any], data: Any, options: Options) -> str:
    """Return the class and text of the error or warning, without TensorFlow's words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            devicemap.parallel_map(fn, data, **{**ONE, **options})
        except DeviceMapError as error:
            kind = next(base.__name__ for base in type(error).__mro__ if base.__name__ in vars(devicemap.errors))
            said = str(error)
            if error.__cause__ is not None:
                said = said.partition(f": {type(error.__cause__).__name__}: in user code")[0]
                said = said.partition(f": {type(error.__cause__).__name__}: To be compatible")[0]
                said = said.replace(f"({error.__cause__})", "(...)")
            return f"{kind}: {said}"
    return "".join(f"{warning.category.__name__}: {warning.message}" for warning in caught)


def test_messages(request: pytest.FixtureRequest) -> None:
    found = "\n".join(f"# {name}\n{_message(*case)}\n" for name, case in MESSAGES.items())
    if request.config.getoption("update_messages"):
        GOLDEN.write_text(found, encoding="utf-8")
    assert found == GOLDEN.read_text(encoding="utf-8")


def test_images_of_different_sizes_as_a_dataset() -> None:
    """Do what the message says."""
    images = [np.zeros([3, 4, 3], np.uint8), np.ones([5, 4, 3], np.uint8)]
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(images), output_signature=tf.TensorSpec([None, None, 3], tf.uint8)
    )
    sums = devicemap.parallel_map(lambda image: tf.reduce_sum(tf.cast(image, tf.int32)), dataset, **ONE)
    assert sums.numpy().tolist() == [0, 60]


def test_a_generator_that_is_left_alone_gives_no_warning() -> None:
    state = GENERATOR.bit_generator.state["state"]
    noise, secure = GENERATOR, random.SystemRandom()
    result = devicemap.parallel_map(lambda n: n + (0 if noise and secure else 1), NUMBERS, **ONE)
    np.testing.assert_array_equal(result, NUMBERS)
    assert GENERATOR.bit_generator.state["state"] == state


class _Own:
    """An object of the user with none of the methods that are called."""

    def predict(self, row: Any) -> Any:
        raise RuntimeError("not fitted")


OWN, ITEMS = _Own(), [1, 2]


@pytest.mark.parametrize(
    ("fn", "data"),
    [
        (lambda n: OWN.predict(n), NUMBERS),
        (lambda n: n * ITEMS["a"], NUMBERS),  # type: ignore[call-overload]
        (lambda n: n + OWN.item, NUMBERS),  # type: ignore[attr-defined]
        (lambda n: OWN.read(n), NUMBERS),  # type: ignore[attr-defined]
        (lambda word: OWN.upper(word), WORDS),  # type: ignore[attr-defined]
        (lambda n: {"a": 1} + OWN, NUMBERS),
    ],
)
def test_no_advice_about_tensors_for_errors_of_other_objects(fn: Callable[..., Any], data: Any) -> None:
    with pytest.raises(devicemap.errors.FunctionError, match=r"name=None\): (RuntimeError|TypeError|AttributeError): "):
        devicemap.parallel_map(fn, data, **ONE)


class _Proxy:
    """Fails outside of some context, as proxies of web frameworks do."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("outside of the context")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("outside of the context")


def test_objects_that_fail_are_no_generators() -> None:
    proxy = _Proxy()
    result = devicemap.parallel_map(lambda n: -n if proxy is None else n, [1, 2], **ONE)
    np.testing.assert_array_equal(result, [1, 2])


def test_random_numbers_of_other_threads_give_no_warning() -> None:
    """A function that only computes with NumPy's constants draws nothing."""

    states = random_states(lambda n: n * np.float32(2)), random_states(lambda n: n * np.random.rand())
    before = [state() for state in states]
    np.random.rand()
    assert [state() == old for state, old in zip(states, before)] == [True, False]


@pytest.mark.skipif("sys.platform != 'linux'")
def test_forks() -> None:
    """A child process of a process with devices gets an error instead of waiting forever; one of another process works."""
    printed = run(
        """
        import os, sys
        import tensorflow as tf
        import devicemap

        def child(call):
            sys.stdout.flush()
            if os.fork() == 0:
                try:
                    print(call())
                except devicemap.errors.DeviceError as error:
                    print(error)
                sys.stdout.flush()
                os._exit(0)
            os.wait()

        child(lambda: devicemap.parallel_map(lambda n: n + 1, [1, 2]).numpy().tolist())
        mapper = devicemap.DeviceMap(lambda n: n + 1)
        mapper([1, 2])
        child(lambda: mapper([1, 2]))
        child(lambda: devicemap.parallel_map(lambda n: n + 2, [1, 2]))
        """
    )
    assert printed[0] == "[2, 3]"
    assert len(printed) == 3
    for line in printed[1:]:
        assert line.startswith("this process was forked after TensorFlow was initialised, ")
