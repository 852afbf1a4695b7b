"""`explain` says before a call what the partitioned graph of the call then shows; and it runs nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from graphs import between_devices, partitions

import devicemap
from devicemap.errors import FunctionError
from devicemap.inspect.plan import Handling

X = tf.reshape(tf.range(21, dtype=tf.float32), [7, 3])
SPEC = tf.TensorSpec(X.shape, X.dtype, name="x")
WORKERS = ["CPU:1", "CPU:2", "CPU:3"]


TOTAL, WEIGHTS = tf.Variable(0.0, name="total"), tf.Variable(tf.ones([3, 4]), name="weights")
EMBEDDING, LARGE = tf.Variable(tf.random.normal([50, 6]), name="embedding"), tf.ones([300])
DROPOUT = tf.keras.layers.Dropout(0.5)
CALLS: list[None] = []


def loop(row: Any) -> Any:
    for _ in tf.range(4):
        row = row + tf.linalg.matvec(WEIGHTS, tf.linalg.matvec(WEIGHTS, row, transpose_a=True))
    return row


def ordered(row: Any) -> Any:
    TOTAL.assign(TOTAL * 0.5 + row[0])
    return row


def atomic(row: Any) -> Any:
    TOTAL.assign_add(row[0])
    return row


def python(row: Any) -> Any:
    return tf.ensure_shape(tf.py_function(lambda row: CALLS.append(None) or row, [row], tf.float32), [3])


COPIED = Handling.COPIED
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], list[int], list[tuple[str, Handling, int]]]] = {
    # function, chunks in flight on three devices, what is captured
    "elementwise": (lambda row: tf.sin(row) * 2, [2, 2, 2], []),
    "loop": (loop, [2, 2, 2], [("weights", COPIED, 48)]),
    "gather": (lambda row: tf.gather(EMBEDDING, tf.cast(row[0], tf.int32)), [2, 2, 2], [("embedding", COPIED, 1200)]),
    "tensor": (lambda row: row * tf.reduce_sum(LARGE), [2, 2, 2], [("LARGE", Handling.KEPT, 1200)]),
    "seeded": (lambda row: row + tf.random.normal([3], seed=7), [2, 2, 2], []),
    "dropped": (lambda batch: DROPOUT(batch, training=True), [1, 1, 1], [("seed_generator_state", Handling.SEED, 16)]),
    "ordered": (ordered, [1, 0, 0], [("total", Handling.ORDERED, 4)]),
    "atomic": (atomic, [2, 2, 2], [("total", Handling.ATOMIC, 4)]),
    "python": (python, [1, 1, 1], []),
}


def _mapper(name: str, devices: list[str] = WORKERS, **options: Any) -> devicemap.DeviceMap:
    return devicemap.DeviceMap(FUNCTIONS[name][0], devices=devices, batched=name == "dropped", name=name, **options)


@contextmanager
def _nothing_runs() -> Iterator[None]:
    variables = [TOTAL, *DROPOUT.variables]
    before = len(CALLS), [variable.numpy().tolist() for variable in variables]
    yield
    assert (len(CALLS), [variable.numpy().tolist() for variable in variables]) == before


@pytest.mark.in_ci(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_runs_and_order_is_that_of_the_graph(name: str) -> None:
    mapper, chunked, dataset = _mapper(name), _mapper(name, batch_size=2), tf.data.Dataset.from_tensor_slices(X)
    with _nothing_runs():
        plan = mapper.explain(SPEC)
        assert mapper.explain(X) == plan  # with the same number of traces
    waits = between_devices(partitions(mapper, X))
    assert [(c.name.rpartition("/")[2], c.handling, c.size_bytes) for c in plan.captured] == FUNCTIONS[name][2]
    pairs = {*itertools.pairwise(WORKERS)} if plan.ordered else set()
    assert {(edge.sender, edge.receiver) for edge in waits if edge.control} == pairs
    # along the tree that brings values of variables to devices
    assert {(edge.sender, edge.receiver) for edge in waits if not edge.control} <= {(WORKERS[0], WORKERS[2])}
    with _nothing_runs():
        plan = chunked.explain(dataset.batch(4) if name == "dropped" else dataset)
        assert plan.engine == chunked.explain(X).engine == "chunks"
    assert between_devices(partitions(chunked, X)) == []
    assert plan.rows == (None if name == "dropped" else 7)
    assert [device.chunks_in_flight for device in plan.devices] == FUNCTIONS[name][1]


def test_a_nest_of_ragged_sparse_and_dense_specs() -> None:
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    data = ragged, tf.sparse.from_dense([[1.0, 0.0], [0.0, 2.0]]), {"n": tf.constant([1.0, 2.0])}
    sparse = tf.SparseTensorSpec([None, 2], tf.float32)
    specs = tf.RaggedTensorSpec([2, None], tf.float32), sparse, {"n": tf.TensorSpec([2])}
    mapper = devicemap.DeviceMap(lambda r, s, d: d["n"] + tf.reduce_sum(r), devices=["CPU:0", "CPU:1"])
    plan = mapper.explain(specs)
    assert plan == mapper.explain(data)  # of what is sparse, nothing is known either
    assert (plan.bytes_per_row, plan.result_bytes_per_row) == (None, 4)


@pytest.mark.parametrize(("rows", "by_device"), [(0, [0, 0, 0]), (7, [3, 2, 2]), (None, [None] * 3)])
def test_rows_of_devices(rows: int | None, by_device: list[int | None]) -> None:
    plan = _mapper("loop").explain(tf.TensorSpec([rows, 3]))
    assert (plan.rows, [device.rows for device in plan.devices]) == (rows, by_device)
    assert [device.device[-5:] for device in plan.devices] == WORKERS
    assert (plan.bytes_per_row, plan.result_bytes_per_row) == (12, 12)
    assert f"{'an unknown number of' if rows is None else rows} rows on 3 devices" in str(plan)
    (captured,) = _mapper("loop", ["CPU:0"]).explain(X).captured
    assert captured.handling is Handling.IN_PLACE


# What fn captures


def test_names_come_from_the_code_where_variables_have_none() -> None:
    total, table = tf.Variable(1.0), tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
    named = tf.Variable(2.0, name="scale")

    def fn(n: Any) -> Any:
        total.assign_add(1.0)
        return table.lookup(n) + tf.cast(named, tf.int64)

    plan = devicemap.DeviceMap(fn, devices=WORKERS).explain(tf.TensorSpec([5], tf.int64))
    handlings = {captured.name: captured.handling for captured in plan.captured}
    assert {"total", "table", "scale"} <= {*handlings}
    assert handlings["table"] is Handling.LOOKED_UP


def test_summaries_keep_no_order(tmp_path: Path) -> None:
    writer = tf.summary.create_file_writer(str(tmp_path))

    def fn(row: Any) -> Any:
        with writer.as_default(step=tf.cast(row[0], tf.int64)):
            tf.summary.write("row", row)
        return row

    mapper = devicemap.DeviceMap(fn, devices=WORKERS)
    plan = mapper.explain(X)
    assert (plan.ordered, [captured.handling for captured in plan.captured]) == ((), [Handling.ATOMIC])
    assert not any("tf.device" in line for line in plan.advice)
    assert between_devices(partitions(mapper, X)) == []
    writer.flush()
    (file,) = map(str, tmp_path.iterdir())
    assert sum(b"row" in record.numpy() for record in tf.data.TFRecordDataset(file)) == len(X)


# The value


PRINTED: dict[str, list[str]] = {
    "ordered": [
        "ordered: 7 rows on 3 devices, in one graph",
        "CPU:1 3 1 CPU:2, CPU:3 2 1",
        "rows: one by one, because fn writes a variable or another resource, once per row (`TOTAL.assign(TOTAL",
        "order: kept, because fn writes `total` in row order, as in `TOTAL.assign(TOTAL * 0.5 + row[0])`, line ",
        "sizes: 12 B per row, 12 B per row of results",
        "captured: `total`, 4 B: written in row order",
        "traces of fn: 1",
        "* the devices work one after another",
    ],
    "python": ["because EagerPyFunc acts once per row (`return tf.ensure_shape(tf.py_function(lambda row"],
}


@pytest.mark.parametrize("name", PRINTED)
def test_it_prints_facts_with_the_lines_of_the_code(name: str) -> None:
    text = " ".join(str(_mapper(name).explain(X)).split())
    assert [part for part in PRINTED[name] if part not in text] == []


def _with_reasons(row: Any) -> Any:
    for _ in range(9):
        row = tf.gather(row, tf.math.invert_permutation(tf.argsort(row)))
        row = tf.sort(row) + 0.0
    return row


@pytest.mark.parametrize("training", [False, True])
def test_it_fits_on_one_screen(training: bool) -> None:
    layers: list[Any] = [tf.keras.Input([8, 8, 3])]
    for _ in range(10):
        layers += [tf.keras.layers.Conv2D(3, 3, padding="same"), tf.keras.layers.BatchNormalization()]
    model = tf.keras.Sequential(layers)
    mapper = devicemap.DeviceMap(lambda batch: model(batch, training=training), batched=True, devices="CPU")
    plan = mapper.explain(tf.TensorSpec([64, 8, 8, 3]))
    assert len(plan.captured) == len(plan.to_dict()["captured"]) == 60
    assert len(plan.ordered) == (20 if training else 0)
    assert any("training=False" in sentence for sentence in plan.advice) == training
    for each in (plan, devicemap.DeviceMap(_with_reasons, devices=WORKERS).explain(X)):
        lines = str(each).splitlines()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 100


LOOPS: list[tuple[Callable[..., Any], Any, dict[str, Any]]] = [
    (lambda row: tf.reduce_sum(tf.sparse.segment_sum(row, [0, 1, 2], [0, 1, 1])), X, {}),
    (lambda row: tf.sparse.to_dense(tf.sparse.from_dense(row)), X, {}),
    (lambda row: row * 2, tf.ragged.constant([[1.0], [2.0, 3.0]]), {}),
    (lambda row: row * 2, X, {"fn_output_signature": tf.RaggedTensorSpec([None], tf.float32, 0)}),
    (atomic, X, {}),
    (lambda row: tf.py_function(lambda x: x, [row], tf.float32), X, {}),
    (lambda row: tf.cond(row[0] > 1, lambda: row, lambda: -row), X, {"jit_compile": True}),
]


@pytest.mark.parametrize(("fn", "data", "options"), LOOPS)
def test_a_loop_is_advised_to_vectorize_if_that_is_possible(fn: Any, data: Any, options: dict[str, Any]) -> None:
    mapper = devicemap.DeviceMap(fn, devices=["CPU:0"], **options)
    (advice,) = [line for line in mapper.explain(data).advice if line.startswith("rows run one by one because ")]
    try:
        devicemap.DeviceMap(fn, devices=["CPU:0"], vectorize=True, **options).explain(data)
    except FunctionError:
        assert "vectorize=True" not in advice
    else:
        assert ": pass vectorize=True, and compare the results with DeviceMap.verify; or else " in advice
    mapper(data)
    assert mapper.report.row_by_row in advice


def test_reports_name_no_loop_that_there_is_not_or_that_was_asked_for() -> None:
    for options in ({}, {"vectorize": False}, {"batched": True}, {"batch_size": 2, "vectorize": False}):
        mapper = devicemap.DeviceMap(lambda row: row * 2, devices=["CPU:0"], **options)
        mapper(X)
        assert mapper.report.row_by_row is None
