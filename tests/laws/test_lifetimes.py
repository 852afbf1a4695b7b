"""Nothing is kept for ever: what a map holds goes with its function, its mapper or its dataset."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import devicemap
from devicemap.compile.cache import ProgramCache

X = tf.range(12.0)
SIZE = 4099
"""Elements of captured tensors: as many as nothing else has."""

WAYS: dict[str, dict[str, Any]] = {
    "one graph": {},
    "mapped": {"vectorize": False},
    "batches": {"batched": True},
    "chunks": {"batch_size": 4},
}


def alive() -> int:
    """Captured tensors and copies of them, on all devices, after a garbage collection."""
    gc.collect()  # functions in cycles, then what was compiled of them
    gc.collect()
    return sum(isinstance(o, tf.Tensor) and hasattr(o, "numpy") and o.shape == [SIZE] for o in gc.get_objects())


class Scale:
    """An object with a method that counts how often Python runs it."""

    def __init__(self) -> None:
        self.table = tf.ones([SIZE])
        self.traces = 0

    def step(self, row: Any) -> Any:
        self.traces += 1
        return row * self.table[0] * self.table[1]


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("way", WAYS)
def test_new_functions_take_what_they_capture_with_them(way: str, devices: list[str]) -> None:
    def shift(by: float) -> weakref.ref[Any]:
        table = tf.fill([SIZE], by)
        result = devicemap.parallel_map(lambda row: row + table[3] + table[1], X, devices=devices, **WAYS[way])
        np.testing.assert_array_equal(result, X + 2 * by)
        return weakref.ref(table)

    references = [shift(float(i)) for i in range(3)]
    assert alive() == 0
    assert [reference() for reference in references] == [None] * 3


def test_what_is_compiled_lives_as_long_as_its_function(devices: list[str]) -> None:
    scale = Scale()
    for _ in range(3):
        devicemap.parallel_map(scale.step, X, devices=devices)
        gc.collect()
    assert scale.traces == 1
    assert alive() >= len({*devices})
    gone = weakref.ref(scale)
    del scale
    assert gone() is None
    assert alive() == 0


def test_a_dropped_map_frees_its_function_at_once() -> None:
    scale = Scale()
    mapper = devicemap.DeviceMap(scale.step, devices=["CPU:0", "CPU:1"])
    mapper(X)
    gone = weakref.ref(scale)
    gc.disable()
    try:
        del scale, mapper
        assert gone() is None
    finally:
        gc.enable()


class Doubler:
    """A callable object that counts its traces."""

    __slots__ = ()

    def step(self, row: Any) -> Any:
        self.traces += 1
        return 2 * row

    __call__ = step


@dataclass
class Unhashable(Doubler):
    """A dataclass that is not frozen."""

    traces: int = 0


class Slots(Doubler):
    """No weak reference to it can be made."""

    __slots__ = ("traces",)

    def __init__(self) -> None:
        self.traces = 0


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


def test_who_listens_is_not_kept_and_costs_no_trace() -> None:
    scale = Scale()

    class Listener:
        heard = 0

        def __call__(self, event: Any) -> None:
            self.heard += 1

    gone = []
    for _ in range(3):
        listener = Listener()
        devicemap.parallel_map(scale.step, X, devices=["CPU:0", "CPU:1"], progress=listener)
        assert listener.heard
        gone.append(weakref.ref(listener))
    del listener
    gc.collect()
    assert scale.traces == 1
    assert [reference() for reference in gone] == [None] * 3
    with pytest.raises(devicemap.errors.OptionError, match="progress=3"):
        devicemap.parallel_map(scale.step, X, devices=["CPU:0", "CPU:1"], progress=3)


def test_memory_is_bounded() -> None:
    functions: list[Callable[[Any], Any]] = [lambda row: row, lambda row: row + 1, lambda row: row + 2]
    options = {"devices": ["CPU:0"], "progress": False}
    memory = ProgramCache(2)
    first, second, third = (memory.program_of(fn, options) for fn in functions)
    assert memory.program_of(functions[2], options)._compiled is third._compiled
    assert memory.program_of(functions[1], options)._compiled is second._compiled
    assert memory.program_of(functions[0], options)._compiled is not first._compiled  # the oldest of three
    assert memory.program_of(functions[1], options)._compiled is second._compiled
    assert memory.program_of(functions[2], options)._compiled is not third._compiled


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
    return lambda: [model.fit(pairs, epochs=2, verbose=0, shuffle=False), model.predict(pairs, verbose=0)][1]


USES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "dataset": (lambda dataset: dataset, 12),
    "iterator": (_iterated, 12),
    "derived": (lambda dataset: dataset.map(lambda chunk: chunk).unbatch().batch(5), 12),
    "zip": (lambda dataset: tf.data.Dataset.zip((dataset, dataset)).map(lambda a, b: tf.concat([a, b], 0)), 24),
    "concatenate": (lambda dataset: dataset.concatenate(dataset), 24),
    "flat_map": (lambda dataset: tf.data.Dataset.range(2).flat_map(lambda _: dataset), 24),
    "iterator over flat_map": (lambda dataset: iter(tf.data.Dataset.range(2).flat_map(lambda _: dataset)), 24),
    "tf.function": (_in_function, 12),
    "fit": (_fitted, 12),
}


@pytest.mark.in_ci(2)
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
    with pytest.raises(tf.errors.UnknownError, match=r"DeviceMap.as_dataset made is gone.*; keep that dataset"):
        list(derived)


def _objects() -> Counter[str]:
    gc.collect()
    # TensorFlow leaves an empty list behind for each thread that used it
    found = (o for o in gc.get_objects() if not (type(o) is list and not o))
    return Counter(f"{type(o).__module__}.{type(o).__name__}" for o in found)


@pytest.mark.in_ci(2)
@pytest.mark.parametrize(
    "way",
    [
        "call",
        "report",
        pytest.param("explain", marks=pytest.mark.nightly),
        "explain chunks",
        "verify",
        "stream",
        "parallel_map",
    ],
)
def test_calls_leave_nothing_behind(way: str) -> None:
    scale = Scale()
    devices = ["CPU:0", "CPU:1", "CPU:2"]
    mapper = devicemap.DeviceMap(scale.step, devices=devices)
    chunks = devicemap.DeviceMap(scale.step, devices=devices, batch_size=3)
    calls: dict[str, Callable[[], object]] = {
        "call": lambda: mapper(X),
        "report": lambda: (mapper(X), str(mapper.report)),
        "explain": lambda: str(mapper.explain(X)),
        "explain chunks": lambda: str(chunks.explain(X)),
        "verify": lambda: str(mapper.verify(X, 4)),
        "stream": lambda: [*chunks.stream(X)],
        "parallel_map": lambda: devicemap.parallel_map(scale.step, X, devices=devices),
    }
    for _ in range(3):
        calls[way]()
    _objects()  # looking at all objects for the first time makes some
    before = _objects()
    for _ in range(8):
        calls[way]()
    grown = {name: more for name, more in (_objects() - before).items() if more >= 4}
    assert grown == {}


def test_tables_that_stay_in_place_go_with_their_function() -> None:
    def once() -> Any:
        table = tf.Variable(tf.zeros([10, 2]))
        devicemap.parallel_map(lambda i: tf.gather(table, i), tf.range(4), in_place=[table])
        return weakref.ref(table)

    gone = once()
    gc.collect()
    assert gone() is None
