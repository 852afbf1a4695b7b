"""Law 8: calls leave nothing behind; what a map holds goes with its function, its mapper or its dataset.

`tests/test_interruption.py` asserts that Ctrl-C stops at once.
"""

from __future__ import annotations

import copy
import gc
import pickle
import resource
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import ways
from oracle import gradients_of

import devicemap
from devicemap.compile.program import ProgramCache
from devicemap.data.rows import as_rows

X = tf.range(12.0)
SIZE = 4099
"""Elements of captured tensors: as many as nothing else has."""

WAYS: dict[str, dict[str, Any]] = {
    "one graph": {},
    "mapped": {"vectorize": False},
    "batches": {"batched": True},
    "chunks": {"batch_size": 4},
}


@pytest.fixture(scope="module", autouse=True)
def _without_objects_of_other_tests() -> None:
    """Leave out of `gc.get_objects` what earlier tests of this process keep: looking at it would take most of the time."""
    gc.collect()
    gc.freeze()


def alive() -> int:
    """Captured tensors and copies of them, on all devices, after a garbage collection."""
    gc.collect()  # functions in cycles, then what was compiled of them
    gc.collect()
    return sum(isinstance(o, tf.Tensor) and hasattr(o, "numpy") and o.shape == [SIZE] for o in gc.get_objects())


class Scale:
    """An object with a method that counts how often Python runs it."""

    def __init__(self) -> None:
        self.table, self.level = tf.ones([SIZE]), tf.Variable(1.0)
        self.traces = 0

    def step(self, row: Any) -> Any:
        self.traces += 1
        return row * self.table[0] * self.table[1] * self.level


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("way", WAYS)
def test_new_functions_take_what_they_capture_with_them(way: str, devices: list[str]) -> None:
    def shift(by: float) -> None:
        table, in_place = tf.fill([SIZE], by), tf.Variable(tf.zeros([10, 2]))
        options = {**WAYS[way], "in_place": [in_place]}
        result = devicemap.parallel_map(
            lambda r: r + table[3] + table[1] + in_place[0, 0], X, devices=devices, **options
        )
        np.testing.assert_array_equal(result, X + 2 * by)
        references.extend(map(weakref.ref, (table, in_place)))

    references: list[Any] = []
    for i in range(3):
        shift(float(i))
    assert alive() == 0
    assert [reference() for reference in references] == [None] * 6


def test_what_is_compiled_lives_as_long_as_its_function(devices: list[str]) -> None:
    scale, listeners = Scale(), []
    for _ in range(3):
        listener = ways.Counter()
        devicemap.parallel_map(scale.step, X, devices=devices, progress=listener)
        assert listener.count
        listeners.append(weakref.ref(listener))
        del listener
        gc.collect()
    assert scale.traces == 1
    assert [reference() for reference in listeners] == [None] * 3
    assert alive() >= len({*devices})
    mapper = devicemap.DeviceMap(scale.step, devices=devices)
    mapper(X)
    gone = weakref.ref(scale)
    gc.disable()
    try:
        del scale, mapper
        assert gone() is None
    finally:
        gc.enable()
    assert alive() == 0


class Slots:
    """A callable object that counts its traces, without weak references."""

    __slots__ = ("traces",)

    def __init__(self) -> None:
        self.traces = 0

    def step(self, row: Any) -> Any:
        self.traces += 1
        return 2 * row

    __call__ = step


class Unhashable(Slots):
    """All are equal, as objects of a dataclass may be; it is their identity that counts."""

    def __eq__(self, other: object) -> bool:
        return True


class WithFunction(tf.Module):
    """Its method is a `tf.function`."""

    def __init__(self) -> None:
        super().__init__()
        self.traces = 0

    @tf.function
    def step(self, row: Any) -> Any:
        self.traces += 1
        return 2 * row


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("make", [Unhashable, Slots, WithFunction])
def test_methods_and_objects_are_traced_once(make: Callable[[], Any]) -> None:
    one, other = make(), make()
    for each in (one, other):
        for _ in range(3):
            devicemap.parallel_map(each.step, X, devices=["CPU:0", "CPU:1"])
            gc.collect()
    assert (one.traces, other.traces) == (1, 1)
    if make is not WithFunction:
        for _ in range(3):
            devicemap.parallel_map(one, X, devices=["CPU:0", "CPU:1"])
        assert one.traces == 2


def test_a_class_that_is_gone() -> None:
    """The garbage collector reports exceptions in callbacks as warnings."""

    def call() -> weakref.ref[type]:
        class Features:
            @classmethod
            def of(cls, row: Any) -> Any:
                return row + 2

        np.testing.assert_array_equal(devicemap.parallel_map(Features.of, X), X + 2)
        return weakref.ref(Features)

    reference = call()
    gc.collect()
    assert reference() is None


def test_memory_is_bounded() -> None:
    """A cache for two functions drops the one that was used first."""
    functions: list[Callable[[Any], Any]] = [lambda row: row, lambda row: row + 1, lambda row: row + 2]
    options = {"devices": ["CPU:0"], "progress": False}
    memory = ProgramCache(2)
    spec = as_rows(X)
    first, second, third = (memory.program_of(fn, options).compiled_for(spec) for fn in functions)

    def again(number: int) -> Any:
        return memory.program_of(functions[number], options).compiled_for(spec)

    assert again(2) is third
    assert again(1) is second
    assert again(0) is not first
    assert again(1) is second
    assert again(2) is not third
    memory, factor, scaled = ProgramCache(6), 0, lambda row: row * factor
    first = again(0)
    while factor < 10:  # few programs are kept of a function that refers to another number each time
        memory.program_of(scaled, options)
        factor += 1
    assert again(0) is first


def _iterated(dataset: Any) -> Iterator[Any]:
    iterator = iter(dataset.batch(2).prefetch(1))
    return (row for batch in iterator for row in batch)


def _in_function(dataset: Any) -> Any:
    @tf.function
    def rows() -> Any:
        found = tf.TensorArray(tf.float32, 0, dynamic_size=True, infer_shape=False, element_shape=[None])
        for chunk in dataset:
            found = found.write(found.size(), chunk)
        return found.concat()

    return rows.get_concrete_function()


def _fitted(dataset: Any) -> Any:
    model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    pairs = dataset.map(lambda chunk: (chunk[:, None], chunk[:, None]))

    def fit_and_predict() -> Any:
        model.fit(pairs, epochs=2, verbose=0, shuffle=False)
        return model.predict(pairs, verbose=0)

    return fit_and_predict


USES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "dataset": (lambda dataset: dataset, 12),
    "iterator": (_iterated, 12),
    "zip": (lambda dataset: tf.data.Dataset.zip((dataset, dataset)).map(lambda a, b: tf.concat([a, b], 0)), 24),
    "iterator over flat_map": (lambda dataset: iter(tf.data.Dataset.range(2).flat_map(lambda _: dataset)), 24),
    "tf.function": (_in_function, 12),
    "fit": (_fitted, 12),
}


@pytest.mark.parametrize("use", USES)
def test_a_dataset_keeps_its_mapper_and_nothing_does_after_it(use: str) -> None:
    make, rows = USES[use]

    def made() -> tuple[Any, list[Any]]:
        table, data = tf.ones([SIZE]), X + 0
        mapper = devicemap.DeviceMap(lambda row: row + table[5] + table[2], devices=["CPU:0", "CPU:3"], batch_size=4)
        return make(mapper.as_dataset(data)), [weakref.ref(each) for each in (mapper, table, data)]

    used, references = made()
    gc.collect()
    chunks = used() if callable(used) else used
    assert sum(np.size(each) for each in chunks) == rows
    del chunks, used
    assert alive() == 0
    assert [reference() for reference in references] == [None] * 3


def test_a_dataset_that_a_function_returned_says_what_it_lacks() -> None:
    @tf.function
    def doubled(dataset: Any) -> Any:
        return dataset.map(lambda chunk: 2 * chunk)

    mapper = devicemap.DeviceMap(lambda row: row, devices=["CPU:0"], batch_size=4)
    dataset = mapper.as_dataset(X)
    derived = doubled(dataset)
    assert sum(chunk.shape[0] for chunk in derived) == 12
    del dataset
    gc.collect()
    # TensorFlow 2.22 misses the Python function before that function can say what is gone.
    with pytest.raises(tf.errors.OpError, match=r"made is gone.*; keep that dataset|Could not find callback"):
        list(derived)


def _objects() -> Counter[str]:
    gc.collect()
    # TensorFlow leaves an empty list behind for each thread that used it
    found = (o for o in gc.get_objects() if not (type(o) is list and not o))
    return Counter(f"{type(o).__module__}.{type(o).__name__}" for o in found)


@pytest.mark.in_ci(2)
@pytest.mark.parametrize("way", ["call", "gradient", "explain", "verify", "stream", "parallel_map"])
def test_calls_leave_nothing_behind(way: str) -> None:
    scale, options = Scale(), {"devices": ["CPU:0", "CPU:1", "CPU:2"]}
    mapper = devicemap.DeviceMap(scale.step, **options)
    calls: dict[str, Callable[[], object]] = {
        "call": lambda: (mapper(X), str(mapper.report)),
        "gradient": lambda: gradients_of(mapper, X),
        "explain": lambda: str(mapper.explain(X)),
        "verify": lambda: str(mapper.verify(X, 4)),
        "stream": lambda: [*devicemap.DeviceMap(scale.step, **options, batch_size=3).stream(X)],
        "parallel_map": lambda: devicemap.parallel_map(scale.step, X, **options),
    }
    for _ in range(3):
        calls[way]()
    _objects()  # looking at all objects for the first time makes some
    before = _objects()
    for _ in range(8):
        calls[way]()
    assert {name: more for name, more in (_objects() - before).items() if more >= 4} == {}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is measured on Linux")
def test_copies_of_variables_leave_no_memory_behind() -> None:
    """TensorFlow keeps a kernel for each set of attributes of an op in eager code, which no count of objects shows."""
    variables = [tf.Variable(tf.ones([8])) for _ in range(16)]
    mapper = devicemap.DeviceMap(lambda row: row + tf.add_n(variables), devices=["CPU:1", "CPU:2"], batch_size=4)

    def memory_bytes() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    for _ in range(20):
        mapper(X)
    before = memory_bytes()
    for _ in range(40):
        mapper(X)
    assert memory_bytes() - before < 16 << 20  # of 45 MB, if each copy left a kernel


def _handles() -> int:
    gc.collect()
    return sum(isinstance(o, tf.Tensor) and hasattr(o, "numpy") and o.dtype == tf.resource for o in gc.get_objects())


@pytest.mark.parametrize("options", [{}, {"batch_size": 4}], ids=["", "chunks"])
@pytest.mark.parametrize("way", ["call", "stream", "write"])
def test_a_kept_error_keeps_no_copies_of_variables(way: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A notebook keeps the last error, with the frames of its traceback."""
    variable = tf.Variable(1.0)
    devices = ["CPU:1", "CPU:2", "CPU:3"]
    mapper = devicemap.DeviceMap(
        lambda row: tf.debugging.check_numerics(variable / (row - 5), ""), devices=devices, **options
    )
    calls: dict[str, Callable[[], object]] = {
        "call": lambda: mapper(X),
        "stream": lambda: [*mapper.stream(X)],
        "write": lambda: mapper.write(X, tmp_path / "results"),
    }
    kept, before = list[Any](), _handles()
    for _ in range(4):
        try:
            calls[way]()
        except tf.errors.InvalidArgumentError as error:
            kept.append(error)
    assert len(kept) == 4
    assert "row 5 " in str(kept[0])
    assert _handles() == before


def test_a_mapper_that_stays_frees_the_graphs_that_it_was_called_in() -> None:
    scale: list[Any] = []
    mapper = devicemap.DeviceMap(lambda row: row * scale[0], devices=["CPU:0", "CPU:1"])
    graphs = []
    for _ in range(2):

        @tf.function
        def user(x: Any) -> Any:
            scale[:] = [tf.reduce_sum(x)]
            graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
            return mapper(x) + mapper(x)

        user(X)
    del user
    scale.clear()
    gc.collect()
    assert [graph() for graph in graphs] == [None, None]


def test_calls_leave_global_state_alone() -> None:
    tf.random.set_seed(3)
    before = tf.random.normal([2]).numpy().tolist()
    tf.random.set_seed(3)
    devicemap.parallel_map(lambda row: row + tf.random.normal([]), X, devices=["CPU:1", "CPU:2"])
    assert tf.random.normal([2]).numpy().tolist() == before


def test_a_map_is_copied_and_pickled_as_what_it_was_made_of() -> None:
    mapper = devicemap.DeviceMap(tf.square, devices=["CPU:1", "CPU:2"], batch_size=2)
    mapper(tf.range(5))
    for again in (copy.copy(mapper), copy.deepcopy(mapper), pickle.loads(pickle.dumps(mapper))):
        assert again(tf.range(5)).numpy().tolist() == [0, 1, 4, 9, 16]
        assert [row.device.endswith(("CPU:1", "CPU:2")) for row in again.report.devices] == [True, True]
