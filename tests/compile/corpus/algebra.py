"""Linear algebra and calculus: one matrix or vector in; gradients, Jacobians and Hessians inside of a function."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from compile.corpus.samples import complexes, normal, shared, symmetric

MATRIX = shared(4, 4)
BASIS = tf.linalg.qr(MATRIX)[0]
SPREAD = MATRIX @ tf.transpose(MATRIX) + tf.eye(4)


def least_squares(design: Any, target: Any) -> Any:
    gram = tf.matmul(design, design, transpose_a=True) + 0.1 * tf.eye(3)
    return tf.linalg.solve(gram, tf.linalg.matvec(design, target, transpose_a=True)[:, None])[:, 0]


def by_qr(design: Any, target: Any) -> Any:
    q, r = tf.linalg.qr(design)
    return tf.linalg.triangular_solve(r, tf.matmul(q, target[:, None], adjoint_a=True), lower=False)[:, 0]


def whitened(matrix: Any) -> Any:
    values, vectors = tf.linalg.eigh(matrix)
    return vectors @ tf.linalg.diag(tf.math.rsqrt(values)) @ tf.transpose(vectors)


def low_rank(matrix: Any) -> Any:
    s, u, v = tf.linalg.svd(matrix)
    return tf.matmul(u[:, :2] * s[:2], v[:, :2], transpose_b=True)


def pseudo_inverse(matrix: Any) -> Any:
    return tf.linalg.pinv(matrix) @ matrix


def procrustes(points: Any) -> Any:
    """The rotation that fits the points best to shared ones, up to a sign."""
    centred = points - tf.reduce_mean(points, axis=0)
    _, u, v = tf.linalg.svd(tf.transpose(centred) @ shared(6, 3))
    return tf.matmul(u, v, transpose_b=True)


def power_iteration(matrix: Any) -> Any:
    vector = tf.ones([4])
    for _ in tf.range(30):
        vector = tf.linalg.matvec(matrix, vector)
        vector /= tf.norm(vector)
    return tf.tensordot(vector, tf.linalg.matvec(matrix, vector), 1)


def quadratic_form(vector: Any) -> Any:
    factor = tf.linalg.cholesky(SPREAD)
    solved = tf.linalg.triangular_solve(factor, vector[:, None], lower=True)
    return tf.reduce_sum(solved**2) + 2.0 * tf.reduce_sum(tf.math.log(tf.linalg.diag_part(factor)))


def graph_laplacian(affinity: Any) -> Any:
    upper = tf.linalg.band_part(tf.abs(affinity), 0, -1)
    weights = upper + tf.transpose(upper)
    weights = tf.linalg.set_diag(weights, tf.zeros([4]))
    laplacian = tf.linalg.diag(tf.reduce_sum(weights, axis=1)) - weights
    return tf.linalg.eigvalsh(laplacian)


def gram_schmidt(matrix: Any) -> Any:
    columns: list[Any] = []
    for column in tf.unstack(matrix, axis=1):
        for other in columns:
            column = column - tf.reduce_sum(column * other) * other
        columns.append(column / tf.linalg.norm(column))
    return tf.stack(columns, axis=1)


def rotation(angles: Any) -> Any:
    c, s = tf.cos(angles), tf.sin(angles)
    zero, one = tf.zeros([]), tf.ones([])
    about_z = tf.reshape(tf.stack([c[0], -s[0], zero, s[0], c[0], zero, zero, zero, one]), [3, 3])
    about_x = tf.convert_to_tensor([[one, zero, zero], [zero, c[1], -s[1]], [zero, s[1], c[1]]])
    return tf.linalg.trace(about_z @ about_x), about_z @ about_x


def rotated(points: Any, axis: Any) -> Any:
    """Rodrigues' formula, for points `[4, 3]`."""
    unit = tf.broadcast_to(axis / tf.norm(axis), [4, 3])
    along = tf.reduce_sum(points * unit, axis=1, keepdims=True)
    return points * 0.6 + tf.linalg.cross(unit, points) * 0.8 + unit * along * 0.4


def unitary_evolution(state: Any) -> Any:
    """A Schrödinger step (Crank-Nicolson) of a complex state `[4]`."""
    hamiltonian = tf.complex(SPREAD, tf.zeros([4, 4]))
    left = tf.eye(4, dtype=tf.complex64) + 0.05j * hamiltonian
    right = tf.eye(4, dtype=tf.complex64) - 0.05j * hamiltonian
    state = tf.linalg.solve(left, tf.linalg.matvec(right, state)[:, None])[:, 0]
    return state, tf.abs(tf.reduce_sum(tf.math.conj(state) * state))


def density_matrix(state: Any) -> Any:
    rho = tf.einsum("i,j->ij", state, tf.math.conj(state))
    return tf.math.real(tf.linalg.trace(rho)), tf.linalg.adjoint(rho) @ rho


def contracted(a: Any) -> Any:
    return tf.einsum("ij,jk,lk->il", a, MATRIX, a), tf.tensordot(a, a, [[0, 1], [1, 0]])


def kernel_ridge(points: Any) -> Any:
    train = shared(7, 2)
    kernel = lambda a, b: tf.exp(-0.5 * tf.reduce_sum((a[:, None] - b[None]) ** 2, axis=-1))
    weights = tf.linalg.cholesky_solve(tf.linalg.cholesky(kernel(train, train) + 0.1 * tf.eye(7)), shared(7, 1))
    return tf.squeeze(kernel(points, train) @ weights, -1)


def gaussian_process(observed: Any) -> Any:
    x = tf.linspace(0.0, 1.0, 6)
    kernel = tf.exp(-10.0 * (x[:, None] - x[None]) ** 2) + 0.1 * tf.eye(6)
    factor = tf.linalg.cholesky(kernel)
    alpha = tf.linalg.cholesky_solve(factor, observed[:, None])
    return -0.5 * tf.squeeze(tf.transpose(observed[:, None]) @ alpha) - tf.linalg.logdet(kernel) / 2.0


def gradient_of_energy(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        energy = tf.reduce_sum(tf.math.softplus(tf.linalg.matvec(MATRIX, x)) ** 2)
    return tape.gradient(energy, x)


def jacobian(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.nn.softmax(tf.linalg.matvec(MATRIX, tf.sin(x)))
    return tape.jacobian(y, x)


def batch_jacobian(points: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(points)
        y = tf.tanh(points @ MATRIX)
    return tape.batch_jacobian(y, points)


def hessian(x: Any) -> Any:
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = tf.reduce_sum(tf.sin(x) * tf.linalg.matvec(MATRIX, x**2))
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
            y = tf.reduce_prod(1.0 + x**2)
        gradient = tape.gradient(y, x)
    return accumulator.jvp(gradient)


def gradient_descent(x: Any) -> Any:
    for _ in tf.range(10):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = (1.0 - x[0]) ** 2 + 10.0 * (x[1] - x[0] ** 2) ** 2
        x = x - 0.005 * tf.clip_by_norm(tape.gradient(loss, x), 10.0)
    return x


MATRICES, VECTORS, DESIGN = normal(4, 4), normal(4), normal(6, 3)
FUNCTIONS = {
    "least squares": (least_squares, (DESIGN, normal(6, seed=1))),
    "least squares by QR": (by_qr, (DESIGN, normal(6, seed=1))),
    "least squares by tf.linalg": (lambda a, b: tf.linalg.lstsq(a, b[:, None], 0.1), (DESIGN, normal(6, seed=1))),
    "whitening matrix": (whitened, symmetric(4)),
    "low rank": (low_rank, MATRICES),
    "pseudo-inverse": (pseudo_inverse, DESIGN),
    "Procrustes": (procrustes, normal(6, 3)),
    "condition number": (lambda m: (lambda s: s[0] / s[-1])(tf.linalg.svd(m, compute_uv=False)), MATRICES),
    "power iteration": (power_iteration, symmetric(4)),
    "quadratic form": (quadratic_form, VECTORS),
    "graph Laplacian": (graph_laplacian, MATRICES),
    "Gram-Schmidt": (gram_schmidt, MATRICES),
    "rotation matrices": (rotation, normal(2)),
    "Rodrigues' rotation": (rotated, (normal(4, 3), normal(3))),
    "matrix exponential": (lambda m: tf.linalg.expm(0.3 * m), MATRICES),
    "square root of a matrix": (lambda m: tf.linalg.sqrtm(m), symmetric(3)),
    "log determinant": (lambda m: tf.linalg.slogdet(m), MATRICES),
    "determinant and inverse": (lambda m: tf.linalg.det(m) * tf.linalg.inv(m), symmetric(3)),
    "LU solve": (lambda m: tf.linalg.lu_solve(*tf.linalg.lu(m), tf.ones([4, 2])), symmetric(4)),
    "Cholesky in float64": (lambda m: tf.linalg.cholesky(m), symmetric(4, dtype=tf.float64)),
    "Schrödinger step": (unitary_evolution, complexes(4)),
    "density matrix": (density_matrix, complexes(4)),
    "contractions": (contracted, MATRICES),
    "products with transposes": (
        lambda m: tf.matmul(m, MATRIX, transpose_a=True) + tf.matmul(MATRIX, m, transpose_b=True),
        MATRICES,
    ),
    "in another basis": (lambda m: tf.transpose(BASIS) @ m @ BASIS, MATRICES),
    "Kronecker product": (lambda a, b: tf.reshape(tf.einsum("ij,kl->ikjl", a, b), [16, 16]), (MATRICES, MATRICES + 1)),
    "kernel ridge regression": (kernel_ridge, normal(5, 2)),
    "Gaussian process": (gaussian_process, normal(6)),
    "gradient of an energy": (gradient_of_energy, VECTORS),
    "Jacobian": (jacobian, VECTORS),
    "batch Jacobian": (batch_jacobian, normal(3, 4)),
    "Hessian": (hessian, VECTORS),
    "divergence": (divergence, VECTORS),
    "Hessian times a vector": (hessian_vector_product, VECTORS),
    "gradient descent": (gradient_descent, normal(2)),
}
