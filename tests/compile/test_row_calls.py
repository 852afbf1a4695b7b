"""Results whose shape differs between rows, inside a function that is vectorised otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graphs import partitions, placements, traced
from oracle import assert_same, gradients_of

import devicemap

_random = np.random.default_rng(0)
ROWS = tf.constant(_random.normal(size=[5, 6]), tf.float32)
WEIGHTS = tf.Variable(_random.normal(size=[6, 6]), dtype=tf.float32)


def _features(row: Any) -> Any:
    """So many ops that a loop over rows with a few others takes less time than one with all."""
    for _ in range(8):
        row = tf.tanh(tf.linalg.matvec(WEIGHTS, row)) + 0.1 * row
    return row


def _positive(row: Any) -> Any:
    return tf.boolean_mask(row, row > 0.0)


def _mean_and_deviation(row: Any) -> Any:
    loud = tf.boolean_mask(_features(row), row > tf.reduce_min(row))
    return tf.reduce_mean(loud), tf.math.reduce_std(loud), tf.cast(tf.size(loud), tf.float32)


def _window(row: Any) -> Any:
    row = _features(row)
    peak = tf.argmax(row[1:-1], output_type=tf.int32) + 1
    return tf.ensure_shape(row[peak - 1 : peak + 2], [3]) * row[:3]


def _padded(row: Any) -> Any:
    row = _features(row)
    kept = _positive(row)
    return tf.ensure_shape(tf.pad(kept, [[0, 6 - tf.size(kept)]]), [6]) - row


def _best_boxes(row: Any) -> Any:
    scores = _features(row)
    boxes = tf.stack([row, row, row + 1.0, row + tf.nn.softplus(scores)], 1)
    kept = tf.image.non_max_suppression(boxes, scores, 4, 0.2)
    return tf.reduce_sum(tf.gather(boxes, kept), 0), tf.reduce_max(tf.gather(scores, kept))


def _entropy(row: Any) -> Any:
    row = _features(row)
    _, places, counts = tf.unique_with_counts(tf.cast(2.0 * row, tf.int32))
    shares = tf.cast(counts, tf.float32) / 6.0
    return -tf.reduce_sum(shares * tf.math.log(shares)) + tf.reduce_sum(row), tf.cast(places, tf.float32) * row


positive = tf.function(_positive)
squares = tf.function(lambda kept: tf.reduce_sum(kept**2))


def _in_functions(row: Any) -> Any:
    return squares(positive(_features(row))) + squares(positive(-row))


def _in_a_branch(row: Any) -> Any:
    row = _features(row)
    return tf.cond(row[0] > 0.0, lambda: squares(positive(row)), lambda: tf.reduce_sum(row[: tf.argmax(row)]))


def _in_loops(row: Any) -> Any:
    row = _features(row)
    for _ in tf.range(2):
        row -= 0.1 * tf.reduce_max(_positive(tf.abs(row)))
    while tf.reduce_sum(row**2) > 0.1:
        row *= 0.5 + 0.2 * tf.tanh(squares(_positive(row)))
    return row


def _words(text: Any) -> Any:
    text = tf.strings.regex_replace(tf.strings.lower(tf.strings.strip(text)), "[^a-z ]", "")
    length, code = tf.strings.length(text), tf.strings.to_hash_bucket_fast(text, 1000)
    for _ in range(4):
        code = (code * 7 + tf.cast(length, tf.int64)) % 1000
    letters = tf.gather(["a", "b", "c"], tf.range(length % 3))
    return tf.strings.reduce_join(letters), code, length


def _cut_twice(row: Any) -> Any:
    row = _features(row)
    kept = _positive(row)
    above = tf.boolean_mask(row, row > tf.reduce_mean(kept))
    some = kept[: tf.size(kept) // 2]
    return tf.reduce_sum(above) * tf.reduce_max(kept), tf.reduce_sum(tf.concat([some, kept - squares(above)], 0))


def _features_between(row: Any) -> Any:
    kept = _positive(row)
    row = _features(tf.ensure_shape(tf.pad(kept, [[0, 6 - tf.size(kept)]]), [6]))
    return tf.reduce_sum(row[: tf.size(kept)] * kept), tf.reduce_sum(row)


def _loop_between(row: Any) -> Any:
    row = _features(row)
    kept = _positive(row)
    mean = tf.reduce_mean(kept)
    for _ in tf.range(2):
        mean = tf.sin(mean)
    return tf.reduce_sum((kept - mean) ** 2)


def _checked(row: Any) -> Any:
    kept = _positive(_features(row))
    with tf.control_dependencies([tf.debugging.assert_less(tf.size(kept), 7)]):
        return tf.reduce_sum(kept) / tf.cast(tf.size(kept), tf.float32)


CASES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "moments": (_mean_and_deviation, ROWS),
    "a window": (_window, ROWS),
    "padded": (_padded, ROWS),
    "non-max suppression": (_best_boxes, ROWS),
    "several results of an op": (_entropy, ROWS),
    "in functions": (_in_functions, ROWS),
    "in a branch": (_in_a_branch, ROWS),
    "in loops": (_in_loops, ROWS),
    "cut twice": (_cut_twice, ROWS),
    "features between": (_features_between, ROWS),
    "a loop between": (_loop_between, ROWS),
    "checked": (_checked, ROWS),
    "text": (_words, tf.constant(["One, two", " THREE ", "", "four five"])),
}


@pytest.mark.in_ci(1)
@pytest.mark.parametrize(("fn", "rows"), CASES.values(), ids=CASES)
def test_only_the_ops_that_need_it_run_row_by_row(devices: list[str], fn: Callable[[Any], Any], rows: Any) -> None:
    mapper = devicemap.DeviceMap(fn, devices=devices)
    plan = traced(mapper, rows)
    assert plan.vectorized, plan.reason
    assert "these ops run row by row, and those that take their results: " in plan.reason
    results = mapper(rows)
    dtypes = tf.nest.map_structure(lambda leaf: leaf.dtype, results)
    alone = tf.function(lambda x: tf.map_fn(fn, x, fn_output_signature=dtypes))
    assert_same(results, alone(rows), rtol=1e-4, atol=1e-5)
    if all(leaf.dtype.is_floating for leaf in tf.nest.flatten(results)):
        sources = (WEIGHTS, rows) if rows.dtype.is_floating else (WEIGHTS,)
        gradients = (gradients_of(lambda _, mapped=mapped: mapped(rows), *sources) for mapped in (mapper, alone))
        for got, wanted in zip(*gradients):
            np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fn", [_mean_and_deviation, _padded])
def test_no_op_runs_twice(fn: Callable[[Any], Any]) -> None:
    mapper = devicemap.DeviceMap(fn, devices=["CPU:0"])
    assert placements(partitions(mapper, ROWS), "Where").total() == 1


def _cropped(row: Any, seed: Any) -> Any:
    image = tf.image.stateless_random_crop(tf.reshape(tf.tile(_features(row), [8]), [4, 4, 3]), [2, 2, 3], seed)
    image = tf.image.stateless_random_flip_left_right(image, seed + 1)
    return tf.image.stateless_random_brightness(image, 0.2, seed + 2)


@pytest.mark.parametrize("fn", [lambda row, seed: _features(row) + tf.random.stateless_normal([6], seed), _cropped])
def test_random_numbers_of_seeds_of_rows_take_one_loop(fn: Callable[..., Any]) -> None:
    mapper = devicemap.DeviceMap(fn, seed=1)
    assert traced(mapper, ROWS).vectorized
    graph = tf.function(lambda x: mapper(x)).get_concrete_function(ROWS[:1]).graph.as_graph_def()
    nodes = [node for function in graph.library.function for node in function.node_def]
    assert sum(node.op in ("While", "StatelessWhile") for node in nodes) == 1


def _chosen(row: Any) -> Any:
    kept = _positive(_features(row))
    return tf.cond(row[0] > 0.0, lambda: tf.reduce_sum(kept), lambda: 1.0)


ROW_BY_ROW: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a result": (lambda row: _positive(_features(row)), "Where"),
    "an argument of a branch": (_chosen, "Where"),
    "few other ops": (lambda row: tf.size(tf.unique(row)[0]), "Unique"),
}


@pytest.mark.parametrize(("fn", "op"), ROW_BY_ROW.values(), ids=ROW_BY_ROW)
def test_otherwise_the_whole_function_does(fn: Callable[[Any], Any], op: str) -> None:
    plan = traced(devicemap.DeviceMap(fn), ROWS)
    assert not plan.vectorized
    assert plan.reason.startswith(f"{op} has no vectorised form")


def test_short_functions_with_many_such_ops_run_row_by_row() -> None:
    """Otherwise, each op would have a loop over rows, which takes longer than the op."""

    def lengths(row: Any) -> Any:
        text = tf.as_string(row[0])
        for _ in range(4):
            text = tf.strings.unicode_transcode(text, "UTF-8", "UTF-8")
        return tf.strings.length(text)

    plan = devicemap.DeviceMap(lengths, devices=["CPU:0"]).explain(ROWS)
    assert not plan.vectorized
    assert "UnicodeTranscode has no vectorised form" in plan.reason
    once = devicemap.DeviceMap(lambda row: lengths(_features(row)), devices=["CPU:0"])
    assert once.explain(ROWS).vectorized
