"""GPflow: kernels, and what models predict for each row."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from clients.agreement import Client, check_gradients, check_results
from clients.data import normal, uniform
from clients.known import known
from clients.packages import imported

gpflow = imported("gpflow")
F64 = tf.float64
X = tf.reshape(tf.linspace(tf.constant(-1.0, F64), 1.0, 12), [6, 2])
Y = tf.sin(3 * X[:, :1])
POINTS = normal(5, 2, dtype=F64)
ROWS = uniform(-1.0, 1.0, 2, dtype=F64)
KERNELS = {
    "Matern52": gpflow.kernels.Matern52(lengthscales=[0.5, 1.0]),
    "SquaredExponential": gpflow.kernels.SquaredExponential(),
    "ArcCosine": gpflow.kernels.ArcCosine(order=1),
    "Periodic": gpflow.kernels.Periodic(gpflow.kernels.SquaredExponential(), period=1.5),
    "sum and product": gpflow.kernels.Linear() + gpflow.kernels.White() * gpflow.kernels.Polynomial(degree=2),
    "Coregion": gpflow.kernels.Coregion(output_dim=3, rank=1, active_dims=[1]),
}


def _models() -> dict[str, Any]:
    points = gpflow.inducing_variables.InducingPoints(X[::2])
    return {
        "GPR": gpflow.models.GPR((X, Y), gpflow.kernels.Matern52(), noise_variance=0.1),
        "SGPR": gpflow.models.SGPR((X, Y), gpflow.kernels.Matern32(), points, noise_variance=0.1),
        "SVGP": gpflow.models.SVGP(gpflow.kernels.Matern32(), gpflow.likelihoods.Gaussian(0.1), points),
        "VGP of classes": gpflow.models.VGP(
            (X, tf.cast(Y > 0, F64)), gpflow.kernels.SquaredExponential(), gpflow.likelihoods.Bernoulli()
        ),
    }


MODELS = _models()
POSTERIOR = MODELS["GPR"].posterior()


def _predicted(model: Any, row: Any) -> Any:
    return tuple(moment[0] for moment in model.predict_f(row[None]))


def _log_likelihood(row: Any, noise: Any) -> Any:
    covariance = KERNELS["SquaredExponential"](row) + noise * tf.eye(5, dtype=F64)
    return gpflow.logdensities.multivariate_normal(row[:, :1], tf.zeros([5, 1], F64), tf.linalg.cholesky(covariance))


CLOSE = {"rtol": 1e-5, "atol": 1e-7}
CLIENTS = {
    **{f"kernel: {name}": Client(k, tf.abs(POINTS) if name == "Coregion" else POINTS) for name, k in KERNELS.items()},
    **{
        f"cross-covariance: {name}": Client(lambda row, k=k: k(row, X), POINTS)
        for name, k in KERNELS.items()
        if name != "Coregion"
    },
    **{
        f"{name}, per row": Client(lambda row, m=m: _predicted(m, row), ROWS, tolerances=CLOSE)
        for name, m in MODELS.items()
    },
    **{
        f"{name}, batched": Client(lambda b, m=m: tuple(m.predict_f(b)), ROWS, batched=True, tolerances=CLOSE)
        for name, m in MODELS.items()
    },
    "GPR's posterior, batched": Client(lambda b: tuple(POSTERIOR.predict_f(b)), ROWS, batched=True, tolerances=CLOSE),
    "classes, predicted": Client(
        lambda row: MODELS["VGP of classes"].predict_y(row[None])[0][0], ROWS, tolerances=CLOSE
    ),
    "likelihood of a row's data": Client(_log_likelihood, (POINTS, uniform(0.1, 1.0, dtype=F64))),
}
CASES = [
    pytest.param(name, vectorize, id=f"{name}-{vectorize}")
    for name, client in CLIENTS.items()
    for vectorize in (("auto",) if client.batched else ("auto", False))
]


@pytest.mark.parametrize(("name", "vectorize"), CASES)
def test_results(name: str, vectorize: Any, request: pytest.FixtureRequest) -> None:
    known(request)
    check_results(CLIENTS[name], vectorize=vectorize)


@pytest.mark.parametrize(("name", "vectorize"), CASES)
def test_gradients(name: str, vectorize: Any, request: pytest.FixtureRequest) -> None:
    """None in the one and zeros in the other count as equal (see `check_gradients`)."""
    known(request)
    check_gradients(CLIENTS[name], vectorize=vectorize)
