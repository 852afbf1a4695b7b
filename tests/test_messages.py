"""The messages of all bad calls, in full: `messages.txt`, which `pytest --update-messages` writes.

A new bad map is a line in `BAD_DATA`, `BAD_OPTIONS` or `CALLS`: it fails in the same words on one device, on several devices,
in chunks and, unless only a run shows what is wrong, inside a `tf.function`. Any other bad call is a line in `REFUSED`. Words
of TensorFlow and NumPy differ between versions and are left out.
"""

from __future__ import annotations

import datetime
import json
import random
import re
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from refused_models import REFUSED_MODELS
from ways import ONE, SEVERAL, Counter, Items, Options, X

import devicemap
from devicemap import Reducer
from devicemap.bench.measurements import BenchmarkResult, Measurement
from devicemap.compile.random import random_states
from devicemap.errors import OTHER_ROW_COUNT, DeviceMapError, FunctionError, UnknownOptionError
from devicemap.ray.actors import columns_of
from devicemap.store.encoding import describe_nest
from devicemap.types import Device

GOLDEN = Path(__file__).parent / "messages.txt"
IMAGES = np.zeros([2, 8, 8, 3], np.float32)
CNN = tf.keras.Sequential([tf.keras.Input([8, 8, 3]), tf.keras.layers.Conv2D(1, 3)])
ONE_NUMBER = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])
MODEL = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
PAIR = [tf.keras.Input([2]), tf.keras.Input([2])]
TWO_INPUTS = tf.keras.Model(PAIR, tf.keras.layers.Add()(PAIR))
GREY_CNN = tf.keras.Sequential([tf.keras.Input([8, 8, 1]), tf.keras.layers.Conv2D(1, 3)])
LSTM = tf.keras.Sequential([tf.keras.Input([None, 1]), tf.keras.layers.LSTM(2)])
WEIGHTS = tf.ones([5, 2])
NUMBERS, WORDS = np.arange(4), tf.constant(["a", "b"])
SQUARES, NAMES = [0, 1, 4, 9], {0: 1.0, 1: 2.0}
GENERATOR = np.random.default_rng(0)
PHYSICAL = tf.config.list_physical_devices("CPU")
COUNTER = tf.Variable(0.0)
NOT_CALLED = Counter()
"""The function of calls that fail before it is traced."""

MAPPER = devicemap.DeviceMap(NOT_CALLED, **ONE)
ORDERED = devicemap.DeviceMap(lambda row: COUNTER.assign(COUNTER * 2.0 + row[0]), on_error="skip", **ONE)
GPU = Device("/job:localhost/replica:0/task:0/device:GPU:0", "GPU", None, "")
BENCHMARKED = BenchmarkResult("fn", (GPU,), (Measurement("batch", 2, peak_memory_bytes=(100,)),))
Pair = namedtuple("Pair", "a b")


class Batches(tf.keras.utils.PyDataset):  # type: ignore[misc]
    """Three batches of four rows."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> Any:
        return np.zeros([4, 2])


class Frame:
    """A data frame as in pandas, with text and numbers."""

    columns = ("name", "number")

    def __array__(self, *_: Any, **__: Any) -> Any:
        return np.array([["a", 1]], object)


class Picture:
    """An image as in PIL."""

    __array_interface__ = np.zeros([2, 2], np.uint8).__array_interface__


class Unhashable(Counter):
    __hash__ = None  # type: ignore[assignment]


class SparseMatrix(Items):
    def toarray(self) -> Any:
        return np.eye(2)


class Own:
    """An object of the user with none of the methods that are called."""

    def predict(self, row: Any) -> Any:
        raise RuntimeError("not fitted")


class Guesses:
    """An object that draws random numbers."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def helped(self, n: Any) -> Any:
        return self._drawn(n)

    def _drawn(self, n: Any) -> Any:
        return n + self.generator.integers(10)


OWN: Any = Own()
GUESSES = Guesses()
LEFT_TO_PYTHON = tf.autograph.experimental.do_not_convert(lambda row: float(row[0]))
LEFT_ALONE = GENERATOR, random.SystemRandom()


async def _waiting(row: Any) -> Any:
    return row


def _yielding(row: Any) -> Any:
    yield row


def _asserting(n: Any) -> Any:
    assert n >= 0, "negative"
    return n


def _opening(path: Any) -> Any:
    with open(path) as file:
        return file.read()


def _shifted(n: Any) -> Any:
    return n + np.random.randint(10)


def _importing(n: Any) -> Any:
    import numpy

    return n + numpy.random.randint(10)


def _exhausted(n: Any) -> Any:
    raise MemoryError("no memory left")


def _array(batch: Any) -> Any:
    return tf.TensorArray(tf.float32, 1).write(0, batch)


def _python(row: Any) -> Any:
    return tf.ensure_shape(tf.py_function(lambda r: r, [row], tf.float32), [2])


def _ragged(row: Any) -> Any:
    return tf.RaggedTensor.from_tensor(row[None])


def _counting(row: Any) -> Any:
    COUNTER.assign_add(1.0)
    return row


def _dataset(*elements: Any) -> Any:
    return tf.data.Dataset.from_tensor_slices(*elements)


def _square(batch: Any) -> Any:
    """As many columns as rows."""
    return tf.zeros([tf.shape(batch)[0], tf.shape(batch)[0]])


def _of_uneven_rank(batch: Any) -> Any:
    return tf.numpy_function(lambda rows: rows if len(rows) == 2 else rows[..., None], [batch], tf.float32)


def _reduced(fn: Any, reducer: Any) -> Any:
    return devicemap.parallel_reduce(fn, [1.0, 2.0], reducer, **SEVERAL)


def _in_eager_functions(call: Callable[[], Any]) -> None:
    tf.config.run_functions_eagerly(True)
    try:
        call()
    finally:
        tf.config.run_functions_eagerly(False)


def _halving(row: Any) -> Any:
    for _ in tf.range(3):
        row = row * 0.5
    return row


_TYPED: dict[str, Any] = {}
exec("def absolute(x):\n    return x if x > 0 else -x", _TYPED)


def _listed(row: Any) -> Any:
    seen: list[Any] = []
    for number in row:
        seen.append(number)
    return seen[0]


def _assigned(row: Any) -> Any:
    row[0] = 1.0
    return row


BATCHES_ONLY = tf.function(lambda rows: rows * 2.0, input_signature=[tf.TensorSpec([None, 2])])
SIZES = [np.zeros([3, 4, 3]), np.zeros([5, 4, 3])]
INFINITE = tf.data.Dataset.range(3).repeat()
ANY_RANK = tf.data.Dataset.from_generator(lambda: iter([]), output_signature=tf.TensorSpec(None, tf.int32))
BATCHED, VECTORIZED = {"batched": True}, {"vectorize": True}

BAD_DATA: dict[str, Any] = {
    "unequal leaves": (X, X[:4]),
    "unequal leaves of a named tuple": Pair(X, {"k": X[:1]}),
    "unequal, ragged": (X, tf.ragged.constant([[1], []])),
    "a scalar": 3.0,
    "a scalar leaf": {"x": X, "k": np.float32(2)},
    "a generator": (row for row in [1.0]),
    "an empty tuple": (),
    "None": None,
    "a string": "rows",
    "a function": tf.sin,
    "uneven lists": [[1], [2, 3]],
    "a set": {"x": {1, 2}},
    "objects": np.array([object(), None]),
    "a list of None": [None],
    "a masked array": {"x": np.ma.masked_equal([1, 2], 2)},
    "a masked array in a list": [np.ma.masked_equal([1, 2], 2), np.zeros(2)],
    "a data frame": Frame(),
    "dicts": [{"a": 1}, {"a": 2}],
    "pictures": [Picture(), Picture()],
    "keys of mixed types": (X, {"k": {"a": X, 1: X}}),
    "a dataset in a nest": (X, tf.data.Dataset.range(6)),
    "a dataset of datasets": tf.data.Dataset.range(4).window(2),
    "a dataset of unknown rank": ANY_RANK,
    "an infinite dataset": INFINITE,
    "a sparse matrix": SparseMatrix(),
    "a structured array": np.array([(1, 2.0)], [("a", int), ("b", float)]),
    "vectors of different sizes": [np.zeros(3), np.zeros(5)],
    "images of different sizes": SIZES,
    "an array of images of different sizes": np.array(SIZES, object),
    "a list of ragged tensors": [tf.ragged.constant([[1], [2, 3]])] * 2,
    "dates": [datetime.date(2024, 1, 1)],
    "an array of durations": np.array([1], "timedelta64[s]"),
}

BAD_OPTIONS: dict[str, Options] = {
    "a misspelt option": {"batch_sise": 2},
    "an option of another library": {"verbose": 1},
    "an unknown option": {"q": 1},
    "batched": {"batched": 1},
    "vectorize, text": {"vectorize": "no"},
    "vectorize, batched": {"batched": True, "vectorize": True},
    "a signature, batched": {"batched": True, "fn_output_signature": tf.int32},
    "batch_size 0": {"batch_size": 0},
    "batch_size True": {"batch_size": True},
    "a signature of text": {"fn_output_signature": "x"},
    "in_place": {"in_place": [tf.Variable(1.0), 3]},
    "in_place, a tensor": {"in_place": tf.range(999)},
    "prefetch": {"prefetch": 0},
    "a negative seed": {"seed": -1},
    "a large seed": {"seed": 2**32},
    "on_error": {"on_error": "ignore"},
    "name": {"name": 3},
    "devices": {"devices": "CPU:9"},
    "names of devices in one text": {"devices": "CPU:0,CPU:1"},
    "a kind of which there is no device": {"devices": "NPU"},
    "no devices": {"devices": []},
    "a number of devices": {"devices": 0},
    "a device twice": {"devices": ["CPU:2", "CPU:0", "/CPU:2"]},
    "a physical device and its part": {"devices": [*PHYSICAL, "CPU:2"]},
    "a kind among names": {"devices": ["CPU:1", "gpu"]},
    "output_device": {"output_device": "CPU:9"},
    "output_device, of several parts": {"output_device": PHYSICAL[0]},
}

CALLS: dict[str, tuple[Any, Any, Options]] = {
    **{f"data: {name}": (NOT_CALLED, data, {}) for name, data in BAD_DATA.items()},
    **{f"option: {name}": (NOT_CALLED, X, options) for name, options in BAD_OPTIONS.items()},
    "data: batches of scalars": (NOT_CALLED, tf.data.Dataset.range(4), BATCHED),
    "data: a batch of unequal leaves": (lambda a, b: a, tf.data.Dataset.from_tensors((X, X[:2])), BATCHED),
    "data: a Keras PyDataset": (NOT_CALLED, Batches(), BATCHED),
    "fn: None": (None, X, {}),
    "fn: the data": (X, tf.sin, {}),
    "fn: async": (_waiting, NUMBERS, {}),
    "fn: a generator": (_yielding, NUMBERS, {}),
    "tracing: a model without batched": (lambda image: CNN(image), IMAGES, {}),
    "tracing: a model of grey images": (lambda image: GREY_CNN(image), IMAGES[..., :1], {}),
    "tracing: a model to which Keras adds an axis": (LSTM, IMAGES[:, 0, :, :1], {}),
    "nothing: a model of the numbers of a row": (ONE_NUMBER, X, {}),
    "tracing: a model of two inputs": (TWO_INPUTS, [X, X], BATCHED),
    "tracing: samples as batches": (MODEL, _dataset(X), BATCHED),
    "tracing: pooling without batched": (lambda image: tf.nn.max_pool2d(image, 2, 2, "VALID"), IMAGES, {}),
    "tracing: predict": (MODEL.predict, X, {}),
    "tracing: predict in a function": (lambda row: MODEL.predict(row[None]), X, {}),
    "tracing: fit": (MODEL.fit, X, {}),
    "tracing: a function at Python's prompt": (_TYPED["absolute"], NUMBERS, {}),
    "tracing: another signature": (lambda row: BATCHES_ONLY(row), X, {}),
    "tracing: an image of unknown rank": (lambda b: tf.image.resize(tf.io.decode_image(b), [2, 2]), WORDS, {}),
    "tracing: loading an image": (lambda path: tf.keras.utils.load_img(path), WORDS, {}),
    "tracing: a list in a loop": (_listed, X, {}),
    "tracing: assigning to a row": (_assigned, X, {}),
    "tracing: too few arguments beside a seed": (lambda a, generator: a, X, {"seed": 1}),
    "tracing: too few arguments": (lambda a, b: a, X, {}),
    "tracing: too many arguments": (lambda a: a, (X, X), {}),
    "tracing: no seed": (lambda a: a, X, {"seed": 1}),
    "tracing: a seed without the option": (lambda a, seed: a, X, {}),
    "tracing: a method of NumPy": (lambda a: a.numpy(), X, {}),
    "tracing: a property of NumPy": (lambda a: a.T, X, {}),
    "tracing: a statistic of NumPy": (lambda a: a.mean(), X, {}),
    "tracing: rounding": (lambda a: round(a[0]), X, {}),
    "tracing: a format": (lambda a: a if f"{a[0]:.2f}" else -a, X, {}),
    "tracing: a number of Python": (LEFT_TO_PYTHON, X, {}),
    "tracing: a function of NumPy": (lambda a: np.sin(a), X, {}),
    "tracing: columns of a tensor": (lambda a: a["x"] + a["y"], X, {}),
    "tracing: float64 and float32": (lambda r: tf.linalg.matvec(WEIGHTS, r, transpose_a=True), np.ones([4, 5]), {}),
    "tracing: int64 and float32": (lambda n: n * tf.constant(2.0), NUMBERS, {}),
    "tracing: int64 and int32": (lambda n: n * tf.constant(2), NUMBERS, {}),
    "tracing: the root of an integer": (lambda n: tf.sqrt(n), NUMBERS, {}),
    "tracing: int64 and a fraction": (lambda n: n * 0.5, NUMBERS, {}),
    "tracing: uint8 and a fraction": (lambda image: image / 255.0, IMAGES.astype(np.uint8), {}),
    "tracing: the sine of an int32": (tf.sin, tf.range(6), {}),
    "tracing: stacking float64 and float32": (lambda r: tf.stack([r[0], 1.0 * WEIGHTS[0, 0]]), np.ones([4, 5]), {}),
    "tracing: joining float32 and float64": (lambda r: tf.concat([WEIGHTS[0], r], 0), np.ones([4, 5]), {}),
    "tracing: a sum over an axis of a batch": (lambda row: tf.reduce_sum(row, 1), X, {}),
    "tracing: an image without channels": (lambda image: tf.image.resize(image, [4, 4]), IMAGES[..., 0], {}),
    "tracing: a pattern in text": (lambda word: re.sub("a", "b", word), WORDS, {}),
    "tracing: JSON": (lambda word: json.loads(word), WORDS, {}),
    "tracing: a generator as a result": (lambda n: _yielding(n), NUMBERS, {}),
    "tracing: opening a file": (_opening, WORDS, {}),
    "tracing: a method of str": (lambda word: word.upper(), WORDS, {}),
    "tracing: indexing a dict": (lambda n: NAMES[n], NUMBERS, {}),
    "tracing: indexing a list": (lambda n: SQUARES[n], NUMBERS, {}),
    "tracing: looking into a list": (lambda n: n if n in SQUARES else -n, NUMBERS, {}),
    "tracing: an assertion": (_asserting, NUMBERS, {}),
    "tracing: printing": (lambda n: tf.print(n), NUMBERS, {}),
    "tracing: a dict as a row": (lambda row: row * 2, _dataset({"a": [1, 2]}), {}),
    "tracing: a dict in a function": (lambda row: tf.reduce_sum(row), {"a": X, "b": X}, {}),
    "tracing: an attribute of a dict": (lambda row: row.a, {"a": X}, {}),
    "tracing: predict of another object": (lambda n: OWN.predict(n), NUMBERS, {}),
    "tracing: creating a variable": (lambda n: tf.Variable(1.0) * tf.cast(n, tf.float32), NUMBERS, {}),
    "result: None": (lambda row: None, X, {}),
    "result: nothing": (lambda row: (), X, {}),
    "result: an object": (lambda row: {"o": NOT_CALLED}, X, {}),
    "result: a list of unlike tensors": (lambda row: [row, row[0]], X, {}),
    "result: a batch's scalar": (tf.reduce_sum, X, BATCHED),
    "result: two rows": (lambda b: tf.stack([1.0, b[0, 0]]), X, BATCHED),
    "result: a list of batches": (lambda b: [b, b * 2], X, BATCHED),
    "result: a TensorArray": (_array, X, {}),
    "result: a length of text, with XLA": (tf.strings.length, ["a", "b"], {"jit_compile": True}),
    "result: ragged, with XLA": (tf.RaggedTensor.from_tensor, X, {**BATCHED, "jit_compile": True}),
    "signature: another nest": (lambda row: row, X, {"fn_output_signature": {"a": tf.float32}}),
    "signature: a tuple for a list": (lambda row: (row, row), X, {"fn_output_signature": [tf.float32] * 2}),
    "signature: another dtype": (lambda row: row, X, {"fn_output_signature": tf.int32}),
    "signature: another shape": (lambda row: row, X, {"fn_output_signature": tf.TensorSpec([3])}),
    "signature: ragged for dense": (_ragged, X, {"fn_output_signature": tf.float32}),
    "vectorize=True: a ragged result": (_ragged, X, VECTORIZED),
    "vectorize=True: ragged data": (tf.reduce_sum, tf.ragged.constant([[1], [2, 3]]), VECTORIZED),
    "vectorize=True: an effect": (_python, X, VECTORIZED),
    "vectorize=True: an op": (lambda row: tf.unique(row).y, X, VECTORIZED),
    "vectorize=True: a write": (_counting, X, VECTORIZED),
    "warning: batches of a dataset for a model": (MODEL, _dataset(X).batch(2, True), {"name": "model"}),
    "warning: random numbers of NumPy": (lambda n: n + np.random.randint(10), NUMBERS, {}),
    "warning: random numbers of a helper": (lambda n: _shifted(n), NUMBERS, {}),
    "warning: a random generator": (lambda n: n + GENERATOR.integers(10), NUMBERS, {}),
    "warning: random numbers of a method": (GUESSES.helped, NUMBERS, {}),
    "warning: random numbers of an import": (_importing, NUMBERS, {}),
    "nothing: objects that are left alone": (lambda n: n + (0 if LEFT_ALONE else 1), NUMBERS, {}),
    "run: fewer rows": (lambda b: tf.boolean_mask(b, b[:, 0] > 99.0), X[:5], BATCHED),
    "run: fewer rows in a leaf": (lambda b: {"a": b[tf.shape(b)[0] :], "b": b}, X[:5], BATCHED),
    "run: fewer ragged rows": (lambda b: (b, tf.RaggedTensor.from_tensor(b)[1:]), X[:5], BATCHED),
    "run: fewer sparse rows": (lambda b: tf.sparse.from_dense(b[1:]), X[:5], BATCHED),
    "run: a scalar of unknown shape": (lambda b: tf.numpy_function(np.sum, [b], tf.float32), X, BATCHED),
    "run: fewer rows, skipped": (lambda b: b[1:], X, {**BATCHED, "on_error": "skip"}),
    "run: text with XLA": (lambda x: tf.strings.length(tf.strings.as_string(x)), X, {"jit_compile": True}),
    "run: text with XLA, skipped": (
        lambda x: tf.strings.length(tf.strings.as_string(x)),
        X,
        {"jit_compile": True, "on_error": "skip"},
    ),
    "run: a row without memory": (lambda n: tf.py_function(_exhausted, [n], tf.int64), NUMBERS[:1], {"batch_size": 2}),
}


REFUSED: dict[str, Callable[[], object]] = {
    "call: data in two arguments": lambda: MAPPER(X, X),
    "call: two arrays for parallel_map": lambda: devicemap.parallel_map(NOT_CALLED, X, X, **ONE),
    "call: eager functions": lambda: _in_eager_functions(lambda: devicemap.parallel_map(_halving, X, **ONE)),
    "call: a dataset inside a tf.function": lambda: _inside(lambda: MAPPER(INFINITE)),
    "call: chunks inside a tf.function": lambda: _inside(lambda: devicemap.DeviceMap(NOT_CALLED, batch_size=3)(X)),
    "call: unknown rank inside a tf.function": lambda: _inside(
        lambda: MAPPER(tf.raw_ops.Placeholder(dtype=tf.float32))
    ),
    "call: shards of different shapes": lambda: devicemap.parallel_map(_square, X[:5], **SEVERAL, **BATCHED),
    "call: different shapes in a leaf": lambda: devicemap.parallel_map(
        lambda b: {"a": b, "b": _square(b)}, X[:5], **SEVERAL, **BATCHED
    ),
    "call: shards of different ranks": lambda: devicemap.parallel_map(_of_uneven_rank, X[:5], **SEVERAL, **BATCHED),
    "stream: inside a tf.function": lambda: _inside(lambda: [*MAPPER.stream(X)]),
    "stream: a scalar": lambda: MAPPER.stream(1.0),
    "on_error: inside a tf.function": lambda: _inside(lambda: devicemap.DeviceMap(NOT_CALLED, on_error="skip")(X)),
    "on_error: a write in row order": lambda: ORDERED(X),
    "on_error: a stream in row order": lambda: [*ORDERED.stream(X)],
    "on_error: a plan in row order": lambda: ORDERED.explain(X),
    "explain: unknown rank": lambda: MAPPER.explain(tf.TensorSpec(None)),
    "explain: a TensorArray": lambda: MAPPER.explain(tf.TensorArraySpec()),
    "explain: a shape": lambda: MAPPER.explain(tf.TensorShape(None)),
    "explain: inside a tf.function": lambda: _inside(lambda: MAPPER.explain(X)),
    "verify: inside a tf.function": lambda: _inside(lambda: MAPPER.verify(X)),
    "verify: no rows": lambda: MAPPER.verify(X[:0]),
    "verify: rows=0": lambda: MAPPER.verify(X, rows=0),
    "verify: rows=1.5": lambda: MAPPER.verify(X, rows=1.5),
    "verify: rows=True": lambda: MAPPER.verify(X, rows=True),
    "verify: tolerance=-1": lambda: MAPPER.verify(X, tolerance=-1),
    "verify: an infinite tolerance": lambda: MAPPER.verify(X, tolerance=float("inf")),
    "verify: a tolerance of text": lambda: MAPPER.verify(X, tolerance="x"),
    "verify: seconds=-1": lambda: MAPPER.verify(X, seconds=-1),
    "verify: infinite seconds": lambda: MAPPER.verify(X, seconds=float("inf")),
    "verify: seconds of text": lambda: MAPPER.verify(X, seconds="x"),
    "benchmark: inside a tf.function": lambda: _inside(lambda: devicemap.benchmark(NOT_CALLED, X)),
    "benchmark: an empty dataset": lambda: devicemap.benchmark(NOT_CALLED, _dataset(X).take(0)),
    "benchmark: a batch without rows": lambda: devicemap.benchmark(NOT_CALLED, X, batch_sizes=[8, 0]),
    "benchmark: batch_size": lambda: devicemap.benchmark(NOT_CALLED, X, batch_size=8),
    "benchmark: rounds=0": lambda: devicemap.benchmark(NOT_CALLED, X, rounds=0),
    "benchmark: seconds=0": lambda: devicemap.benchmark(NOT_CALLED, X, seconds=0),
    "largest_batch: unknown memory": lambda: BENCHMARKED.largest_batch(),
    "largest_batch: margin=1": lambda: BENCHMARKED.largest_batch(1000, margin=1),
    "largest_batch: memory as text": lambda: BENCHMARKED.largest_batch("8 GB"),
    "reducer: an unknown op": lambda: _reduced(NOT_CALLED, "median"),
    "reducer: None": lambda: _reduced(NOT_CALLED, None),
    "reducer: nothing": lambda: _reduced(NOT_CALLED, {}),
    "reducer: an unknown op in a nest": lambda: _reduced(NOT_CALLED, ("sum", "most")),
    "reducer: no functions": lambda: _reduced(NOT_CALLED, Reducer(0, None, None)),
    "reducer: an object without a hash": lambda: _reduced(NOT_CALLED, Reducer(0, Unhashable(), max)),
    "reducer: no initial state": lambda: _reduced(NOT_CALLED, Reducer(None, max, max)),
    "reduce: another nest": lambda: _reduced(lambda x: (x, x), {"a": "sum", "b": "sum"}),
    "reduce: text": lambda: _reduced(tf.as_string, "sum"),
    "reduce: the mean of booleans": lambda: _reduced(lambda x: x > 0, "mean"),
    "reduce: the largest complex number": lambda: _reduced(lambda x: tf.complex(x, x), "max"),
    "reduce: ragged rows": lambda: _reduced(lambda x: tf.RaggedTensor.from_row_lengths(x[None], [1]), "sum"),
    "reduce: rows of different shapes": lambda: _reduced(lambda x: tf.range(x), "sum"),
    "reduce: a state of another dtype": lambda: _reduced(lambda x: x, Reducer(0, tf.add, tf.add)),
    "reduce: an error in merge": lambda: _reduced(lambda x: x, Reducer(0.0, tf.add, lambda a, b: SQUARES["none"])),
    "write: a variant": lambda: describe_nest({"x": tf.TensorSpec([None], tf.variant)}),
    "write: a resource": lambda: describe_nest({"x": tf.TensorSpec([None], tf.resource)}),
    "write: an optional": lambda: describe_nest({"x": tf.OptionalSpec(None)}),
    "write: None": lambda: describe_nest({"x": None}),
    "write: a key that is no text": lambda: describe_nest({1.5: tf.TensorSpec([None], tf.int32)}),
    **REFUSED_MODELS,
    "tasks: no function": lambda: devicemap.parallel_tasks(None, [1]),
    "tasks: a number": lambda: devicemap.parallel_tasks(NOT_CALLED, 3),
    "tasks: a scalar": lambda: devicemap.parallel_tasks(NOT_CALLED, tf.constant(3)),
    "tasks: on_error": lambda: devicemap.parallel_tasks(NOT_CALLED, [1], on_error="ignore"),
    "tasks: progress": lambda: devicemap.parallel_tasks(NOT_CALLED, [1], progress=3),
    "tasks: inside a tf.function": lambda: _inside(lambda: devicemap.parallel_tasks(NOT_CALLED, [1])),
    "list_devices: a number": lambda: devicemap.list_devices(3),
    "simulate_devices: none": lambda: devicemap.simulate_devices(0),
    "simulate_devices: a part": lambda: devicemap.simulate_devices(2.5),
    "simulate_devices: True": lambda: devicemap.simulate_devices(True),
    "simulate_devices: None": lambda: devicemap.simulate_devices(None),
    "simulate_devices: too late": lambda: devicemap.simulate_devices(3),
    "connect: an address": lambda: devicemap.connect({"worker": "a:1"}),
    "connect: an address twice": lambda: devicemap.connect({"worker": ["a:1", "a:1"]}),
    "connect: this host": lambda: devicemap.connect({"localhost": ["a:1"]}),
    "connect: a list": lambda: devicemap.connect(["a:1"]),
    "Ray: a tuple": lambda: columns_of((tf.zeros([2]), tf.zeros([2]))),
    "Ray: a nested dict": lambda: columns_of({"a": {"b": tf.zeros([2])}}),
    "Ray: complex numbers": lambda: columns_of({"a": tf.cast(X, tf.complex64)}),
    "Ray: ragged bfloat16": lambda: columns_of(tf.RaggedTensor.from_tensor(tf.cast(X, tf.bfloat16))),
}


def _ways(name: str) -> Iterator[Callable[[], Any]]:
    fn, data, options = CALLS[name]
    yield lambda: devicemap.parallel_map(fn, data, **{**ONE, **options})
    yield lambda: devicemap.DeviceMap(fn, **{**SEVERAL, **options})(data)
    yield lambda: devicemap.DeviceMap(fn, **{**SEVERAL, "batch_size": 4, **options})(data)
    if not name.startswith("run: ") and "batch_size" not in options and not isinstance(data, tf.data.Dataset):
        yield lambda: _inside(lambda: devicemap.parallel_map(fn, data, **{**SEVERAL, **options}))


def _inside(call: Callable[[], Any]) -> None:
    """Make a call inside of a `tf.function`, and raise its error as it was there, with its cause."""
    errors = []

    def function() -> None:
        try:
            call()
        except DeviceMapError as error:
            errors.append(error)

    tf.function(function, autograph=False)()
    for error in errors:
        raise error


CHANGING = {
    r"failed on rows? \d+( to \d+)?": "failed on row N",
    r"on CPU:\d": "on CPU:N",
    r"\[\d\] \[\d\]\.": "[N] [N].",
    r"(?<=: )\w+Error: .*(?=XLA lacks)": "... ",
    r"line \d+": "line N",
    "0x[0-9a-f]+": "0x...",
    "there is CPU:0, .*": "there is CPU:0, ...",
    r"(?<=[a-z])(_\d+)+\b": "",
    r"a result has .* and .* at index .* values differ": "a result has N and N at index [N]; N of N values differ",
}
"""What differs between machines and calls, such as numbers in names of layers, and random rows."""


def _message(call: Callable[[], Any]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", DeprecationWarning)  # of TensorFlow's dependencies
        said = ""
        try:
            call()
        except DeviceMapError as error:
            said = _without_foreign_words(error)
    said = said or "".join(f"{warning.category.__name__}: {warning.message}" for warning in caught)
    for pattern, text in CHANGING.items():
        said = re.sub(pattern, text, said)
    return said


def _without_foreign_words(error: DeviceMapError) -> str:
    """The class and text of an error, without words of TensorFlow and NumPy, and without lines of this file."""
    kind = next(base.__name__ for base in type(error).__mro__ if base.__name__ in vars(devicemap.errors))
    said, cause = str(error), error.__cause__
    if "could not be traced" in said:
        assert type(cause) in type(error).__mro__
        said = said.partition(f": {type(cause).__name__}: ")[0]
    own = type(cause).__module__.startswith("devicemap") or OTHER_ROW_COUNT in str(cause)
    if cause is not None and str(cause) and not own:
        said = said.replace(str(cause)[:500], "...")
    assert "failed on" in said or getattr(error, "shards", ()) == ()
    return f"{kind}: {said}"


def test_messages(request: pytest.FixtureRequest) -> None:
    found, changing = "", {}
    for name in [*CALLS, *REFUSED]:
        messages = {*map(_message, _ways(name) if name in CALLS else [REFUSED[name]])}
        found += f"# {name}\n{min(messages)}\n\n"
        if len(messages) > 1:
            changing[name] = messages
    if request.config.getoption("update_messages"):
        GOLDEN.write_text(found, encoding="utf-8")
    assert found == GOLDEN.read_text(encoding="utf-8")
    assert changing == {}
    assert NOT_CALLED.count == 0
    assert COUNTER.numpy() == 0
    assert issubclass(UnknownOptionError, TypeError)  # as Python raises for an unknown keyword argument


def test_errors_keep_their_class_inside_a_function_of_autograph() -> None:
    for name in ("data: unequal leaves", "option: a misspelt option", "result: None"):
        fn, data, options = CALLS[name]
        with pytest.raises(DeviceMapError) as outside:
            devicemap.parallel_map(fn, data, **options)
        with pytest.raises(type(outside.value), match=re.escape(str(outside.value))) as inside:
            tf.function(lambda: devicemap.parallel_map(fn, data, **options))()
        assert type(inside.value) is type(outside.value)
        assert isinstance(inside.value, FunctionError | ValueError)


UNDER_A_TAPE: dict[str, tuple[Callable[[], object], str]] = {
    "stream": (lambda: MAPPER.stream(X), "gradients do not go through chunks"),  # at once, not at the first chunk
    "on_error": (lambda: ORDERED(X), "a GradientTape is recording, .* on_error"),
    "tasks": (lambda: devicemap.parallel_tasks(NOT_CALLED, [1]), "open the tape in fn"),
}


@pytest.mark.private("whether a tape is recording")
def test_what_is_refused_under_a_tape() -> None:
    for call, message in UNDER_A_TAPE.values():
        with tf.GradientTape(), pytest.raises(DeviceMapError, match=message):
            call()


def test_random_numbers_of_other_threads_give_no_warning() -> None:
    """A function that only computes with NumPy's constants draws nothing."""
    states = random_states(lambda n: n * np.float32(2)), random_states(lambda n: n * np.random.rand())
    before = [state() for state in states]
    np.random.rand()
    assert [state() == old for state, old in zip(states, before)] == [True, False]
