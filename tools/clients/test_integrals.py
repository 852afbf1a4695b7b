"""VegasFlow: integrands over events, by themselves and inside its integrators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from clients.agreement import ALL, Client, check_gradients, check_results
from clients.data import uniform
from clients.known import known
from clients.packages import imported

import devicemap

vegasflow = imported("vegasflow")
utils = imported("vegasflow.utils")
vflow = imported("vegasflow.vflow")
EVENTS = uniform(0.0, 1.0, 3, dtype=tf.float64)
GRID = (
    tf.cumsum(tf.ones([3, vegasflow.configflow.BINS_MAX + 1], tf.float64), 1, exclusive=True)
    / vegasflow.configflow.BINS_MAX
)


def gaussian(events: Any, **_: Any) -> Any:
    """The integrand of VegasFlow's own examples."""
    square = tf.reduce_sum(tf.square((events - 0.5) / 0.1), axis=-1)
    return tf.exp(-square / 2) / (0.1 * np.sqrt(2 * np.pi)) ** 3


CLIENTS = {
    "integrand, batched": Client(gaussian, EVENTS, batched=True),
    "integrand, per event": Client(gaussian, EVENTS),
    "importance sampling": Client(lambda b: vflow._generate_random_array(b * 0.99, GRID), EVENTS, batched=True),
}


@pytest.mark.parametrize("name", CLIENTS)
def test_results(name: str, request: pytest.FixtureRequest) -> None:
    known(request)
    check_results(CLIENTS[name])


@pytest.mark.parametrize("name", ["integrand, batched", "integrand, per event"])
def test_gradients(name: str, request: pytest.FixtureRequest) -> None:
    known(request)
    check_gradients(CLIENTS[name])


@pytest.mark.parametrize("integrator", ["VegasFlow", "VegasFlowPlus", "PlainFlow"])
@pytest.mark.parametrize("batched", [True, False])
def test_integrators(integrator: str, batched: bool, request: pytest.FixtureRequest) -> None:
    """An integrand that is mapped over devices, in VegasFlow's own graph, gives the integral that it gives without."""
    known(request)

    def integral(integrand: Any) -> Any:
        flow = getattr(vegasflow, integrator)(3, 500, verbose=False)
        flow.set_seed(4)
        flow.compile(integrand)
        return np.asarray(flow.run_integration(2, log_time=False), np.float64)

    mapper = devicemap.DeviceMap(gaussian, devices=ALL, batched=batched)
    np.testing.assert_allclose(integral(lambda x, **_: mapper(x)), integral(gaussian), rtol=1e-6)
