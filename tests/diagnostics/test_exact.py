"""Exact quantities against closed forms and finite differences."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize_scalar

import fedbilevel as fb
from fedbilevel.core.schedules import cube_root
from fedbilevel.diagnostics import NotDefined, lyapunov, mefbo_residual, objective, stationarity
from fedbilevel.engines.simulation import Simulation
from fedbilevel.tasks import Quadratic
from fedbilevel.tasks.weighted_quadratics import WeightedQuadratics
from fedbilevel.testing import largest_difference

RNG = np.random.default_rng(0)
T1 = Quadratic.random()


def h(problem: Quadratic, x: np.ndarray) -> float:
    """The upper loss at the exact lower solution."""
    y = np.broadcast_to(problem.lower(x), problem.s.shape)
    upper = np.einsum("mi,mij,mj->m", y - problem.s, problem.P, y - problem.s)
    return float(problem.mean(upper + np.einsum("mi,mij,mj->m", x - problem.t, problem.R, x - problem.t))) / 2


@pytest.mark.parametrize("problem", [T1, T1.local(), Quadratic.scalar(), Quadratic.scalar().local()])
def test_exact_quantities_of_quadratics(problem: Quadratic) -> None:
    x = RNG.normal(size=problem.B.shape[-1])
    found = fb.diagnostics.exact(problem.task(), x)
    assert largest_difference(found.y, problem.lower(x)) < 1e-9
    assert largest_difference(found.u, problem.adjoint(x)) < 1e-9
    assert largest_difference(found.hypergradient, problem.hypergradient(x)) < 1e-9


@pytest.mark.parametrize("problem", [T1, T1.local()])
def test_closed_forms_against_finite_differences(problem: Quadratic) -> None:
    x = RNG.normal(size=4)
    slopes = [(h(problem, x + 1e-5 * e) - h(problem, x - 1e-5 * e)) / 2e-5 for e in np.eye(4)]
    np.testing.assert_allclose(problem.hypergradient(x), slopes, atol=1e-8)
    np.testing.assert_allclose(problem.hypergradient(problem.solution()), 0, atol=1e-12)


def logistic(private: bool = False, clients: int = 3) -> fb.Task:
    """A regularised logistic regression whose per-feature penalty is learned: not quadratic."""

    def lower(x: Any, y: Any, batch: Any) -> Any:
        return jnp.logaddexp(0, -batch["b"] * (batch["a"] @ y)).mean() + 0.5 * jnp.sum(jnp.exp(x) * y**2)

    def upper(x: Any, y: Any, batch: Any) -> Any:
        return jnp.logaddexp(0, -batch["b"] * (batch["a"] @ y)).mean() + 0.01 * jnp.sum(x**2)

    rng = np.random.default_rng(1)
    rows = lambda n: {"a": rng.normal(size=(n, 4)), "b": rng.choice([-1.0, 1.0], n)}
    problem = fb.Problem(upper, lower, lambda key: (np.zeros(4) - 1, np.zeros(4)), private_x=private)
    return fb.Task(problem, [{"train": rows(8 + m), "val": rows(5)} for m in range(clients)], batch_size=None)


@pytest.mark.parametrize("private", [False, True])
def test_hypergradient_of_a_problem_that_is_not_quadratic(private: bool) -> None:
    """Against central differences of h, with clients of different sizes."""
    task = logistic(private)

    def h(x: np.ndarray) -> float:
        y = fb.diagnostics.lower_solution(task, x)
        blocks = x if private else np.broadcast_to(x, (3, 4))
        each = [task.problem.upper(b, y, c["val"]) for b, c in zip(blocks, task.clients, strict=True)]
        return float(np.mean([float(v) for v in each]))

    x = RNG.normal(size=(3, 4) if private else 4)
    found = np.asarray(fb.diagnostics.hypergradient(task, x))
    for _ in range(3):
        v = RNG.normal(size=x.shape)
        assert np.sum(found * v) == pytest.approx((h(x + 1e-5 * v) - h(x - 1e-5 * v)) / 2e-5, abs=1e-7)


def test_gaps_vanish_at_the_solution_and_only_there() -> None:
    task, x = T1.task(), RNG.normal(size=4)
    y, u = T1.lower(x), T1.adjoint(x)
    assert fb.diagnostics.lower_gap(task, x, y) < 1e-9
    assert fb.diagnostics.adjoint_gap(task, x, y, u) < 1e-9
    assert fb.diagnostics.lower_gap(task, x, y + 1) == pytest.approx(np.sqrt(6))
    assert fb.diagnostics.adjoint_gap(task, x, y, u + 2) == pytest.approx(2 * np.sqrt(6))


def test_an_indefinite_hessian_is_said() -> None:
    problem = fb.Problem(
        lambda x, y, b: (y**2).sum() + (x**2).sum() + b.mean(),
        lambda x, y, b: (y * jnp.array([1.0, -1.0]) * y).sum() + (x * y).sum() + b.mean(),
        lambda key: (np.ones(2), np.ones(2)),
    )
    task = fb.Task(problem, [{"train": np.ones(2), "val": np.ones(2)}], batch_size=None)
    with pytest.raises(fb.FedbilevelError, match="not positive definite"):
        fb.diagnostics.exact(task, np.ones(2))
    with pytest.raises(fb.FedbilevelError, match="not positive definite"):
        fb.diagnostics.adjoint_gap(task, np.ones(2), np.ones(2), np.ones(2))


def test_client_drift_is_the_spread_of_the_clients() -> None:
    """Against the local steps done by hand; identical clients do not drift."""
    algorithm = fb.FedBiO(0.1, 0.2, 0.2, local_steps=1)
    engine = Simulation(T1.task(), algorithm)
    state = engine.start(seed=0)
    drift = fb.diagnostics.client_drift(engine, state)
    y = np.stack([0.2 * b for b in T1.b])  # one step from zero
    assert drift["y"] == pytest.approx(np.mean(np.sum((y - y.mean(0)) ** 2, 1)))
    same = Simulation(Quadratic.random(heterogeneity=0.0).task(), algorithm)
    assert max(fb.diagnostics.client_drift(same, same.start(seed=0)).values()) < 1e-25


@pytest.mark.parametrize("name", ["fednest", "gd", "rfho"])
def test_client_drift_where_the_first_exchange_is_in_a_loop(name: str) -> None:
    """The first uploads are gradients of the clients' own g at 0."""
    algorithm = fb.ALGORITHMS[name]()
    engine = Simulation(T1.task(), algorithm)
    drift = fb.diagnostics.client_drift(engine, engine.start(seed=0))
    expected = np.mean(np.sum((T1.b - T1.b.mean(0)) ** 2, 1))
    assert drift == {"y": pytest.approx(expected)}


@pytest.mark.parametrize("problem", [T1, T1.local()])
def test_the_objective_is_the_upper_loss_at_the_exact_lower_solution(problem: Quadratic) -> None:
    x = RNG.normal(size=4)
    assert objective(problem.task(), x) == pytest.approx(h(problem, x), rel=1e-10)


def test_stationarity_is_the_gradient_map_of_the_constraint() -> None:
    x = np.array([-0.05, 0.05, 0.01, 0.05])
    task, gradient = T1.task(), T1.hypergradient(x)
    assert stationarity(task, x) == pytest.approx(np.linalg.norm(gradient))
    box = replace(task, problem=replace(task.problem, project_x=fb.vectors.box(-0.05, 0.05)))
    for step in (0.001, 0.1):
        expected = np.linalg.norm(x - np.clip(x - step * gradient, -0.05, 0.05)) / step
        assert stationarity(box, x, step=step) == pytest.approx(expected)
        assert expected < np.linalg.norm(gradient)


@pytest.mark.parametrize("x", [[0.2, 0.5, 0.3], [0.0, 0.4, 0.6]])
def test_weightings_of_clients(x: list[float]) -> None:
    problem = WeightedQuadratics.random()
    task, weights = problem.task(), np.array(x)
    found = fb.diagnostics.weighting_stationarity(task, weights)
    assert found == pytest.approx(problem.stationarity(weights), rel=1e-8)
    assert fb.diagnostics.weighting_value(task, weights) == pytest.approx(problem.value(weights), rel=1e-10)
    assert fb.diagnostics.weighting_stationarity(task, problem.solution(), step=0.1) < 1e-8
    with pytest.raises(fb.FedbilevelError, match="for problems with weighting=True"):
        fb.diagnostics.weighting_value(T1.task(), np.zeros(4))


# The residual of MeFBO.


def upsilon(q: Quadratic, x: np.ndarray, y: np.ndarray, c: float, gamma: float) -> float:
    """F / c + G - min_theta [G(x, theta) + |theta - y|^2 / (2 gamma)], by solving for theta."""
    A, Bx = q.mean(q.A), q.mean(q.B) @ x + q.mean(q.b)
    theta = np.linalg.solve(A + np.eye(len(y)) / gamma, Bx + y / gamma)
    lower = lambda y: 0.5 * y @ A @ y - y @ Bx
    f = np.einsum("mi,mij,mj->m", y - q.s, q.P, y - q.s) + np.einsum("mi,mij,mj->m", x - q.t, q.R, x - q.t)
    return q.mean(f) / 2 / c + lower(y) - lower(theta) - np.sum((theta - y) ** 2) / (2 * gamma)


def slopes(q: Quadratic, x: np.ndarray, y: np.ndarray, c: float, gamma: float) -> tuple[np.ndarray, np.ndarray]:
    """The gradient of Upsilon, by central differences (which are exact for quadratics, up to rounding)."""
    rx = [(upsilon(q, x + e, y, c, gamma) - upsilon(q, x - e, y, c, gamma)) / 2 for e in np.eye(len(x))]
    ry = [(upsilon(q, x, y + e, c, gamma) - upsilon(q, x, y - e, c, gamma)) / 2 for e in np.eye(len(y))]
    return np.array(rx), np.array(ry)


def test_the_residual_of_mefbo_is_the_squared_gradient_of_upsilon() -> None:
    for c, gamma in ((10.0, 1.0), (2.7, 0.015)):
        x, y = RNG.normal(size=4), RNG.normal(size=6)
        rx, ry = slopes(T1, x, y, c, gamma)
        found = mefbo_residual(T1.task(), x, y, c, gamma)
        assert found.residual == pytest.approx(rx @ rx + ry @ ry, rel=1e-8)
        assert found.hypergradient == pytest.approx(c * np.linalg.norm(rx), rel=1e-8)
        assert found.lower_gap == pytest.approx(np.linalg.norm(y - T1.lower(x)), rel=1e-8)
        assert found.name == "tangent cone"


def test_the_residual_of_mefbo_vanishes_at_the_solution_of_the_penalised_problem() -> None:
    """Where the gradient of the original problem does not, but c |rx| and |grad h| are near for large c."""
    c, gamma, zero = 10.0, 1.0, np.zeros(10)
    split = lambda z: (z[:4], z[4:])
    offset = np.concatenate(slopes(T1, *split(zero), c, gamma))
    matrix = np.stack([np.concatenate(slopes(T1, *split(e), c, gamma)) - offset for e in np.eye(10)], axis=1)
    x, y = split(np.linalg.solve(matrix, -offset))
    found = mefbo_residual(T1.task(), x, y, c, gamma)
    assert found.residual < 1e-18
    assert found.hypergradient < 1e-8
    assert np.linalg.norm(T1.hypergradient(x)) > 1e-3
    # For any x, and the y where ry = 0, c |rx| is |grad h| up to an error of order 1 / c.
    x, c = RNG.normal(size=4), 1e5
    offset, rows = slopes(T1, x, np.zeros(6), c, gamma)[1], [slopes(T1, x, e, c, gamma)[1] for e in np.eye(6)]
    y = np.linalg.solve(np.stack(rows, axis=1) - offset[:, None], -offset)
    surrogate = mefbo_residual(T1.task(), x, y, c, gamma).hypergradient
    assert surrogate == pytest.approx(np.linalg.norm(T1.hypergradient(x)), rel=1e-3)


def prox_theta(q: Quadratic, x: np.ndarray, y: np.ndarray, gamma: float, project: Any) -> np.ndarray:
    """argmin over a set, by many projected steps."""
    H, right = q.mean(q.A) + np.eye(len(y)) / gamma, q.mean(q.B) @ x + q.mean(q.b) + y / gamma
    theta, step = project(y), 1 / np.linalg.norm(H, 2)
    for _ in range(3000):
        theta = project(theta - step * (H @ theta - right))
    return theta


@pytest.mark.parametrize("shape", ["box", "ball"])
def test_the_residual_of_mefbo_on_the_boundary(shape: str) -> None:
    """x in a box, y in a box or a ball; both on the boundary, and theta, too."""
    x, c, gamma = np.array([-0.05, -0.05, 0.01, 0.05]), 3.0, 0.5
    nearest = {
        "box": lambda y: np.clip(y, -0.3, 0.3),
        "ball": lambda y: 0.5 * y / max(0.5, np.linalg.norm(y)),
    }[shape]
    y = nearest(T1.lower(x) + np.random.default_rng(2).normal(size=6))
    theta = prox_theta(T1, x, y, gamma, nearest)
    assert np.linalg.norm(theta - prox_theta(T1, x, y, gamma, lambda y: y)) > 1e-2
    mean, B = T1.mean, T1.mean(T1.B)
    rx = mean(np.einsum("mij,mj->mi", T1.R, x - T1.t)) / c - B.T @ (y - theta)
    ry = mean(np.einsum("mij,mj->mi", T1.P, y - T1.s)) / c + mean(T1.A) @ y - B @ x - mean(T1.b) - (y - theta) / gamma
    blocked = lambda z, v, bound: ((z == -bound) & (v > 0)) | ((z == bound) & (v < 0))
    assert 0 < blocked(x, rx, 0.05).sum() < 3  # on the bound, some entries point outwards and some do not
    part_x = np.where(blocked(x, rx, 0.05), 0, rx)
    part_y = np.where(blocked(y, ry, 0.3), 0, ry) if shape == "box" else y - nearest(y - ry)
    task = T1.task()
    set_y = fb.vectors.box(-0.3, 0.3) if shape == "box" else fb.vectors.ball(0.5)
    problem = replace(task.problem, project_x=fb.vectors.box(-0.05, 0.05), project_y=set_y)
    found = mefbo_residual(replace(task, problem=problem), x, y, c, gamma)
    assert found.residual == pytest.approx(part_x @ part_x + part_y @ part_y, rel=1e-8)
    assert found.hypergradient == pytest.approx(c * np.linalg.norm(rx), rel=1e-8)
    assert np.isnan(found.lower_gap)  # the free y* is outside
    assert found.name == {"box": "tangent cone", "ball": "prox"}[shape]


def waves() -> fb.Task:
    """A lower loss of curvature between -1 and 1."""
    problem = fb.Problem(
        lambda x, y, b: 0.5 * ((y - b) ** 2).sum() + (x**2).sum(),
        lambda x, y, b: jnp.cos(y - x + b).sum(),
        lambda key: (np.zeros(2), np.zeros(2)),
    )
    return fb.Task(problem, [{"train": np.zeros((1, 2)), "val": np.ones((1, 2))}], batch_size=None)


def test_the_residual_of_mefbo_needs_no_convex_lower_loss() -> None:
    x, y, c, gamma = np.array([0.1, 0.5]), np.array([0.3, 0.4]), 4.0, 0.5

    def value(x: np.ndarray, y: np.ndarray) -> float:
        least: list[Any] = [
            minimize_scalar(lambda t, a=a, b=b: np.cos(t - a) + (t - b) ** 2 / (2 * gamma), tol=1e-14)
            for a, b in zip(x, y, strict=True)
        ]
        return (0.5 * np.sum((y - 1) ** 2) + np.sum(x**2)) / c + np.sum(np.cos(y - x)) - sum(each.fun for each in least)

    d = 1e-5 * np.eye(2)
    rx = [(value(x + e, y) - value(x - e, y)) / 2e-5 for e in d]
    ry = [(value(x, y + e) - value(x, y - e)) / 2e-5 for e in d]
    found = mefbo_residual(waves(), x, y, c, gamma)
    assert found.residual == pytest.approx(np.sum(np.square(rx)) + np.sum(np.square(ry)), rel=1e-7)
    assert np.isnan(found.lower_gap)
    with pytest.raises(NotDefined, match="prox = 2 is not strongly convex here"):
        mefbo_residual(waves(), x, y, c, 2.0)


# The Lyapunov function of FedBiOAcc.

ACC = fb.FedBiOAcc(0.002, 0.1, 0.1, rate=cube_root(4.0, 60.0), local_steps=2)


def constants(q: Quadratic) -> dict[str, float]:
    """mu and L: the gradients of f and g of all clients are L-Lipschitz in (x, y)."""
    zero = np.zeros((q.B.shape[-1], q.B.shape[-1]))
    g = [np.block([[zero, -B.T], [-B, A]]) for A, B in zip(q.A, q.B, strict=True)]
    smoothness = max(np.linalg.norm(H, 2) for H in [*g, *q.P, *q.R])
    return {"curvature": float(min(np.linalg.eigvalsh(A)[0] for A in q.A)), "smoothness": float(smoothness)}


def test_the_lyapunov_function_against_its_formula() -> None:
    engine = Simulation(T1.task(), ACC)
    state = engine.advance(engine.start(seed=0), 3)
    noise = jax.tree.map(lambda a: a + RNG.normal(size=a.shape), state.server.d)
    state = state._replace(server=state.server._replace(d=noise))
    x, y, u, nu, omega, q = (np.asarray(v.tree) for v in (*state.server.z, *state.server.d))
    A, B, mean = T1.mean(T1.A), T1.mean(T1.B), T1.mean
    fx, fy = (mean(np.einsum("mij,mj->mi", H, v)) for H, v in ((T1.R, x - T1.t), (T1.P, y - T1.s)))
    errors = [nu - (fx + B.T @ u), omega - (A @ y - B @ x - mean(T1.b)), q - (A @ u - fy)]
    gaps = [y - T1.lower(x), u - T1.adjoint(x)]
    squares = lambda vectors: sum(v @ v for v in vectors)
    t = 1 + 2 * 4  # two steps by init, two in each round
    alpha = 4.0 / (60 + t) ** (1 / 3)
    mu, L = constants(T1).values()
    expected = h(T1, x) + 18 * 0.002 * L**2 / (mu * 0.1) * squares(gaps)
    expected += 9 * 7 * 5 * 0.002 / (64 * alpha) * squares(errors)
    assert lyapunov(engine, state, mu, L, batch=7) == pytest.approx(expected, rel=1e-9)
    assert float(squares(gaps)) > 1e-3


@pytest.mark.slow
def test_the_lyapunov_function_decreases() -> None:
    """Without noise, for steps as the theory wants them. In continuous time |y - y*|^2 falls at the rate 2 gamma mu and
    feeds |u - u*|^2 with tau K^2 / mu, K = |mean P|: the sum falls if tau is below 2 gamma mu^2 / K^2."""
    mu, L = constants(T1).values()
    gamma, K = 0.1, np.linalg.norm(T1.mean(T1.P), 2)
    algorithm = fb.FedBiOAcc(mu**2 * gamma / (36 * L**2), gamma, float(gamma * mu**2 / K**2), local_steps=2)
    watched = [fb.diagnostics.DIAGNOSTICS["lyapunov"].using(**constants(T1)), "lower_gap"]
    rows = fb.solve(T1.task(), algorithm, rounds=40, every=2, diagnostics=watched, x=np.ones(4)).history
    values = [row["lyapunov"] for row in rows]
    assert max(np.diff(values)) < 0
    assert rows[-1]["lower_gap"] < rows[0]["lower_gap"]


def test_the_lyapunov_function_is_that_of_fedbioacc() -> None:
    engine = Simulation(T1.task(), fb.FedBiO())
    with pytest.raises(fb.FedbilevelError, match="the diagnostic lyapunov is for FedBiOAcc"):
        lyapunov(engine, engine.start(seed=0))
