"""`explain` says before a call what the partitioned graph of the call then shows; and it runs nothing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from cases import IN_CI, Case
from graphs import between_devices, partitions

import devicemap
from devicemap.errors import DataError, FunctionError
from devicemap.inspect.plan import Handling

X = tf.reshape(tf.range(21, dtype=tf.float32), [7, 3])
SPEC = tf.TensorSpec(X.shape, X.dtype, name="x")
WORKERS = ["CPU:1", "CPU:2", "CPU:3"]


class Functions:
    """Functions to explain, with the state that they capture."""

    def __init__(self) -> None:
        self.calls = 0
        self.total = tf.Variable(0.0)
        self.weights = tf.Variable(tf.ones([3, 4]))
        self.embedding = tf.Variable(tf.random.normal([50, 6]))
        self.large = tf.ones([300])
        self.dropout = tf.keras.layers.Dropout(0.5)

    def elementwise(self, row: Any) -> Any:
        return tf.sin(row) * 2

    def loop(self, row: Any) -> Any:
        for _ in tf.range(4):
            row = row + tf.linalg.matvec(self.weights, tf.linalg.matvec(self.weights, row, transpose_a=True))
        return row

    def gather(self, row: Any) -> Any:
        return tf.gather(self.embedding, tf.cast(row[0], tf.int32) % 50)

    def tensor(self, row: Any) -> Any:
        return row * tf.reduce_sum(self.large)

    def ordered(self, row: Any) -> Any:
        self.total.assign(self.total * 0.5 + row[0])
        return row

    def atomic(self, row: Any) -> Any:
        self.total.assign_add(row[0])
        return row

    def python(self, row: Any) -> Any:
        def count(row: Any) -> Any:
            self.calls += 1
            return row

        return tf.ensure_shape(tf.py_function(count, [row], tf.float32), [3])

    def seeded(self, row: Any) -> Any:
        return row + tf.random.normal([3], seed=7)

    def dropped(self, batch: Any) -> Any:
        return self.dropout(batch, training=True)


NAMES = ["elementwise", "loop", "gather", "tensor", "seeded", "dropped", "ordered", "atomic", "python"]


def _mapper(name: str, devices: list[str] = WORKERS, **options: Any) -> tuple[Any, Functions]:
    functions = Functions()
    batched = name == "dropped"
    return devicemap.DeviceMap(getattr(functions, name), devices=devices, batched=batched, **options), functions


@pytest.mark.in_ci(2)
@pytest.mark.parametrize(("given", "instead"), [(X, SPEC), (SPEC, X)], ids=["data", "spec"])
@pytest.mark.parametrize("workers", [WORKERS, ["CPU:3", "CPU:0", "CPU:5"]], ids=["workers", "with the host"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_runs_and_order_is_that_of_the_graph(name: str, workers: list[str], given: Any, instead: Any) -> None:
    mapper, functions = _mapper(name, workers)
    states = [variable.numpy() for variable in functions.dropout.variables]
    plan = mapper.explain(given)
    assert (functions.calls, float(functions.total)) == (0, 0.0)
    np.testing.assert_equal([variable.numpy() for variable in functions.dropout.variables], states)
    waits = between_devices(partitions(mapper, X))
    assert mapper.explain(instead) == plan  # with the same number of traces
    if workers == WORKERS:
        pairs = {*itertools.pairwise(WORKERS)} if plan.ordered else set()
        assert {(edge.sender, edge.receiver) for edge in waits} == pairs
        assert all(edge.control for edge in waits)


@pytest.mark.in_ci(2)
@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_data_and_of_a_dataset(name: str) -> None:
    mapper, functions = _mapper(name, batch_size=2)
    dataset = tf.data.Dataset.from_tensor_slices(X)
    plan = mapper.explain(dataset.batch(4) if name == "dropped" else dataset)
    assert plan.engine == mapper.explain(X).engine == "chunks"
    assert plan.rows == (None if name == "dropped" else 7)
    in_flight = [device.chunks_in_flight for device in plan.devices]
    assert in_flight == {"ordered": [1, 0, 0], "dropped": [1, 1, 1], "python": [1, 1, 1]}.get(name, [2, 2, 2])
    assert functions.calls == 0
    assert between_devices(partitions(mapper, X)) == []
    (one,) = _mapper("loop", ["CPU:1"], batch_size=2, prefetch=1)[0].explain(X).devices
    assert one.chunks_in_flight == 1  # as `prefetch`, even where each core of a CPU could take a chunk


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
    plan = _mapper("loop")[0].explain(tf.TensorSpec([rows, 3]))
    assert (plan.rows, [device.rows for device in plan.devices]) == (rows, by_device)
    assert [device.device[-5:] for device in plan.devices] == WORKERS
    assert (plan.bytes_per_row, plan.result_bytes_per_row) == (12, 12)
    assert f"{'an unknown number of' if rows is None else rows} rows on 3 devices" in str(plan)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((tf.TensorSpec([3]), X), r"data_or_spec\[1\] is a .*Tensor; expected tf.TensorSpec"),
        (tf.TensorSpec([]), "needs rows as its first axis"),
        (tf.TensorSpec(None), "needs rows as its first axis"),
        ((tf.TensorSpec([3]), tf.TensorSpec([4])), r"data_or_spec\[0\] has 3, data_or_spec\[1\] has 4"),
        (tf.TensorArraySpec(), "TensorArraySpec; expected"),
        ([None, 3], r"^data_or_spec is \[None, 3\], a shape; .*, such as tf\.TensorSpec\(\[None, 3\], tf\.float32\)$"),
        ((1000, 3), r"^data_or_spec is \(1000, 3\), a shape; expected data, or a spec"),
        (tf.TensorShape(None), r"^data_or_spec is <unknown>, a shape; "),
    ],
)
def test_specs_that_cannot_be(given: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        devicemap.DeviceMap(tf.sin, devices=["CPU:0"]).explain(given)


@pytest.mark.in_ci(2)
@pytest.mark.parametrize("case", IN_CI, ids=str)
def test_whatever_can_be_mapped_can_be_explained(case: Case) -> None:
    mapper = devicemap.DeviceMap(case.fn, devices=WORKERS, batched=case.batched, **case.options)
    plan = mapper.explain(case.data)
    assert plan.ordered == ()
    json.dumps(plan.to_dict())


# What fn captures


CAPTURED: list[tuple[str, list[str], dict[str, Any], tuple[str, Handling, int]]] = [
    ("loop", WORKERS, {}, ("weights", Handling.COPIED, 48)),
    ("loop", WORKERS, {"batch_size": 2}, ("weights", Handling.COPIED, 48)),
    ("loop", ["CPU:0"], {}, ("weights", Handling.IN_PLACE, 48)),
    ("gather", WORKERS, {}, ("embedding", Handling.COPIED, 1200)),
    ("tensor", WORKERS, {}, ("large", Handling.KEPT, 1200)),
    ("ordered", WORKERS, {}, ("total", Handling.ORDERED, 4)),
    ("atomic", WORKERS, {}, ("total", Handling.ATOMIC, 4)),
]


@pytest.mark.nightly
def test_how_what_is_captured_is_shared() -> None:
    for name, devices, options, expected in CAPTURED:
        (found,) = _mapper(name, devices, **options)[0].explain(X).captured
        assert (found.name, found.handling, found.size_bytes) == expected
    (found,) = _mapper("dropped")[0].explain(X).captured
    assert found.handling is Handling.SEED
    assert "seed_generator_state" in found.name


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
        "rows: one by one, because fn writes a variable or another resource, once per row (`self.total.assign(self.",
        "order: kept, because fn writes `total` in row order, as in `self.total.assign(self.total * 0.5 + row[0])`, line ",
        "sizes: 12 B per row, 12 B per row of results",
        "captured: `total`, 4 B: written in row order",
        "traces of fn: 1",
        "* the devices work one after another",
    ],
    "python": ["because EagerPyFunc acts once per row (`return tf.ensure_shape(tf.py_function(count"],
}


@pytest.mark.parametrize("name", PRINTED)
def test_it_prints_facts_with_the_lines_of_the_code(name: str) -> None:
    text = " ".join(str(_mapper(name)[0].explain(X)).split())
    assert [part for part in PRINTED[name] if part not in text] == []


def _with_reasons(row: Any) -> Any:
    for _ in range(9):
        row = tf.gather(row, tf.math.invert_permutation(tf.argsort(row)))
        row = tf.sort(row) + 0.0
    return row


@pytest.mark.parametrize("training", [False, True])
def test_it_fits_on_one_screen(training: bool) -> None:
    layers: list[Any] = [tf.keras.Input([8, 8, 3])]
    for _ in range(40):
        layers += [tf.keras.layers.Conv2D(3, 3, padding="same"), tf.keras.layers.BatchNormalization()]
    model = tf.keras.Sequential(layers)
    mapper = devicemap.DeviceMap(lambda batch: model(batch, training=training), batched=True, devices="CPU")
    plan = mapper.explain(tf.TensorSpec([64, 8, 8, 3]))
    assert len(plan.captured) == len(plan.to_dict()["captured"]) == 240
    assert len(plan.ordered) == (80 if training else 0)
    assert any("training=False" in sentence for sentence in plan.advice) == training
    for each in (plan, devicemap.DeviceMap(_with_reasons, devices=WORKERS).explain(X)):
        lines = str(each).splitlines()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 100


COUNT = tf.Variable(0.0)


def _counted(row: Any) -> Any:
    COUNT.assign_add(row[0])
    return row


LOOPS: list[tuple[Callable[..., Any], Any, dict[str, Any]]] = [
    (lambda row: tf.reduce_sum(tf.sparse.segment_sum(row, [0, 1, 2], [0, 1, 1])), X, {}),
    (tf.function(lambda row: row * 2).get_concrete_function(tf.TensorSpec([3])), X, {}),
    (lambda row: tf.sparse.to_dense(tf.sparse.from_dense(row)), X, {}),
    (lambda row: row * 2, tf.ragged.constant([[1.0], [2.0, 3.0]]), {}),
    (lambda row: row * 2, X, {"fn_output_signature": tf.RaggedTensorSpec([None], tf.float32, 0)}),
    (_counted, X, {}),
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
        assert ": pass vectorize=True, and compare the results with DeviceMap.verify; or else use" in advice
    mapper(data)
    assert mapper.report.row_by_row in advice


def test_a_call_that_was_asked_for_as_it_runs_has_no_loop_to_report() -> None:
    for options in ({}, {"vectorize": False}, {"batched": True}, {"batch_size": 2, "vectorize": False}):
        mapper = devicemap.DeviceMap(lambda row: row * 2, devices=["CPU:0"], **options)
        mapper(X)
        assert mapper.report.row_by_row is None
