"""phasespace: decays into n bodies, of a mass, a boost and a seed per row."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from clients.agreement import Client, check_results
from clients.data import normal, seeds
from clients.known import known
from clients.packages import imported

phasespace = imported("phasespace")
MASS, PION, KAON = 5279.0, 139.6, 493.7


class OfTheRow(tf.random.Generator):
    """What phasespace takes for a generator: its draws follow from a seed `[2]` alone, one after another."""

    def __init__(self, seed: Any) -> None:
        self._row_seed, self._draws = seed, 0

    def uniform(
        self, shape: Any, minval: Any = 0, maxval: Any = None, dtype: Any = tf.float32, name: Any = None
    ) -> Any:
        self._draws += 1
        seed = tf.random.fold_in(self._row_seed, self._draws)
        return tf.random.stateless_uniform(shape, seed, minval, maxval, dtype)


def _three_bodies(seed: Any) -> Any:
    weight, particles = phasespace.nbody_decay(MASS, [PION, PION, KAON]).generate(1, seed=OfTheRow(seed))
    return weight[0], {name: momentum[0] for name, momentum in particles.items()}


def _boosted(seed: Any, momentum: Any) -> Any:
    boost = tf.concat([momentum, tf.sqrt(tf.reduce_sum(momentum**2, keepdims=True) + MASS**2)], 0)
    weight, particles = phasespace.nbody_decay(MASS, [PION, KAON]).generate(
        1, boost_to=boost[None], seed=OfTheRow(seed), normalize_weights=True
    )
    return weight[0], particles["p_0"][0]


def _tree(seed: Any) -> Any:
    """A decay of what decays."""
    kaon, pion = phasespace.GenParticle("K+", KAON), phasespace.GenParticle("pi-", PION)
    excited = phasespace.GenParticle("K*", 895.8).set_children(kaon, pion)
    top = phasespace.GenParticle("B0", MASS).set_children(excited, phasespace.GenParticle("gamma", 0.0))
    weight, particles = top.generate(4, seed=OfTheRow(seed))
    return weight, particles["K+"]


CLOSE = {"rtol": 1e-6, "atol": 1e-4}
"""Momenta are in MeV, thousands of them."""
CLIENTS = {
    "three bodies": Client(_three_bodies, seeds(), tolerances=CLOSE),
    "boosted": Client(_boosted, (seeds(), 100 * normal(3, dtype=tf.float64)), tolerances=CLOSE),
    "tree": Client(_tree, seeds(), tolerances=CLOSE),
}


@pytest.mark.parametrize("vectorize", ["auto", False])
@pytest.mark.parametrize("name", CLIENTS)
def test_results(name: str, vectorize: Any, request: pytest.FixtureRequest) -> None:
    known(request)
    check_results(CLIENTS[name], vectorize=vectorize)
