"""Results that cannot be gathered: errors name the leaf and what to return instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from ways import IN_MEMORY, SEVERAL, Counter, Options, X, ways

import devicemap
from devicemap.errors import FunctionError


def _array(batch: Any) -> Any:
    return tf.TensorArray(tf.float32, 1).write(0, batch)


def _python(row: Any) -> Any:
    return tf.ensure_shape(tf.py_function(lambda r: r, [row], tf.float32), [2])


def _ragged(row: Any) -> Any:
    return tf.RaggedTensor.from_tensor(row[None])


def _two(row: Any) -> Any:
    return row, row


def _list(row: Any) -> Any:
    return [row, row]


_RAGGED = tf.RaggedTensorSpec(dtype=tf.int32, ragged_rank=3)
BATCHED: Options = {"batched": True}
VECTORIZED: Options = {"vectorize": True}
BAD_RESULTS: list[tuple[str, Any, Options, str]] = [
    ("None", lambda row: None, {}, r"^the result of fn is None; expected a tensor for each row\. .* let it return "),
    ("None leaf", lambda row: (row, None), {}, r"^the result\[1\] of fn is None; "),
    ("None of a batch", lambda b: {"a": None}, BATCHED, r"^the result\['a'\] of fn is None; "),
    ("nothing", lambda row: (), {}, r"^fn returned \(\), a nest without leaves; expected at least one tensor$"),
    ("an object", lambda row: {"o": Counter()}, {}, r"^fn could not be traced .* return value of type Counter"),
    ("a list of unlike", lambda row: [row, row[0]], {}, r"^the result of fn is a list, not a tensor: Shapes must"),
    ("a batch's scalar", tf.reduce_sum, BATCHED, r"^the result of fn is a scalar; .* Set batched=False for a fn "),
    ("fewer results", lambda b: (b, 1.0), BATCHED, r"^the result\[1\] of fn is a scalar; with batched=True fn "),
    ("two rows", lambda b: tf.stack([1.0, b[0, 0]]), BATCHED, r"^the result of fn has 2 row\(s\), shape \(2,\), "),
    ("a list of batches", lambda b: [b, b * 2], BATCHED, r" of fn is a list of 2; .* return a tuple for several "),
    ("a TensorArray", _array, {}, r"^the result of fn is a TensorArray or another object, not a tensor; return its "),
    ("a TensorArray of a batch", lambda b: {"t": _array(b)}, BATCHED, r"^the result\['t'\] of fn is a TensorArray or "),
    ("another nest", lambda row: row, {"fn_output_signature": {"a": tf.float32}}, r" the nests must be the same$"),
    ("another dtype", lambda row: row, {"fn_output_signature": tf.int32}, r" has int32 where fn returns float32; "),
    (
        "another rank and dtype",
        lambda row: row,
        {"fn_output_signature": _RAGGED},
        r" has RaggedTensorSpec\(.*, tf\.int32, 3, ",
    ),
    (
        "ragged for dense",
        _ragged,
        {"fn_output_signature": tf.float32},
        r" has .*float32.* where fn returns RaggedTensorSpec",
    ),
    (
        "a tuple for a list",
        _two,
        {"fn_output_signature": [tf.float32] * 2},
        r" is \[tf\.float32, .* fn returns \(TensorSp",
    ),
    (
        "one for a list of two",
        _list,
        {"fn_output_signature": [tf.float32]},
        r" is \[tf\.float32\], but fn returns \[TensorSp",
    ),
    ("ragged with XLA", tf.RaggedTensor.from_tensor, {**BATCHED, "jit_compile": True}, r"^jit_compile=True with "),
    ("ragged", _ragged, VECTORIZED, r": fn returns ragged or sparse "),
    (
        "a signature",
        tf.identity,
        {**VECTORIZED, "fn_output_signature": (tf.float32, tf.float32)},
        ": fn_output_signature is ",
    ),
    ("an effect", _python, VECTORIZED, r"^vectorize=True: EagerPyFunc acts once per row \(.* line \d+ of .*\)\. Use "),
    (
        "an op",
        lambda row: tf.unique(row).y,
        VECTORIZED,
        r"^vectorize=True: Unique has no vectorised form \(.*\)\. Use ",
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

    message = r"^vectorize=True: fn writes a variable or another resource, once per row \(`.*`, line \d+ of .*\)\."
    with pytest.raises(FunctionError, match=message):
        devicemap.DeviceMap(count, **SEVERAL, vectorize=True)(X)
    assert counter.numpy() == 0


def test_vectorizing_ragged_data() -> None:
    with pytest.raises(FunctionError, match=r"^vectorize=True: the data holds ragged or sparse tensors\."):
        devicemap.DeviceMap(tf.reduce_sum, **SEVERAL, vectorize=True)(tf.ragged.constant([[1], [2, 3]]))


WRONG_ROWS: list[tuple[Any, int]] = [
    (lambda b: tf.boolean_mask(b, b[:, 0] > 3.0), 0),
    (lambda b: tf.concat([b, b], 0), 0),
    (lambda b: (b, b[:0]), 1),
    (lambda b: {"a": b[tf.shape(b)[0] :], "b": b}, 0),
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
    assert shard.start == 0 or "batch_size" in way  # fn is right for the single row of the first chunk


@pytest.mark.in_ci(3)
@pytest.mark.parametrize("way", IN_MEMORY.values(), ids=list(IN_MEMORY))
@wrong_rows
def test_wrong_number_of_rows_inside_a_function(fn: Any, leaf: int, way: Options) -> None:
    mapper = devicemap.DeviceMap(fn, **way, batched=True)
    function = tf.function(lambda x: mapper(x), input_signature=[tf.TensorSpec([None, 2])], autograph=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="fn returned another number of rows than it was given"):
        function(X[:5])


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
    # The number of axes is unknown without rows.
    wanted = X[:rows] * 2 if rows else np.zeros([0], np.float32)
    result = mapper(X[:rows])
    assert result.dtype == tf.float32
    np.testing.assert_array_equal(result, wanted, strict=True)
    if "batch_size" not in way:
        for known in (rows, None):
            function = tf.function(lambda x: mapper(x), input_signature=[tf.TensorSpec([known, 2])], autograph=False)
            np.testing.assert_array_equal(function(X[:rows]), wanted, strict=True)


@pytest.mark.in_ci(2)
@ways
@pytest.mark.parametrize("rows", [6, 5, 1, 0])
def test_sparse_results_of_unknown_rank(rows: int, way: Options) -> None:
    def fn(x: Any) -> Any:
        whole = tf.sparse.from_dense(x)
        parts = [
            tf.raw_ops.PlaceholderWithDefault(input=part, shape=None)
            for part in (whole.indices, whole.values, whole.dense_shape)
        ]
        return tf.SparseTensor(*parts)

    mapper = devicemap.DeviceMap(fn, **way)
    results = [mapper(X[:rows])]
    if "batch_size" not in way:
        for known in (rows, None):
            function = tf.function(lambda x: mapper(x), input_signature=[tf.TensorSpec([known, 2])], autograph=False)
            results.append(function(X[:rows]))
    for result in results:
        assert isinstance(result, tf.SparseTensor)
        assert result.dense_shape.numpy().tolist() == ([rows, 2] if rows else [0])
        if rows:
            np.testing.assert_array_equal(tf.sparse.to_dense(result), X[:rows])
