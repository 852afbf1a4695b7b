"""Law 7: errors say what was given, what was expected and what to change; bad arguments fail before anything runs."""

from __future__ import annotations

import collections
import pickle
import re
import threading
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import devicemap
from devicemap.errors import DataError, DeviceError, DeviceMapError, FunctionError, OptionError, UnknownOptionError

X = tf.reshape(tf.range(12.0), [6, 2])
Pair = namedtuple("Pair", "a b")
Options = dict[str, Any]

ONE: Options = {"devices": ["CPU:1"]}
SEVERAL: Options = {"devices": ["CPU:2", "CPU:0", "CPU:5"]}
IN_MEMORY = {"one device": ONE, "several devices": SEVERAL}
CHUNKED = {"one device, chunks": {**ONE, "batch_size": 4}, "several devices, chunks": {**SEVERAL, "batch_size": 4}}
WAYS = {**IN_MEMORY, **CHUNKED}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))


class Counter:
    """A function that counts how often Python runs it, for tracing or otherwise."""

    def __init__(self, fn: Callable[..., Any] = lambda *rows: rows[0]):
        self.fn, self.count = fn, 0

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        return self.fn(*args)


BAD_OPTIONS: list[tuple[Options, type[Exception], str]] = [
    (
        {"batch_sise": 2},
        UnknownOptionError,
        r"^'batch_sise' is not an option; did you mean 'batch_size'\? The options ",
    ),
    ({"device": "GPU"}, UnknownOptionError, r"'device' is not an option; did you mean 'devices'\?"),
    ({"q": 1}, UnknownOptionError, r"^'q' is not an option\. The options are devices, batched, .*, name$"),
    ({"batched": 1}, OptionError, r"^batched=1; expected True or False$"),
    ({"batched": None}, OptionError, r"^batched=None; expected True or False$"),
    ({"jit_compile": "yes"}, OptionError, r"^jit_compile='yes'; expected True or False$"),
    ({"vectorize": "no"}, OptionError, r"^vectorize='no'; expected True, False or 'auto'$"),
    ({"vectorize": 1}, OptionError, r"^vectorize=1; expected True, False or 'auto'$"),
    ({"batched": True, "vectorize": True}, OptionError, r"vectorize=True with batched=True: .* leave vectorize out"),
    ({"batched": True, "vectorize": False}, OptionError, r"vectorize=False with batched=True: .* set batched=False"),
    ({"batched": True, "fn_output_signature": tf.int32}, OptionError, r"fn_output_signature with .* leave it out$"),
    (
        {"batch_size": 0},
        OptionError,
        r"^batch_size=0; expected None, 'auto' or an int of at least 1, in rows per device call$",
    ),
    ({"batch_size": -3}, OptionError, r"^batch_size=-3; "),
    ({"batch_size": 2.5}, OptionError, r"^batch_size=2.5; "),
    ({"batch_size": True}, OptionError, r"^batch_size=True; "),
    ({"batch_size": "4"}, OptionError, r"^batch_size='4'; "),
    ({"seed": -1}, OptionError, r"^seed=-1; expected None or an int from 0 to 2\*\*32 - 1$"),
    ({"seed": 2**32}, OptionError, r"^seed=4294967296; "),
    ({"seed": False}, OptionError, r"^seed=False; "),
    ({"seed": 1.0}, OptionError, r"^seed=1.0; "),
    ({"name": ""}, OptionError, r"^name=''; expected None or a non-empty string$"),
    ({"name": 3}, OptionError, r"^name=3; expected None or a non-empty string$"),
    ({"devices": "CPU:9"}, DeviceError, r"'CPU:9'.* there is CPU:0, CPU:1, .*CPU:7"),
    ({"devices": "TPU"}, DeviceError, r"^devices='TPU': there is no device of this kind; there is CPU:0, "),
    (
        {"devices": []},
        DeviceError,
        r"^devices is empty; expected at least one device, or None for all; there is CPU:0, ",
    ),
    (
        {"devices": ["CPU:1", "/CPU:1"]},
        DeviceError,
        r"devices holds /job:.*CPU:1 more than once; name each device once",
    ),
    ({"devices": [3]}, DeviceError, r"^devices has 3 of type int; expected names such as 'GPU:0'"),
    ({"output_device": "CPU:9"}, DeviceError, r"'CPU:9'.* there is CPU:0, "),
    ({"output_device": 7}, DeviceError, r"7 of type int; expected "),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS, ids=lambda value: str(value)[:60])
def test_bad_options(options: Options, error: type[Exception], message: str) -> None:
    fn = Counter()
    for call in (lambda: devicemap.DeviceMap(fn, **options), lambda: devicemap.parallel_map(fn, X, **options)):
        with pytest.raises(error, match=message):
            call()
    assert fn.count == 0
    assert issubclass(error, DeviceMapError)
    assert issubclass(error, ValueError)


def test_an_unknown_option_is_a_type_error_too() -> None:
    """As Python raises for an unknown keyword argument."""
    with pytest.raises(TypeError, match="not an option"):
        devicemap.DeviceMap(tf.identity, colour="red")


@pytest.mark.parametrize("fn", [None, 3, "tf.sin"], ids=str)
def test_fn_is_not_callable(fn: Any) -> None:
    with pytest.raises(
        OptionError, match=f"^fn is of type {type(fn).__name__}, not callable; fn comes first, then the data$"
    ):
        devicemap.DeviceMap(fn)


@pytest.mark.parametrize("data", [X, np.zeros([3]), [1.0, 2.0]], ids=["tensor", "array", "list"])
def test_fn_after_the_data(data: Any) -> None:
    message = f"^fn is of type {type(data).__name__}, not callable; fn comes first, then the data$"
    with pytest.raises(OptionError, match=message):
        devicemap.parallel_map(data, tf.sin)


def test_numbers_of_numpy_are_numbers() -> None:
    def fn(row: Any, seed: Any) -> Any:
        return row + tf.random.stateless_normal([2], seed)

    wanted = devicemap.parallel_map(fn, X, **ONE, batch_size=4, seed=2**32 - 1)
    for integer in (np.int64, np.uint32):
        options = {"batch_size": integer(4), "seed": integer(2**32 - 1)}
        np.testing.assert_array_equal(devicemap.parallel_map(fn, X, **SEVERAL, **options), wanted)
    with pytest.raises(OptionError, match=r"^batch_size=.*0.*; expected None, 'auto' or an int of at least 1"):
        devicemap.DeviceMap(fn, batch_size=np.int64(0))


BAD_DATA: list[tuple[str, Any, str]] = [
    (
        "unequal",
        (X, X[:4]),
        r"^the leaves of data have different numbers of rows: data\[0\] has 6, data\[1\] has 4\. They ",
    ),
    (
        "unequal in a dict",
        {"a": X, "b": [1, 2]},
        r"data\['a'\] has 6, data\['b'\] has 2\. They must share their first axis$",
    ),
    ("unequal in a named tuple", Pair(X, {"k": X[:1]}), r"data\.a has 6, data\.b\['k'\] has 1"),
    ("unequal ragged", (X, tf.ragged.constant([[1], []])), r"data\[0\] has 6, data\[1\] has 2"),
    ("unequal sparse", (X, tf.sparse.eye(3)), r"data\[0\] has 6, data\[1\] has 3"),
    (
        "scalar",
        3.0,
        r"^data is a scalar \(float32\); every leaf needs rows as its first axis, of shape \[rows, \.\.\.\]\. ",
    ),
    (
        "scalar tensor",
        tf.constant(1),
        r"^data is a scalar \(int32\); .* Close over values that are the same for every row",
    ),
    ("scalar leaf", {"x": X, "k": np.float32(2)}, r"^data\['k'\] is a scalar \(float32\)"),
    (
        "generator",
        (row for row in [1.0]),
        r"^data is a generator, which can be read only once .* pass list\(\.\.\.\) of it",
    ),
    (
        "iterator",
        (X, iter([1, 2])),
        r"^data\[1\] is a list_iterator, which .* tf\.data\.Dataset\.from_generator\(\.\.\.\)",
    ),
    ("empty tuple", (), r"^data is \(\), a nest without leaves; expected at least one tensor to map over$"),
    ("empty dict", {}, r"^data is \{\}, a nest without leaves"),
    ("nested empty", ({}, ()), r"^data is \(\{\}, \(\)\), a nest without leaves"),
    ("None", None, r"^data is None; expected a tensor, an array or a list with rows as its first axis$"),
    ("None leaf", (X, None), r"^data\[1\] is None; expected a tensor"),
    ("string", "rows", r"^data is 'rows'; expected a tensor"),
    ("bytes", b"rows", r"^data is b'rows'; expected a tensor"),
    ("function", tf.sin, r"^data is <.*>; expected a tensor"),
    (
        "uneven lists",
        [[1], [2, 3]],
        r"^data is a list that does not convert .*; tf\.ragged\.constant makes rows of different",
    ),
    ("set", {"x": {1, 2}}, r"^data\['x'\] is a set that does not convert to a tensor"),
    ("objects", np.array([object(), None]), r"^data is a ndarray of shape \(2,\) that does not convert to a tensor"),
    (
        "keys of mixed types",
        {"a": X, 1: X},
        r"^data holds a dict whose keys cannot be sorted \(.*\); use keys of one type$",
    ),
    ("nested keys of mixed types", (X, {"k": {"a": X, 1: X}}), r"^data holds a dict whose keys cannot be sorted "),
    ("dataset in a nest", (X, tf.data.Dataset.range(6)), r"^data\[1\] is a Dataset inside a nest; zip datasets with "),
]


@pytest.mark.parametrize("way", [ONE, SEVERAL, CHUNKED["several devices, chunks"]], ids=["one", "several", "chunks"])
@pytest.mark.parametrize(("data", "message"), [case[1:] for case in BAD_DATA], ids=[case[0] for case in BAD_DATA])
def test_bad_data(data: Any, message: str, way: Options) -> None:
    fn = Counter()
    with pytest.raises(DataError, match=message) as caught:
        devicemap.DeviceMap(fn, **way)(data)
    assert isinstance(caught.value, ValueError)
    assert fn.count == 0


_nested = tf.data.Dataset.range(4).window(2)
_any_rank = tf.data.Dataset.from_generator(lambda: iter([]), output_signature=tf.TensorSpec(None, tf.int32))
BAD_DATASETS: list[tuple[str, Any, Options, str]] = [
    (
        "batches of scalars",
        tf.data.Dataset.range(4),
        {"batched": True},
        r"^the dataset has .* a scalar .* \.batch\(n\) ",
    ),
    (
        "of datasets",
        _nested,
        {},
        r"^the dataset has elements with DatasetSpec.*; expected dense, ragged or sparse tensors",
    ),
    (
        "unknown rank",
        _any_rank,
        {},
        r"^the dataset has elements of unknown rank .* output_signature, or map tf\.ensure_",
    ),
    (
        "infinite",
        tf.data.Dataset.range(3).repeat(),
        {},
        r"^the dataset is infinite, and its whole result would be too; take a part of it with \.take\(n\), or map "
        r"it as a stream$",
    ),
    ("infinite batches", tf.data.Dataset.range(3).repeat().batch(2), {"batched": True}, r"^the dataset is infinite, "),
    ("batches of unknown rank", _any_rank, {"batched": True}, r"^the dataset has elements of unknown rank "),
]


@pytest.mark.parametrize(
    ("dataset", "options", "message"), [case[1:] for case in BAD_DATASETS], ids=[case[0] for case in BAD_DATASETS]
)
def test_bad_datasets(dataset: Any, options: Options, message: str) -> None:
    fn = Counter()
    with pytest.raises(DataError, match=message):
        devicemap.DeviceMap(fn, **SEVERAL, **options)(dataset)
    assert fn.count == 0


def test_a_part_of_an_infinite_dataset() -> None:
    dataset = tf.data.Dataset.range(3).repeat().take(7)
    np.testing.assert_array_equal(devicemap.parallel_map(lambda i: i * 2, dataset, **SEVERAL), [0, 2, 4, 0, 2, 4, 0])


@ways
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    "data",
    [collections.defaultdict(list, b=[1, 2, 3, 4, 5], a=[6, 7, 8, 9, 0]), collections.Counter(b=X[:5], a=-X[:5])],
    ids=["defaultdict", "Counter"],
)
def test_other_mappings_are_dicts(data: Any, batched: bool, way: Options) -> None:
    result = devicemap.parallel_map(lambda rows: {"all": rows, "b": rows["b"] * 2}, data, **way, batched=batched)
    assert type(result) is type(result["all"]) is dict
    assert set(result["all"]) == {"a", "b"}
    for key in "ab":
        np.testing.assert_array_equal(result["all"][key], data[key])
    np.testing.assert_array_equal(result["b"], 2 * np.asarray(data["b"]))


def test_a_batch_of_a_dataset_with_unequal_leaves() -> None:
    dataset = tf.data.Dataset.from_tensors((tf.zeros([3]), tf.zeros([2])))
    with pytest.raises(DataError, match=r"different numbers of rows: data\[0\] has 3, data\[1\] has 2"):
        devicemap.DeviceMap(lambda a, b: a, **SEVERAL, batched=True)(dataset)


def test_a_dataset_inside_a_function() -> None:
    fn = Counter()
    mapper = devicemap.DeviceMap(fn, **SEVERAL)
    with pytest.raises(
        DataError, match=r"data cannot be mapped chunk by chunk inside a tf.function; do it outside, or pass tensors"
    ):
        tf.function(lambda: mapper(tf.data.Dataset.range(4)), autograph=False)()
    assert fn.count == 0


@pytest.mark.parametrize("autograph", [True, False])
def test_chunks_inside_a_function(autograph: bool) -> None:
    fn = Counter()
    mapper = devicemap.DeviceMap(fn, **SEVERAL, batch_size=3)
    message = "batch_size=3 inside a tf.function: chunks are .* Map outside of the tf.function, or leave batch_size out"
    with pytest.raises(OptionError, match=message) as caught:
        tf.function(lambda x: mapper(x), autograph=autograph)(X)
    assert type(caught.value) is OptionError
    assert fn.count == 0


def test_unknown_rank_inside_a_function() -> None:
    fn = Counter()
    mapper = devicemap.DeviceMap(fn, **SEVERAL)
    function = tf.function(mapper, input_signature=[tf.TensorSpec(None, tf.int32)], autograph=False)
    with pytest.raises(DataError, match=r"data is of unknown rank \(int32\); every leaf needs rows as its first axis"):
        function(tf.range(3))
    assert fn.count == 0


@pytest.mark.parametrize("data", [X, tf.data.Dataset.from_tensor_slices(X)], ids=["in memory", "dataset"])
def test_a_tape_with_chunks(data: Any) -> None:
    fn = Counter()
    mapper = devicemap.DeviceMap(fn, **SEVERAL, batch_size=2)
    with (
        tf.GradientTape() as tape,
        pytest.raises(OptionError, match=r"GradientTape is recording, and .* batch_size, or "),
    ):
        mapper(data)
    assert fn.count == 0
    with tf.GradientTape() as tape, tape.stop_recording():  # what the message says
        np.testing.assert_array_equal(mapper(data), X)


BAD_RESULTS: list[tuple[str, Any, Options, str]] = [
    (
        "None",
        lambda row: None,
        {},
        r"^the result of fn is None; expected a tensor for each row\. .* let it return something",
    ),
    ("None leaf", lambda row: (row, None), {}, r"^the result\[1\] of fn is None; "),
    ("None of a batch", lambda b: {"a": None}, {"batched": True}, r"^the result\['a'\] of fn is None; "),
    ("nothing", lambda row: (), {}, r"^fn returned \(\), a nest without leaves; expected at least one tensor$"),
    (
        "an object",
        lambda row: {"o": Counter()},
        {},
        r"^fn could not be traced for one row .* return value of type Counter",
    ),
    (
        "a list of unlike",
        lambda row: (row, [row, row[0]]),
        {},
        r"^the result\[1\] of fn is a list, not a tensor: Shapes must",
    ),
    (
        "a batch's scalar",
        tf.reduce_sum,
        {"batched": True},
        r"^the result of fn is a scalar; .* Set batched=False for a fn ",
    ),
    (
        "fewer results",
        lambda b: (b, 1.0),
        {"batched": True},
        r"^the result\[1\] of fn is a scalar; with batched=True fn ",
    ),
    (
        "a signature of too few",
        lambda row: (row, row),
        {"fn_output_signature": tf.float32},
        r"^fn_output_signature is <dtype: .float32.>, but fn returns \(TensorSpec\(.*\): the nests must be the same$",
    ),
    (
        "a signature of another nest",
        lambda row: row,
        {"fn_output_signature": {"a": tf.float32}},
        r"^fn_output_signature is \{'a': .*\}, but fn returns TensorSpec\(.*\): the nests must be the same$",
    ),
    (
        "a signature of another dtype",
        lambda row: row,
        {"fn_output_signature": tf.float64},
        r"^fn_output_signature has float64 where fn returns float32; they must be the same$",
    ),
    (
        "a signature with a spec of another dtype",
        lambda row: (row, row),
        {"fn_output_signature": (tf.float32, tf.TensorSpec([2], tf.int32))},
        r"^fn_output_signature has int32 where fn returns float32; they must be the same$",
    ),
    (
        "a TensorArray",
        lambda row: tf.TensorArray(tf.float32, 2).unstack(row),
        {},
        r"^the result of fn is a TensorArray or another object, not a tensor; return its \.stack\(\) or \.concat\(\)$",
    ),
    (
        "a TensorArray of a batch",
        lambda b: {"t": tf.TensorArray(tf.float32, 1).write(0, b)},
        {"batched": True},
        r"^the result\['t'\] of fn is a TensorArray or another object, not a tensor; ",
    ),
    (
        "ragged with XLA",
        lambda b: tf.RaggedTensor.from_tensor(b),
        {"batched": True, "jit_compile": True},
        r"^jit_compile=True with ragged or sparse results: XLA has only dense ones; set it to False$",
    ),
    (
        "vectorize=True with ragged results",
        lambda row: tf.RaggedTensor.from_tensor(row[None]),
        {"vectorize": True},
        r"^vectorize=True: fn returns ragged or sparse tensors\. Use vectorize='auto' or False to map row by row$",
    ),
    (
        "vectorize=True with a signature",
        lambda row: row,
        {"vectorize": True, "fn_output_signature": tf.float32},
        r"^vectorize=True: fn_output_signature is given, which is for tf\.map_fn\. Use ",
    ),
    (
        "vectorize=True with an effect",
        lambda row: tf.ensure_shape(tf.py_function(lambda r: r, [row], tf.float32), [2]),
        {"vectorize": True},
        r"^vectorize=True: EagerPyFunc acts once per row\. Use ",
    ),
    (
        "vectorize=True with an op that does not convert",
        lambda row: tf.unique(row).y,
        {"vectorize": True},
        r"^vectorize=True: Unique has no vectorised form\. Use vectorize='auto' or False$",
    ),
]


@ways
@pytest.mark.parametrize(
    ("fn", "options", "message"), [case[1:] for case in BAD_RESULTS], ids=[case[0] for case in BAD_RESULTS]
)
def test_bad_results(fn: Any, options: Options, message: str, way: Options) -> None:
    with pytest.raises(FunctionError, match=message) as caught:
        devicemap.DeviceMap(fn, **way, **options)(X)
    assert caught.value.shards == ()


def test_vectorizing_a_write() -> None:
    counter = tf.Variable(0.0)

    def count(row: Any) -> Any:
        counter.assign_add(1.0)
        return row

    with pytest.raises(
        FunctionError, match=r"^vectorize=True: fn writes a variable or another resource, once per row\."
    ):
        devicemap.DeviceMap(count, **SEVERAL, vectorize=True)(X)
    assert counter.numpy() == 0


def test_vectorizing_ragged_data() -> None:
    with pytest.raises(FunctionError, match=r"^vectorize=True: the data holds ragged or sparse tensors\."):
        devicemap.DeviceMap(tf.reduce_sum, **SEVERAL, vectorize=True)(tf.ragged.constant([[1], [2, 3]]))


WRONG_ROWS: list[tuple[Any, int]] = [
    (lambda b: b[:-1], 0),
    (lambda b: tf.concat([b, b], 0), 0),
    (lambda b: (b, b[:0]), 1),
    (lambda b: {"a": tf.reduce_sum(b, 0, keepdims=True)[1:], "b": b}, 0),
    (lambda b: (b, tf.RaggedTensor.from_tensor(b)[1:]), 1),
    (lambda b: tf.sparse.from_dense(b[1:]), 0),
]
wrong_rows = pytest.mark.parametrize(("fn", "leaf"), WRONG_ROWS, ids=range(len(WRONG_ROWS)))


@ways
@wrong_rows
def test_wrong_number_of_rows(fn: Any, leaf: int, way: Options) -> None:
    mapper = devicemap.DeviceMap(fn, **way, batched=True)
    with pytest.raises(
        FunctionError, match=r"^fn returned \d+ row\(s\) for the \d+ row\(s\) it was given \("
    ) as caught:
        mapper(X[:5])
    (shard,) = caught.value.shards
    text = str(caught.value)
    assert f"for the {len(shard)} row(s) it was given ({shard}; leaf {leaf} of its results)" in text
    assert "with batched=True it must return one row per input row, in order. Set batched=False for " in text
    assert shard.start == 0 or "batch_size" in way  # not the first chunk, where fn is right for a single row


@pytest.mark.parametrize("way", IN_MEMORY.values(), ids=list(IN_MEMORY))
@wrong_rows
def test_wrong_number_of_rows_inside_a_function(fn: Any, leaf: int, way: Options) -> None:
    mapper = devicemap.DeviceMap(fn, **way, batched=True)
    function = tf.function(lambda x: mapper(x), input_signature=[tf.TensorSpec([None, 2])], autograph=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="fn returned another number of rows than it was given"):
        function(X[:5])


def test_wrong_number_of_rows_on_one_device_inside_a_function() -> None:
    """Of rows whose number is known: told while tracing where fn's is known too, else when it runs."""
    mapper = devicemap.DeviceMap(lambda b: tf.zeros([3, 2]), **ONE, batched=True)
    with pytest.raises(
        FunctionError, match=r"fn returned 3 row\(s\) for the 6 row\(s\) it was given; .* in order\. Set "
    ):
        tf.function(lambda x: mapper(x), autograph=False)(X)
    mapper = devicemap.DeviceMap(lambda b: tf.boolean_mask(b, b[:, 0] > 3.0), **ONE, batched=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="fn returned another number of rows than it was given"):
        tf.function(lambda x: mapper(x), autograph=False)(X)


@ways
def test_wrong_number_of_rows_in_the_pieces_of_xla(way: Options) -> None:
    """On one device, pieces of 4 and 2 rows give 3 rows each: 6, as many as were given."""
    mapper = devicemap.DeviceMap(lambda b: tf.zeros([3, 2]), **way, batched=True, jit_compile=True)
    message = r"^<lambda> failed on rows? \d.* on CPU:\d: InvalidArgumentError: .*fn must return one row per input row"
    with pytest.raises(FunctionError, match=message) as caught:
        mapper(X)
    assert isinstance(caught.value, tf.errors.InvalidArgumentError)


def test_wrong_number_of_rows_in_the_pieces_of_xla_inside_a_function() -> None:
    mapper = devicemap.DeviceMap(lambda b: tf.zeros([3, 2]), **ONE, batched=True, jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="fn must return one row per input row"):
        tf.function(lambda x: mapper(x), autograph=False)(X)


def _square(batch: Any) -> Any:
    """As many columns as rows."""
    return tf.zeros([tf.shape(batch)[0], tf.shape(batch)[0]])


def _of_uneven_rank(batch: Any) -> Any:
    return tf.numpy_function(lambda rows: rows if len(rows) == 2 else rows[..., None], [batch], tf.float32)


@pytest.mark.parametrize("as_batches", [False, True])
@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (_square, r"\(2,\), \(1,\)"),
        (lambda b: {"a": b, "b": _square(b)}, r"\(2,\), \(1,\)"),
        (_of_uneven_rank, r"\(2,\), \(2, 1\)"),
    ],
    ids=["shapes", "shapes of a leaf", "ranks"],
)
def test_different_inner_shapes(fn: Any, shapes: str, as_batches: bool) -> None:
    mapper = devicemap.DeviceMap(fn, **SEVERAL, batched=True)
    message = (
        rf"^fn returned dense results of different inner shapes for different shards: {shapes}; a dense tensor cannot "
        r"hold both\. Return a tf\.RaggedTensor, give fn_output_signature=tf\.RaggedTensorSpec\(\.\.\.\), or pad to a fixed "
        r"shape; if the data is a dataset of batches, set batched=True$"
    )
    with pytest.raises(FunctionError, match=message):
        mapper(X[:5])


@ways
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("rows", [6, 5, 1, 0])
def test_results_of_unknown_rank(rows: int, batched: bool, way: Options) -> None:
    def fn(x: Any) -> Any:
        return tf.numpy_function(lambda array: array * 2, [x], tf.float32)

    mapper = devicemap.DeviceMap(fn, **way, batched=batched)
    # without rows, nothing tells how many axes results would have
    wanted = X[:rows] * 2 if rows else np.zeros([0], np.float32)
    result = mapper(X[:rows])
    assert result.dtype == tf.float32
    np.testing.assert_array_equal(result, wanted, strict=True)
    if "batch_size" not in way:
        for known in (rows, None):
            function = tf.function(lambda x: mapper(x), input_signature=[tf.TensorSpec([known, 2])], autograph=False)
            np.testing.assert_array_equal(function(X[:rows]), wanted, strict=True)


class CustomError(Exception):
    """One that cannot be made from a message alone."""

    def __init__(self, code: int, *, detail: str):
        super().__init__(f"code {code}: {detail}")
        self.code, self.detail = code, detail


def _raising(error: Exception) -> Callable[..., Any]:
    """A function of a row (of two numbers) that raises in row 5 of `X`, on whichever device has it."""

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
    ("a ValueError", _raising(ValueError("odd value")), tf.errors.InvalidArgumentError, "ValueError: odd value"),
    ("a TypeError", _raising(TypeError("odd type")), tf.errors.InvalidArgumentError, "TypeError: odd type"),
    ("division by zero", _raising(ZeroDivisionError("by zero")), tf.errors.UnknownError, "ZeroDivisionError: by zero"),
    ("no memory", _raising(MemoryError("too much")), tf.errors.ResourceExhaustedError, "MemoryError: too much"),
    (
        "TensorFlow's own error",
        _raising(tf.errors.ResourceExhaustedError(None, None, "no room")),
        tf.errors.UnknownError,  # what py_function makes of it
        "ResourceExhaustedError: no room",
    ),
    ("a custom error", _raising(CustomError(7, detail="hot")), tf.errors.UnknownError, "CustomError: code 7: hot"),
    (
        "a bad index",
        lambda row: tf.gather([1.0] * 10, tf.cast(row[0], tf.int32)),
        tf.errors.InvalidArgumentError,
        "= 10",
    ),
]
LAST_SHARD = {
    "one device": "rows 0 to 5 on CPU:1",
    "several devices": "rows 4 to 5 on CPU:5",
    "one device, chunks": "rows? .*5 on CPU:1(, then CPU:1)*",
    "several devices, chunks": "rows? .*5 on CPU:[205](, then CPU:[205])*",
}


@pytest.mark.parametrize(("way", "where"), [(WAYS[name], where) for name, where in LAST_SHARD.items()], ids=LAST_SHARD)
@pytest.mark.parametrize(("fn", "error", "message"), [case[1:] for case in RAISED], ids=[case[0] for case in RAISED])
def test_an_error_inside_fn(
    fn: Callable[..., Any], error: type[Exception], message: str, way: Options, where: str
) -> None:
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


@pytest.mark.parametrize("thread", ["the main thread", "another thread"])
def test_the_whole_message(thread: str) -> None:
    """A call in the main thread runs in a thread of its own, and in others it does not."""
    mapper = devicemap.DeviceMap(_raising(ZeroDivisionError("by zero")), **ONE, name="mine")
    raised: list[Exception] = []

    def call() -> None:
        try:
            mapper(X)
        except Exception as error:
            raised.append(error)

    if thread == "the main thread":
        call()
    else:
        other = threading.Thread(target=call)
        other.start()
        other.join()
    (error,) = raised
    assert str(error) == "mine failed on rows 0 to 5 on CPU:1: UnknownError: ZeroDivisionError: by zero"


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
@pytest.mark.parametrize("failing", ["the main thread", "another thread"])
def test_a_call_that_fails_leaves_another_alone(failing: str, way: Options) -> None:
    """One call is inside of fn from before the other one fails until after it has failed."""
    inside, failed = threading.Event(), threading.Event()

    def python(row: Any) -> Any:
        if row[0] < 0:
            assert inside.wait(60)
            raise TypeError("odd type")
        inside.set()
        assert failed.wait(60)
        return row

    def fn(row: Any) -> Any:
        return tf.ensure_shape(tf.py_function(python, [row], tf.float32), [2])

    mapper = devicemap.DeviceMap(fn, **way)
    results: list[Any] = []
    errors: list[Exception] = []

    def succeed() -> None:
        results.append(mapper(X + 1))

    def fail() -> None:
        try:
            mapper(-X - 1)
        except Exception as error:
            errors.append(error)
        failed.set()

    here, there = (fail, succeed) if failing == "the main thread" else (succeed, fail)
    other = threading.Thread(target=there)
    other.start()
    here()
    other.join()
    (error,) = errors
    assert isinstance(error, FunctionError)
    assert "InvalidArgumentError: TypeError: odd type" in str(error)
    (result,) = results
    np.testing.assert_array_equal(result, X + 1)


def test_an_error_inside_fn_that_writes_is_not_located() -> None:
    """Finding out would write a second time."""
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


def test_an_error_inside_fn_under_a_tape() -> None:
    mapper = devicemap.DeviceMap(_asserting, **SEVERAL)
    with (
        tf.GradientTape(),
        pytest.raises(FunctionError, match=r"rows 4 to 5 on CPU:5: InvalidArgumentError: .*too large"),
    ):
        mapper(X)


WHILE_TRACING: list[Exception] = [
    ZeroDivisionError("by zero"),
    KeyError("key"),
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
    assert caught.value.__cause__ is error
    assert caught.value.shards == ()
    assert str(error) in str(caught.value)
    assert caught.value.args == (str(caught.value),)


def _raising_while_tracing(row: Any) -> Any:
    raise ValueError("odd value")


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
    @tf.function
    def function() -> Any:
        return devicemap.parallel_map(_raising_while_tracing, X, **SEVERAL)

    with pytest.raises(FunctionError, match="ValueError: odd value") as caught:
        function()
    assert isinstance(caught.value, ValueError)


def test_a_custom_error_keeps_its_attributes() -> None:
    @tf.autograph.experimental.do_not_convert
    def fn(row: Any) -> Any:
        raise CustomError(7, detail="hot")

    with pytest.raises(CustomError, match="code 7: hot") as caught:
        devicemap.parallel_map(fn, X, **SEVERAL, batched=True)
    assert (caught.value.code, caught.value.detail) == (7, "hot")


@pytest.mark.parametrize(
    ("fn", "data", "options", "given"),
    [
        (lambda a, b: a, X, {}, ""),
        (lambda a: a, (X, X), {}, ", as 2 arguments,"),
        (lambda a: a, X, {"seed": 1}, " and the keyword seed"),
        (lambda a, b: a, (X, X), {"seed": 1}, ", as 2 arguments, and the keyword seed"),
        (lambda a: a + "text", X, {}, ""),
    ],
    ids=["too few arguments", "too many arguments", "no seed", "several arguments, no seed", "a bad addition"],
)
def test_fn_does_not_fit_the_data(fn: Any, data: Any, options: Options, given: str) -> None:
    message = rf"^fn could not be traced for one row \(batched=False\){given} of TensorSpec\("
    with pytest.raises(FunctionError, match=message) as caught:
        devicemap.parallel_map(fn, data, **SEVERAL, **options)
    assert isinstance(caught.value, TypeError | ValueError)
    assert type(caught.value.__cause__) in type(caught.value).__mro__


def test_an_error_of_the_input() -> None:
    """It is no error of fn's, and comes through as it is."""

    def rows() -> Any:
        yield 1.0
        raise KeyError("broken input")

    dataset = tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([], tf.float32))
    with pytest.raises(tf.errors.UnknownError, match=re.escape("KeyError: 'broken input'")):
        devicemap.parallel_map(lambda row: row, dataset, **SEVERAL, batch_size=1)
