"""Differential equations, filters of states, and roots: steps, scans, and loops that rows leave at different times."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from compile.corpus.samples import integers, normal, shared, uniform

WEIGHTS = shared(6, 6) * 0.3
TRANSITION = tf.constant([[1.0, 0.1], [0.0, 1.0]])
NOISE = shared(20, 8)


def kepler(state: Any) -> Any:
    """Velocity Verlet of one body in the plane, `[x, y, vx, vy]`."""
    place, velocity = state[:2], state[2:]
    pull = lambda p: -p / (tf.norm(p) ** 3 + 0.1)
    for _ in tf.range(10):
        velocity += 0.05 * pull(place)
        place += 0.1 * velocity
        velocity += 0.05 * pull(place)
    return tf.concat([place, velocity], axis=0)


def lorenz96(x: Any) -> Any:
    slope = lambda x: (tf.roll(x, -1, 0) - tf.roll(x, 2, 0)) * tf.roll(x, 1, 0) - x + 8.0
    k1 = slope(x)
    k2 = slope(x + 0.025 * k1)
    k3 = slope(x + 0.025 * k2)
    return x + 0.05 / 6.0 * (k1 + 2.0 * k2 + 2.0 * k3 + slope(x + 0.05 * k3))


def heat(u: Any, diffusivity: Any) -> Any:
    for _ in tf.range(8):
        inner = u[1:-1] + diffusivity * (u[2:] - 2 * u[1:-1] + u[:-2])
        u = tf.concat([u[:1], inner, u[-1:]], 0)
    return u


def burgers(u: Any) -> Any:
    for _ in tf.range(4):
        left = tf.concat([u[-1:], u[:-1]], 0)
        right = tf.concat([u[1:], u[:1]], 0)
        u = u - 0.05 * u * (right - left) / 2.0 + 0.02 * (right - 2.0 * u + left)
    return u


def wave_2d(u: Any) -> Any:
    """Two fields in `[2, height, width]`, with fixed edges."""
    now, before = u[0], u[1]
    padded = tf.pad(now, [[1, 1], [1, 1]])
    laplacian = padded[2:, 1:-1] + padded[:-2, 1:-1] + padded[1:-1, 2:] + padded[1:-1, :-2] - 4.0 * now
    return tf.stack([2.0 * now - before + 0.1 * laplacian, now])


def reaction_diffusion(fields: Any) -> Any:
    stencil = tf.constant([[0.05, 0.2, 0.05], [0.2, -1.0, 0.2], [0.05, 0.2, 0.05]])[:, :, None, None]
    padded = tf.pad(fields, [[1, 1], [1, 1], [0, 0]], "SYMMETRIC")
    spread = tf.nn.depthwise_conv2d(padded[None], tf.tile(stencil, [1, 1, 2, 1]), [1, 1, 1, 1], "VALID")[0]
    u, v = fields[..., 0], fields[..., 1]
    grown = tf.stack([0.04 * (1.0 - u) - u * v**2, u * v**2 - 0.1 * v], axis=-1)
    return fields + spread * [0.16, 0.08] + grown


def spectral_advection(u: Any) -> Any:
    waves = tf.cast(tf.range(9), tf.complex64) * tf.constant(1j, tf.complex64)
    return tf.signal.irfft(tf.signal.rfft(u) * tf.exp(-0.3 * 2.0 * np.pi / 16 * waves))


def n_body(places: Any, masses: Any) -> Any:
    apart = places[None] - places[:, None]
    distances = tf.reduce_sum(apart**2, axis=-1, keepdims=True) + 0.01
    force = tf.reduce_sum(apart * masses[None, :, None] * distances**-1.5, axis=1)
    return tf.linalg.set_diag(tf.sqrt(distances[..., 0]), tf.zeros([4])), force


def neural_ode(state: Any) -> Any:
    slope = lambda t, y: tf.tanh(tf.linalg.matvec(WEIGHTS, y)) * tf.cos(t)
    t = tf.constant(0.0)
    while t < 0.95:
        middle = state + 0.05 * slope(t, state)
        state = state + 0.1 * slope(t + 0.05, middle)
        t += 0.1
    return state


def adaptive_heun(rate: Any) -> Any:
    """The step that one row rejects another accepts."""
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
    for _ in range(2):
        u = tf.linalg.tridiagonal_solve(diagonals, u)
    return u


def kalman(measured: Any) -> Any:
    """Position and velocity of positions `[steps]`, with their covariance."""
    mean, covariance = tf.zeros([2]), tf.eye(2)
    for z in measured:
        mean = tf.linalg.matvec(TRANSITION, mean)
        covariance = TRANSITION @ covariance @ tf.transpose(TRANSITION) + 0.01 * tf.eye(2)
        gain = covariance[:, 0] / (covariance[0, 0] + 0.5)
        mean += gain * (z - mean[0])
        covariance -= tf.tensordot(gain, covariance[0], 0)
    return mean, covariance


def kalman_scan(measured: Any) -> Any:
    observe = tf.constant([[1.0, 0.0], [0.5, 0.5]])

    def step(state: Any, z: Any) -> Any:
        mean, covariance = state
        mean = tf.linalg.matvec(TRANSITION, mean)
        covariance = tf.matmul(TRANSITION @ covariance, TRANSITION, transpose_b=True) + 0.01 * tf.eye(2)
        innovation = observe @ covariance @ tf.transpose(observe) + 0.2 * tf.eye(2)
        gain = tf.transpose(tf.linalg.solve(innovation, observe @ covariance))
        mean = mean + tf.linalg.matvec(gain, z - tf.linalg.matvec(observe, mean))
        return mean, covariance - gain @ observe @ covariance

    return tf.scan(step, measured, (tf.zeros([2]), tf.eye(2)))[0]


def ensemble_kalman(observed: Any) -> Any:
    members = NOISE + 0.5
    mean = tf.reduce_mean(members, axis=0)
    spread = members - mean
    covariance = tf.matmul(spread, spread, transpose_a=True) / 19.0
    gain = tf.transpose(tf.linalg.cholesky_solve(tf.linalg.cholesky(covariance + tf.eye(8)), covariance))
    return mean + tf.linalg.matvec(gain, observed - mean)


def forward_algorithm(emitted: Any) -> Any:
    """Log likelihood of a hidden Markov model whose emissions have log probabilities `[steps, states]`."""
    transition = tf.nn.log_softmax(shared(4, 4))
    step = lambda alpha, e: tf.reduce_logsumexp(alpha[:, None] + transition, axis=0) + e
    return tf.reduce_logsumexp(tf.foldl(step, emitted[1:], emitted[0]))


def viterbi(emitted: Any) -> Any:
    transition = tf.nn.log_softmax(shared(4, 4))
    score, back = emitted[0], tf.TensorArray(tf.int32, 9, element_shape=[4])
    for t in tf.range(1, 10):
        paths = score[:, None] + transition
        back = back.write(t - 1, tf.argmax(paths, axis=0, output_type=tf.int32))
        score = tf.reduce_max(paths, axis=0) + emitted[t]
    state = tf.argmax(score, output_type=tf.int32)
    path = tf.TensorArray(tf.int32, 10, element_shape=[]).write(9, state)
    for t in tf.range(8, -1, -1):
        state = back.read(t)[state]
        path = path.write(t, state)
    return path.stack()


def newton(a: Any) -> Any:
    """The cube root, until it changes no more."""
    x = tf.maximum(a, 1.0)
    for _ in tf.range(50):
        change = (x**3 - a) / (3.0 * x**2)
        x -= change
        if tf.abs(change) < 1e-5 * x:
            break
    return x


def bisection(a: Any) -> Any:
    def step(low: Any, high: Any) -> Any:
        middle = (low + high) / 2.0
        below = middle * tf.exp(middle) < a
        return tf.where(below, middle, low), tf.where(below, high, middle)

    low, high = tf.while_loop(lambda low, high: high - low > 1e-4 * (1.0 + a), step, (tf.zeros([]), a + 1.0))
    return (low + high) / 2.0


def newton_system(start: Any) -> Any:
    """Two equations, by Jacobians of a tape."""
    x = start
    for _ in range(2):
        with tf.GradientTape() as tape:
            tape.watch(x)
            residual = tf.stack([x[0] ** 2 + x[1] ** 2 - 4.0, x[0] - x[1] ** 3])
        x = x - tf.linalg.solve(tape.jacobian(residual, x) + 0.1 * tf.eye(2), residual[:, None])[:, 0]
    return x


def collatz(n: Any) -> Any:
    steps = tf.constant(0)
    while n > 1:
        n = tf.where(n % 2 == 0, n // 2, 3 * n + 1)
        steps += 1
    return steps


def mandelbrot(c: Any) -> Any:
    z, count = tf.zeros_like(c), tf.constant(0)
    while count < 30 and tf.abs(z) < 2.0:
        z = z * z + c
        count += 1
    return count


def conjugate_gradients(b: Any) -> Any:
    matrix = WEIGHTS @ tf.transpose(WEIGHTS) + tf.eye(6)
    x, r, p = tf.zeros([6]), b, b
    while tf.reduce_sum(r * r) > 1e-6:
        image = tf.linalg.matvec(matrix, p)
        alpha = tf.reduce_sum(r * r) / tf.tensordot(p, image, 1)
        left = r - alpha * image
        x, p, r = x + alpha * p, left + tf.reduce_sum(left**2) / tf.reduce_sum(r**2) * p, left
    return x


def random_walk_to_a_wall(place: Any) -> Any:
    steps = tf.constant(0)
    while tf.abs(place) < 3.0 and steps < 20:
        place += NOISE[steps, 0]
        steps += 1
    return place, steps


def metropolis(start: Any) -> Any:
    """A chain with the random numbers of all rows."""
    energy = lambda x: (x**2 - 1.0) ** 2
    x, accepted = start, tf.constant(0.0)
    for t in tf.range(20):
        proposal = x + NOISE[t, 0]
        if tf.exp(energy(x) - energy(proposal)) > tf.abs(NOISE[t, 1]):
            x = proposal
            accepted += 1.0
    return x, accepted / 20.0


def game_of_life(cells: Any) -> Any:
    shifts = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]
    around = tf.add_n([tf.roll(cells, shift, axis=[0, 1]) for shift in shifts])
    return tf.cast((around == 3) | ((cells == 1) & (around == 2)), tf.int32)


FUNCTIONS = {
    "Kepler orbit": (kepler, normal(4)),
    "Lorenz 96": (lorenz96, normal(8)),
    "heat equation": (heat, (normal(12), uniform(high=0.4))),
    "Burgers equation": (burgers, normal(12)),
    "wave equation": (wave_2d, normal(2, 6, 6)),
    "reaction and diffusion": (reaction_diffusion, uniform(6, 6, 2)),
    "spectral advection": (spectral_advection, normal(16)),
    "n bodies": (n_body, (normal(4, 3), uniform(4))),
    "neural ODE": (neural_ode, normal(6)),
    "adaptive steps": (adaptive_heun, uniform(low=0.5, high=4.0)),
    "implicit Euler": (implicit_euler, normal(8)),
    "Kalman filter": (kalman, normal(10)),
    "Kalman filter by scan": (kalman_scan, normal(8, 2)),
    "ensemble Kalman filter": (ensemble_kalman, normal(8)),
    "forward algorithm": (forward_algorithm, normal(10, 4)),
    "Viterbi path": (viterbi, normal(10, 4)),
    "Newton's method": (newton, uniform(low=0.5, high=90.0)),
    "bisection": (bisection, uniform(low=0.5, high=9.0)),
    "Newton's method for a system": (newton_system, uniform(2, low=0.5, high=2.0)),
    "Collatz": (collatz, integers(high=30) + 1),
    "Mandelbrot": (mandelbrot, tf.complex(uniform(low=-1.5, high=0.5), uniform(low=-1.0, seed=1))),
    "conjugate gradients": (conjugate_gradients, normal(6)),
    "walk to a wall": (random_walk_to_a_wall, normal()),
    "Metropolis chain": (metropolis, normal()),
    "game of life": (game_of_life, integers(6, 6, high=2)),
    "leapfrog in float64": (
        lambda s: tf.stack([s[0] + 0.1 * s[1], s[1] - 0.1 * tf.sin(s[0])]),
        normal(2, dtype=tf.float64),
    ),
}
