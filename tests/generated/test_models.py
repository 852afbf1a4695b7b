"""Random Keras models train for two steps on several devices, and as pipelines, as they do on one device."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st
from models import RandomModel, models

import devicemap
from devicemap.errors import FunctionError, OptionError

pytestmark = [
    pytest.mark.nightly,  # tests/laws/test_training.py and test_split.py have examples that were chosen
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore:.*batch normalization in training needs the whole batch:RuntimeWarning"),
]
MANY = settings(max_examples=150, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate], print_blob=True)
DEVICES = [f"CPU:{i}" for i in range(1, 8)]
HALVED = {"accumulate": 2}, {"recompute": True}


def _check(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in wanted:
        tf.nest.assert_same_structure(found[name], wanted[name])
        for one, other in zip(tf.nest.flatten(found[name]), tf.nest.flatten(wanted[name]), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5, err_msg=name)


def _trained(model: RandomModel, of: Any) -> dict[str, Any]:
    return model.fit(of) | {"weights": of.get_weights(), "slots": [slot.numpy() for slot in of.optimizer.variables]}


def _on_devices(model: RandomModel, count: int, options: dict[str, Any]) -> dict[str, Any]:
    return _trained(model, devicemap.parallelize(model.made(), DEVICES[:count], **options))


def _as_pipeline(model: RandomModel, count: int, options: dict[str, Any]) -> dict[str, Any]:
    whole = model.made()
    stages = devicemap.split(whole, count)
    pipeline = devicemap.Pipeline(stages, DEVICES[: count * options.get("replicas", 1)], **options).as_model()
    model.compile(pipeline)
    found = model.fit(pipeline)
    stages.copy_weights_to(whole)
    return found | {"weights": whole.get_weights()}


def _compare(train: Any, model: RandomModel, count: int, options: dict[str, Any]) -> None:
    wanted = _trained(model, model.made())
    try:
        found = train(model, count, options)
    except (FunctionError, OptionError) as error:
        event(f"refused: {re.sub('[0-9]+', 'N', str(error))[:80]}")
        return
    event("trained")
    _check(found, {name: wanted[name] for name in found})


PIPELINES = st.fixed_dictionaries(
    {"microbatches": st.integers(1, 4), "schedule": st.sampled_from(["1f1b", "gpipe"])},
    optional={"replicas": st.just(2)},
)
MODELS = {"model": models(), "count": st.integers(2, 3)}


def test_on_several_devices() -> None:
    MANY(given(train=st.just(_on_devices), **MODELS, options=st.sampled_from([{}, *HALVED]))(_compare))()


def test_as_pipelines() -> None:
    MANY(given(train=st.just(_as_pipeline), **MODELS, options=PIPELINES)(_compare))()
