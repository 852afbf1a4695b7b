"""Differential equations, state filters and root finding: steps, scans, and loops of a different length per row."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from compile.corpus.samples import integers, normal, shared, uniform

TRANSITION = tf.constant([[1.0, 0.1], [0.0, 1.0]])
LOG_TRANSITION = tf.nn.log_softmax(shared(4, 4))


def kepler(state: Any) -> Any:
    """Velocity Verlet of one body in the plane, `[x, y, vx, vy]`."""
    position, velocity = state[:2], state[2:]
    pull = lambda p: -p / (tf.norm(p) ** 3 + 0.1)
    for _ in tf.range(10):
        velocity += 0.05 * pull(position)
        position += 0.1 * velocity
        velocity += 0.05 * pull(position)
    return tf.concat([position, velocity], axis=0)


def heat(u: Any, diffusivity: Any) -> Any:
    for _ in tf.range(8):
        inner = u[1:-1] + diffusivity * (u[2:] - 2 * u[1:-1] + u[:-2])
        u = tf.concat([u[:1], inner, u[-1:]], 0)
    return u


def wave_2d(u: Any) -> Any:
    """One step of two fields `[2, height, width]`, with fixed edges."""
    now, before = u[0], u[1]
    padded = tf.pad(now, [[1, 1], [1, 1]])
    laplacian = padded[2:, 1:-1] + padded[:-2, 1:-1] + padded[1:-1, 2:] + padded[1:-1, :-2] - 4.0 * now
    return tf.stack([2.0 * now - before + 0.1 * laplacian, now])


def n_body(positions: Any, masses: Any) -> Any:
    apart = positions[None] - positions[:, None]
    distances = tf.reduce_sum(apart**2, axis=-1, keepdims=True) + 0.01
    force = tf.reduce_sum(apart * masses[None, :, None] * distances**-1.5, axis=1)
    return tf.linalg.set_diag(tf.sqrt(distances[..., 0]), tf.zeros([4])), force


def adaptive_heun(rate: Any) -> Any:
    """Each row accepts and rejects steps of its own."""
    t, y, h = tf.constant(0.0), tf.constant(1.0), tf.constant(0.5)
    while t < 1.0:
        h = tf.minimum(h, 1.0 - t + 1e-4)
        slope = -rate * y
        end = -rate * (y + h * slope)
        if tf.abs(h * (end - slope) / 2.0) < 0.01:
            t, y = t + h, y + h * (slope + end) / 2.0
            h *= 1.5
        else:
            h *= 0.5
    return y


def implicit_euler(u: Any) -> Any:
    diagonals = tf.stack([tf.fill([8], -0.5), tf.fill([8], 2.0), tf.fill([8], -0.5)])
    return tf.linalg.tridiagonal_solve(diagonals, tf.linalg.tridiagonal_solve(diagonals, u))


def kalman(measured: Any) -> Any:
    """Track position and velocity from positions `[steps]`."""
    mean, covariance = tf.zeros([2]), tf.eye(2)
    for z in measured:
        mean = tf.linalg.matvec(TRANSITION, mean)
        covariance = TRANSITION @ covariance @ tf.transpose(TRANSITION) + 0.01 * tf.eye(2)
        gain = covariance[:, 0] / (covariance[0, 0] + 0.5)
        mean += gain * (z - mean[0])
        covariance -= tf.tensordot(gain, covariance[0], 0)
    return mean, covariance


def forward_algorithm(emitted: Any) -> Any:
    """Log likelihood of a hidden Markov model, from log probabilities `[steps, states]` of what it emitted."""
    step = lambda alpha, e: tf.reduce_logsumexp(alpha[:, None] + LOG_TRANSITION, axis=0) + e
    return tf.reduce_logsumexp(tf.foldl(step, emitted[1:], emitted[0]))


def cube_root(a: Any) -> Any:
    """Newton's method, until the change is small."""
    x = tf.maximum(a, 1.0)
    for _ in tf.range(50):
        change = (x**3 - a) / (3.0 * x**2)
        x -= change
        if tf.abs(change) < 1e-5 * x:
            break
    return x


def game_of_life(cells: Any) -> Any:
    shifts = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]
    around = tf.add_n([tf.roll(cells, shift, axis=[0, 1]) for shift in shifts])
    return tf.cast((around == 3) | ((cells == 1) & (around == 2)), tf.int32)


FUNCTIONS = {
    "Kepler orbit": (kepler, normal(4)),
    "heat equation": (heat, (normal(12), uniform(high=0.4))),
    "wave equation": (wave_2d, normal(2, 6, 6)),
    "n bodies": (n_body, (normal(4, 3), uniform(4))),
    "adaptive steps": (adaptive_heun, uniform(low=0.5, high=4.0)),
    "implicit Euler": (implicit_euler, normal(8)),
    "Kalman filter": (kalman, normal(10)),
    "forward algorithm": (forward_algorithm, normal(10, 4)),
    "Newton's method": (cube_root, uniform(low=0.5, high=90.0)),
    "game of life": (game_of_life, integers(6, 6, high=2)),
}
