"""Small models of KerasHub with random weights: trained on several devices, and split into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from clients.packages import imported

import devicemap
from devicemap.errors import OptionError

hub = imported("keras_hub").models

TOKENS = np.arange(22 * 8, dtype="int32").reshape(22, 8) * 7 % 49 + 1
MASK = np.where(np.arange(22)[:, None] % 3 + np.arange(8) < 8, 1, 0).astype("int32")
TEXT = {"token_ids": TOKENS, "padding_mask": MASK}
SEGMENTS = TEXT | {"segment_ids": TOKENS % 2}
PAIRS = {f"{part}_{name}": values for part in ("encoder", "decoder") for name, values in TEXT.items()}
IMAGES = np.random.default_rng(0).normal(size=[22, 32, 32, 3]).astype("f")

LANGUAGE = {"vocabulary_size": 50, "num_layers": 2, "hidden_dim": 16, "intermediate_dim": 32}
ENCODER = LANGUAGE | {"num_heads": 2, "dropout": 0.0}
LONGEST = ENCODER | {"max_sequence_length": 12}
DECODER = LANGUAGE | {"num_query_heads": 4, "num_key_value_heads": 2}
VISION = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "image_shape": (32, 32, 3)}
ALBERT = {"vocabulary_size": 50, "num_groups": 1, "num_inner_repetitions": 2, "embedding_dim": 8}
STAGES = {"stackwise_num_filters": [4, 8], "image_shape": (32, 32, 3)}

MODELS: dict[str, tuple[dict[str, Any], Any]] = {
    "Albert": (LONGEST | ALBERT, SEGMENTS),
    "Bart": (LONGEST, PAIRS),
    "Bert": (LONGEST, SEGMENTS),
    "Bloom": (ENCODER, TEXT),
    "DebertaV3": (LONGEST | {"bucket_size": 4}, TEXT),
    "DistilBert": (LONGEST, TEXT),
    "GPT2": (LONGEST, TEXT),
    "GPTNeoX": (LONGEST, TEXT),
    "Gemma": (DECODER | {"head_dim": 4}, TEXT),
    "Llama": (DECODER, TEXT),
    "Mistral": (DECODER | {"sliding_window": 4}, TEXT),
    "OPT": (LONGEST, TEXT),
    "Phi3": (DECODER, TEXT),
    "Qwen": (DECODER, TEXT),
    "Qwen3": (DECODER | {"head_dim": 4}, TEXT),
    "Roberta": (LONGEST, TEXT),
    "T5": (ENCODER, PAIRS),
    "DenseNet": (
        {"stackwise_num_repeats": [2, 2], "compression_ratio": 0.5, "growth_rate": 4, "image_shape": (32, 32, 3)},
        IMAGES,
    ),
    "VGG": (STAGES | {"stackwise_num_repeats": [1, 1]}, IMAGES),
    "ViT": (VISION | {"patch_size": 8, "mlp_dim": 32, "dropout_rate": 0.0, "attention_dropout": 0.0}, IMAGES),
}
"""The options of a backbone, and rows."""

WITHOUT_CONFIG = {"GPTNeoX", "Llama", "Qwen3", "ViT"}
"""Models with a layer that `from_config` cannot make of its `get_config`, with KerasHub 0.32."""


def _made(name: str) -> Any:
    keras.utils.set_random_seed(0)
    backbone = getattr(hub, f"{name}Backbone")(**MODELS[name][0])
    output = backbone.output
    if isinstance(output, dict):
        output = output.get("sequence_output", output.get("decoder_sequence_output"))
    pooling = keras.layers.GlobalAveragePooling1D() if len(output.shape) == 3 else keras.layers.GlobalAveragePooling2D()
    return keras.Model(backbone.input, keras.layers.Dense(3)(pooling(output)))


def _trained(model: Any, rows: Any) -> tuple[Any, Any]:
    """The losses of steps of 11 rows, and predictions."""
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
    targets = IMAGES[:, 0, :3, 0]
    losses = model.fit(rows, targets, batch_size=11, epochs=2, shuffle=False, verbose=0).history["loss"]
    return losses, model.predict(rows, verbose=0)


def _check(name: str, changed: Callable[[Any], Any]) -> None:
    rows = MODELS[name][1]
    for got, wanted in zip(_trained(changed(_made(name)), rows), _trained(_made(name), rows)):
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=3e-4)


@pytest.mark.parametrize("name", MODELS)
def test_parallelized(name: str) -> None:
    _check(name, lambda model: devicemap.parallelize(model, ["CPU:0", "CPU:2", "CPU:5"]))


@pytest.mark.parametrize("name", MODELS)
def test_split(name: str) -> None:
    devices = ["CPU:1", "CPU:2"]
    if name in WITHOUT_CONFIG:
        with pytest.raises(OptionError, match="cannot be copied to its stage by get_config"):
            devicemap.split(_made(name), 2, "bytes", devices)
        return
    _check(name, lambda model: devicemap.Pipeline(devicemap.split(model, 2, "bytes", devices), devices).as_model())
