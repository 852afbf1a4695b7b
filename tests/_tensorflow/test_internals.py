"""What devicemap uses of TensorFlow beyond its public names is still there and does what it is used for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from devicemap import _tensorflow
from devicemap._tensorflow import runtime, usable
from devicemap._tensorflow.calls import begin_backward_on, prepare_gradient
from devicemap._tensorflow.functions import (
    NO_AUTO_CONTROL_DEPS,
    NO_AUTO_CONTROL_DEPS_NOINLINE,
    add_control_input,
    add_control_outputs,
    graphs_within,
    in_xla_context,
    last_set_seed,
    pinning_loops,
    python_function,
    summary_settings,
    with_captures,
)
from devicemap._tensorflow.gradient_links import fan_out, gradient_redirector
from devicemap._tensorflow.gradients import can_redirect_gradients, order_of_gradients, unpin_gradients
from devicemap._tensorflow.keras import is_seed, states_of
from devicemap._tensorflow.runtime import allocator_bytes, colocate_with_inputs
from devicemap.compile.vectorize import vectorize

pytestmark = pytest.mark.private("what is tested here")

X = tf.constant([[1.0, 2.0], [3.0, 4.0]])


def test_every_name_exists() -> None:
    modules = [import_module(f"devicemap._tensorflow.{found.name}") for found in iter_modules(_tensorflow.__path__)]
    names = {f"{module.__name__}.{name}": value for module in modules for name, value in vars(module).items()}
    private = {name: value for name, value in names.items() if isinstance(value, _tensorflow.Private)}
    assert [name for name, value in private.items() if not value.is_available] == []
    assert private


def test_no_control_dependencies_are_added() -> None:
    def chained(**options: object) -> int:
        def two_prints(x: tf.Tensor) -> tf.Tensor:
            tf.print(x, output_stream="file:///dev/null")
            tf.print(x, output_stream="file:///dev/null")
            return x

        graph = tf.function(two_prints, **options).get_concrete_function(tf.TensorSpec([])).graph
        return sum(bool(op.control_inputs) for op in graph.get_operations() if op.type == "PrintV2")

    assert chained() == 1
    for attributes in (NO_AUTO_CONTROL_DEPS, NO_AUTO_CONTROL_DEPS_NOINLINE):
        assert chained(experimental_attributes=attributes) == 0


def test_ops_that_must_run() -> None:
    count = tf.Variable(0)

    @tf.function(experimental_attributes=NO_AUTO_CONTROL_DEPS_NOINLINE)
    def unused(x: tf.Tensor) -> tf.Tensor:
        (result,) = add_control_outputs([tf.raw_ops.AssignAddVariableOp(resource=count.handle, value=1)], [x])
        return result

    @tf.function
    def caller(x: tf.Tensor) -> tf.Tensor:
        unused(x)
        return x

    caller(tf.constant(1))
    assert int(count) == 1


def test_python_functions() -> None:
    double = lambda x: 2 * x
    for call in (tf.py_function, tf.numpy_function):
        function = tf.function(lambda x: call(double, [x], tf.float32))
        graph = function.get_concrete_function(tf.TensorSpec([])).graph
        (token,) = (op.get_attr("token") for op in graph.get_operations() if "PyFunc" in op.type)
        assert python_function(token.decode()) is double


@pytest.mark.parametrize("free", [False, True])
def test_gradients_of_gathers_ask_for_no_device(free: bool) -> None:
    spec = tf.TensorSpec([None, 2])
    inner = tf.function(lambda x: tf.gather(tf.tanh(x), [1, 0], axis=1))
    gather = tf.function(lambda x: inner(x)).get_concrete_function(spec)
    if free:
        unpin_gradients(gather.graph)
    gradient = tf.function(lambda x: tf.gradients(gather(x), x)[0])
    graph_def = gradient.get_concrete_function(spec).graph.as_graph_def()
    if free:
        unpin_gradients(gather.graph)  # once more: each trace meets the functions that fn calls
        (op,) = (op for op in inner.get_concrete_function(spec).graph.get_operations() if "Gather" in op.type)
        wrapped = [cell.cell_contents.__name__ for cell in op._gradient_function.__closure__]
        assert "_GatherV2Grad" in wrapped  # wrapped once
    in_functions = [node for function in graph_def.library.function for node in function.node_def]
    assert any("_class" in node.attr for node in in_functions) != free
    np.testing.assert_allclose(gradient(X), 1 - np.tanh(X) ** 2, rtol=1e-3)


def test_what_is_compiled_with_all_around_it() -> None:
    found = []

    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        found.append(in_xla_context())
        return x

    around = [tf.function(lambda x, n=n: inner(x), jit_compile=n == 1) for n in range(3)]
    for i, function in enumerate(around):
        function(tf.zeros([i]))
    assert found == [False, True, False]


def test_functions_that_a_function_calls() -> None:
    inner = tf.function(lambda x: tf.sin(x))
    middle = tf.function(lambda x: inner(x) + tf.cos(x))
    graph = tf.function(lambda x: middle(x)).get_concrete_function(tf.TensorSpec([None])).graph
    found = graphs_within(graph)
    assert len(found) == 1 + len(graph.as_graph_def().library.function)
    types = {op.type for inside in found for op in inside.get_operations()}
    assert {"Sin", "Cos"} <= types


@pytest.mark.parametrize("order", [1, 2])
def test_a_call_that_runs_in_another_thread_is_recorded_here(order: int) -> None:
    variable = tf.Variable(3.0)

    @tf.function
    def cube(x: tf.Tensor) -> list[tf.Tensor]:
        while tf.reduce_sum(x) < 100.0:
            x = x * variable * x
        return [x]

    concrete = cube.get_concrete_function(tf.TensorSpec([]))
    x = tf.constant(2.0)

    def gradients(call: Any) -> list[float]:
        with tf.GradientTape(persistent=order == 2) as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                (y,) = call()
            found = tape.gradient(y, [x, variable])
        return [float(value) for value in (y, *found, *([outer.gradient(found[0], x)] if order == 2 else []))]

    def prepared() -> Any:
        prepare_gradient(concrete, [x], "CPU:0")
        return concrete(x)

    assert gradients(prepared) == gradients(lambda: concrete(x))


def test_loops_take_copies_of_results_of_calls() -> None:
    helper = tf.function(lambda x: 2 * x)

    @tf.function(autograph=False)
    def function(x: Any) -> Any:
        with pinning_loops():
            return tf.while_loop(lambda _: True, lambda x: (x + 1,), [helper(x)], maximum_iterations=3)

    (loop,) = (op for op in function.get_concrete_function(tf.constant(1)).graph.get_operations() if "While" in op.type)
    assert not any("Call" in tensor.op.type for tensor in loop.inputs)
    assert int(function(tf.constant(1))[0]) == 5


def test_each_seeding_is_another() -> None:
    tf.random.set_seed(1)
    first = last_set_seed()
    tf.random.normal([])
    assert last_set_seed() is first is not None
    tf.random.set_seed(1)
    assert last_set_seed() is not first


@pytest.mark.parametrize("condition", [True, False])
def test_settings_of_summaries_are_copied_to_another_thread(condition: bool, tmp_path: Path) -> None:
    with tf.summary.create_file_writer(str(tmp_path)).as_default(7), tf.summary.record_if(condition):
        set_up = summary_settings()

    def settings() -> Any:
        set_up()
        return bool(tf.summary.should_record_summaries()), tf.summary.experimental.get_step()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(settings).result() == (condition, 7)


@pytest.mark.parametrize("called", [False, True])
def test_the_gradient_function_of_an_op_is_used(called: bool) -> None:
    """That of an op, and of a call of a function: by `tf.gradients`, and by a tape around the function."""
    sine: Any = tf.function(tf.sin).get_concrete_function(tf.TensorSpec([])) if called else tf.sin

    @tf.function(autograph=False)
    def fn(x: tf.Tensor) -> tf.Tensor:
        y = sine(x)
        y.op._gradient_function = lambda op, *upstream: 7.0 * upstream[0]
        return y

    x = tf.constant(0.5)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = fn(x)
    assert float(tape.gradient(y, x)) == 7.0
    assert float(tf.function(lambda x: tf.gradients(fn(x), x)[0])(x)) == 7.0
    assert can_redirect_gradients()


def test_the_backward_call_of_a_call_is_placed() -> None:
    sine = tf.function(tf.sin).get_concrete_function(tf.TensorSpec([]))
    begin_backward_on("/CPU:1", sine)
    gradient = tf.function(lambda x: tf.gradients(sine(x), x)).get_concrete_function(tf.TensorSpec([]))
    calls = [op.device for op in gradient.graph.get_operations() if "PartitionedCall" in op.type]
    assert [device[-5:] for device in calls if device] == ["CPU:1"]


def test_gradients_of_several_users_are_added_on_the_current_device() -> None:
    with tf.device("CPU:1"):
        variable = tf.Variable([1.0, 2.0])

    @tf.function
    def gradient() -> Any:
        with tf.device("CPU:1"):
            handles = fan_out(variable.handle, 2)
        reads = [tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32) for handle in handles]
        assert all(read.shape == [2] for read in reads)
        return tf.gradients([reads[0] * 3.0, reads[1] * 4.0], variable.handle)[0]

    assert gradient().numpy().tolist() == [7.0, 7.0]
    sums = [op.device for op in gradient.get_concrete_function().graph.get_operations() if op.type == "AddN"]
    assert [device[-5:] for device in sums] == ["CPU:1"]


def test_an_op_takes_another_input_and_waits_for_another_op() -> None:
    @tf.function
    def fn(x: tf.Tensor) -> tf.Tensor:
        y = tf.sin(x)
        y.op._update_input(0, tf.constant(0.0))
        return y

    assert float(fn(tf.constant(1.0))) == 0.0
    with tf.Graph().as_default():
        first, second = tf.no_op(), tf.no_op()
        add_control_input(first, second)
        assert first.control_inputs == [second]


def test_which_gradients_a_call_has_to_keep() -> None:
    variable, x = tf.Variable(2.0), tf.constant(3.0)
    concrete = tf.function(lambda x: x * variable).get_concrete_function(x)
    order = lambda: order_of_gradients(concrete, [x, *concrete.captured_inputs])
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        assert order() == 0
        tape.watch(x)
        assert order() == 1
    with tf.GradientTape():  # the variable
        assert order() == 1
        with tf.GradientTape():
            assert order() == 2
    with tf.GradientTape(persistent=True):
        assert order() == 2


def test_rows_are_taken_without_a_copy() -> None:
    row = tf.function(lambda x: [tf.sin(x)]).get_concrete_function(tf.TensorSpec([2]))
    whole, _ = vectorize(row, [tf.TensorSpec([None, 2])], force=False)
    (sine,) = [op for op in whole.graph.get_operations() if op.type == "Sin"]
    assert sine.inputs[0].op.type == "Placeholder"


def test_the_memory_of_devices() -> None:
    assert usable(runtime._context, runtime._listing, runtime._sizes)
    assert allocator_bytes() == {}  # of devices that are no CPUs; tests/simulators/test_softgpu.py has some


def test_a_view_with_other_captures_leaves_the_function_alone() -> None:
    own, other, x = tf.Variable(2.0), tf.Variable(3.0), tf.constant(5.0)
    concrete = tf.function(lambda x: x * own).get_concrete_function(x)
    view = with_captures(concrete, {concrete.captured_inputs[0].ref(): other.handle})
    for function, factor in ((concrete, 2.0), (view, 3.0)):
        taken = tf.function(lambda x, function=function: tf.gradients(function(x), x)[0])
        assert float(function(x)) == factor * 5.0
        assert float(taken(x)) == factor


@pytest.mark.parametrize("loop", [False, True])
def test_gradients_of_a_replica_go_to_its_value(loop: bool) -> None:
    original, replica = tf.Variable([1.0, 2.0]), tf.Variable([0.0, 0.0])

    @tf.function
    def looked_up(x: tf.Tensor) -> tf.Tensor:
        value = original.read_value()
        assigned = tf.raw_ops.AssignVariableOp(resource=replica.handle, value=value)
        handle = gradient_redirector()(replica.handle, value)
        with tf.control_dependencies([assigned]):
            return x * tf.raw_ops.ResourceGather(resource=handle, indices=[1, 1], dtype=tf.float32)

    @tf.function
    def gradient(x: tf.Tensor) -> tf.Tensor:
        total = x
        for _ in tf.range(2 if loop else 1):
            total = looked_up(total)
        return tf.convert_to_tensor(tf.gradients(total, original.handle)[0])

    with tf.GradientTape() as tape:
        rows = looked_up(tf.constant([3.0, 4.0]))
    assert rows.numpy().tolist() == [6.0, 8.0]
    assert tf.convert_to_tensor(tape.gradient(rows, original)).numpy().tolist() == [0.0, 7.0]
    assert gradient(tf.constant([3.0, 4.0])).numpy().tolist() == [0.0, 28.0 if loop else 7.0]


def test_ops_beside_their_inputs() -> None:
    devices = [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in (1, 2)]

    @tf.function
    def call(x: tf.Tensor) -> tf.Tensor:
        with tf.device(devices[0]):
            one = x + 1.0
        with tf.device(devices[1]):
            colocate_with_inputs(devices)
            other = x + 2.0
        passed = tf.identity_n([one, other])
        found.append([(x * 1.0).device, (other * 1.0).device, (passed[1] * passed[0]).device])
        with tf.device(devices[0]):
            found.append([(other * 1.0).device])
        return tf.gradients(sevenfold(one, other)[1] * 1.0, [other])[0]

    @tf.custom_gradient
    def sevenfold(*values: tf.Tensor) -> Any:
        return tuple(map(tf.identity, values)), lambda *upstream: [7.0 * each for each in upstream]

    found: list[list[str]] = []
    np.testing.assert_equal(call(X).numpy(), np.full_like(X, 7.0))
    assert found == [["", devices[1], devices[1]], [devices[0]]]


def test_frozen_weights_are_no_states() -> None:
    """`recompute` leaves out layers with states."""
    dense, adapted, norm, dropout = layers.Dense(2), layers.Dense(2), layers.BatchNormalization(), layers.Dropout(0.5)
    keras.Sequential([keras.Input([3]), dense, adapted, norm, dropout])
    adapted.enable_lora(1)
    dense.trainable = norm.trainable = False
    assert [states_of(dense), states_of(adapted)] == [[], []]
    assert states_of(norm) == [norm.moving_mean, norm.moving_variance]
    assert [is_seed(state) for state in states_of(dropout)] == [True]
