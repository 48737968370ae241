"""Client weights: PrimalDual, AFL, FedAvg with given weights, and the toy problem of the primal-dual paper."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.afl import AFL
from fedbilevel.algorithms.fedavg import FedAvg
from fedbilevel.algorithms.primal_dual import PrimalDual, PrimalDualState
from fedbilevel.core.vectors import Vector
from fedbilevel.engines.messaging.local import Local
from fedbilevel.engines.participation import Independent, Uniform
from fedbilevel.engines.program import round_keys
from fedbilevel.engines.simulation import Simulation, compiled_advance
from fedbilevel.tasks import Quadratic, WeightedQuadratics
from fedbilevel.tasks.client_weighting_toy import SEEDS, Toy, _loss, client_weighting_toy
from fedbilevel.tasks.weighted_quadratics import project

BOUNDARY, INTERIOR = WeightedQuadratics.random(seed=0), WeightedQuadratics.random(seed=2)
T7 = WeightedQuadratics.line(0.0, 1.0, 4.0)
TASK, LINE = BOUNDARY.task(), T7.task()  # made once: finding the solution takes a second
D = 4


# The primal-dual method


@pytest.mark.parametrize("problem", [BOUNDARY, INTERIOR], ids=["boundary", "interior"])
@pytest.mark.parametrize("options", [{}, {"inner_steps": 5, "iterate": "random"}], ids=str)
def test_primal_dual_reaches_the_solution(problem: WeightedQuadratics, options: dict[str, Any]) -> None:
    x_star = problem.solution()
    assert problem.stationarity(x_star) < 1e-12
    assert (x_star.min() < 1e-12) == (problem is BOUNDARY)
    task = TASK if problem is BOUNDARY else problem.task()
    result = fb.solve(task, PrimalDual(**options), rounds=2500, every=2500)
    np.testing.assert_allclose(result.x, x_star, atol=1e-9)
    np.testing.assert_allclose(result.y, problem.lower(x_star), atol=1e-9)
    np.testing.assert_allclose(result.state.server.multiplier.tree, -problem.adjoint(x_star), atol=1e-9)


def test_the_multiplier_stays_in_its_ball() -> None:
    radius = 0.5 * float(np.linalg.norm(BOUNDARY.adjoint(np.full(3, 1 / 3))))
    result = fb.solve(TASK, PrimalDual(lr_upper=1e-9, radius=radius), rounds=500, every=500)
    np.testing.assert_allclose(np.linalg.norm(result.state.server.multiplier.tree), radius, rtol=1e-9)


@pytest.mark.parametrize("K", [1, 5])
def test_the_cost_of_primal_dual(K: int) -> None:
    for cohort in (None, Uniform(2), Independent(0.5, resample=True)):
        planned = fb.plan(TASK, PrimalDual(inner_steps=K), cohort)
        assert (planned.exchanges, planned.down, planned.up) == (K, 2 * K * D, 2 * K * D)
        assert planned.oracles == {"Gg": K, "H": K}
        assert planned.total(lambda e: e.bytes_up) == 8 * K * (2 * D + 1)  # and one number
        assert planned.total(lambda e: e.bytes_down) == 8 * K * 2 * D


def unconstrained(task: fb.Task) -> fb.Task:
    """The same task without a projection of x, so that x moves by the estimate of its gradient."""
    return replace(task, problem=replace(task.problem, project_x=lambda x: x))


def servers(task: fb.Task, algorithm: fb.Algorithm, x: Any, y: Any, l: Any, cohort: Any, many: int) -> Any:  # noqa: E741
    """The server's states after one round from a given one, for many keys."""
    engine = Simulation(unconstrained(task), algorithm, cohort)
    state = engine.start(0, x, y)
    if isinstance(algorithm, PrimalDual):
        state = state._replace(server=PrimalDualState(state.server.x, state.server.y, Vector(jnp.asarray(l), "y")))

    def one(key: jax.Array) -> Any:
        return compiled_advance(engine.program, engine.task.data, state._replace(key=key), jnp.asarray(1)).server

    return jax.vmap(one)(jax.random.split(jax.random.key(5), many))


def assert_mean(samples: Any, expected: np.ndarray) -> None:
    samples = np.asarray(samples)
    error = samples.std(axis=0, ddof=1) / np.sqrt(len(samples))
    assert np.all(error > 0)
    assert np.all(np.abs(samples.mean(axis=0) - expected) < 4 * error)
    assert np.all(error < 0.02 * np.abs(expected).max())  # so that a wrong factor would be noticed


SMALL = {"clients": 4, "rows": 8, "features": 3, "seed": 1}
X, W, L = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.3, -1.0, 0.5]), np.array([1.0, 2.0, -1.0])


def small_toy() -> Toy:
    return Toy.random(4, 8, 3, np.random.default_rng(1))


@pytest.mark.slow
def test_the_estimates_of_primal_dual_are_unbiased() -> None:
    """Over active sets, batches and noise, at given x, w and lambda."""
    toy, gamma, cohort = small_toy(), 1.5, Independent(0.5, resample=True)
    algorithm = PrimalDual(1.0, 1.0, 1.0, augmentation=gamma)
    after = servers(client_weighting_toy(**SMALL, noise=0.1), algorithm, X, W, L, cohort, 8000)
    server, *clients = toy.gradients(W)
    g = np.stack(clients)
    assert_mean(X - after.x.tree, g @ L)
    assert_mean(W - after.y.tree, server + toy.hessian(X, W) @ L + gamma * X @ g)
    assert_mean(after.multiplier.tree - L, X @ g)


@pytest.mark.slow
def test_the_inner_step_is_drawn_uniformly() -> None:
    """With everybody and without noise, the gradient of x is one of those of the K steps, computed here."""
    toy, eta = small_toy(), 0.02
    w, l, expected = W, L, []  # noqa: E741
    for _ in range(3):
        server, *clients = toy.gradients(w)
        g = np.stack(clients)
        expected.append(g @ l)
        w, l = w - eta * (server + toy.hessian(X, w) @ l + X @ g), l + eta * X @ g  # noqa: E741
    task, algorithm = client_weighting_toy(**SMALL), PrimalDual(1.0, eta, eta, inner_steps=3)
    last = servers(task, algorithm, X, W, L, None, 1)
    np.testing.assert_allclose(X - last.x.tree[0], expected[-1], rtol=1e-9)
    drawn = servers(task, replace(algorithm, iterate="random"), X, W, L, None, 3000)
    np.testing.assert_allclose(drawn.y.tree[0], w, rtol=1e-9)
    np.testing.assert_allclose(drawn.multiplier.tree[0], l, rtol=1e-9)
    close = [np.linalg.norm(X - drawn.x.tree - each, axis=1) < 1e-9 for each in expected]
    assert np.all(np.sum(close, axis=0) == 1)
    np.testing.assert_allclose(np.mean(close, axis=1), 1 / 3, atol=4 * np.sqrt(2 / 9 / 3000))


def test_problems_that_do_not_fit_are_refused() -> None:
    for kind in (PrimalDual, AFL):
        with pytest.raises(fb.FedbilevelError, match=r"weights clients: it needs a problem with weighting=True"):
            fb.plan(Quadratic.scalar().task(), kind())
    at_clients = replace(TASK, server=None, clients=[{**c, "val": c["train"]} for c in TASK.clients])
    with pytest.raises(fb.FedbilevelError, match=r"^PrimalDual evaluates the upper loss on the server"):
        fb.plan(at_clients, PrimalDual())
    assert fb.plan(at_clients, AFL()).down == D


# AFL


def test_afl_equalises_the_extremes() -> None:
    """Two extremes that keep positive weights: lambda_1 - lambda_3 changes by gamma (L_1 - L_3) = gamma (c_3 - c_1)
    (w - middle) in every round, so that the sum of w - middle over all rounds telescopes. The mean is over w_1 .. w_T,
    not w_0, hence, when the weights have settled at a difference of 0: mean - middle = -(w_0 - middle) / T.
    """
    T, gamma, w0, middle = 3000, 0.02, -1.0, 2.0
    result = fb.solve(LINE, AFL(lr_upper=gamma, lr_lower=0.2), rounds=T, every=T, y=np.array([w0]))
    np.testing.assert_allclose(result.x, [0.5, 0, 0.5], atol=1e-9)
    np.testing.assert_allclose(result.state.server.y.tree, [middle], atol=1e-9)
    np.testing.assert_allclose(result.y, [middle - (w0 - middle) / T], atol=1e-9)


def test_the_mean_of_afl_before_it_has_settled() -> None:
    """The same sum after a few rounds, when the last difference of the weights is not 0 yet."""
    gamma = 0.02
    short, longer = (fb.solve(LINE, AFL(gamma, 0.2), rounds=T, every=T) for T in (7, 8))
    assert min(float(np.min(np.asarray(r.x)[[0, 2]])) for r in (short, longer)) > 0
    difference = float(longer.x[0] - longer.x[2]) - gamma * 4.0 * (0.0 - 2.0)
    np.testing.assert_allclose(short.y, [2 + difference / (gamma * 4.0 * 7)], atol=1e-12)


def test_afl_reaches_a_saddle_point() -> None:
    """w is trained with the weights, and no other weights have a larger loss: x = P(x + losses)."""
    result = fb.solve(TASK, AFL(), rounds=20_000, every=20_000)
    x, w = np.asarray(result.x), np.asarray(result.state.server.y.tree)
    np.testing.assert_allclose(w, BOUNDARY.lower(x), atol=1e-8)
    losses = np.array([0.5 * (w - c) @ H @ (w - c) for H, c in zip(BOUNDARY.H, BOUNDARY.c, strict=True)])
    np.testing.assert_allclose(project(x + losses), x, atol=1e-8)
    np.testing.assert_allclose(result.y, w, atol=1e-2)


@pytest.mark.slow
def test_the_estimates_of_afl_are_unbiased() -> None:
    toy = small_toy()
    cohort = Independent(0.5)
    after = servers(client_weighting_toy(**SMALL, noise=0.1), AFL(1.0, 1.0), X, W, None, cohort, 8000)
    losses = [
        0.5 * np.sum((A @ W - B) ** 2) + np.cos(a @ W - b) for A, B, a, b in zip(*vars(toy).values(), strict=True)
    ]
    assert_mean(after.x.tree - X, np.array(losses[1:]))
    assert_mean(W - after.y.tree, X @ toy.gradients(W)[1:])


def test_the_cost_of_afl() -> None:
    for cohort in (None, Uniform(2)):
        planned = fb.plan(TASK, AFL(), cohort)
        assert (planned.exchanges, planned.down, planned.up, planned.oracles) == (1, D, D, {"Gg": 1})
        assert planned.total(lambda e: e.bytes_up) == 8 * (D + 1)


# Both, where some clients do not take part: an independent trajectory in numpy


def active(q: WeightedQuadratics, seed: int, rounds: int, cohort: Any) -> Any:
    """The cohorts that the engine draws, as masks."""
    n = len(q.H)
    for round in range(rounds):
        if isinstance(cohort, list):
            yield np.isin(np.arange(n), cohort)
            continue
        drawn = cohort.draw(round_keys(jax.random.key(seed), round)[0], n)
        yield np.isin(np.arange(n), np.asarray(drawn.ids)[np.asarray(drawn.active)])


def primal_dual(q: WeightedQuadratics, cohorts: Any, eta_x: float, eta_w: float, eta_l: float) -> tuple[Any, Any]:
    x, w, l = np.full(len(q.H), 1 / len(q.H)), np.zeros(q.c.shape[1]), np.zeros(q.c.shape[1])  # noqa: E741
    for there in cohorts:
        factor = len(there) / there.sum()
        shares = factor * np.where(there, x, 0)
        g = np.einsum("ijk,ik->ij", q.H, w - q.c)
        x, w, l = (  # noqa: E741
            project(x - eta_x * factor * np.where(there, g @ l, 0)),
            w - eta_w * (q.H0 @ (w - q.c0) + np.tensordot(shares, q.H, 1) @ l + shares @ g),
            l + eta_l * shares @ g,
        )
    return x, w


def afl(q: WeightedQuadratics, cohorts: Any, eta_x: float, eta_w: float) -> tuple[Any, Any]:
    x, w, visited = np.full(len(q.H), 1 / len(q.H)), np.zeros(q.c.shape[1]), []
    for there in cohorts:
        factor = len(there) / there.sum()
        g = np.einsum("ijk,ik->ij", q.H, w - q.c)
        losses = 0.5 * np.einsum("ij,ij->i", w - q.c, g)
        step = eta_w * factor * np.where(there, x, 0) @ g
        x, w = project(x + eta_x * factor * np.where(there, losses, 0)), w - step
        visited.append(w)
    return x, np.mean(visited, axis=0)


@pytest.mark.parametrize("engine", ["simulation", "local"])
@pytest.mark.parametrize("cohort", [[0, 2, 3, 5, 6], Independent(0.6)], ids=["fixed", "independent"])
def test_trajectories_with_partial_participation(cohort: Any, engine: str) -> None:
    """Full batches, seven clients of which some are active: equal to double precision, in both engines."""
    q, seed, rounds = WeightedQuadratics.random(clients=7, d=3, seed=4), 3, 8
    for algorithm, reference in ((PrimalDual(0.02, 0.1, 0.2), primal_dual), (AFL(0.02, 0.1), afl)):
        found = fb.solve(q.task(), algorithm, rounds, seed, cohort, every=rounds, engine=engine)
        steps = [
            getattr(algorithm, name) for name in ("lr_upper", "lr_lower", "lr_adjoint") if hasattr(algorithm, name)
        ]
        x, y = reference(q, active(q, seed, rounds, cohort), *steps)
        assert np.max(np.abs(x - 1 / 7)) > 1e-3
        np.testing.assert_allclose(found.x, x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(found.y, y, rtol=0, atol=1e-12)


# FedAvg


@pytest.mark.parametrize("tau", [1, 4])
def test_fedavg_with_given_weights(tau: int) -> None:
    """Local steps are on the client's own loss, so that it moves by (I - (I - eta H)^tau)(c - w), times its weight."""
    q, task, eta, weights = BOUNDARY, TASK, 0.2, np.array([0.5, 0.2, 0.3])
    pull = np.stack([np.eye(D) - np.linalg.matrix_power(np.eye(D) - eta * H, tau) for H in q.H])
    limit = np.linalg.solve(np.tensordot(weights, pull, 1), np.einsum("i,ijk,ik->j", weights, pull, q.c))
    result = fb.solve(task, FedAvg(eta, tau, client_weights=tuple(4 * weights)), rounds=300, every=300)
    np.testing.assert_allclose(result.x, weights, rtol=1e-12)
    np.testing.assert_allclose(result.y, limit, atol=1e-9)
    assert tau > 1 or np.allclose(limit, q.lower(weights))
    started = fb.solve(task, FedAvg(eta, tau), rounds=300, every=300, x=weights)
    np.testing.assert_allclose(started.y, limit, atol=1e-9)


def test_the_cost_of_fedavg_with_given_weights() -> None:
    for algorithm in (FedAvg(), FedAvg(client_weights=(1, 2, 3))):
        planned = fb.plan(TASK, algorithm)
        assert (planned.exchanges, planned.down, planned.up, planned.oracles) == (1, D, D, {"Gg": 5})


def test_fedavg_on_the_validation_rows_of_the_server() -> None:
    task, algorithm = TASK, FedAvg(0.2, 3, validation_only=True)
    result = fb.solve(task, algorithm, rounds=150, every=150)
    np.testing.assert_allclose(result.y, BOUNDARY.c0, atol=1e-9)
    few, same = (fb.solve(task, algorithm, rounds=2, every=2, engine=name) for name in ("simulation", "local"))
    np.testing.assert_allclose(few.y, same.y, atol=1e-12)
    for each in (result, same):
        assert each.plan.exchanges == each.metrics["exchanges"] == each.metrics["megabytes"] == 0


def test_fedavg_on_the_validation_rows_of_the_clients() -> None:
    q, algorithm = Quadratic.random(clients=3), FedAvg(0.2, 1, validation_only=True)
    minimiser = np.linalg.solve(q.mean(q.P), q.mean(np.einsum("mij,mj->mi", q.P, q.s)))
    result = fb.solve(q.task(), algorithm, rounds=600, every=600)
    np.testing.assert_allclose(result.y, minimiser, atol=1e-9)
    assert fb.plan(q.task(), replace(algorithm, local_steps=4)).oracles == {"Gf": 4}
    engine = Local(q.task(), algorithm)
    few = fb.solve(q.task(), algorithm, rounds=2)
    np.testing.assert_allclose(engine.solution(engine.advance(engine.start(0), 2))[1], few.y, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: FedAvg(client_weights=(0.5, -0.5)), "client_weights must be at least 0, not -0.5."),
        (lambda: FedAvg(client_weights=(0.0, 0.0)), "client_weights must be finite and not all zero."),
        (lambda: FedAvg(client_weights=(float("inf"), 1.0)), "client_weights must be finite and not all zero."),
        (
            lambda: FedAvg(client_weights=(1.0,), validation_only=True),
            "validation_only leaves out the losses that client_weights would weigh.",
        ),
        (
            lambda: fb.solve(TASK, FedAvg(client_weights=(0.5, 0.5))),
            "client_weights must be 3 numbers, one per client, not 2.",
        ),
        (
            lambda: fb.solve(Quadratic.scalar().task(), FedAvg(client_weights=(0.5, 0.5))),
            "client_weights are for problems with weighting=True; here, give the task weights=.",
        ),
    ],
)
def test_bad_weights_are_refused(make: Any, sentence: str) -> None:
    with pytest.raises(fb.FedbilevelError) as caught:
        make()
    assert str(caught.value) == f"FedAvg: {sentence}"


# The toy problem


def test_the_losses_of_the_toy() -> None:
    toy, task = Toy.random(15, 30, 20, np.random.default_rng(3)), client_weighting_toy(seed=3)
    np.testing.assert_array_equal(task.server["B"][0], toy.B[0])
    assert task.problem is client_weighting_toy(seed=4, noise=0.5).problem
    for A, a in zip(toy.A, toy.a, strict=True):
        assert np.linalg.eigvalsh(A.T @ A - np.outer(a, a))[0] >= 0.1
    np.testing.assert_allclose(toy.A.var(), 20**-0.5, rtol=0.05)  # drawing again favours larger entries
    np.testing.assert_allclose(toy.B.var(), 30**-0.5, rtol=0.2)
    w = np.random.default_rng(0).normal(size=20)
    rows = [task.server, *(client["train"] for client in task.clients)]
    gradient = jax.jit(lambda row: jax.grad(_loss, 1)(None, jnp.asarray(w), row))
    np.testing.assert_allclose([gradient(row) for row in rows], toy.gradients(w), rtol=1e-9)


def test_what_is_measured_on_the_toy() -> None:
    toy = Toy.random(15, 30, 20, np.random.default_rng(3))
    x = np.random.default_rng(0).dirichlet(np.full(15, 0.5))
    w = toy.lower(x)
    assert np.linalg.norm(x @ toy.gradients(w)[1:]) < 1e-11  # with a curvature of 0.1 or more: w* to 1e-10
    v, h = np.random.default_rng(1).normal(size=15), 1e-5
    difference = (toy.value(toy.lower(x + h * v)) - toy.value(toy.lower(x - h * v))) / (2 * h)
    np.testing.assert_allclose(toy.gradient(x) @ v, difference, rtol=1e-6)
    measured = client_weighting_toy(seed=3).metrics(x, w)  # type: ignore
    moved = np.linalg.norm(x - project(x - 0.001 * toy.gradient(x)))
    assert measured == {"value": toy.value(w), "stationarity": moved, "lower_gap": 0}


@pytest.mark.slow
def test_noise_is_white_in_gradients_and_hessians_and_nowhere_else() -> None:
    noise, rows = 0.5, client_weighting_toy(features=4, rows=10, clients=2, noise=0.5).clients[0]["train"]
    assert len(rows["A"]) == 2 * SEEDS
    w, v = jnp.asarray([0.3, -1.0, 0.5, 2.0]), jnp.asarray([1.0, 2.0, -1.0, 0.5])
    one = lambda row: jax.tree.map(lambda a: a[None], row)

    @jax.jit
    @jax.vmap
    def derivatives(row: Any) -> Any:
        gradient = lambda w: jax.grad(_loss, 1)(None, w, one(row))
        return _loss(None, w, one(row)), gradient(w), jax.jacfwd(gradient)(w), jax.jvp(gradient, (w,), (v,))[1]

    values, gradients, hessians, products = map(np.asarray, derivatives(jax.tree.map(jnp.asarray, rows)))
    exact = {name: rows[name][:1] for name in ("A", "B", "a", "b")}
    value, gradient = jax.value_and_grad(_loss, 1)(None, w, exact)
    hessian = jax.jacfwd(jax.grad(_loss, 1), 1)(None, w, exact)
    np.testing.assert_allclose(values, value, rtol=1e-12)
    np.testing.assert_allclose(products, hessians @ v, atol=1e-12)
    np.testing.assert_allclose(hessians, hessians.swapaxes(1, 2), atol=1e-12)
    upper = np.triu_indices(4)
    for noisy, clean in ((gradients, gradient), (hessians[:, *upper], np.asarray(hessian)[upper])):
        noise_of = noisy - np.asarray(clean)
        np.testing.assert_allclose(noise_of[::2], -noise_of[1::2], atol=1e-12)  # pairs
        covariance = noise_of[::2].T @ noise_of[::2] / SEEDS
        # Of a covariance of white noise: deviations sqrt(2 / n) on the diagonal, else 1 / sqrt(n).
        spread = noise**2 * np.sqrt((1 + np.eye(len(covariance))) / SEEDS)
        assert np.all(np.abs(covariance - noise**2 * np.eye(len(covariance))) < 4.5 * spread)


@pytest.mark.parametrize("K", [1, 5])
def test_primal_dual_solves_the_toy(K: int) -> None:
    task = client_weighting_toy()
    result = fb.solve(task, PrimalDual(**task.suggested.hyper["primal-dual"], inner_steps=K), rounds=800, every=800)
    assert result.history[0]["stationarity"] > 1e-3
    assert result.metrics["stationarity"] < 1e-7
    assert result.metrics["value"] < result.history[0]["value"] - 0.5


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"noise": -1.0}, "must be at least 1, noise and seed not negative"),
        ({"clients": 0}, "clients, rows and features must be at least 1"),
        ({"rows": 3, "features": 5}, "with 3 rows and 5 features hardly any loss is 0.1-strongly convex"),
    ],
    ids=str,
)
def test_toys_that_cannot_be_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fb.FedbilevelError, match=sentence):
        client_weighting_toy(**options)
