"""The stages of a split Keras model have its layers, weights and losses, are saved as the model, and leave it as it was."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from oracle import assert_close
from pipelined import Drawing, Piped, chain, dense, x

from devicemap import Pipeline, split
from devicemap.errors import OptionError

pytestmark = pytest.mark.filterwarnings("ignore:a Pipeline called under a tape")

DEVICE_COUNTS = (3, 4)


def piped(model: Any, devices: list[str], count: int = 3) -> Piped:
    stages = split(model, count, "bytes", devices)
    return Piped(stages, Pipeline(stages, devices, microbatches=3))


def fitted(model: Any, rows: Any, eager: bool = False) -> list[float]:
    """The losses of steps of 4 and 3 rows."""
    if not model.compiled:
        model.compile("adam", "mse", run_eagerly=eager, jit_compile=False)
    return model.fit(rows, rows, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]


def test_a_pipeline_in_a_layer_of_mixed_precision(devices: list[str]) -> None:
    model = chain(dense(), dense(), dense(), dtype="float16")
    own = piped(model, devices)
    own.dtype_policy = "mixed_float16"
    losses = fitted(own, x.astype("float16"))
    assert_close(losses, fitted(model, x.astype("float16")), 2e-3, 1e-4)
    assert {variable.dtype for variable in own.optimizer.variables} == {"int64", "float32"}


@pytest.mark.parametrize("by", ["time", "bytes"])
def test_split_leaves_variables_losses_and_the_random_state_as_they_are(by: Any, devices: list[str]) -> None:
    noise = layers.Lambda(lambda rows: rows + tf.random.normal(tf.shape(rows)))
    options = {"kernel_regularizer": "l2", "kernel_constraint": "max_norm", "activity_regularizer": "l2"}
    model = chain(dense(**options), layers.ActivityRegularization(l1=0.1), noise, Drawing())
    model(x)
    before = [each.numpy() for each in (*model.variables, *model.losses)]
    state = random.getstate()  # from which Keras draws the order of a PyDataset
    assert len(split(model, 2, by, devices)) == 2
    assert random.getstate() == state
    np.testing.assert_equal([each.numpy() for each in (*model.variables, *model.losses)], before)


def test_save_load_and_continue_with_two_pipelines(devices: list[str], tmp_path: Path) -> None:
    """Pipelines over one model are independent; the model keeps its traces and its optimizer."""
    model, whole = (chain(dense(), layers.Dropout(0.0), dense(8), dense()) for _ in range(2))
    whole.set_weights(model.get_weights())
    fitted(whole, x, eager=True)
    one, other = (piped(model, devices) for _ in range(2))
    fitted(one, x)
    fitted(model, x)
    one.save_weights(tmp_path / "one.weights.h5")
    other.load_weights(tmp_path / "one.weights.h5")
    for each in (one, other, model):
        assert_close(each.predict(x, verbose=0), whole.predict(x, verbose=0))
    wanted = fitted(whole, x)
    assert_close(fitted(one, x), wanted)
    assert_close(fitted(model, x), wanted)
    assert_close(tf.function(one)(x, training=True), whole.predict(x, verbose=0))


def test_a_loop_with_an_optimizer(devices: list[str]) -> None:
    given, layer = keras.Input([4]), dense()
    model = keras.Model(given, dense()(layer(dense()(layer(given)))))  # tied
    stages = split(model, 3, "bytes", devices)
    homes = [device for stage in stages for device in {variable.value.device for variable in stage.variables}]
    assert len(homes) == len({*homes}) > 1

    def trained(call: Any, variables: Any) -> list[float]:
        own = keras.optimizers.AdamW()

        @tf.function
        def step(rows: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(call(rows) ** 2)
            own.apply(tape.gradient(loss, variables), variables)
            return loss

        own.build(variables)
        return [float(step(x)) for _ in range(3)]

    variables = [variable for stage in stages for variable in stage.trainable_variables]
    assert len(variables) == len(model.trainable_variables)
    learned = trained(Pipeline(stages, devices, microbatches=3), variables)
    assert_close(learned, trained(model, model.trainable_variables))


def test_copies_cast_inputs_as_their_layers_do(devices: list[str]) -> None:
    """Rows are infinite in float16, to which the copy of a layer without autocast would cast them."""
    scaled = layers.Lambda(lambda rows: rows / 1e5, (4,), dtype="mixed_float16", autocast=False)
    given = keras.Input([4])
    model = keras.Model(given, dense(dtype="float32")(scaled(given)))
    assert_close(Pipeline(split(model, 2, "bytes", devices), devices)(1e5 * x), model(1e5 * x))


def test_grouped_convolutions_are_split() -> None:
    """Keras compiles them with XLA, which reads no variables of other devices. Emulated GPUs have no XLA."""
    cpus = [f"CPU:{i}" for i in range(3)]
    with tf.device(cpus[0]):
        model = chain(layers.Reshape([1, 2, 2]), *(layers.Conv2D(2, 1, groups=2) for _ in cpus), layers.Flatten())
        assert_close(Pipeline(split(model, 3, "bytes", cpus), cpus, microbatches=3)(x), model(x))


def test_layers_keep_their_order(devices: list[str]) -> None:
    given = keras.Input([4])
    hidden = dense()(given)
    model = keras.Model(given, [dense()(hidden), dense()(hidden)])
    own = Pipeline(split(model, 2, "bytes", devices), devices).as_model()
    model.set_weights([tf.random.normal(weight.shape) for weight in model.get_weights()])
    own.set_weights(model.get_weights())
    assert_close([*own(x)], [*model(x)])


def test_weights_are_copied_to_all_layers_or_none(devices: list[str]) -> None:
    stages = split(chain(dense(), dense()), 2, "bytes", devices)
    other = chain(dense(), dense(3))
    before = other.get_weights()
    with pytest.raises(OptionError, match="has other layers"):
        stages.copy_weights_to(other)
    np.testing.assert_equal(other.get_weights(), before)


@pytest.mark.private("knowing that XLA compiles")
def test_xla_is_refused(devices: list[str]) -> None:
    own = piped(chain(dense(), dense()), devices, 2)
    own.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(OptionError, match="jit_compile=False"):
        own.train_on_batch(x, x)
