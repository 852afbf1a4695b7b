"""Statistics: one sample, one set of parameters, or one prediction and its target in; densities and losses out."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from compile.corpus.samples import integers, normal, shared, uniform

DRAWS = shared(200)
CENTRES = shared(4, 3)
HALF_LOG_TAU = 0.5 * float(np.log(2 * np.pi))


def standardised(sample: Any) -> Any:
    mean, variance = tf.nn.moments(sample, axes=[0])
    return (sample - mean) / tf.sqrt(variance + 1e-6)


def histogram_entropy(sample: Any) -> Any:
    counts = tf.histogram_fixed_width(sample, [-2.0, 2.0], nbins=8)
    shares = tf.cast(counts, tf.float32) / 20.0
    return counts, -tf.reduce_sum(tf.math.xlogy(shares, shares))


def means_of_bins(sample: Any) -> Any:
    bins = tf.searchsorted([-1.0, 0.0, 1.0], sample)
    return bins, tf.math.unsorted_segment_mean(sample, bins, 4)


def black_scholes_delta(spot: Any, volatility: Any) -> Any:
    cdf = lambda x: 0.5 * (1.0 + tf.math.erf(x / np.float32(np.sqrt(2.0))))
    with tf.GradientTape() as tape:
        tape.watch(spot)
        d1 = tf.math.log(spot) / volatility + volatility / 2.0
        price = spot * cdf(d1) - cdf(d1 - volatility)
    return price, tape.gradient(price, spot)


def mixture(x: Any) -> Any:
    log_weights = tf.nn.log_softmax(tf.constant([0.1, 0.2, 0.3, 0.4]))
    log_density = -0.5 * tf.reduce_sum((x - CENTRES) ** 2, axis=-1) - 3 * HALF_LOG_TAU
    return tf.reduce_logsumexp(log_weights + log_density)


def beta(x: Any) -> Any:
    a, b = 1.0 + 2.0 * x[0], 2.0 + x[1]
    return tf.math.xlogy(a - 1.0, x[2]) + tf.math.xlog1py(b - 1.0, -x[2]) - tf.math.lbeta(tf.stack([a, b]))


def leapfrog(x: Any) -> Any:
    """Two steps of Hamiltonian Monte Carlo."""
    momentum = DRAWS[:3]
    for _ in range(2):
        with tf.GradientTape() as tape:
            tape.watch(x)
            density = mixture(x)
        momentum += 0.1 * tape.gradient(density, x)
        x += 0.1 * momentum
    return x, density


def discounted_gain(scores: Any, relevance: Any) -> Any:
    order = tf.argsort(scores, direction="DESCENDING", stable=True)
    discount = 1.0 / tf.math.log(tf.range(8.0) + 2.0)
    return tf.reduce_sum((2.0 ** tf.gather(relevance, order) - 1.0) * discount)


SAMPLES, POINT, LOGITS = normal(20), normal(3), normal(6)
OPTIONS = (uniform(low=0.8, high=1.2), uniform(low=0.1, high=0.4))
FUNCTIONS = {
    "standardised columns": (standardised, normal(8, 3)),
    "trimmed mean": (lambda s: tf.reduce_mean(tf.sort(s, direction="DESCENDING")[2:-2]), SAMPLES),
    "ranks": (lambda s: (tf.argsort(tf.argsort(s)), tf.argsort(s, direction="DESCENDING")[:3]), SAMPLES),
    "histogram and entropy": (histogram_entropy, SAMPLES),
    "empirical distribution": (lambda s: tf.searchsorted(tf.sort(s), tf.linspace(-2.0, 2.0, 9), "right") / 20, SAMPLES),
    "means of bins": (means_of_bins, SAMPLES),
    "Black-Scholes with delta": (black_scholes_delta, OPTIONS),
    "Gaussian mixture": (mixture, POINT),
    "beta density in float64": (beta, uniform(3, low=0.1, high=0.9, dtype=tf.float64)),
    "incomplete beta": (lambda x: tf.math.betainc(1.0 + x[0], 2.0 + x[1], x[2]), uniform(3, low=0.1, high=0.9)),
    "von Mises": (lambda x: x * tf.cos(0.5) - tf.math.log(tf.math.bessel_i0e(x)) - x, uniform(low=0.5, high=5.0)),
    "Hamiltonian Monte Carlo": (leapfrog, POINT),
    "clipped by norm": (lambda x: tf.clip_by_norm(x, 1.0), POINT),
    "clipped by global norm": (lambda x: tf.clip_by_global_norm([x, x * 2.0], 0.5)[0][1], POINT),
    "Huber loss": (lambda p, t: tf.keras.losses.huber(t, p), (LOGITS, LOGITS * 0.2)),
    "categorical cross-entropy": (tf.nn.softmax_cross_entropy_with_logits, (tf.nn.softmax(LOGITS), LOGITS * 2.0)),
    "sparse cross-entropy": (tf.nn.sparse_softmax_cross_entropy_with_logits, (integers(high=6), LOGITS)),
    "among the best": (lambda s: tf.math.in_top_k([2], s[None], 3)[0], normal(8)),
    "inverse permutation": (lambda s: tf.math.invert_permutation(tf.argsort(s)), SAMPLES),
    "discounted gain": (discounted_gain, (normal(8), uniform(8, high=3.0, seed=1))),
}
