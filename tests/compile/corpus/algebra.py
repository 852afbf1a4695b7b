"""Linear algebra and calculus: one matrix or vector in; gradients, Jacobians and Hessians inside the function."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from compile.corpus.samples import complexes, normal, shared, symmetric

MATRIX = shared(4, 4)


def least_squares_by_qr(design: Any, target: Any) -> Any:
    q, r = tf.linalg.qr(design)
    return tf.linalg.triangular_solve(r, tf.matmul(q, target[:, None], adjoint_a=True), lower=False)[:, 0]


def whitening(matrix: Any) -> Any:
    values, vectors = tf.linalg.eigh(matrix)
    return vectors @ tf.linalg.diag(tf.math.rsqrt(values)) @ tf.transpose(vectors)


def procrustes(points: Any) -> Any:
    """The orthogonal matrix that fits the points best to shared ones."""
    centred = points - tf.reduce_mean(points, axis=0)
    _, u, v = tf.linalg.svd(tf.transpose(centred) @ shared(6, 3))
    return tf.matmul(u, v, transpose_b=True)


def graph_laplacian(affinity: Any) -> Any:
    upper = tf.linalg.band_part(tf.abs(affinity), 0, -1)
    weights = tf.linalg.set_diag(upper + tf.transpose(upper), tf.zeros([4]))
    return tf.linalg.eigvalsh(tf.linalg.diag(tf.reduce_sum(weights, axis=1)) - weights)


def schroedinger_step(state: Any) -> Any:
    """Crank-Nicolson for a complex state `[4]`."""
    hamiltonian = tf.complex(MATRIX + tf.transpose(MATRIX), tf.zeros([4, 4]))
    left = tf.eye(4, dtype=tf.complex64) + 0.05j * hamiltonian
    state = tf.linalg.solve(left, tf.linalg.matvec(left, state, adjoint_a=True)[:, None])[:, 0]
    return state, tf.abs(tf.reduce_sum(tf.math.conj(state) * state))


def kernel_ridge(points: Any) -> Any:
    train = shared(7, 2)
    kernel = lambda a, b: tf.exp(-0.5 * tf.reduce_sum((a[:, None] - b[None]) ** 2, axis=-1))
    weights = tf.linalg.cholesky_solve(tf.linalg.cholesky(kernel(train, train) + 0.1 * tf.eye(7)), shared(7, 1))
    return tf.squeeze(kernel(points, train) @ weights, -1)


def jacobian(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.nn.softmax(tf.linalg.matvec(MATRIX, tf.sin(x)))
    return tape.jacobian(y, x)


def hessian(x: Any) -> Any:
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = tf.reduce_sum(tf.sin(x) * tf.linalg.matvec(MATRIX, tf.square(x)))
        gradient = inner.gradient(y, x)
    return outer.jacobian(gradient, x)


def divergence(x: Any) -> Any:
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        parts = tf.unstack(tf.sin(x) * tf.roll(x, 1, 0))
    return tf.add_n([tape.gradient(part, x)[i] for i, part in enumerate(parts)])


def hessian_vector_product(x: Any) -> Any:
    with tf.autodiff.ForwardAccumulator(x, tf.ones([4])) as accumulator:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_prod(1.0 + tf.square(x))
        gradient = tape.gradient(y, x)
    return accumulator.jvp(gradient)


def gradient_descent(x: Any) -> Any:
    for _ in tf.range(10):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.math.softplus(tf.linalg.matvec(MATRIX, x)) ** 2) + x[0] * x[1]
        x -= 0.05 * tape.gradient(loss, x)
    return x


MATRICES, VECTORS, DESIGN = normal(4, 4), normal(4), normal(6, 3)
FUNCTIONS = {
    "least squares by QR": (least_squares_by_qr, (DESIGN, normal(6, seed=1))),
    "whitening matrix": (whitening, symmetric(4)),
    "pseudo-inverse": (lambda m: tf.linalg.pinv(m) @ m, DESIGN),
    "Procrustes": (procrustes, normal(6, 3)),
    "graph Laplacian": (graph_laplacian, MATRICES),
    "torque": (lambda arm, force: tf.reduce_sum(tf.linalg.cross(arm, force), axis=0), (normal(4, 3), normal(4, 3))),
    "square root of a matrix": (lambda m: tf.linalg.sqrtm(m), symmetric(3)),
    "determinant and inverse": (lambda m: tf.linalg.det(m) * tf.linalg.inv(m), symmetric(3)),
    "LU solve": (lambda m: tf.linalg.lu_solve(*tf.linalg.lu(m), tf.ones([4, 2])), symmetric(4)),
    "Cholesky in float64": (lambda m: tf.linalg.cholesky(m), symmetric(4, dtype=tf.float64)),
    "Schrödinger step": (schroedinger_step, complexes(4)),
    "quadratic form": (lambda a: tf.einsum("ij,jk,lk->il", a, MATRIX, a), MATRICES),
    "change of basis": (lambda m: tf.matmul(MATRIX, m, transpose_a=True) @ MATRIX, MATRICES),
    "Kronecker product": (lambda a, b: tf.reshape(tf.einsum("ij,kl->ikjl", a, b), [16, 16]), (MATRICES, MATRICES + 1)),
    "kernel ridge regression": (kernel_ridge, normal(5, 2)),
    "Jacobian": (jacobian, VECTORS),
    "Hessian": (hessian, VECTORS),
    "divergence": (divergence, VECTORS),
    "Hessian times a vector": (hessian_vector_product, VECTORS),
    "gradient descent": (gradient_descent, VECTORS),
}
