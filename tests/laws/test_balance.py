"""Law 9, and the others where a call balances itself: one graph whose devices take rows as they are done with others."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from cases import ALL, IN_CI, ROWS, Case
from graphs import between_devices, ops_on, partitions
from oracle import assert_same, gradients_of

import devicemap
from benchmarks import simulator
from devicemap.data.rows import as_rows
from devicemap.errors import FunctionError
from devicemap.run.calls import Nobody
from devicemap.run.one_graph import OneGraph

pytestmark = pytest.mark.private("a variable that belongs to one run of a graph")
DEVICE_COUNTS = (2, 3, 8)


class Balanced:
    """A map whose calls balance themselves, however short they are."""

    def __init__(self, fn: Any, devices: list[str], **options: Any):
        self.program = devicemap.DeviceMap(fn, devices=devices, **options)._program
        self._graph = OneGraph(self.program, Nobody())

    def can(self, data: Any) -> bool:
        return self.program.compiled_for(as_rows(data)).balances

    def __call__(self, data: Any, speed: float = 0.0) -> Any:
        rows = as_rows(data)
        compiled = self.program.compiled_for(rows)
        results, speeds = self._graph.in_pieces(compiled, rows, [speed] * len(compiled.places))
        assert any(speeds)
        return results


OTHERS = ("control flow", "inner function", "py_function", "lookup table", "ragged in", "sparse in", "compiled batch")
"""What the loop over pieces, which rows are taken into, may meet besides."""

NOT_DENSE = ("ragged", "deeper", "sparse", "sets", "of unknown rank")
BALANCING = [case for case in IN_CI if not case.name.startswith(NOT_DENSE)]
BALANCING += [case for case in ALL if case.name in OTHERS]


def _skip_where_xla_lacks(case: Case, devices: list[str]) -> None:
    if "jit_compile" in case.options and any(device.startswith("GPU") for device in devices):
        pytest.skip("not applicable: XLA does not compile for emulated GPUs")


@pytest.mark.in_ci(2)
@pytest.mark.parametrize("case", BALANCING, ids=str)
def test_same_answer(case: Case, devices: list[str]) -> None:
    _skip_where_xla_lacks(case, devices)
    mapper = Balanced(case.fn, devices, batched=case.batched, **case.options)
    for speed in (0.0, 500.0, 1e9):
        assert_same(mapper(case.data, speed), case.serial())


DTYPES = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64 complex128 string"


def test_results_of_every_dtype() -> None:
    numbers = tf.range(40)
    dtypes = [*map(tf.as_dtype, DTYPES.split()), tf.dtypes.experimental.float8_e5m2]
    mapper = Balanced(lambda n: tuple(_as(dtype, n) for dtype in dtypes), ["CPU:3", "CPU:0", "CPU:1"], batched=True)
    for dtype, got in zip(dtypes, mapper(numbers), strict=True):
        assert got.dtype == dtype
        np.testing.assert_array_equal(_as(tf.string, got), _as(tf.string, _as(dtype, numbers)))


def _as(dtype: Any, numbers: Any) -> Any:
    if numbers.dtype == dtype:
        return numbers
    if tf.dtypes.experimental.float8_e5m2 in (dtype, numbers.dtype):  # cast from and to few others
        numbers = tf.cast(numbers, tf.float32)
    return tf.strings.as_string(numbers) if dtype == tf.string else tf.cast(numbers, dtype)


def test_what_fn_does_happens_once_per_row(devices: list[str]) -> None:
    seen: list[int] = []
    total = tf.Variable(0)

    def fn(n: Any) -> Any:
        total.assign_add(n)
        tf.py_function(lambda n: seen.append(int(n)), [n], [])
        return n

    mapper = Balanced(fn, devices)
    for calls in (1, 2, 3):
        assert mapper(tf.range(30)).numpy().tolist() == list(range(30))
        assert Counter(seen) == dict.fromkeys(range(30), calls)
        assert int(total) == calls * sum(range(30))


def test_a_variable_is_what_it_was_when_the_call_began() -> None:
    variable = tf.Variable(1.0)
    mapper = Balanced(lambda x: x * variable, ["CPU:1", "CPU:2"])
    for value in (2.0, 3.0):
        variable.assign(value)
        np.testing.assert_array_equal(mapper(tf.ones([50])), np.full(50, value))


@pytest.mark.nightly
def test_calls_at_once_do_not_meet() -> None:
    mapper = Balanced(lambda row: row * 2, ["CPU:1", "CPU:0", "CPU:2"], batched=True)
    data = [tf.random.uniform([200 + i, 2]) for i in range(4)]
    mapper(data[0])
    wrong: list[int] = []

    def call(i: int) -> None:
        for _ in range(20):
            if not np.array_equal(mapper(data[i], 2000.0), data[i] * 2):
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(data))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_errors_name_rows_and_device() -> None:
    mapper = Balanced(lambda n: tf.debugging.check_numerics(1 / n, "bad"), ["CPU:1", "CPU:2"])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"row.* on CPU:") as raised:
        mapper(tf.constant([1.0] * 30 + [0.0] + [1.0] * 9))
    assert isinstance(raised.value, FunctionError)
    assert any(30 in range(shard.start, shard.stop) for shard in raised.value.shards)


def test_a_wrong_number_of_rows_is_refused() -> None:
    mapper = Balanced(lambda batch: batch[:-1], ["CPU:1", "CPU:2"], batched=True)
    with pytest.raises(FunctionError, match="returned"):
        mapper(tf.range(40))


@pytest.mark.nightly
def test_no_edge_joins_two_devices() -> None:
    mapper = Balanced(lambda row: tf.sin(row), ["CPU:1", "CPU:2", "CPU:3"], batched=True)
    graphs = partitions(mapper, tf.zeros([60, 2]))
    assert ops_on(graphs).keys() >= {"CPU:1", "CPU:2", "CPU:3"}
    assert between_devices(graphs) == []


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls inside a `tf.function` that no tape follows balance themselves, however short; what was asked about them."""
    asked: list[Any] = []
    monkeypatch.setattr("devicemap.run.embedded.COMPILING_SECONDS", -1.0)
    monkeypatch.setattr("devicemap.run.embedded.balance_pays", lambda rows, *_: asked.append(rows) or rows > 0)
    return asked


def of_any_rows(mapper: Any, data: Any) -> Any:
    """A call inside a `tf.function` that does not know how many rows there are."""
    call = tf.function(lambda rows: mapper(rows), autograph=False)
    return call.get_concrete_function(as_rows(data).specs)(data)


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("case", BALANCING, ids=str)
def test_same_answer_inside_a_function(case: Case, devices: list[str], inside: list[Any]) -> None:
    _skip_where_xla_lacks(case, devices)
    mapper = devicemap.DeviceMap(case.fn, devices=devices, batched=case.batched, **case.options)
    balances = mapper._program.compiled_for(as_rows(case.data))
    assert_same(of_any_rows(mapper, case.data), case.serial())
    assert bool(inside) == (balances.balances and balances.traced.audit.repeatable)


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [None, 0, 200])
def test_static_shapes_inside_a_function(rows: int | None, devices: list[str]) -> None:
    mapper = devicemap.DeviceMap(lambda row: {"row": row, "text": tf.strings.as_string(row[0])}, devices=devices)
    results = tf.function(lambda x: mapper(x)).get_concrete_function(tf.TensorSpec([rows, 3])).structured_outputs
    assert {name: leaf.shape.as_list() for name, leaf in results.items()} == {"row": [rows, 3], "text": [rows]}


W = tf.Variable([[1.0, 2.0], [0.5, -1.0], [2.0, 0.0]])


B = tf.Variable([0.25, 4.0])


def _scaled(rows: Any) -> Any:
    return tf.map_fn(lambda row: tf.sin(row) * B + B * tf.reduce_sum(W), rows @ W) + W[0]


def _second_gradients(call: Any, *sources: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(sources)
        first = gradients_of(call, *sources)
        of_first = tf.reduce_sum(first[0] ** 2)
    return [*first, *tape.gradient(of_first, sources)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fn", "gradients"), [(_scaled, gradients_of), (lambda rows: tf.sin(rows @ W), _second_gradients)]
)
def test_gradients_through_a_function_that_was_traced_without_a_tape(
    devices: list[str], inside: list[Any], fn: Any, gradients: Any
) -> None:
    mapper = devicemap.DeviceMap(fn, devices=devices, batched=True)
    x = tf.random.stateless_uniform([40, 3], [1, 2])
    call = tf.function(lambda rows: mapper(rows), autograph=False).get_concrete_function(tf.TensorSpec([None, 3]))
    assert bool(inside) == (len(set(devices)) > 1)
    for got, wanted in zip(gradients(call, x, W), gradients(fn, x, W)):
        np.testing.assert_allclose(tf.convert_to_tensor(got), tf.convert_to_tensor(wanted), rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
def test_gradients_are_those_of_the_variables_that_the_call_read(devices: list[str], inside: list[Any]) -> None:
    """Whatever these are assigned after it, in its function and later."""
    weights, count = tf.Variable(tf.ones([3, 2])), tf.Variable(3)
    x = tf.random.stateless_uniform([100, 3], [1, 2])

    def fn(rows: Any) -> Any:
        return tf.sin(rows @ weights) * tf.cast(count, tf.float32)

    def gradients(call: Any) -> Any:
        def and_assigns(rows: Any) -> Any:
            y = call(rows)
            weights.assign_add(tf.ones_like(weights))
            return y

        function = tf.function(and_assigns, autograph=False).get_concrete_function(x)
        weights.assign(tf.ones_like(weights))
        count.assign(3)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        count.assign(5)
        weights.assign(tf.zeros_like(weights))
        return tape.gradient(y, [x, weights])

    wanted = gradients(fn)
    assert not inside
    for got, right in zip(gradients(devicemap.DeviceMap(fn, devices=devices, batched=True)), wanted):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-4)
    assert bool(inside) == (len(set(devices)) > 1)


@pytest.mark.nightly
def test_gradients_within_the_function(inside: list[Any]) -> None:
    scale = tf.Variable(1.0)
    mapper = devicemap.DeviceMap(lambda row: scale * row**2, devices=["CPU:1", "CPU:2"])

    @tf.function
    def gradient(x: Any) -> Any:
        y = mapper(x)
        scale.assign_add(1.0)
        return tf.gradients(tf.reduce_sum(y), x)[0]

    np.testing.assert_array_equal(gradient(tf.fill([40, 2], 3.0)), tf.fill([40, 2], 6.0))
    assert inside


@pytest.mark.nightly
def test_gradients_to_a_tensor_that_is_captured_are_not_lost(inside: list[Any]) -> None:
    table = tf.constant([2.0, 3.0])
    mapper = devicemap.DeviceMap(lambda row: row * table, devices=["CPU:1", "CPU:2"])
    call = tf.function(lambda x: mapper(x))
    call(tf.ones([40, 2]))
    with tf.GradientTape() as tape:
        tape.watch(table)
        y = call(tf.ones([40, 2]))
    np.testing.assert_array_equal(tape.gradient(y, table), [40.0, 40.0])
    assert not inside


@pytest.mark.nightly
def test_under_a_tape_a_function_has_a_shard_for_each_device(inside: list[Any]) -> None:
    """Their gradients cost no second run of the rows."""
    mapper = devicemap.DeviceMap(lambda row: row * 2, devices=["CPU:1", "CPU:2"])
    x = tf.ones([40, 2])
    with tf.GradientTape() as tape:
        tape.watch(x)
        tf.function(lambda x: mapper(x))(x)
    assert not inside


@pytest.mark.nightly
def test_variables_are_what_they_are_when_the_call_comes(inside: list[Any]) -> None:
    variable = tf.Variable(1.0)
    mapper = devicemap.DeviceMap(lambda x: x * variable, devices=["CPU:1", "CPU:2"])

    @tf.function
    def call(x: Any) -> Any:
        before = mapper(x)
        variable.assign_add(1.0)
        return before, mapper(x)

    for value in (1.0, 2.0, 3.0):
        before, after = call(tf.ones([50]))
        np.testing.assert_array_equal(before, np.full(50, value))
        np.testing.assert_array_equal(after, np.full(50, value + 1))
    assert inside


@pytest.mark.nightly
def test_a_function_that_balances_itself_is_saved(tmp_path: Path, inside: list[Any]) -> None:
    class Model(tf.Module):
        def __init__(self) -> None:
            self.variables_of_fn = [W, B]
            self.mapper = devicemap.DeviceMap(_scaled, devices=["CPU:1", "CPU:2"], batched=True)

        @tf.function(input_signature=[tf.TensorSpec([None, 3])])
        def call(self, x: Any) -> Any:
            return self.mapper(x)

    model, x = Model(), tf.ones([40, 3])
    tf.saved_model.save(model, str(tmp_path))
    assert inside
    for each in (model, tf.saved_model.load(str(tmp_path))):
        for _ in range(3):
            np.testing.assert_allclose(each.call(x), _scaled(x), rtol=1e-6)


@pytest.mark.nightly
def test_in_a_function_rows_keep_their_seeds_and_are_reduced(inside: list[Any]) -> None:
    mapper = devicemap.DeviceMap(
        lambda x, seed: x + tf.random.stateless_normal([2], seed), devices=["CPU:1", "CPU:2"], seed=7
    )
    x = tf.ones([50, 2])
    np.testing.assert_array_equal(of_any_rows(mapper, x), mapper(x))
    total = tf.function(lambda rows: mapper.reduce(rows, "mean"), input_signature=[tf.TensorSpec([None, 2])])(x)
    np.testing.assert_allclose(total, tf.reduce_mean(mapper(x), 0), rtol=1e-5)
    assert len(inside) == 2


def test_in_a_function_too_few_rows_returned_are_an_error(inside: list[Any]) -> None:
    mapper = devicemap.DeviceMap(lambda batch: batch[:-1], devices=["CPU:1", "CPU:2"], batched=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="another number of rows"):
        of_any_rows(mapper, tf.zeros([40]))


@pytest.mark.nightly
def test_in_a_function_long_calls_balance_themselves_and_short_ones_do_not(
    sim: simulator.Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second long call on, where the first one of all, which makes kernels, was another."""
    monkeypatch.setattr("devicemap.run.embedded.COMPILING_SECONDS", 0.2)
    sim.configure(1, speed=0.1)

    def fn(rows: Any) -> Any:
        return sim.work(rows, rows[:, 0])

    mapper = devicemap.DeviceMap(fn, devices=["CPU:0", "CPU:1", "CPU:2"], batched=True)
    call = tf.function(lambda rows: mapper(rows), input_signature=[tf.TensorSpec([None, 1])])
    for seconds, slow in ((0.0, [64] * 4), (0.001, [64, range(1, 20), range(1, 20)])):
        x = tf.fill([192, 1], seconds)
        for rows in slow:
            sim.reset()
            sim.configure(1, speed=0.1)
            np.testing.assert_allclose(call(x), 2 * x + 1, rtol=1e-6)
            taken = sum(each.rows for each in sim.calls(1))
            assert taken == rows if isinstance(rows, int) else taken in rows


@pytest.mark.nightly
def test_in_a_function_few_rows_do_not_tell_how_long_many_take(
    sim: simulator.Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("devicemap.run.embedded.COMPILING_SECONDS", -1.0)
    mapper = devicemap.DeviceMap(lambda x: sim.work(x, x[:, 0]), devices=["CPU:0", "CPU:1", "CPU:2"], batched=True)
    call = tf.function(lambda x: mapper(x), input_signature=[tf.TensorSpec([None, 1])])
    x = tf.zeros([192, 1])
    for data in (x, x, x[:0], tf.fill([1, 1], 0.05)):
        call(data)
    sim.reset()
    call(x)
    assert [each.rows for each in sim.calls(1)] == [64]


def test_seeded_functions_draw_the_same_in_each_run() -> None:
    """Which device takes which rows is chance, so functions with number streams of their own do not balance themselves."""
    assert not Balanced(lambda x: x + tf.random.normal([], seed=1), ["CPU:1", "CPU:2"]).can(tf.zeros([ROWS]))


def test_without_options_a_slow_device_gets_less(sim: simulator.Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """First in chunks, later in one graph: in both, rows go where they are done soonest, each once and in order."""
    monkeypatch.setattr("devicemap.run.calls.COMPILING_SECONDS", 0.1)
    sim.configure(1, speed=0.1)

    def fn(rows: Any) -> Any:
        return sim.work(rows, 0.004 * tf.cast(tf.shape(rows)[0], tf.float32))

    mapper = devicemap.DeviceMap(fn, devices=["CPU:0", "CPU:1", "CPU:2"], batched=True)
    x = tf.random.uniform([256, 4])
    ways = []
    for _ in range(3):
        np.testing.assert_allclose(mapper(x), 2 * x + 1)
        ways.append(mapper.report.way)
        slow = next(device for device in mapper.report.devices if device.device.endswith("CPU:1"))
        assert 0 < slow.rows < 256 * 0.1 / 2.1 * 2
    assert ways[0] == "chunks"
    assert ways[-1] == "one graph"


def test_short_calls_take_one_graph_from_the_second_on() -> None:
    """The first one is not known to be short: it goes in chunks, whose compilation is not taken for the time of rows."""
    mapper = devicemap.DeviceMap(lambda row: tf.sin(row), devices=["CPU:0", "CPU:1", "CPU:2"])
    x = tf.random.uniform([200, 4])
    ways = []
    for _ in range(3):
        np.testing.assert_allclose(mapper(x), tf.sin(x), rtol=1e-6)
        ways.append(mapper.report.way)
    assert ways == ["chunks", "one graph", "one graph"]


@pytest.mark.nightly
def test_what_takes_as_long_for_few_rows_gets_a_shard_for_each_device(sim: simulator.Simulator) -> None:
    mapper = devicemap.DeviceMap(lambda rows: sim.work(rows, 0.15), devices=["CPU:0", "CPU:1", "CPU:2"], batched=True)
    x = tf.random.uniform([256, 4])
    ways = []
    for _ in range(3):
        np.testing.assert_allclose(mapper(x), 2 * x + 1)
        ways.append(mapper.report.way)
    assert ways == ["chunks", "chunks", "one graph"]
    assert [device.calls for device in mapper.report.devices] == [1, 1, 1]


def test_what_does_not_fit_at_once_goes_on_in_chunks(sim: simulator.Simulator) -> None:
    for device in range(2):
        sim.configure(device, memory_rows=40)
    mapper = devicemap.DeviceMap(lambda rows: sim.work(rows, 1e-4), devices=["CPU:0", "CPU:1"], batched=True)
    for rows in (64, 300, 300):
        x = tf.random.uniform([rows, 4])
        np.testing.assert_allclose(mapper(x), 2 * x + 1)
    assert mapper.report.retries == 0  # it knows by now
