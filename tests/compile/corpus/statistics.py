"""Statistics: one sample, one set of parameters or one pair of prediction and target in; densities, losses, resampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from compile.corpus.samples import integers, normal, shared, symmetric, uniform

DRAWS = shared(200)
PICKED = tf.constant(np.random.default_rng(0).integers(0, 20, [30, 20]), tf.int32)
CENTRES = shared(4, 3)
HALF_LOG_TAU = 0.5 * float(np.log(2 * np.pi))


def standardised(sample: Any) -> Any:
    mean, variance = tf.nn.moments(sample, axes=[0])
    return (sample - mean) / tf.sqrt(variance + 1e-6)


def skewness_and_kurtosis(sample: Any) -> Any:
    centred = sample - tf.reduce_mean(sample)
    deviation = tf.math.reduce_std(sample)
    return tf.reduce_mean(centred**3) / deviation**3, tf.reduce_mean(centred**4) / deviation**4 - 3.0


def covariance(points: Any) -> Any:
    centred = points - tf.reduce_mean(points, axis=0, keepdims=True)
    matrix = tf.matmul(centred, centred, transpose_a=True) / tf.cast(tf.shape(points)[0] - 1, tf.float32)
    scale = tf.sqrt(tf.linalg.diag_part(matrix))
    return matrix / tf.tensordot(scale, scale, 0)


def quantiles(sample: Any) -> Any:
    ordered = tf.sort(sample)
    place = tf.constant([0.05, 0.25, 0.5, 0.75, 0.95]) * 19.0
    low = tf.cast(place, tf.int32)
    return ordered[10], tf.gather(ordered, low) + (place - tf.floor(place)) * (
        tf.gather(ordered, low + 1) - tf.gather(ordered, low)
    )


def trimmed_mean(sample: Any) -> Any:
    return tf.reduce_mean(tf.sort(sample, direction="DESCENDING")[2:-2])


def ranks(sample: Any) -> Any:
    return tf.argsort(tf.argsort(sample)), tf.argsort(sample, direction="DESCENDING")[:3]


def histogram_entropy(sample: Any) -> Any:
    counts = tf.histogram_fixed_width(sample, [-2.0, 2.0], nbins=8)
    shares = tf.cast(counts, tf.float32) / 20.0
    return counts, -tf.reduce_sum(tf.math.xlogy(shares, shares))


def empirical_distribution(sample: Any) -> Any:
    places = tf.linspace(-2.0, 2.0, 9)
    return tf.searchsorted(tf.sort(sample), places, side="right") / 20


def binned(sample: Any) -> Any:
    bins = tf.searchsorted([-1.0, 0.0, 1.0], sample)
    return bins, tf.math.unsorted_segment_mean(sample, bins, 4)


def bootstrap(sample: Any) -> Any:
    """A 90 % interval of the mean, resampled in the same way for all rows."""
    means = tf.sort(tf.reduce_mean(tf.gather(sample, PICKED), axis=1))
    return tf.stack([means[1], means[28]])


def kernel_density(sample: Any) -> Any:
    width = 1.06 * tf.math.reduce_std(sample) * 20**-0.2
    grid = tf.linspace(-3.0, 3.0, 16)
    return tf.reduce_mean(tf.exp(-0.5 * ((grid[:, None] - sample[None]) / width) ** 2), axis=1) / width


def option_price(spot: Any, volatility: Any) -> Any:
    """Monte Carlo with the normal numbers of all rows, and its standard error."""
    final = spot * tf.exp(-0.5 * volatility**2 + volatility * DRAWS)
    payoff = tf.nn.relu(final - 1.0)
    return tf.reduce_mean(payoff), tf.math.reduce_std(payoff) / np.sqrt(200.0)


def black_scholes_delta(spot: Any, volatility: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(spot)
        d1 = tf.math.log(spot) / volatility + volatility / 2.0
        cdf = lambda x: 0.5 * (1.0 + tf.math.erf(x / np.float32(np.sqrt(2.0))))
        price = spot * cdf(d1) - cdf(d1 - volatility)
    return price, tape.gradient(price, spot)


def mixture(x: Any) -> Any:
    log_weights = tf.nn.log_softmax(tf.constant([0.1, 0.2, 0.3, 0.4]))
    log_density = -0.5 * tf.reduce_sum((x - CENTRES) ** 2, axis=-1) - 3 * HALF_LOG_TAU
    return tf.reduce_logsumexp(log_weights + log_density)


def responsibilities(x: Any) -> Any:
    distances = tf.norm(x[None] - CENTRES, axis=-1)
    return tf.nn.softmax(-(distances**2)), tf.argmin(distances)


def multivariate_normal(x: Any, scale: Any) -> Any:
    factor = tf.linalg.cholesky(scale)
    z = tf.linalg.triangular_solve(factor, (x - 0.5)[:, None])
    logdet = tf.reduce_sum(tf.math.log(tf.linalg.diag_part(factor)))
    return -0.5 * tf.reduce_sum(z**2) - logdet - 3 * HALF_LOG_TAU


def gamma(x: Any) -> Any:
    shape, rate = x[0] + 1.0, x[1]
    return shape * tf.math.log(rate) - tf.math.lgamma(shape) + (shape - 1.0) * tf.math.log(x[2]) - rate * x[2]


def beta(x: Any) -> Any:
    a, b = 1.0 + 2.0 * x[0], 2.0 + x[1]
    return tf.math.xlogy(a - 1.0, x[2]) + tf.math.xlog1py(b - 1.0, -x[2]) - tf.math.lbeta(tf.stack([a, b]))


def student_t(x: Any) -> Any:
    freedom = tf.constant(4.0, tf.float64)
    y = x * float(np.exp(-0.5))
    constant = (
        tf.math.lgamma((freedom + 1) / 2) - tf.math.lgamma(freedom / 2) - 0.5 * tf.math.log(float(np.pi) * freedom)
    )
    return tf.reduce_sum(constant - 0.5 * (freedom + 1.0) * tf.math.log1p(y**2 / freedom))


def poisson(counts: Any, log_rate: Any) -> Any:
    counts = tf.cast(counts, tf.float32)
    return tf.reduce_sum(counts * log_rate - tf.exp(log_rate) - tf.math.lgamma(counts + 1.0))


def von_mises(angles: Any, concentration: Any) -> Any:
    log_norm = tf.math.log(tf.math.bessel_i0e(concentration)) + concentration + 2 * HALF_LOG_TAU
    return tf.reduce_sum(concentration * tf.cos(angles) - log_norm)


def variational_bound(code: Any) -> Any:
    mean, log_variance = tf.split(code, 2)
    z = mean + tf.exp(0.5 * log_variance) * DRAWS[:3]
    divergence = -0.5 * tf.reduce_sum(1.0 + log_variance - mean**2 - tf.exp(log_variance))
    return tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.ones([3]), logits=z)) + divergence


def hierarchical(x: Any) -> Any:
    """Log density of eight schools: overall mean, log scale, and one effect per school."""
    mu, log_tau, effects = x[0], x[1], x[2:]
    observed = tf.constant([28.0, 8, -3, 7, -1, 1, 18, 12])
    errors = tf.constant([15.0, 10, 16, 11, 9, 11, 10, 18])
    log_normal = lambda x, m, s: -0.5 * ((x - m) / s) ** 2 - tf.math.log(s) - HALF_LOG_TAU
    prior = log_normal(mu, 0.0, 10.0) + log_normal(log_tau, 5.0, 1.0) + tf.reduce_sum(log_normal(effects, 0.0, 1.0))
    return prior + tf.reduce_sum(log_normal(observed, mu + tf.exp(log_tau) * effects, errors))


def hamiltonian_step(x: Any) -> Any:
    momentum = DRAWS[:3]
    for _ in range(2):
        with tf.GradientTape() as tape:
            tape.watch(x)
            density = mixture(x)
        momentum += 0.1 * tape.gradient(density, x)
        x += 0.1 * momentum
    return x, density


def focal_loss(logits: Any, label: Any) -> Any:
    log_p = tf.nn.log_softmax(logits)[label]
    return -((1.0 - tf.exp(log_p)) ** 2) * log_p


def dice_loss(predicted: Any, mask: Any) -> Any:
    truth = tf.cast(mask, tf.float32)
    return 1.0 - (2.0 * tf.reduce_sum(predicted * truth) + 1.0) / (tf.reduce_sum(predicted + truth) + 1.0)


def contrastive(embedded: Any) -> Any:
    unit = tf.math.l2_normalize(embedded, axis=-1)
    similar = tf.matmul(unit, CENTRES, transpose_b=True) / 0.5
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.range(4), logits=similar)


def precision_at_two(scores: Any, relevant: Any) -> Any:
    _, best = tf.math.top_k(scores, k=2)
    return tf.reduce_mean(tf.cast(tf.gather(relevant, best), tf.float32))


def discounted_gain(scores: Any, relevance: Any) -> Any:
    order = tf.argsort(scores, direction="DESCENDING", stable=True)
    discount = 1.0 / tf.math.log(tf.range(8.0) + 2.0)
    return tf.reduce_sum((2.0 ** tf.gather(relevance, order) - 1.0) * discount)


def wasserstein(a: Any, b: Any) -> Any:
    return tf.reduce_mean(tf.abs(tf.sort(a) - tf.sort(b)))


SAMPLES, POINT, LOGITS = normal(20), normal(3), normal(6)
CHANCES = tf.nn.softmax(LOGITS)
FUNCTIONS = {
    "standardised columns": (standardised, normal(8, 3)),
    "skewness and kurtosis": (skewness_and_kurtosis, SAMPLES),
    "correlation matrix": (covariance, normal(8, 3)),
    "quantiles": (quantiles, SAMPLES),
    "trimmed mean": (trimmed_mean, SAMPLES),
    "ranks": (ranks, SAMPLES),
    "histogram and entropy": (histogram_entropy, SAMPLES),
    "empirical distribution": (empirical_distribution, SAMPLES),
    "means of bins": (binned, SAMPLES),
    "bootstrap": (bootstrap, SAMPLES),
    "kernel density": (kernel_density, SAMPLES),
    "option price": (option_price, (uniform(low=0.8, high=1.2), uniform(low=0.1, high=0.4))),
    "Black-Scholes with delta": (black_scholes_delta, (uniform(low=0.8, high=1.2), uniform(low=0.1, high=0.4))),
    "Gaussian mixture": (mixture, POINT),
    "responsibilities": (responsibilities, POINT),
    "multivariate normal": (multivariate_normal, (POINT, symmetric(3))),
    "gamma density": (gamma, uniform(3, low=0.1)),
    "beta density": (beta, uniform(3, low=0.1, high=0.9)),
    "incomplete beta": (lambda x: tf.math.betainc(1.0 + x[0], 2.0 + x[1], x[2]), uniform(3, low=0.1, high=0.9)),
    "Student's t": (student_t, normal(4, dtype=tf.float64)),
    "Poisson regression": (poisson, (integers(4, high=6), normal(4))),
    "von Mises": (von_mises, (normal(4), uniform(low=0.5, high=5.0))),
    "Dirichlet": (
        lambda a: tf.reduce_sum((a - 1.0) * tf.math.log([0.2, 0.3, 0.5])) - tf.math.lbeta(a),
        uniform(3, low=0.5, high=3.0),
    ),
    "variational bound": (variational_bound, normal(6)),
    "eight schools": (hierarchical, normal(10)),
    "Hamiltonian Monte Carlo": (hamiltonian_step, POINT),
    "incomplete gamma": (lambda x: tf.math.igamma(x[0] + 0.5, x[1]) + tf.math.digamma(x[0] + 1.0), uniform(2, low=0.1)),
    "clipped by norm": (lambda x: tf.clip_by_norm(x, 1.0), POINT),
    "clipped by global norm": (lambda x: tf.clip_by_global_norm([x, x * 2.0], 0.5)[0][1], POINT),
    "Huber loss": (lambda p, t: tf.keras.losses.huber(t, p), (LOGITS, LOGITS * 0.2)),
    "categorical cross-entropy": (
        lambda z, p: tf.nn.softmax_cross_entropy_with_logits(labels=p, logits=z),
        (LOGITS * 2.0, CHANCES),
    ),
    "sparse categorical cross-entropy": (
        lambda z, label: tf.nn.sparse_softmax_cross_entropy_with_logits(label, z),
        (LOGITS, integers(high=6)),
    ),
    "Keras cross-entropy": (
        lambda p, label: tf.keras.losses.sparse_categorical_crossentropy(label[None], p[None])[0],
        (CHANCES, integers(high=6)),
    ),
    "divergence of distributions": (
        lambda p: tf.keras.losses.KLDivergence(reduction=None)(tf.constant([0.1, 0.2, 0.3, 0.2, 0.1, 0.1]), p),
        CHANCES,
    ),
    "cosine loss": (lambda a, b: tf.keras.losses.cosine_similarity(a, b), (LOGITS, CHANCES)),
    "focal loss": (focal_loss, (LOGITS, integers(high=6))),
    "Dice loss": (dice_loss, (uniform(6, 6), uniform(6, 6, seed=1) > 0.5)),
    "contrastive loss": (contrastive, normal(4, 3)),
    "precision at two": (precision_at_two, (normal(8), uniform(8, seed=1) > 0.5)),
    "among the best": (lambda s: tf.math.in_top_k([2], s[None], 3)[0], normal(8)),
    "inverse permutation": (lambda s: tf.math.invert_permutation(tf.argsort(s)), SAMPLES),
    "discounted gain": (discounted_gain, (normal(8), uniform(8, high=3.0, seed=1))),
    "Wasserstein distance": (wasserstein, (SAMPLES, SAMPLES[::-1])),
    "logits of a weighted loss": (
        lambda z, t: tf.nn.weighted_cross_entropy_with_logits(t, z, pos_weight=2.0),
        (LOGITS, CHANCES),
    ),
}
