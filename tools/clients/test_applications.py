"""keras.applications with random weights, on batches and image by image."""

from __future__ import annotations

import functools
from typing import Any

import keras
import pytest
import tensorflow as tf
from clients.agreement import Client, check_gradients, check_results
from clients.data import uniform
from clients.known import known

IMAGES = uniform(0.0, 255.0, 32, 32, 3)
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


@functools.cache
def _model(name: str) -> Any:
    keras.utils.set_random_seed(0)
    options = {"input_shape": (32, 32, 3), "weights": None, "classes": 5}
    if name == "MobileNetV2":
        options["alpha"] = 0.35
    return getattr(keras.applications, name)(**options)


def client(name: str, batched: bool) -> Client:
    model = _model(name)
    if batched:
        return Client(lambda b: model(b, training=False), IMAGES, batched=True, tolerances=CLOSE, empty=False)
    return Client(lambda row: model(row[None], training=False)[0], IMAGES, tolerances=CLOSE)


names = pytest.mark.parametrize("name", ["MobileNetV2", "EfficientNetB0", "ResNet50"])
batches = pytest.mark.parametrize("batched", [True, False], ids=["batched", "per row"])


@names
@batches
def test_results(name: str, batched: bool, request: pytest.FixtureRequest) -> None:
    known(request)
    check_results(client(name, batched))


@pytest.mark.parametrize("name", ["MobileNetV2"])
@batches
def test_gradients(name: str, batched: bool, request: pytest.FixtureRequest) -> None:
    known(request)
    check_gradients(client(name, batched))


def test_predict_agrees() -> None:
    """With what Keras itself predicts, too."""
    batches = client("MobileNetV2", True)
    predicted = _model("MobileNetV2").predict(IMAGES, verbose=0)
    batches.assert_same(batches.mapper(devices=["CPU:0", "CPU:4"])(IMAGES), tf.constant(predicted))
