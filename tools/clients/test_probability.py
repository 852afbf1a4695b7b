"""TensorFlow Probability: chains, solvers, minimisers, densities and bijectors, one problem per row."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from clients.agreement import Client, check_gradients, check_results
from clients.data import (
    COUNTS,
    DEFINITE,
    PAIRS,
    POSITIVE,
    SHARES,
    TRIANGULAR,
    VECTORS,
    integers,
    normal,
    seeds,
    uniform,
)
from clients.known import known
from clients.packages import imported

tfp = imported("tensorflow_probability")
tfb, tfd, tfm = tfp.bijectors, tfp.distributions, tfp.math

_MATRIX = tf.constant([[-0.5, 1.0], [-1.0, -0.3]])
_FLOW = tfb.MaskedAutoregressiveFlow(
    tfb.AutoregressiveNetwork(params=2, hidden_units=[6], event_shape=[4], activation="tanh")
)
_FLOW.forward(tf.ones([1, 4]))  # makes its variables
CLOSE = {"rtol": 1e-3, "atol": 1e-4}
"""For what iterates until it is good enough."""


def _energy(x: Any) -> Any:
    return -0.5 * tf.reduce_sum(x**2, -1) - 0.1 * tf.reduce_sum(x**4, -1)


def _chain(kernel: Any, state: Any, seed: Any) -> Any:
    return tfp.mcmc.sample_chain(4, state, kernel=kernel, num_burnin_steps=2, trace_fn=None, seed=seed)


def _hmc(state: Any, seed: Any) -> Any:
    return _chain(tfp.mcmc.HamiltonianMonteCarlo(_energy, step_size=0.2, num_leapfrog_steps=3), state, seed)


def _adapted(state: Any, seed: Any) -> Any:
    hmc = tfp.mcmc.HamiltonianMonteCarlo(_energy, step_size=0.2, num_leapfrog_steps=2)
    return _chain(tfp.mcmc.DualAveragingStepSizeAdaptation(hmc, num_adaptation_steps=2), state, seed)


def _walk(state: Any, seed: Any) -> Any:
    return _chain(tfp.mcmc.RandomWalkMetropolis(_energy), state, seed)


def _nuts(state: Any, seed: Any) -> Any:
    return _chain(tfp.mcmc.NoUTurnSampler(_energy, step_size=0.3, max_tree_depth=2), state, seed)


def _solved(solver: Any) -> Any:
    field = lambda t, y: tf.linalg.matvec(_MATRIX, y) - 0.1 * y**3
    return lambda start: solver.solve(field, 0.0, start, solution_times=[0.5, 1.0]).states


def _rosenbrock(x: Any) -> Any:
    return tf.reduce_sum((1 - x[..., :-1]) ** 2 + 5 * (x[..., 1:] - x[..., :-1] ** 2) ** 2, -1)


def _minimised(minimise: Any, **options: Any) -> Any:
    def fn(start: Any) -> Any:
        found = minimise(lambda x: tfm.value_and_gradient(_rosenbrock, x), start, max_iterations=30, **options)
        return found.position, found.converged

    return fn


def _root(shift: Any) -> Any:
    return tfm.find_root_chandrupatla(lambda x: x**3 + x - shift, -3.0, 3.0).estimated_root


def _smoothed(x: Any) -> Any:
    model = tfd.HiddenMarkovModel(
        tfd.Categorical(probs=[0.8, 0.2]),
        tfd.Categorical(probs=[[0.7, 0.3], [0.2, 0.8]]),
        tfd.Normal([0.0, 2.0], 1.0),
        4,
    )
    return model.log_prob(x), model.posterior_marginals(x).logits


def _kalman(x: Any) -> Any:
    model = tfd.LinearGaussianStateSpaceModel(
        4,
        [[1.0, 1.0], [0.0, 1.0]],
        tfd.MultivariateNormalDiag(scale_diag=[0.3, 0.1]),
        [[1.0, 0.0]],
        tfd.MultivariateNormalDiag(scale_diag=[0.5]),
        tfd.MultivariateNormalDiag(scale_diag=[1.0, 1.0]),
    )
    return model.log_prob(x[:, None])


def _process(x: Any) -> Any:
    kernel = tfm.psd_kernels.ExponentiatedQuadratic(length_scale=x[0] ** 2 + 0.5)
    return tfd.GaussianProcess(kernel, tf.range(4.0)[:, None], observation_noise_variance=0.1).log_prob(x)


def _mixture(x: Any) -> Any:
    parts = tfd.Normal([-1.0, 1.0], [0.5, 1.5])
    return tfd.MixtureSameFamily(tfd.Categorical(probs=[0.3, 0.7]), parts).log_prob(x)


CHAINS = {
    "HMC": Client(_hmc, (VECTORS, seeds())),
    "HMC with step size adaptation": Client(_adapted, (VECTORS, seeds())),
    "random walk": Client(_walk, (VECTORS, seeds())),
    "NUTS": Client(_nuts, (VECTORS, seeds()), tolerances=CLOSE),
}
DENSITIES = {
    "Bernoulli": Client(lambda x, n: tfd.Bernoulli(logits=x).log_prob(n), (VECTORS, integers(0, 2, 4))),
    "Beta": Client(lambda x: tfd.Beta(2.0, 1 + x[0]).log_prob(x), SHARES),
    "Binomial": Client(
        lambda n, p: tfd.Binomial(5.0, probs=p).log_prob(n), (integers(0, 6, 4, dtype=tf.float32), SHARES)
    ),
    "Categorical": Client(lambda x, n: tfd.Categorical(logits=x).log_prob(n), (VECTORS, integers(0, 4))),
    "Cauchy": Client(lambda x: tfd.Cauchy(x[0], 2.0).log_prob(x), VECTORS),
    "Dirichlet": Client(lambda a, x: tfd.Dirichlet(a).log_prob(tf.nn.softmax(x)), (POSITIVE, VECTORS)),
    "Gamma": Client(lambda x: tfd.Gamma(x[0], 2.0).log_prob(x), POSITIVE),
    "Gaussian process": Client(_process, VECTORS, tolerances=CLOSE),
    "hidden Markov model": Client(_smoothed, VECTORS, tolerances=CLOSE),
    "InverseGamma": Client(lambda x: tfd.InverseGamma(2.0, x[0]).log_prob(x), POSITIVE),
    "linear Gaussian state space model": Client(_kalman, VECTORS, tolerances=CLOSE),
    "LKJ": Client(
        lambda x: tfd.CholeskyLKJ(4, 1.0 + x[0]).log_prob(tfb.CorrelationCholesky()(tf.tile(x, [2])[:6])), POSITIVE
    ),
    "Logistic": Client(lambda x: tfd.Logistic(x[0], 1.5).log_prob(x), VECTORS),
    "mixture": Client(_mixture, VECTORS),
    "MultivariateNormalTriL": Client(
        lambda m, x: tfd.MultivariateNormalTriL(x, m).log_prob(tf.ones([3])), (TRIANGULAR, normal(3))
    ),
    "NegativeBinomial": Client(lambda x: tfd.NegativeBinomial(3.0, x).log_prob([0.0, 1.0, 2.0, 3.0]), VECTORS),
    "Poisson": Client(lambda r, n: tfd.Poisson(r).log_prob(n), (POSITIVE, integers(0, 6, 4, dtype=tf.float32))),
    "StudentT": Client(lambda x, d: tfd.StudentT(d[0], x[0], 2.0).log_prob(x), (VECTORS, POSITIVE)),
    "TruncatedNormal": Client(lambda x: tfd.TruncatedNormal(0.0, 1.0 + x[0], -3.0, 3.0).log_prob(x), SHARES),
    "VonMises": Client(lambda x: tfd.VonMises(0.5, tf.exp(x[0])).log_prob(x), VECTORS),
    "Weibull": Client(lambda x: tfd.Weibull(1.5, x[0]).log_prob(x), POSITIVE),
    "Wishart": Client(lambda m: tfd.WishartTriL(5.0, tf.eye(3)).log_prob(m), DEFINITE),
    "divergence": Client(lambda x, y: tfd.kl_divergence(tfd.Normal(x, 1.0), tfd.Normal(y, 2.0)), PAIRS),
    "quantile": Client(lambda x: tfd.Normal(1.0, 2.0).quantile(x), SHARES),
    "percentile": Client(lambda x: tfp.stats.percentile(x, 30.0, interpolation="linear"), VECTORS),
    "interpolation": Client(
        lambda x: tfm.interp_regular_1d_grid(x, -2.0, 2.0, [0.0, 1.0, 4.0, 9.0], fill_value="extrapolate"), VECTORS
    ),
    "jacobian": Client(lambda x: tfm.value_and_gradient(lambda y: tf.reduce_sum(tf.sin(y) * y), x), VECTORS),
}
SAMPLES = {
    name: Client((lambda make: lambda x, seed: make(x).sample(3, seed=seed))(make), (POSITIVE, seeds()))
    for name, make in {
        "Normal": lambda x: tfd.Normal(x, 1.0),
        "Gamma": lambda x: tfd.Gamma(x, 1.0),
        "Beta": lambda x: tfd.Beta(x, 2.0),
        "Dirichlet": tfd.Dirichlet,
        "Categorical": lambda x: tfd.Categorical(logits=x),
        "Poisson": tfd.Poisson,
        "VonMises": lambda x: tfd.VonMises(0.0, x),
        "StudentT": lambda x: tfd.StudentT(3.0, 0.0, x),
    }.items()
}


def _both_ways(make: Any) -> Any:
    def fn(x: Any) -> Any:
        bijector = make()
        y = bijector.forward(x)
        return y, bijector.inverse(tf.identity(y)), bijector.forward_log_det_jacobian(x)

    return fn


BIJECTORS = {
    "CorrelationCholesky": Client(_both_ways(tfb.CorrelationCholesky), normal(6), tolerances=CLOSE),
    "chain": Client(_both_ways(lambda: tfb.Chain([tfb.Shift(1.0), tfb.Exp(), tfb.Scale(0.5)])), VECTORS),
    "Exp": Client(_both_ways(tfb.Exp), VECTORS),
    "FillScaleTriL": Client(_both_ways(tfb.FillScaleTriL), normal(6)),
    "MaskedAutoregressiveFlow": Client(
        lambda x: (_FLOW.forward(x[None])[0], _FLOW.inverse(x[None])[0]), VECTORS, tolerances=CLOSE
    ),
    "MaskedAutoregressiveFlow, batched": Client(lambda b: _FLOW.inverse(b), VECTORS, batched=True, tolerances=CLOSE),
    "Ordered": Client(_both_ways(tfb.Ascending), VECTORS),
    "RationalQuadraticSpline": Client(
        _both_ways(lambda: tfb.RationalQuadraticSpline([1.0, 2.0, 1.0], [2.0, 1.0, 1.0], [0.5, 1.5], range_min=-2.0)),
        VECTORS,
        tolerances=CLOSE,
    ),
    "Sigmoid": Client(_both_ways(lambda: tfb.Sigmoid(-1.0, 3.0)), VECTORS),
    "SoftmaxCentered": Client(_both_ways(tfb.SoftmaxCentered), VECTORS),
    "Softplus": Client(_both_ways(tfb.Softplus), VECTORS),
}
SOLVERS = {
    "Dormand-Prince": Client(_solved(tfm.ode.DormandPrince()), normal(2), tolerances=CLOSE),
    "BDF": Client(_solved(tfm.ode.BDF()), normal(2), tolerances=CLOSE),
    "root": Client(_root, uniform(-2.0, 2.0), tolerances=CLOSE),
}
MINIMISERS = {
    "L-BFGS": Client(_minimised(tfp.optimizer.lbfgs_minimize), uniform(-1.0, 1.0, 3), tolerances=CLOSE),
    "BFGS": Client(_minimised(tfp.optimizer.bfgs_minimize), uniform(-1.0, 1.0, 3), tolerances=CLOSE),
    "Nelder-Mead": Client(
        lambda x: tfp.optimizer.nelder_mead_minimize(_rosenbrock, initial_vertex=x, max_iterations=20).position,
        uniform(-1.0, 1.0, 2),
        tolerances=CLOSE,
    ),
}
RESULTS = {
    f"{group}: {name}": client
    for group, table in {
        "chain": CHAINS,
        "density": DENSITIES,
        "sample": SAMPLES,
        "bijector": BIJECTORS,
        "solver": SOLVERS,
        "minimiser": MINIMISERS,
    }.items()
    for name, client in table.items()
}
DIFFERENTIATED = [name for name in RESULTS if name.partition(":")[0] in ("density", "sample", "bijector")]
DIFFERENTIATED += ["solver: Dormand-Prince", "chain: HMC"]


def ways(name: str) -> list[Any]:
    return [pytest.param(name, v, id=f"{name}-{v}") for v in (("auto",) if RESULTS[name].batched else ("auto", False))]


@pytest.mark.parametrize(("name", "vectorize"), [way for name in RESULTS for way in ways(name)])
def test_results(name: str, vectorize: Any, request: pytest.FixtureRequest) -> None:
    known(request)
    check_results(RESULTS[name], vectorize=vectorize)


@pytest.mark.parametrize(("name", "vectorize"), [way for name in DIFFERENTIATED for way in ways(name)])
def test_gradients(name: str, vectorize: Any, request: pytest.FixtureRequest) -> None:
    """None in the one and zeros in the other count as equal (see `check_gradients`)."""
    known(request)
    if not RESULTS[name].differentiable:
        pytest.skip("its results are whole numbers")
    check_gradients(RESULTS[name], vectorize=vectorize)


def test_chains_of_many_rows_do_not_depend_on_the_devices() -> None:
    """Seeds are the rows' own, so that a chain is the same wherever it runs."""
    rows = int(COUNTS.shape[0])
    every = Client(_hmc, (VECTORS, seeds()))
    one, three = (every.mapper(devices=devices)(every.data) for devices in (["CPU:0"], ["CPU:1", "CPU:0", "CPU:4"]))
    assert one.shape == three.shape == (rows, 4, 4)
    tf.debugging.assert_near(one, three)
