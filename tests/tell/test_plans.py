"""What a plan says of ops, rows and bytes, and advises: names and numbers in, so that it can be told of GPUs without one."""

from __future__ import annotations

import pathlib
from dataclasses import replace
from typing import Any

import pytest
import tensorflow as tf
from histories import device

import devicemap
from devicemap._tensorflow.functions import Kernel
from devicemap.compile.kernels import kernel_for
from devicemap.tell.plan.advice import advise
from devicemap.tell.plan.memory import Memory
from devicemap.tell.plan.plan import DevicePlan, Plan, StrayOp, Transfer
from devicemap.tell.plan.strays import stray_ops
from devicemap.tell.plan.traffic import Leaf, rows_sent

FLOAT, TEXT = tf.float32.as_datatype_enum, tf.string.as_datatype_enum
KERNELS = {
    "DecodeJpeg": [Kernel("CPU", {})],
    "Sin": [Kernel("CPU", {"T": frozenset([FLOAT])}), Kernel("GPU", {"T": frozenset([FLOAT])})],
    "Identity": [Kernel("CPU", {}), Kernel("DEFAULT", {"T": frozenset([FLOAT])})],
    "AsString": [Kernel("CPU", {})],
}


@pytest.mark.parametrize(
    ("op", "kind", "dtypes", "there"),
    [
        ("DecodeJpeg", "GPU", {}, False),
        ("DecodeJpeg", "CPU", {}, True),
        ("Sin", "GPU", {"T": [FLOAT]}, True),
        ("Identity", "GPU", {"T": [FLOAT]}, True),
        ("Identity", "GPU", {"T": [TEXT]}, False),
    ],
)
def test_kernels_by_kind_and_dtype(op: str, kind: str, dtypes: dict[str, list[int]], there: bool) -> None:
    assert (kernel_for(KERNELS[op], kind, dtypes) is not None) is there


def test_ops_without_a_kernel_on_a_gpu() -> None:
    def fn(text: Any) -> Any:
        return tf.sin(tf.cast(tf.io.decode_jpeg(text), tf.float32)), tf.strings.as_string(tf.identity(1.0))

    ops = tf.function(fn).get_concrete_function(tf.TensorSpec([], tf.string)).graph.get_operations()

    def kernels_of(op: str) -> list[Kernel]:
        return KERNELS.get(op, [])

    found = stray_ops(ops, [device(0)], ["GPU"], kernels_of)
    assert {(s.op, s.device, s.reason) for s in found} == {
        ("DecodeJpeg", "GPU", "no kernel"),
        ("AsString", "GPU", "no kernel"),
    }  # an identity, of the text too, is a copy, which runs wherever its input is
    assert stray_ops(ops, [device(0, "CPU")], ["CPU"], kernels_of) == []


def test_rows_in_one_graph_and_in_chunks() -> None:
    leaves = [Leaf(1, 12, "host"), Leaf(3, None, "host")]
    parts: dict[str, list[int | None]] = {"a": [3, 1], "host": [2]}
    assert rows_sent("rows", leaves[:1], parts, to_devices=True, chunks=False) == [
        Transfer("rows", "host", "a", 2, 48, 12)
    ]
    assert rows_sent("results", leaves, parts, to_devices=False, chunks=False) == [
        Transfer("results", "a", "host", 8, None, None)
    ]
    assert rows_sent("rows", leaves[:1], {"a": [None], "host": [None]}, to_devices=True, chunks=True) == [
        Transfer("rows", "host", "a", None, None, 12)
    ]


def _plan(**facts: Any) -> Plan:
    devices = facts.pop("device_rows", [4, 4])
    usual = Plan(
        name="fn", way="one graph", balanced=False, rows=8, batch_size=None,
        batched=False, vectorized=True, reason="it can", traces=1,
        devices=tuple(DevicePlan(f"/device:GPU:{i}", "GPU", n, 1, None, 100, None, i) for i, n in enumerate(devices)),
        control_edges=(), ordered=(), strays=(), transfers=(), captured=(), random_ops=(), python_ops=(),
        memory_bytes_per_row=25,
        memory=(),
    )  # fmt: skip
    return replace(usual, **facts)


ADVICE: list[tuple[dict[str, Any], str]] = [
    (
        {"ordered": ("total",)},
        "`total` is written in a way that depends on order (as in v.assign(g(v))), so the devices work one after another, "
        "in row order: if the order does not matter, use assign_add of a tf.Variable (not one of Keras's), and do not read its "
        "value; or return what changes it, and update it after the call",
    ),
    (
        {"strays": (StrayOp("DecodeJpeg", "GPU", "no kernel"),)},
        "DecodeJpeg has no kernel on GPU: do this in the input pipeline (Dataset.map) instead",
    ),
    (
        {"strays": tuple(StrayOp(op, "GPU", "no kernel") for op in ("A", "B", "C"))},
        "A, B and C have no kernel on GPU: do this in the input pipeline (Dataset.map) instead",
    ),
    (
        {"strays": tuple(StrayOp(op, "GPU", "int32", "int64") for op in ("A", "B"))},
        "A and B have no kernel for int32 on GPU itself, and the host computes it: cast to int64",
    ),
    (
        {"vectorized": False, "reason": "Foo has no vectorised form"},
        "fn is mapped row by row because Foo has no vectorised form; a fn of a whole batch (batched=True) may be faster",
    ),
    (
        {"python_ops": ("PyFunc",)},
        "PyFunc calls Python, where all devices take turns: use TensorFlow ops instead where it computes, or do it in the "
        "input pipeline",
    ),
    ({"rows": 3, "device_rows": [1, 1, 1, 0, 0, 0, 0, 0]}, "3 rows for 8 devices: 5 devices stay idle"),
    ({"rows": 1, "device_rows": [1, 0]}, "1 row for 2 devices: 1 device stays idle"),
    (
        {"way": "chunks", "batch_size": 8},
        "8 rows in chunks of up to 8 are 1 for 2 devices: use a smaller batch_size",
    ),
    (
        {"memory": (Memory("/device:GPU:0", 0, 0, 0, 0, 0, 2.0**28, 2**30),)},
        "GPU:0 takes up to 2.0 GiB at once, and has 1.0 GiB: pass batch_size; 3 rows at once fit",
    ),
    (
        {"devices": tuple(DevicePlan(f"/device:GPU:{i}", "GPU", 2, 1, None, 9, 99, g) for i, g in enumerate([0, 1, 1, 2]))},
        "GPU:1 and GPU:2 are parts of one GPU, where large kernels take turns: they may be no faster than one",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "sentence"), ADVICE)
def test_advice(facts: dict[str, Any], sentence: str) -> None:
    assert advise(_plan(**facts)) == (sentence,)


def test_no_advice_where_nothing_stands_in_the_way() -> None:
    assert _plan().advice == ()
    assert _plan(vectorized=False, reason="vectorize=False").advice == ()


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("way", [{}, {"batch_size": 10}], ids=["one graph", "chunks"])
@pytest.mark.parametrize("spec", [tf.TensorSpec([100, 3]), tf.TensorSpec([None, 3]), tf.TensorSpec([10, 3], tf.string)])
def test_plans_are_drawn(tmp_path: pathlib.Path, way: dict[str, Any], spec: Any) -> None:
    pytest.importorskip("matplotlib")
    level = tf.Variable(0.0)

    def fn(row: Any) -> Any:
        if row.dtype != tf.string:
            level.assign(level * 2.0 + row[0])
        return row

    plan = devicemap.DeviceMap(fn, devices=["CPU:0", "CPU:1", "CPU:2"], **way).explain(spec)
    plan.plot(tmp_path / "plan.svg")
    picture = (tmp_path / "plan.svg").read_text()
    assert "<svg" in picture
    for text in (plan.summary, "CPU:1", *(["in red"] if plan.control_edges else [])):
        assert text in picture  # it is drawn as outlines, and said in a comment
    with pytest.raises(ValueError, match="not supported"):
        plan.plot(tmp_path / "plan.nonsense")
