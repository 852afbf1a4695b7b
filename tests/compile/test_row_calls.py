"""Results whose shape differs between rows, inside a function that is vectorised otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graphs import partitions, placements, traced
from oracle import assert_one_by_one

import devicemap
from devicemap.errors import FunctionError

_random = np.random.default_rng(0)
ROWS = tf.constant(_random.normal(size=[5, 6]), tf.float32)
WEIGHTS = tf.Variable(_random.normal(size=[6, 6]), dtype=tf.float32)
IMAGES = tf.constant(_random.normal(size=[3, 6, 6, 2]), tf.float32)


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


def _padded(row: Any) -> Any:
    row = _features(row)
    kept = _positive(row)
    return tf.ensure_shape(tf.pad(kept, [[0, 6 - tf.size(kept)]]), [6]) - row


positive = tf.function(_positive)
squares = tf.function(lambda kept: tf.reduce_sum(kept**2))


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


def _cut_twice(row: Any) -> Any:
    row = _features(row)
    kept = _positive(row)
    above = tf.boolean_mask(row, row > tf.reduce_mean(kept))
    some = kept[: tf.size(kept) // 2]
    return tf.reduce_sum(above) * tf.reduce_max(kept), tf.reduce_sum(tf.concat([some, kept - squares(above)], 0))


def _sliced(row: Any) -> Any:
    row = _features(row)
    kept = _positive(row)
    begin = tf.stack([tf.size(kept) // 2])
    return tf.reduce_sum(tf.concat([tf.cast(begin, tf.float32), kept], 0)), tf.slice(row, begin, [2])


def _checked(row: Any) -> Any:
    kept = _positive(_features(row))
    with tf.control_dependencies([tf.debugging.assert_less(tf.size(kept), 7)]):
        return tf.reduce_sum(kept) / tf.cast(tf.size(kept), tf.float32)


def _two_results(image: Any) -> Any:
    """An op of which the first loop stacks one result, and the second one takes another."""
    moments = tf.raw_ops.FusedBatchNormGradV3(
        y_backprop=image[None], x=IMAGES[:1], scale=[1.0, 2.0], reserve_space_1=[0.1, 0.2], reserve_space_2=[1.0, 2.0],
        reserve_space_3=tf.zeros([0]), is_training=False,
    )  # fmt: skip
    found = tf.raw_ops.Where(condition=moments.scale_backprop)
    size = tf.cast(tf.size(found), tf.float32)
    features = _features(tf.tile(moments.offset_backprop / 99.0, [3]) + size)
    return features, tf.reduce_sum(tf.cast(found, tf.float32) * features[0])


BOXES = tf.constant([[0.1, 0.0, 0.8, 0.7], [0.0, 0.2, 0.9, 0.9]])


def _crop(image: Any) -> Any:
    return tf.image.crop_and_resize(image[None], BOXES * image[0, 0, 0] ** 2, [0, 0], [3, 3])


def _crop_in_loop(image: Any) -> Any:
    total = tf.zeros([2, 3, 3, 2])
    while tf.reduce_sum(total) < 5.0:
        total += tf.abs(_crop(image)) + 0.1
    return total


ALONE = "these ops alone run row by row: CropAndResize has no vectorised form (`return tf.image."
TOGETHER = "these ops run row by row, and those that take their results: "
CASES: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "moments": (_mean_and_deviation, ROWS, TOGETHER),
    "padded": (_padded, ROWS, TOGETHER),
    "in a branch": (_in_a_branch, ROWS, TOGETHER),
    "in loops": (_in_loops, ROWS, TOGETHER),
    "cut twice": (_cut_twice, ROWS, TOGETHER),
    "sliced": (_sliced, ROWS, TOGETHER),
    "checked": (_checked, ROWS, TOGETHER),
    "two results": (_two_results, IMAGES, TOGETHER),
    "alone in a loop": (_crop_in_loop, IMAGES, ALONE),
}


@pytest.mark.in_ci(2)
@pytest.mark.parametrize(("fn", "rows", "reason"), CASES.values(), ids=CASES)
def test_only_the_ops_that_need_it_run_row_by_row(devices: list[str], fn: Any, rows: Any, reason: str) -> None:
    mapper = devicemap.DeviceMap(fn, devices=devices)
    plan = traced(mapper, rows)
    assert plan.vectorized, plan.reason
    assert reason in plan.reason
    assert_one_by_one(mapper, fn, rows, WEIGHTS)


@pytest.mark.parametrize("fn", [_mean_and_deviation, _padded])
def test_no_op_runs_twice(fn: Callable[[Any], Any]) -> None:
    mapper = devicemap.DeviceMap(fn, devices=["CPU:0"])
    assert placements(partitions(mapper, ROWS), "Where").total() == 1


def test_other_ops_wait_for_ops_that_run_row_by_row() -> None:
    def checked(row: Any) -> Any:
        row = _features(row)
        with tf.control_dependencies([tf.ensure_shape(tf.boolean_mask(row, row > -9.0), [6])]):
            checks = tf.ensure_shape(tf.boolean_mask(row, row > 0.0), [6])
        with tf.control_dependencies([checks]):
            return row * 2.0

    mapper = devicemap.DeviceMap(checked)
    assert traced(mapper, ROWS).vectorized
    with pytest.raises(FunctionError, match="not compatible with expected shape"):
        mapper(ROWS)


def _number_of_loops(fn: Callable[..., Any]) -> int:
    mapper = devicemap.DeviceMap(fn, seed=1, devices=["CPU:0"])
    assert traced(mapper, ROWS).vectorized
    graph = tf.function(lambda x: mapper(x)).get_concrete_function(ROWS).graph.as_graph_def()
    nodes = [node for function in graph.library.function for node in function.node_def]
    return sum(node.op in ("While", "StatelessWhile") for node in nodes)


def test_random_numbers_of_seeds_of_rows_take_one_loop() -> None:
    def cropped(row: Any, seed: Any) -> Any:
        image = tf.image.stateless_random_crop(tf.reshape(tf.tile(_features(row), [8]), [4, 4, 3]), [2, 2, 3], seed)
        return tf.image.stateless_random_brightness(image, 0.2, seed + 2)

    assert _number_of_loops(cropped) == 1


def _lengths(row: Any) -> Any:
    text = tf.as_string(row[0])
    for _ in range(4):
        text = tf.strings.unicode_transcode(text, "UTF-8", "UTF-8")
    return tf.strings.length(text)


def test_ops_that_take_results_of_each_other_take_one_loop() -> None:
    assert _number_of_loops(lambda row, seed: _lengths(row)) == 1


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
