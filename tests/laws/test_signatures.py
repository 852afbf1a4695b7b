"""Law 1 for `fn_output_signature`: a map returns what `tf.map_fn` returns for it, lists and empty ragged results included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from oracle import assert_same

import devicemap

ROWS = tf.range(1, 6)
OF_ROW = tf.RaggedTensorSpec([None], tf.int32)
SIGNATURES: dict[str, tuple[Any, Any]] = {
    "ragged": (tf.range, OF_ROW),
    "ragged, unknown shape": (lambda n: tf.as_string(tf.range(n)), tf.RaggedTensorSpec(dtype=tf.string, ragged_rank=0)),
    "two ragged axes, unknown shape": (
        lambda n: tf.RaggedTensor.from_row_lengths(tf.range(n), [n]), tf.RaggedTensorSpec(dtype=tf.int32, ragged_rank=1)),
    "list": (lambda n: [n, 2 * n], [tf.int32, tf.int32]),
    "list of one": (lambda n: [n], [tf.int32]),
    "list of unlike results": (lambda n: [n, tf.range(n)], [tf.int32, OF_ROW]),
    "lists in a nest": (
        lambda n: {"a": [n, (2 * n, [3 * n])], "b": n}, {"a": [tf.int32, (tf.int32, [tf.int32])], "b": tf.int32}),
}  # fmt: skip


@pytest.mark.in_ci(4)
@pytest.mark.parametrize("rows", [5, 0])
@pytest.mark.parametrize("options", [{}, {"batch_size": 2}], ids=["one graph", "chunks"])
@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(devices: list[str], name: str, options: dict[str, Any], rows: int) -> None:
    fn, signature = SIGNATURES[name]
    mapper = devicemap.DeviceMap(fn, devices=devices, fn_output_signature=signature, **options)
    data = ROWS[:rows]
    wanted = tf.map_fn(fn, data, fn_output_signature=signature)
    assert_same(mapper(data), wanted)
    if not options:
        assert_same(tf.function(lambda x: mapper(x))(data), wanted)


def test_lists_that_the_signature_does_not_have_become_tensors(devices: list[str]) -> None:
    signature = {"results": [tf.int32, tf.int32], "pair": tf.int32}
    got = devicemap.parallel_map(
        lambda n: {"results": [n, n], "pair": [n, n]}, ROWS, devices=devices, fn_output_signature=signature
    )
    assert_same(got, {"results": [ROWS, ROWS], "pair": tf.stack([ROWS, ROWS], 1)})


def test_lists_are_tuples_in_datasets_and_files(devices: list[str], tmp_path: Path) -> None:
    mapper = devicemap.DeviceMap(
        lambda n: [n, 2 * n], devices=devices, batch_size=2, fn_output_signature=[tf.int32, tf.int32]
    )
    chunks = list(mapper.stream(ROWS))
    assert [type(chunk) for chunk in chunks] == [list] * 3
    for chunk, element in zip(chunks, mapper.as_dataset(ROWS), strict=True):
        assert_same(tuple(chunk), element)
    mapper.write(ROWS, tmp_path)
    assert_same(tuple(map(tf.constant, devicemap.open_results(tmp_path).load())), (ROWS, 2 * ROWS))
