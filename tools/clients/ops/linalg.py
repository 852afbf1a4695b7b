"""`tf.linalg`, products and `tf.einsum`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from clients.data import (
    DEFINITE,
    MATRICES,
    SIDES,
    SYMMETRIC,
    TALL,
    TRIANGULAR,
    VECTORS,
    WIDE,
    integers,
    normal,
    uniform,
)

_SHARED = tf.constant([[2.0, 1.0, 0.0], [0.5, 3.0, 1.0], [0.0, 1.0, 2.0]])
_SYSTEM = (DEFINITE, SIDES)
_DIAGONALS = uniform(1.0, 2.0, 3, 5) * tf.constant([[0.3], [1.5], [0.3]])


def _lu(matrix: Any) -> Any:
    factors, order = tf.linalg.lu(matrix)
    return factors, order, tf.linalg.lu_reconstruct(factors, order)


def _svd(matrix: Any) -> Any:
    s, u, v = tf.linalg.svd(matrix)
    return s, tf.matmul(u, tf.linalg.diag(s) @ v, transpose_b=True)


OPS = {
    "adjoint": (tf.linalg.adjoint, normal(2, 3, dtype=tf.complex64)),
    "band_part": (lambda m: tf.linalg.band_part(m, 1, 0), MATRICES),
    "band_part of the row": (lambda m, n: tf.linalg.band_part(m, n, -1), (MATRICES, integers(0, 3))),
    "banded_triangular_solve": (
        lambda b, y: tf.linalg.banded_triangular_solve(b, y),
        (uniform(1.0, 2.0, 2, 5), normal(5, 2)),
    ),
    "cholesky": (tf.linalg.cholesky, DEFINITE),
    "cholesky_solve": (lambda m, y: tf.linalg.cholesky_solve(tf.linalg.cholesky(m), y), _SYSTEM),
    "cholesky_solve of a shared matrix": (
        lambda y: tf.linalg.cholesky_solve(tf.linalg.cholesky(_SHARED @ tf.transpose(_SHARED)), y),
        SIDES,
    ),
    "det": (tf.linalg.det, MATRICES),
    "diag": (tf.linalg.diag, VECTORS),
    "diag of other diagonals": (lambda x: tf.linalg.diag(x, k=1, num_rows=4, num_cols=7, padding_value=9.0), VECTORS),
    "diag_part": (tf.linalg.diag_part, MATRICES),
    "diag_part of other diagonals": (lambda m: tf.linalg.diag_part(m, k=(-1, 1), padding_value=9.0), MATRICES),
    "eig": (lambda m: tf.abs(tf.linalg.eig(m)[0]), MATRICES),
    "eigh": (lambda m: tf.linalg.eigh(m)[0], SYMMETRIC),
    "eigh with vectors": (lambda m: tf.abs(tf.linalg.eigh(m)[1]), SYMMETRIC),
    "eigvals": (lambda m: tf.abs(tf.linalg.eigvals(m)), MATRICES),
    "eigvalsh": (tf.linalg.eigvalsh, SYMMETRIC),
    "einsum": (lambda x, y: tf.einsum("ij,jk->ik", x, y), (WIDE, TALL)),
    "einsum of the diagonal": (lambda m: tf.einsum("ii->i", m), MATRICES),
    "einsum of three": (lambda x, m, y: tf.einsum("i,ij,j->", x, m, y), (normal(3), MATRICES, normal(3))),
    "einsum that repeats": (lambda x, y: tf.einsum("iij,j->i", x, y), (normal(3, 3, 4), VECTORS)),
    "einsum with an ellipsis": (lambda x, y: tf.einsum("...ij,...jk->...ik", x, y), (normal(2, 3, 5), TALL)),
    "einsum with a shared matrix": (lambda m: tf.einsum("ij,kj->ki", _SHARED, m), MATRICES),
    "expm": (tf.linalg.expm, MATRICES),
    "eye of the row": (lambda x: tf.eye(3) * x[0], VECTORS),
    "global_norm": (lambda x, y: tf.linalg.global_norm([x, y]), (WIDE, TALL)),
    "inv": (tf.linalg.inv, DEFINITE),
    "inv, adjoint": (lambda m: tf.linalg.inv(m, adjoint=True), DEFINITE),
    "kronecker": (
        lambda a, b: tf.linalg.LinearOperatorKronecker(
            [tf.linalg.LinearOperatorFullMatrix(a), tf.linalg.LinearOperatorFullMatrix(b)]
        ).to_dense(),
        (MATRICES, DEFINITE),
    ),
    "linear operator, block diagonal": (
        lambda a, x: tf.linalg.LinearOperatorBlockDiag(
            [tf.linalg.LinearOperatorFullMatrix(a), tf.linalg.LinearOperatorDiag(x)]
        ).matvec(tf.ones([7])),
        (MATRICES, VECTORS),
    ),
    "linear operator, circulant": (
        lambda x: tf.math.real(tf.linalg.LinearOperatorCirculant(tf.cast(x, tf.complex64)).to_dense()),
        VECTORS,
    ),
    "linear operator, low rank update": (
        lambda m, u: tf.linalg.LinearOperatorLowRankUpdate(
            tf.linalg.LinearOperatorFullMatrix(m, is_positive_definite=True, is_self_adjoint=True), u
        ).solve(tf.ones([3, 1])),
        _SYSTEM,
    ),
    "linear operator, Toeplitz": (
        lambda x: tf.linalg.LinearOperatorToeplitz(x, x).to_dense(),
        VECTORS,
    ),
    "logdet": (tf.linalg.logdet, DEFINITE),
    "logm": (tf.linalg.logm, tf.cast(DEFINITE, tf.complex64)),
    "lstsq": (lambda m, y: tf.linalg.lstsq(m, y, fast=True), (TALL, normal(5, 2))),
    "lstsq, slow": (
        lambda m, y: tf.stop_gradient(tf.linalg.lstsq(m, y, fast=False)),  # it has no gradient
        (TALL, normal(5, 2)),
    ),
    "lu": (_lu, MATRICES),
    "lu_matrix_inverse": (lambda m: tf.linalg.lu_matrix_inverse(*tf.linalg.lu(m)), DEFINITE),
    "lu_solve": (lambda m, y: tf.linalg.lu_solve(*tf.linalg.lu(m), y), _SYSTEM),
    "matmul": (tf.matmul, (WIDE, TALL)),
    "matmul of integers": (lambda a: tf.matmul(a, a), integers(-3, 4, 3, 3)),
    "matmul of a shared matrix": (lambda m: _SHARED @ m @ _SHARED, MATRICES),
    "matmul, adjoint": (lambda a: tf.matmul(a, a, adjoint_a=True), normal(2, 3, dtype=tf.complex64)),
    "matmul of more axes": (tf.matmul, (normal(2, 3, 4), normal(4, 2))),
    "matmul of bytes": (
        lambda a, b: tf.matmul(a, b, output_type=tf.int32),
        (integers(-9, 9, 2, 3, dtype=tf.int8), integers(-9, 9, 3, 2, dtype=tf.int8)),
    ),
    "sparse-dense matmul": (
        lambda m: tf.sparse.sparse_dense_matmul(tf.sparse.from_dense(_SHARED), m),
        MATRICES,
    ),
    "sparse-dense matmul of the row": (lambda a, b: tf.sparse.sparse_dense_matmul(tf.sparse.from_dense(a), b), _SYSTEM),
    "matrix_rank": (tf.linalg.matrix_rank, WIDE),
    "matrix_transpose": (tf.linalg.matrix_transpose, WIDE),
    "matvec": (tf.linalg.matvec, (WIDE, normal(5))),
    "matvec of a shared matrix": (lambda x: tf.linalg.matvec(_SHARED, x), normal(3)),
    "norm": (lambda m: (tf.norm(m), tf.norm(m, 1, axis=0), tf.norm(m, "fro", axis=[0, 1])), MATRICES),
    "norm by the singular values": (lambda m: tf.norm(m, 2, axis=[-2, -1]), MATRICES),
    "pinv": (tf.linalg.pinv, WIDE),
    "qr": (lambda m: tf.linalg.qr(m), TALL),
    "qr, full": (lambda m: tf.linalg.qr(m, full_matrices=True).r, TALL),
    "set_diag": (lambda m, x: tf.linalg.set_diag(m, x), (MATRICES, normal(3))),
    "set_diag of other diagonals": (lambda m, x: tf.linalg.set_diag(m, x, k=1), (MATRICES, normal(2))),
    "slogdet": (lambda m: tuple(tf.linalg.slogdet(m)), MATRICES),
    "solve": (tf.linalg.solve, _SYSTEM),
    "solve of a shared matrix": (lambda y: tf.linalg.solve(_SHARED, y), SIDES),
    "solve, adjoint": (lambda m, y: tf.linalg.solve(m, y, adjoint=True), _SYSTEM),
    "sqrtm": (tf.linalg.sqrtm, DEFINITE),
    "svd": (_svd, TALL),
    "svd, singular values": (lambda m: tf.linalg.svd(m, compute_uv=False), MATRICES),
    "tensor_diag": (tf.linalg.tensor_diag, VECTORS),
    "tensor_diag_part": (tf.linalg.tensor_diag_part, MATRICES),
    "tensordot": (lambda x, y: tf.tensordot(x, y, [[0], [1]]), (WIDE, MATRICES)),
    "tensordot of no axes": (lambda x: tf.tensordot(x, x, 0), VECTORS),
    "trace": (tf.linalg.trace, MATRICES),
    "triangular_solve": (lambda m, y: tf.linalg.triangular_solve(m, y), (TRIANGULAR, SIDES)),
    "triangular_solve, adjoint": (lambda m, y: tf.linalg.triangular_solve(m, y, adjoint=True), (TRIANGULAR, SIDES)),
    "tridiagonal_matmul": (
        lambda d, y: tf.linalg.tridiagonal_matmul(d, y, diagonals_format="compact"),
        (_DIAGONALS, normal(5, 2)),
    ),
    "tridiagonal_solve": (lambda d, y: tf.linalg.tridiagonal_solve(d, y), (_DIAGONALS, normal(5, 2))),
    "tridiagonal_solve of a vector": (lambda d, y: tf.linalg.tridiagonal_solve(d, y), (_DIAGONALS, normal(5))),
    "eigh_tridiagonal": (lambda x, y: tf.linalg.eigh_tridiagonal(x, y), (VECTORS, normal(3))),
    "conjugate gradient": (
        lambda m, y: (
            tf.linalg.experimental.conjugate_gradient(
                tf.linalg.LinearOperatorFullMatrix(m, is_self_adjoint=True, is_positive_definite=True), y, max_iter=5
            ).x
        ),
        (DEFINITE, normal(3)),
    ),
    "cholesky of complex": (
        lambda m: tf.linalg.cholesky(m @ tf.linalg.adjoint(m) + tf.eye(3, dtype=m.dtype)),
        normal(3, 3, dtype=tf.complex128),
    ),
}
