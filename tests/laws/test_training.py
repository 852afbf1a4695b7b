"""Law 10: weights, losses and metrics of a parallelized Keras model are those of one device with the same batches."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import oracle
import processes
import pytest
import tensorflow as tf
import trainings
from graphs import between_devices, partitions, placements
from keras import layers
from pipelined import Drawing
from trainings import CASES, STEPS, Applies, Case, InTraining, X, Y, mlp, normalized, sequential

import devicemap
from devicemap.errors import FunctionError, OptionError

DEVICE_COUNTS = 2, 3


def assert_close(got: Any, wanted: Any, rtol: float = 1e-5) -> None:
    oracle.assert_close(got, wanted, rtol, rtol)


FRUGAL = [{"accumulate": 3}, {"recompute": True}, {"accumulate": 2, "recompute": True}]
IN_CI = {
    "class weights, accumulated", "added sums", "subclassed, validation, several steps per execution", "lookups",
    "batch normalization", "batch normalization of few rows", "tensors assigned to a recomputed layer",
    "inherited training mode, normalized", "inherited training mode, recomputed", "trained weights that a layer changes",
    "weights in a tf.function", "weights in recompute_grad", "a call that is a tf.function", "batch normalization, checks",
    "lookups, weights in recompute_grad", "weights in recompute_grad, batch normalization", "weights in a ConcreteFunction",
}  # fmt: skip
NEEDS_OWN_TRACES = {"a call that is a tf.function", "batch normalization, checks"}
FRUGALLY_IN_CI = {
    "complex values", "inherited training mode", "tied weights, moving average of weights", "weights in a ConcreteFunction",
    "a call that is a tf.function", "lookups, weights in recompute_grad",
}  # fmt: skip
FRUGALLY_TRAINED = FRUGALLY_IN_CI | {
    "added sums", "outputs in a dict", "weights changed in a step that uses them", "lookups", "masks, gradients of slices",
    "scaled",
}  # fmt: skip


def training(name: str, options: dict[str, Any], in_ci: bool) -> Any:
    added = pytest.mark.private("adding gradients on the devices of variables")
    again = pytest.mark.private("tracing functions again, and calls without automatic control dependencies")
    marks = [added] * ("lookups" in name) + [again] * (name in NEEDS_OWN_TRACES) + [pytest.mark.nightly] * (not in_ci)
    return pytest.param(name, options, marks=marks)


TRAININGS = [
    *(training(name, {}, name in IN_CI) for name in CASES),
    *(training(name, FRUGAL[2], name in FRUGALLY_IN_CI) for name in sorted(FRUGALLY_TRAINED)),
    ("batch normalization, nested, adding losses", {"recompute": True}),
]


@pytest.mark.parametrize("device", ["CPU:0", "CPU:1"])
def test_lookups_with_a_single_device(device: str) -> None:
    case = CASES["lookups"]
    assert_close(case.trained(devicemap.parallelize(case.made(), [device])), case.wanted, case.rtol)


def test_a_metric_that_is_not_a_number_leaves_weights_alone(devices: list[str]) -> None:
    def known_error(y: Any, outputs: Any) -> Any:
        return tf.reduce_mean(tf.where(tf.math.is_nan(y), 0.0, tf.where(tf.math.is_nan(y), 0.0, y) - outputs) ** 2, 1)

    def trained(model: Any) -> Any:
        model.compile("sgd", known_error, metrics=["mae"], jit_compile=False)
        model.fit(X, np.where(Y > 0.5, np.nan, Y), batch_size=11, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    made = Case(mlp).made
    weights = trained(made())
    assert np.all(np.isfinite(weights[0]))
    assert_close(trained(devicemap.parallelize(made(), devices)), weights)


@pytest.mark.parametrize(("name", "options"), TRAININGS, ids=str)
def test_trained_as_by_one_device(name: str, options: dict[str, Any], devices: list[str]) -> None:
    case = CASES[name]
    model = case.made()
    before = model.get_weights()
    assert_close(case.trained(devicemap.parallelize(model, devices, **options | case.options)), case.wanted, case.rtol)
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(before, case.wanted["weights"]))


def test_explains_models_whose_call_has_no_argument_training(devices: list[str]) -> None:
    model = devicemap.parallelize(CASES["a loss that changes what it uses"].made(), devices, accumulate=2)
    plan = model.explain(X)
    assert plan.bytes_per_row
    assert (plan.microbatches, plan.gathered_for) == (2, ("compute_loss",))


def test_verify_names_the_first_layer_that_differs(devices: list[str]) -> None:
    centred = layers.Lambda(lambda x: x - tf.reduce_mean(x, 0), name="centred")
    model = sequential(layers.Dense(4), centred, *(layers.Dense(4) for _ in range(10)))
    model.compile("sgd", "mse", jit_compile=False)
    verification = devicemap.parallelize(model, devices).verify(X, rows=5)
    assert verification.rows == 5
    assert [finding.output for finding in verification.findings] == ["the output of layer 'centred'"]
    assert "the output of layer 'centred' has " in str(verification)
    inputs = keras.Input([3, 2])
    outputs, _ = layers.GRU(4, return_state=True)(inputs)
    recurrent = keras.Model(inputs, outputs)
    recurrent.compile("sgd", "mse", jit_compile=False)
    assert devicemap.parallelize(recurrent, devices).verify(np.ones([8, 3, 2], "f")).ok


def added_to_the_fifth(rows: Any) -> Any:
    index = tf.range(tf.shape(rows)[0])
    return rows + tf.math.unsorted_segment_sum(rows, tf.where(index > 3, 4, -1), tf.size(index))


def centred(x: Any) -> Any:
    return x - tf.reduce_mean(x, 0)


def with_noise(x: Any) -> Any:
    return x + keras.random.normal(keras.ops.shape(x), seed=1337)


def with_same_noise(x: Any) -> Any:
    return x + tf.random.normal(tf.shape(x), seed=7)


def projected(x: Any) -> Any:
    """Uses numbers from a fixed seed that are the same for all rows."""
    return x @ tf.random.stateless_normal([x.shape[-1], 3], [1, 2])


OTHER_ROWS, FIXED_SEED = "Each device sees some of the rows", "drawn from a fixed seed"
EMBEDDED, RAGGED = X[:32, :2, None] + tf.zeros([4]), tf.RaggedTensor.from_row_lengths(X[:, 0], [1, 2, 3, 4] * 3 + [4])
SPARSE = tf.sparse.from_dense(X * (X > 0))
WARNED: dict[str, tuple[Any, Callable[[Any], Any] | layers.Layer, list[str]]] = {
    # rows, a function or a layer, and what its warnings say
    "the number of rows": (EMBEDDED, lambda x: x / tf.cast(tf.shape(x)[0], x.dtype), [OTHER_ROWS]),
    "earlier rows": (EMBEDDED, tf.cumsum, [OTHER_ROWS]),
    "failing for few rows": (EMBEDDED, lambda x: x + tf.gather(x, [3]), [OTHER_ROWS]),
    "one row": (EMBEDDED, added_to_the_fifth, [OTHER_ROWS]),
    "in training": (EMBEDDED, InTraining(centred), [OTHER_ROWS]),
    "in training, after dropout": (
        EMBEDDED, keras.Sequential([layers.Dropout(0.5), InTraining(centred)]), [OTHER_ROWS]),
    "in training, after batch normalization": (
        EMBEDDED, keras.Sequential([layers.BatchNormalization(), InTraining(centred)]), [OTHER_ROWS]),
    "random layers": (
        EMBEDDED, keras.Sequential([layers.GaussianNoise(0.5), layers.SpatialDropout1D(0.5), Drawing()]), []),
    "a fixed seed": (EMBEDDED, InTraining(with_noise), [FIXED_SEED]),
    "a seed of a normalized layer": (
        EMBEDDED, keras.Sequential([layers.BatchNormalization(), InTraining(with_same_noise)]), []),
    "numbers that rows share": (EMBEDDED, InTraining(projected), []),
    "ragged: padded mean": (RAGGED, lambda x: tf.reduce_mean(x.to_tensor(), 1, keepdims=True), [OTHER_ROWS]),
    "ragged: mean": (RAGGED, lambda x: tf.reduce_mean(x, 1)[:, None], []),
    "ragged: int32 splits": (
        RAGGED.with_row_splits_dtype(tf.int32), lambda x: x.to_tensor()[:, :1] + x.values[0], [OTHER_ROWS]),
    "ragged: two inputs": (
        (RAGGED, -RAGGED), lambda x: tf.reduce_mean(x[0] * x[1], 1, True) + tf.reduce_mean(x[0].values), [OTHER_ROWS]),
    "sparse: number of values": (
        SPARSE, lambda x: tf.sparse.to_dense(x) / tf.cast(tf.size(x.values), tf.float32), [OTHER_ROWS]),
    "sparse: dense": (SPARSE, tf.sparse.to_dense, []),
    "sparse: a result": (X, lambda x: tf.sparse.from_dense(x * tf.cast(x > 0, x.dtype)), []),
}  # fmt: skip


@pytest.mark.parametrize("name", WARNED)
def test_outputs_that_depend_on_other_rows_are_reported_once(
    name: str, devices: list[str], recwarn: pytest.WarningsRecorder
) -> None:
    rows, function, reported = WARNED[name]

    class Model(keras.Model):
        def call(self, x: Any, training: bool = False) -> Any:
            return function(x, training=training) if isinstance(function, layers.Layer) else function(x)

        def train_step(self, data: Any) -> Any:
            self(data[0], training=True)
            return {}

    model = Model()
    model.part = function  # Keras finds a layer
    model.compile(jit_compile=False)
    devicemap.parallelize(model, devices)
    for _ in range(2):
        model.train_on_batch(rows)
        model.predict_on_batch(rows)
    messages = [str(each.message) for each in recwarn]
    assert [what for each in messages for what in (OTHER_ROWS, FIXED_SEED) if what in each] == reported


@pytest.mark.parametrize("rows", [1, 6])
def test_noise_of_a_program_with_a_seed_is_not_reported(rows: int, devices: list[str]) -> None:
    """Each op of a shard gets another seed, also if there are fewer shards than devices."""
    keras.utils.set_random_seed(1)
    noise = InTraining(lambda x: x + tf.random.normal(tf.shape(x)))
    model = sequential(layers.BatchNormalization(), noise, layers.Dense(2))
    model.compile("sgd", "mse", jit_compile=False)
    devicemap.parallelize(model, devices).train_on_batch(X[:rows], Y[:rows])  # a warning would be an error


def test_each_kind_of_call_is_compared(devices: list[str], recwarn: pytest.WarningsRecorder) -> None:
    class Encoder(layers.Layer):
        def call(self, x: Any, centre: bool = False) -> Any:
            return centred(x) if centre else x + 1.0

    encoder = Encoder()
    model = keras.Sequential([keras.Input([6]), encoder])
    model.test_step = lambda x: {"one": tf.reduce_sum(encoder(x)), "other": tf.reduce_sum(encoder(x, centre=True))}
    model.compile(jit_compile=False)
    devicemap.parallelize(model, devices).evaluate(X, batch_size=len(X), verbose=0)
    assert sum(OTHER_ROWS in str(each.message) for each in recwarn) == 1


def test_steps_repeat_their_weights(devices: list[str]) -> None:
    """No update of a variable overtakes a read of it."""

    def cubes(y: Any, outputs: Any) -> Any:
        return tf.reduce_mean(tf.abs(y - outputs) ** 3, -1)

    def trained() -> list[Any]:
        keras.utils.set_random_seed(1)
        given = keras.Input([6])
        hidden = layers.Dense(7, "gelu")(given)
        model = keras.Model(given, [layers.Dense(2)(hidden), layers.Dense(2)(hidden)])
        model.compile(keras.optimizers.AdamW(0.05, epsilon=1e-2), [cubes, "mse"], jit_compile=False)
        devicemap.parallelize(model, devices).fit(X, [Y, Y], batch_size=8, epochs=3, shuffle=False, verbose=0)
        weights: list[Any] = model.get_weights()
        return weights

    first, *others = (trained() for _ in range(4))
    for other in others:
        for weight, wanted in zip(other, first):
            np.testing.assert_allclose(weight, wanted, rtol=1e-5, atol=1e-6)


def test_loops_do_not_run_on_random_rows(devices: list[str]) -> None:
    """This one would not end for 0."""

    def steps_to_1(n: Any) -> Any:
        def step(n: Any, steps: Any) -> Any:
            return tf.where(n % 2 == 0, n // 2, tf.where(n == 1, n, 3 * n + 1)), steps + tf.cast(n != 1, n.dtype)

        return tf.while_loop(lambda n, _: tf.reduce_any(n != 1), step, (n, tf.zeros_like(n)))[1]

    model = keras.Sequential([keras.Input([1], dtype="int32"), layers.Lambda(steps_to_1)])
    model.compile(jit_compile=False)
    found = devicemap.parallelize(model, devices).predict(np.arange(1, 9)[:, None], verbose=0)
    np.testing.assert_array_equal(found[:, 0], [0, 1, 7, 2, 5, 8, 16, 3])


@pytest.mark.parametrize("name", ["momentum, clipnorm", "scaled"])
def test_spread_variables_are_updated_where_they_are(name: str, devices: list[str]) -> None:
    case = CASES[name]
    with devicemap.spread_variables(devices):
        model = case.made()
    assert_close(case.fitted(devicemap.parallelize(model, devices)), case.wanted)
    homes = [variable.value.device for variable in model.trainable_variables]
    assert len({*homes}) == len(devices)
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    assert [slot.value.device for slot in optimizer.momentums] == homes


def test_variables_of_an_optimizer_have_its_name() -> None:
    model = devicemap.parallelize(mlp(), ["CPU:1", "CPU:2"])
    model.compile("nadam", "mse", jit_compile=False)
    model.train_on_batch(X, Y)
    name = f"{model.optimizer.name}/"
    assert all(v.path.startswith(name) and v.path.count(name) == 1 for v in model.optimizer.variables)


@pytest.mark.parametrize("count", [1, pytest.param(8, marks=pytest.mark.nightly)])
def test_other_numbers_of_devices(count: int) -> None:
    case = CASES["batch normalization"]
    model = devicemap.parallelize(case.made(), [f"CPU:{i}" for i in range(1, 8)][:count])
    assert_close(case.trained(model), case.wanted)


def test_local_batch_normalization_takes_a_devices_rows(devices: list[str]) -> None:
    case = Case(normalized)
    models = devicemap.parallelize(case.made(), devices, batch_norm="local"), case.eager()
    losses, wanted = (case.fitted(model)["history"]["loss"] for model in models)
    assert losses[-1] < losses[0]
    assert abs(losses[0] - wanted[0]) > 1e-4
    # the mean over devices of means of rows, once, of a batch that all share alike
    one = devicemap.parallelize(case.made(), devices, batch_norm="local")
    one.train_on_batch(X[: 4 * len(devices)], Y[: 4 * len(devices)])
    np.testing.assert_allclose(one.layers[0].moving_mean, 0.2 * X[: 4 * len(devices)].mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("options", [{}, *FRUGAL], ids=str)
def test_gradients_see_the_random_numbers_of_the_forward_pass(options: dict[str, Any], devices: list[str]) -> None:
    keras.utils.set_random_seed(1)
    hidden = Applies(lambda x, scale: scale * x), layers.Dropout(0.5)
    model = keras.Sequential([keras.Input([6]), *hidden])
    model.compile(keras.optimizers.SGD(0.1), lambda _, output: output, jit_compile=False)
    devicemap.parallelize(model, devices, **options)
    scale = model.get_weights()[0]
    for _ in range(2):
        model.reset_metrics()  # train_on_batch of Keras 3.12 returns the mean over all batches since
        loss = model.train_on_batch(X, X)
        scale -= 0.1 * loss / scale  # of the mean of what was not dropped
        np.testing.assert_allclose(model.get_weights()[0], scale, rtol=1e-5)


def _out_of_memory(given: Any) -> Any:
    def fail(_: Any) -> Any:
        raise MemoryError

    return tf.ensure_shape(tf.py_function(fail, [given], given.dtype), given.shape)


IN_GRADIENT = InTraining(tf.custom_gradient(lambda x: (tf.identity(x), _out_of_memory)))


@pytest.mark.parametrize(("layer", "method"), [(IN_GRADIENT, "fit"), (layers.Lambda(_out_of_memory), "evaluate")])
def test_steps_without_memory_say_what_to_do(layer: Any, method: str, devices: list[str]) -> None:
    model = Case(lambda: sequential(layers.Dense(8), layer, layers.Dense(4))).made()
    devicemap.parallelize(model, devices)
    before = model.get_weights()
    with pytest.raises(tf.errors.ResourceExhaustedError, match=r"batch_size.*accumulate=.*recompute=") as raised:
        getattr(model, method)(X, Y, batch_size=11, verbose=0)
    assert isinstance(raised.value, FunctionError)
    np.testing.assert_equal(model.get_weights(), before)


class Noise(layers.Layer):
    """Draws twice: what it gives has nothing of its input but the shape and a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator()

    def call(self, x: Any) -> Any:
        return 0 * x + tf.concat([keras.random.uniform([tf.shape(x)[0], 1], seed=self.seeds) for _ in range(2)], 1)


@pytest.mark.parametrize("norm", [[], [layers.BatchNormalization]], ids=["", "batch normalization"])
def test_no_random_number_comes_twice_and_all_come_again(norm: Any, devices: list[str]) -> None:
    def drawn() -> Any:
        seen = tf.Variable(tf.zeros([7, 2]))

        def loss(_: Any, output: Any) -> Any:
            seen.assign(output)
            return output

        def made() -> keras.Model:
            return keras.Sequential([keras.Input([6]), layers.Dense(2), *(layer() for layer in norm), Noise()])

        model = Case(made, lambda: {"loss": loss}).made()
        devicemap.parallelize(model, devices)
        numbers = []
        for _ in range(3):
            model.train_on_batch(X[:7], Y[:7])
            numbers += seen.numpy().ravel().tolist()
        return numbers

    numbers = drawn()
    assert len({*numbers}) == 3 * 7 * 2
    assert drawn() == numbers


def test_report_counts_all_rows(devices: list[str]) -> None:
    model = devicemap.parallelize(CASES["momentum, clipnorm"].made(), devices)
    for epochs in (1, 2):
        model.fit(X, Y, batch_size=11, epochs=epochs, validation_data=(X, Y), verbose=0)
        report = model.report()
        assert (report.steps, sum(device.rows for device in report.devices)) == (4 * epochs, 34 * epochs)
        shares = [device.rows for device in report.devices if device.device.endswith(devices[0])]
        assert shares == [(3 * -(-11 // len(devices)) + 1) * epochs]
    assert f"{2 * 34} rows in 8 training steps" in str(report)
    for _ in range(3):
        model.train_on_batch(X[:11], Y[:11])
    assert model.report().steps == 4 * 2 + 3
    again = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: model.train_on_batch(X[:2], Y[:2]))
    model.fit(X, Y, batch_size=11, epochs=2, callbacks=[again], verbose=0)
    assert model.report().steps == 4 * 2 + 2


@pytest.mark.nightly
def test_copies_and_saved_models_are_of_one_device(tmp_path: Path, devices: list[str]) -> None:
    model = devicemap.parallelize(CASES["batch normalization"].made(), devices)
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "model.keras")
    assert "devicemap" not in str(keras.saving.serialize_keras_object(model))
    copies = pickle.loads(pickle.dumps(model)), copy.deepcopy(model), keras.models.load_model(tmp_path / "model.keras")
    for copied in copies:
        assert not hasattr(copied, "detach")
        assert copied.optimizer.iterations == 2
        assert_close(copied.predict(X, verbose=0), model.predict(X, verbose=0))
    assert hasattr(model, "detach")


@pytest.mark.nightly
def test_compiled_with_other_layers_in_training(devices: list[str]) -> None:
    """A normalization that is frozen takes its moving averages, and moves them again once it is not."""

    def trained(model: keras.Model) -> list[Any]:
        weights = []
        for trainable in (True, False, True):
            model.layers[0].trainable = trainable
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
            model.fit(X, Y, **STEPS)
            weights += model.get_weights()
        return weights

    case = CASES["batch normalization"]
    assert_close(trained(devicemap.parallelize(case.made(), devices)), trained(case.made()))


@pytest.mark.parametrize("use", ["call", "predict_on_batch"])
def test_threads_that_use_a_layer_while_a_step_is_traced(use: str, devices: list[str]) -> None:
    """The other thread enters the layer during the step, and leaves it later."""
    begun, traced, step_thread = threading.Event(), threading.Event(), threading.get_ident()

    class Waits(layers.Dense):
        def call(self, x: Any) -> Any:
            if threading.get_ident() != step_thread:
                begun.set()
                traced.wait(60)
            return super().call(x)

    shared = Waits(2)
    model, other = (sequential(shared) for _ in range(2))
    other.compile(jit_compile=False)
    call = other if use == "call" else devicemap.parallelize(other, devices).predict_on_batch

    def loss(y: Any, outputs: Any) -> Any:
        if "call" in vars(shared) and not running:  # while the step is traced
            running.append(pool.submit(call, X))
            begun.wait(1)  # it does not begin if its own step waits for this one
        return tf.reduce_mean((y - outputs) ** 2)

    running: list[Any] = []
    model.compile("sgd", loss, jit_compile=False)
    with ThreadPoolExecutor(1) as pool:
        devicemap.parallelize(model, devices).train_on_batch(X, Y)
        traced.set()
        running[0].result()
    assert all("call" not in vars(layer) for layer in (model, other, shared))


@pytest.mark.in_ci(1)
def test_a_step_is_traced_once(devices: list[str]) -> None:
    """Keras traces it twice, because its first trace creates the variables of the optimizer and of metrics."""
    traced: list[Any] = []

    class Optimizer(keras.optimizers.Adam):
        def apply(self, *arguments: Any) -> None:
            traced.append(arguments)
            super().apply(*arguments)

    model = keras.Sequential([keras.Input([6]), layers.Dense(2)])
    model.compile(Optimizer(), "mse", metrics=["accuracy"], jit_compile=False)
    devicemap.parallelize(model, devices).fit(X, Y, batch_size=11, epochs=2, verbose=0)
    assert len(traced) == 1


@pytest.mark.private("gradients that TensorFlow does not keep forever")
def test_a_model_takes_its_graphs_with_it(devices: list[str]) -> None:
    def graphs() -> int:
        gc.collect()
        gc.collect()
        return sum(type(each).__name__ == "FuncGraph" for each in gc.get_objects())

    before = graphs()
    devicemap.parallelize(CASES["batch normalization"].made(), devices).fit(X, Y, verbose=0)
    assert graphs() == before


@pytest.mark.nightly
def test_models_in_a_loop_retain_no_more_memory_than_without_devicemap() -> None:
    program = """
        import gc
        import sys
        import keras
        import numpy as np
        import devicemap

        devicemap.simulate_devices(4)

        def retained():
            model = keras.Sequential([keras.Input([32])])
            for _ in range(4):
                model.add(keras.layers.Dense(64, "relu"))
                model.add(keras.layers.BatchNormalization())
            model.compile("adam", "mse", jit_compile=False)
            if sys.argv[1] == "parallel":
                devicemap.parallelize(model)
            model.fit(np.ones([64, 32]), np.ones([64, 64]), batch_size=30, verbose=0)
            del model
            gc.collect()
            with open("/proc/self/statm") as statm:
                return int(statm.read().split()[1]) * 4096

        bytes = [retained() for _ in range(9)]
        print((bytes[-1] - bytes[3]) // 5)
        """
    (parallel,), (plain,) = (processes.run(program, kind) for kind in ("parallel", "plain"))
    assert int(parallel) <= 1.3 * int(plain)


def with_assertion(x: Any) -> Any:
    tf.debugging.assert_less(x, 99.0)
    return x


@pytest.mark.private("inlining the calls, whose ops are otherwise in no partitioned graph of the step")
@pytest.mark.in_ci(3)
@pytest.mark.parametrize(
    ("model", "products"),
    [
        (mlp, 5),
        (normalized, 6),
        (lambda: sequential(layers.Dense(8, "tanh"), layers.Lambda(with_assertion)), 5),
    ],
    ids=["", "batch normalization", "an assertion"],
)
def test_really_parallel(model: Any, products: int) -> None:
    workers = ["CPU:1", "CPU:2", "CPU:3"]
    made = devicemap.parallelize(Case(model).made(), workers)
    graphs = partitions(made.train_on_batch, X[:11], Y[:11])
    assert [placements(graphs, "MatMul")[worker] for worker in workers] == [products] * 3
    assert placements(graphs, "BiasAddGrad") == dict.fromkeys(workers, 2)
    # along the tree that brings values of variables to devices, and their gradients back
    assert {(edge.sender, edge.receiver) for edge in between_devices(graphs)} == {
        ("CPU:1", "CPU:3"),
        ("CPU:3", "CPU:1"),
    }
    # and on one device without or after parallelize
    for plain in (tf.function(made), made.detach().predict_on_batch):
        assert {*placements(partitions(plain, X[:11]), "MatMul")} == {"CPU:0"}
    assert "detach" not in vars(made)


@pytest.mark.private("inlining the calls, whose ops are otherwise in no partitioned graph of the step")
@pytest.mark.in_ci(2)
def test_xla_compiles_what_each_device_runs() -> None:
    made = devicemap.parallelize(Case(compile=lambda: {"jit_compile": True}).made(), ["CPU:1", "CPU:2"])
    graphs = partitions(made.train_on_batch, X[:11], Y[:11])
    compiled = Counter(node.device[-5:] for graph in graphs for node in graph.node if "_XlaMustCompile" in node.attr)
    assert compiled == {"CPU:1": 2, "CPU:2": 2}, "forwards and backwards"


@pytest.mark.private("inlining the calls, whose ops are otherwise in no partitioned graph of the step")
def test_losses_of_rows_are_computed_where_the_rows_are() -> None:
    """From the second step on: Keras builds losses and metrics in the first one."""
    model = mlp()
    model.compile("sgd", "mse", metrics=["mae"], jit_compile=False)
    devicemap.parallelize(model, ["CPU:1", "CPU:2"])
    model.train_on_batch(X[:11], Y[:11])
    graphs = partitions(model.train_on_batch, X[:11], Y[:11])
    assert placements(graphs, "Square") == placements(graphs, "Abs") == {"CPU:1": 1, "CPU:2": 1}


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        pytest.param(
            "batch normalization",
            {},
            "synchronized batch normalization",
            marks=pytest.mark.private("replacing inputs of ops"),
        ),
        pytest.param("masks, gradients of slices", {}, "a loop", marks=pytest.mark.nightly),
        ("momentum, clipnorm", {"recompute": True}, "recompute"),
        ("weights in recompute_grad", {}, "of another device"),
    ],
)
def test_a_warning_says_where_xla_does_not_compile(
    name: str, options: dict[str, Any], reason: str, devices: list[str]
) -> None:
    case = CASES[name]
    model = case.made()
    model.jit_compile = True
    rows = {key: values[:11] for key, values in case.data.items()}
    with pytest.warns(RuntimeWarning, match=f"jit_compile=True, .*is ignored for .*{reason}"):
        loss = devicemap.parallelize(model, devices, **options).train_on_batch(**rows)
    np.testing.assert_allclose(loss, case.eager().train_on_batch(**rows), rtol=1e-5)


class Compiled(layers.Dense):
    call = tf.function(layers.Dense.call, jit_compile=True)


@pytest.mark.in_ci(1)
def test_variables_in_a_function_that_xla_compiles_need_one_device() -> None:
    case = Case(lambda: sequential(Compiled(3)))
    loss = devicemap.parallelize(case.made(), ["CPU:0"]).train_on_batch(X, Y)
    np.testing.assert_allclose(loss, case.made().train_on_batch(X, Y), rtol=1e-6)
    with pytest.raises(FunctionError, match="remove jit_compile=True"):
        devicemap.parallelize(case.made(), ["CPU:0", "CPU:1"]).train_on_batch(X, Y)


@pytest.mark.in_ci(1)
def test_errors_of_layers_show_the_shapes_of_the_batch(devices: list[str]) -> None:
    model = devicemap.parallelize(mlp(), devices)
    with pytest.raises(ValueError, match=r"received input with shape \(11, 2\)"):
        model.predict_on_batch(X[:11, :2])
    fixed = devicemap.parallelize(sequential(layers.Lambda(lambda x: tf.reshape(x, [11, 6]))), devices)
    with pytest.raises(
        FunctionError,
        match=r"works for the rows of this batch, but not for 97 rows, .* layers that are not its attributes",
    ):
        fixed.predict_on_batch(X[:11])


def test_other_backends_of_keras_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(OptionError, match="KERAS_BACKEND=tensorflow"):
        devicemap.parallelize(model)


class Unbuilt(keras.Model):
    """Makes a layer when it is built; the others get their variables in the first call. It counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = layers.Dense(8, "tanh"), layers.Dense(1)
        self.calls = self.add_weight(initializer="zeros", trainable=False)

    def build(self, shape: Any) -> None:
        self.normalization = layers.BatchNormalization()

    def call(self, x: Any, training: bool = False) -> Any:
        self.calls.assign_add(1.0)
        return self.last(self.normalization(self.hidden(x), training=training))


@pytest.mark.parametrize("name", ["evaluate", "predict", "train_on_batch"])
@pytest.mark.parametrize("make", [lambda: keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(1)]), Unbuilt])
def test_the_first_call_builds_a_model(devices: list[str], make: Any, name: str) -> None:
    def called(parallel: bool) -> dict[str, Any]:
        keras.utils.set_random_seed(7)
        model = make()
        model.compile("sgd", "mse", jit_compile=False, run_eagerly=not parallel)
        if parallel:
            devicemap.parallelize(model, devices)
        first = getattr(model, name)(*((X,) if name == "predict" else (X, Y)))
        model.train_on_batch(X, Y)
        return {"first": first, "weights": model.get_weights()}

    assert_close(called(True), called(False))


@pytest.mark.filterwarnings("ignore:.* if other rows change. Each device sees some of the rows:RuntimeWarning")
def test_errors_of_layers_that_combine_rows_say_what_devices_see(devices: list[str]) -> None:
    edges, values = keras.Input([None]), keras.Input([6])
    model = keras.Model([edges, values], layers.Lambda(lambda pair: tf.matmul(*pair))([edges, values]))
    model.compile(loss="mse", jit_compile=False)
    square, rows = tf.TensorSpec([None, None]), tf.TensorSpec([None, 6])
    graphs = tf.data.Dataset.from_generator(
        lambda: (((np.eye(n), X[:n]), X[:n]) for n in (6, 5)), output_signature=((square, rows), rows)
    ).apply(tf.data.experimental.assert_cardinality(2))
    assert model.evaluate(graphs, verbose=0) == 0
    with pytest.raises(tf.errors.InvalidArgumentError, match="Matrix size-incompatible") as raised:
        devicemap.parallelize(model, devices).evaluate(graphs, verbose=0)
    assert re.search(r"Each device sees some of the rows.*model\.detach\(\)", raised.value.__notes__[0])


class Effect(layers.Layer):
    """Returns its input, and does something to a state in training."""

    def __init__(self, effect: Callable[[Any, Any], Any], state: Any) -> None:
        super().__init__()
        self.effect, self.state = effect, state

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.effect(self.state, x)
        return x


def weight() -> keras.Variable:
    return keras.Variable(0.0, trainable=False, name="count")


def adding_share() -> layers.Layer:
    layer = Effect(lambda _, x: layer.add_loss(1.0 / number_of_rows(x)), None)
    return layer


def number_of_rows(x: Any) -> Any:
    return keras.ops.cast(keras.ops.shape(x)[0], "float32")


@pytest.mark.in_ci(1)
def test_added_losses_in_float64(devices: list[str]) -> None:
    def weights(parallel: bool) -> Any:
        model = Case(lambda: sequential(layers.Dense(4), trainings.AddsLosses()), policy="float64").made()
        if parallel:
            devicemap.parallelize(model, devices, added_losses="mean")
        model.fit(X, Y, batch_size=34, verbose=0)
        return model.get_weights()

    keras.config.set_floatx("float64")  # of losses
    try:
        oracle.assert_close(weights(True), weights(False), rtol=1e-12, atol=1e-13)
    finally:
        keras.config.set_floatx("float32")


def functional(output: Callable[[Any], Any]) -> keras.Model:
    given = keras.Input([6])
    return keras.Model(given, [layers.BatchNormalization()(given), output(given)])


NO_ROWS = {
    "a table": layers.Lambda(lambda x: tf.ones([5, 6])),
    "a table of unknown size": layers.Lambda(lambda x: tf.boolean_mask(tf.ones([4, 6]), 4 * [True])),
    "products": lambda x: keras.ops.matmul(x, keras.ops.transpose(x)),
    "a scalar": keras.ops.mean,
}
INLINED = pytest.mark.private("inlining calls, so that failed checks do not cancel each other")


@pytest.mark.parametrize("batch_norm", ["synchronized", "local"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=[INLINED] * ("unknown" in name)) for name in NO_ROWS])
def test_outputs_that_are_no_rows_are_refused(name: str, batch_norm: Any, devices: list[str]) -> None:
    model = functional(NO_ROWS[name])
    model.compile("sgd", ["mse", "mse"], jit_compile=False)
    devicemap.parallelize(model, devices, batch_norm=batch_norm)
    before, rows = model.get_weights(), X[: 5 * len(devices)]
    for call in (model.predict, lambda rows, verbose: model.fit(rows, [rows, rows], verbose=verbose)):
        with pytest.raises((FunctionError, tf.errors.InvalidArgumentError), match="one row for each row"):
            call(rows, verbose=0)
    np.testing.assert_equal(model.get_weights(), before)


def test_no_rows(devices: list[str]) -> None:
    case = CASES["batch normalization"]

    def found(model: keras.Model) -> Any:
        batches = [model.train_on_batch(X[:n], Y[:n]) for n in (11, 1, 0)] + [model.test_on_batch(X[:0], Y[:0])]
        return {"batches": batches, "empty": model.predict_on_batch(X[:0]), "weights": model.get_weights()}

    got, wanted = found(devicemap.parallelize(case.made(), devices)), found(case.eager())
    if np.isnan(wanted["batches"]).any():  # Keras 3.12 divides by the number of rows
        for results in (got, wanted):
            results["batches"] = [np.nan_to_num(loss) for loss in results["batches"]]
    assert_close(got, wanted)


def test_a_step_knows_the_rows_of_a_batch(devices: list[str]) -> None:
    """Also where outputs have one number, for which Keras weights the means of losses by the static number of rows."""
    shapes = []
    given = keras.Input([6])
    model = keras.Model(given, [layers.Dense(1)(given), layers.Dense(3)(given)])
    model.train_step = lambda data: shapes.extend(each.shape for each in model(data[0])) or {}
    model.compile("sgd", jit_compile=False)
    devicemap.parallelize(model, devices).train_on_batch(X[:10])
    assert shapes[-2:] == [[10, 1], [10, 3]]


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=str)
def test_added_losses_are_not_needed_to_predict(options: dict[str, Any], devices: list[str]) -> None:
    model = Case(lambda: sequential(trainings.AddsLosses(), layers.ReLU(activity_regularizer="l2"))).made()
    alone = model(X)
    devicemap.parallelize(model, devices, **options)
    before = model.get_weights()
    for _ in range(2):
        np.testing.assert_allclose(model.predict(X, verbose=0), alone, rtol=1e-5, atol=1e-6)
        for call in (model.evaluate, model.fit):
            with pytest.raises(FunctionError, match="added_losses="):
                call(X, Y, verbose=0)
    np.testing.assert_equal(model.get_weights(), before)


def reduced(value: Any) -> Any:
    return tf.distribute.get_replica_context().all_reduce("SUM", value)


def looked_up_twice(x: Any, table: Any) -> Any:
    """Looks up rows of a table for each row, and the same one for all rows."""
    table = tf.convert_to_tensor(table)
    return x * tf.gather(table, tf.argmax(x, 1)) + tf.gather(table, [0])


class Centered(layers.BatchNormalization):
    """Computes the mean itself."""

    def call(self, x: Any, training: bool = False, mask: Any = None) -> Any:
        if training:
            self.moving_mean.assign(tf.reduce_mean(x, 0))
        return x - self.moving_mean


def noisy() -> layers.Layer:
    return layers.Lambda(lambda x: x + tf.random.normal(tf.shape(x)), name="noisy")


def built_norm() -> layers.Layer:
    layer = layers.BatchNormalization()
    layer.build([None, 6])
    return layer


def draw_twice(dropout: layers.Layer, x: Any) -> None:
    tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, dropout(x, training=True)), [0, x])


def normalize_once(norm: layers.Layer, x: Any) -> None:
    """Normalize rows in the first call in each graph."""
    graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, "normalized"):
        graph.normalized = True
        norm(x, training=True)


REFUSED: dict[str, tuple[Callable[[], layers.Layer], dict[str, Any], str]] = {
    # a layer, options, what the error says
    "a value of rows": (lambda: Effect(lambda count, x: count.assign_add(tf.reduce_sum(x)), weight()), {}, "count"),
    "a number of rows": (
        lambda: Effect(lambda count, x: count.assign_add(number_of_rows(x)), weight()), {}, "a new value"),
    "a share of rows": (adding_share, {}, "added_losses="),
    "a loss for each row": (
        lambda: trainings.AddsLosses("square"), {"added_losses": "sum"}, "adds a loss with a value for each row"),
    "a metric": (
        lambda: Effect(lambda mean, x: mean.update_state(x), keras.metrics.Mean()), {}, "none of the model's variables"),
    "a variable": (
        lambda: Effect(lambda mean, x: mean.assign(mean + tf.reduce_mean(x)), tf.Variable(0.0)), {}, "add_weight"),
    "a tally": (lambda: Effect(lambda count, _: count.assign_add(1.0), tf.Variable(0.0)), {}, "add_weight"),
    "a replica": (lambda: layers.Lambda(lambda x: x - reduced(tf.reduce_sum(x, 0))), {}, "all_reduce of tf.distribute"),
    "a mean of a layer's own": (Centered, {}, "needs batch_norm='local'"),
    "mixed lookups": (lambda: Applies(looked_up_twice, [6, 6]), {}, "looked up in several ways"),
    "a lookup in a ConcreteFunction": (
        lambda: trainings.Concrete(lambda x: [2]), {}, "slices of each device.* ConcreteFunction"),
    "a moving average in a branch": (
        lambda: Effect(lambda norm, x: tf.cond(x[0, 0] > 9, lambda: norm(x, training=True), lambda: x), built_norm()), {},
        "moving_mean .* branch"),
    "a moving average in a tf.function": (
        lambda: Effect(lambda norm, x: tf.function(norm, autograph=False)(x, training=True), built_norm()),
        {"batch_norm": "local"}, r"moving_mean gets a new value .* tf\.function inside a layer"),
    "a normalization on one device": (
        lambda: Effect(normalize_once, built_norm()), {}, "more often on one device"),
    "draws in a loop": (
        lambda: Effect(draw_twice, layers.Dropout(0.5)), {}, "the same numbers in each step"),
    "draws that run again": (noisy, {"recompute": True}, r"keras\.random"),
    "draws of a layer that runs again": (noisy, {"recompute": ["noisy"]}, r"keras\.random"),
    "a trained weight that changes again": (
        lambda: Applies(trainings.decaying), {"recompute": True}, "weight gets a new value"),
}  # fmt: skip


@pytest.mark.parametrize("norm", [[], [layers.BatchNormalization]], ids=["", "batch normalization"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_devices_cannot_do_apart_is_refused(name: str, norm: Any, devices: list[str]) -> None:
    layer, options, word = REFUSED[name]
    model = Case(lambda: sequential(layer(), *(each() for each in norm))).made()
    devicemap.parallelize(model, devices, **options)
    before = model.get_weights()
    with pytest.raises(FunctionError, match=word) as raised:
        model.train_on_batch(X, Y)
    assert "in user code" not in str(raised.value)  # a traceback of devicemap
    np.testing.assert_equal(model.get_weights(), before)
    model.detach().run_eagerly = True  # which traces nothing
    assert np.all(np.isfinite(model.evaluate(X, Y, verbose=0)))


def test_batches_of_a_generator(devices: list[str]) -> None:
    def losses(model: keras.Model) -> Any:
        batches = ((X[i : i + 11], Y[i : i + 11]) for i in (0, 11, 22, 33))
        return model.fit(batches, epochs=2, steps_per_epoch=2, shuffle=False, verbose=0).history["loss"]

    case = CASES["momentum, clipnorm"]
    assert_close(losses(devicemap.parallelize(case.made(), devices)), losses(case.eager()))
