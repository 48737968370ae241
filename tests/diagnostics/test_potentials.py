"""Potential functions, drifts and errors of momenta against their formulas in numpy."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.diagnostics import DIAGNOSTICS, Snapshot
from fedbilevel.engines.simulation import Simulation
from fedbilevel.tasks import Quadratic, WeightedQuadratics

T1 = Quadratic.random(clients=3, p=2, d=3)
T4 = T1.local()
RNG = np.random.default_rng(1)


def shaken(tree: Any) -> Any:
    """The same with noise, so that nothing is zero or equal by chance."""
    return jax.tree.map(lambda a: a + RNG.normal(size=a.shape) if np.issubdtype(a.dtype, np.floating) else a, tree)


def columns(name: str, engine: Simulation, state: Any, history: Any = (), **options: float) -> dict[str, float]:
    moment = Snapshot(engine, state, history)
    chosen = DIAGNOSTICS[name].using(**options)
    chosen.check(moment)
    return chosen.columns(moment)


def square(v: Any) -> float:
    return float(np.sum(np.square(v)))


def upper(q: Quadratic, x: np.ndarray, y: np.ndarray) -> float:
    """The mean of f_m(x, y_m); y may be the same for all."""
    y = np.broadcast_to(y, q.s.shape)
    f = np.einsum("mi,mij,mj->m", y - q.s, q.P, y - q.s) + np.einsum("mi,mij,mj->m", x - q.t, q.R, x - q.t)
    return float(q.mean(f)) / 2


def test_the_potential_of_fedbio() -> None:
    engine = Simulation(T1.task(), fb.FedBiO(0.01, 0.2, 0.3, local_steps=1))
    state = engine.start(0)
    state = state._replace(server=shaken(state.server))
    x, y, u = (np.asarray(v.tree) for v in state.server)
    mu, L, L1 = 0.4, 2.0, 3.0
    star = T1.lower(x)
    of_y, of_u = L1**2 / 0.2 * square(y - star), L**2 / 0.3 * square(u - T1.adjoint(x))
    expected = upper(T1, x, star) + 9 * 0.01 / mu * (of_y + of_u)
    constants = {"curvature": mu, "smoothness": L, "smoothness_upper": L1}
    assert columns("fedbio_potential", engine, state, **constants)["fedbio_potential"] == pytest.approx(expected)
    error = columns("adjoint_error", engine, state)["adjoint_error"]
    assert error == pytest.approx(np.linalg.norm(u - T1.adjoint(x)))
    assert error != pytest.approx(columns("adjoint_gap", engine, state)["adjoint_gap"])  # which is at the current y


@pytest.mark.parametrize("accelerated", [False, True])
def test_the_potentials_of_the_local_variants(accelerated: bool) -> None:
    kind = fb.FedBiOAccLocal if accelerated else fb.FedBiOLocal
    more = {"rate": "cube_root(2, 9)"} if accelerated else {}
    engine = Simulation(T4.task(), kind(0.01, 0.2, 0.3, 2, local_steps=2, **more))
    state = engine.start(0)
    state = state._replace(server=shaken(state.server), memory=shaken(state.memory))
    x = np.asarray(state.server.x.tree)
    y = np.asarray(engine.solution(state)[1])
    mu, L, L1 = 0.4, 2.0, 3.0
    gaps = np.mean([square(y[m] - T4.lower(x)[m]) for m in range(3)])
    expected = upper(T4, x, T4.lower(x)) + (18 if accelerated else 9) * 0.01 * L1**2 / (mu * 0.2) * gaps
    if accelerated:
        slopes = np.einsum("mij,mj->mi", T4.A, y) - np.einsum("mij,j->mi", T4.B, x) - T4.b
        of_omega = np.mean([square(np.asarray(state.memory.d.y.tree)[m] - slopes[m]) for m in range(3)])
        of_nu = square(np.asarray(state.server.nu.tree) - T4.hypergradient(x))
        alpha = 2 / (9 + int(state.server.t)) ** (1 / 3)
        expected += 9 * 5 * 3 * 0.01 / (16 * alpha) * (of_nu + (L1 / L) ** 2 * of_omega)
        errors = columns("momentum_errors", engine, state)
        assert errors["momentum_error_x"] == pytest.approx(np.sqrt(of_nu))
        assert errors["momentum_error_y"] == pytest.approx(np.sqrt(of_omega))
    constants = {"curvature": mu, "smoothness": L, "smoothness_upper": L1} | ({"batch": 5} if accelerated else {})
    assert columns("local_potential", engine, state, **constants)["local_potential"] == pytest.approx(expected)


def test_the_errors_of_the_momenta_of_fedbioacc() -> None:
    engine = Simulation(T1.task(), fb.FedBiOAcc(0.01, 0.2, 0.3, local_steps=1))
    state = engine.start(0)
    state = state._replace(server=shaken(state.server))
    x, y, u, nu, omega, q = (np.asarray(v.tree) for v in (*state.server.z, *state.server.d))
    A, B, mean = T1.mean(T1.A), T1.mean(T1.B), T1.mean
    fx, fy = (mean(np.einsum("mij,mj->mi", H, v)) for H, v in ((T1.R, x - T1.t), (T1.P, y - T1.s)))
    expected = [nu - (fx + B.T @ u), omega - (A @ y - B @ x - mean(T1.b)), q - (A @ u - fy)]
    found = columns("momentum_errors", engine, state)
    assert list(found) == ["momentum_error_x", "momentum_error_y", "momentum_error_u"]
    np.testing.assert_allclose([*found.values()], [np.linalg.norm(error) for error in expected], rtol=1e-9)


def test_the_potential_of_mefbo() -> None:
    """Psi, with v by solving for theta."""
    c, gamma, L, l, least = 7.0, 0.5, 2.0, 3.0, -1.0  # noqa: E741
    engine = Simulation(T1.task(), fb.MeFBO(penalty=c, prox=gamma))
    state = engine.start(0)
    state = state._replace(server=shaken(state.server))
    x, y, theta = (np.asarray(v.tree) for v in state.server.z)
    A, Bx = T1.mean(T1.A), T1.mean(T1.B) @ x + T1.mean(T1.b)
    star = np.linalg.solve(A + np.eye(3) / gamma, Bx + y / gamma)
    lower = lambda y: 0.5 * y @ A @ y - y @ Bx
    v = lower(star) + square(star - y) / (2 * gamma)
    K = np.sqrt(L**2 + 3 / gamma**2) / (2 * l)
    expected = (upper(T1, x, y) - least) / c + lower(y) - v + K * square(theta - star)
    found = columns("mefbo_potential", engine, state, smoothness=L, lipschitz=l, least=least)
    assert found["mefbo_potential"] == pytest.approx(expected)
    assert found["mefbo_theta_gap"] == pytest.approx(np.linalg.norm(theta - star))


def test_the_drift_of_mefbo() -> None:
    """The local steps of every client in numpy, with exact gradients."""
    q = replace(T1, weights=np.array([1.0, 2.0, 3.0]))
    c, gamma, eta, tau = 5.0, 0.5, (0.3, 0.05, 0.07), 3
    local = dict(zip(("local_lr_upper", "local_lr_lower", "local_lr_prox"), eta, strict=True))
    engine = Simulation(q.task(), fb.MeFBO(**local, penalty=c, prox=gamma, local_steps=tau))
    state = engine.start(0)
    state = state._replace(server=shaken(state.server))
    start = [np.asarray(v.tree) for v in state.server.z]
    drift = np.zeros(3)
    for m in range(3):
        z = [*start]
        for _ in range(tau):
            drift += q.weights[m] / tau * np.array([square(a - b) for a, b in zip(z, start, strict=True)])
            x, y, theta = z
            g_y = lambda y, x=x, m=m: q.A[m] @ y - q.B[m] @ x - q.b[m]
            h_x = q.R[m] @ (x - q.t[m]) / c - q.B[m].T @ (y - theta)
            h_y = q.P[m] @ (y - q.s[m]) / c + g_y(y) - (y - theta) / gamma
            h_theta = g_y(theta) + (theta - y) / gamma
            z = [a - step * h for a, step, h in zip(z, eta, (h_x, h_y, h_theta), strict=True)]
    found = columns("mefbo_drift", engine, state)
    np.testing.assert_allclose([found[f"mefbo_drift_{name}"] for name in ("x", "y", "theta")], drift, rtol=1e-9)


def test_the_moreau_gradient_of_weights() -> None:
    """rho |x - x^|, with x^ by many short steps of another kind: mirror descent on the simplex."""
    w, rho, x = WeightedQuadratics.random(seed=2), 8.0, np.array([0.5, 0.1, 0.4])
    engine = Simulation(w.task(), fb.PrimalDual())
    found = columns("moreau_gradient", engine, engine.start(0, x=x), weight=rho)["moreau_gradient"]
    z = np.full(3, 1 / 3)
    for _ in range(4000):
        z = z * np.exp(-0.05 * (w.gradient(z) + rho * (z - x)))
        z /= z.sum()
    assert found == pytest.approx(rho * np.linalg.norm(x - z), rel=1e-6)
    assert found > 0.01
    there = engine.start(0, x=w.solution())
    assert columns("moreau_gradient", engine, there, weight=rho)["moreau_gradient"] < 1e-6


def test_the_virtual_average_is_that_of_the_local_points() -> None:
    """Three local steps of FedBiO by every client in numpy; |grad h|^2 at the averages before each."""
    engine = Simulation(T1.task(), fb.FedBiO(0.1, 0.2, 0.3, local_steps=3))
    state = engine.start(0)
    state = state._replace(server=shaken(state.server))
    points = [[np.asarray(v.tree) for v in state.server]] * 3
    squares = []
    for _ in range(3):
        squares.append(square(T1.hypergradient(np.mean([x for x, _, _ in points], axis=0))))
        points = [
            [
                x - 0.1 * (T1.R[m] @ (x - T1.t[m]) + T1.B[m].T @ u),
                y - 0.2 * (T1.A[m] @ y - T1.B[m] @ x - T1.b[m]),
                u - 0.3 * (T1.A[m] @ u - T1.P[m] @ (y - T1.s[m])),
            ]
            for m, (x, y, u) in enumerate(points)
        ]
    found = columns("virtual_hypergradient", engine, state)["virtual_hypergradient"]
    assert found == pytest.approx(np.sqrt(np.mean(squares)))
    assert np.ptp(squares) > 1e-3


@pytest.mark.slow
def test_the_virtual_average_draws_the_batches_of_the_round() -> None:
    """With I + 1 local steps, the last virtual average is where the same round with I steps ends."""
    task = fb.tasks.quadratic(clients=3, p=2, d=3, noise=0.5)
    two, three = (Simulation(task, fb.FedBiO(0.1, 0.2, 0.3, local_steps=n)) for n in (2, 3))
    state = two.start(0)
    of = lambda engine: columns("virtual_hypergradient", engine, state)["virtual_hypergradient"] ** 2
    end = two.metrics(two.advance(state, 1))["hypergradient"]
    assert 3 * of(three) - 2 * of(two) == pytest.approx(end**2)


def test_the_mean_over_rounds() -> None:
    """Trapezoids: every round counts once, the first and the last one half."""
    algorithm = fb.FedBiO(0.1, 0.2, 0.2, local_steps=1)
    rows = fb.solve(T1.task(), algorithm, 10, every=3, diagnostics=["mean_squared_hypergradient"]).history
    rounds, squares = [row["round"] for row in rows], [row["hypergradient"] ** 2 for row in rows]
    assert rounds == [0, 3, 6, 9, 10]
    assert rows[-1]["mean_squared_hypergradient"] == pytest.approx(np.trapezoid(squares, rounds) / 10)
    assert rows[0]["mean_squared_hypergradient"] == pytest.approx(squares[0])


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("fedbio_potential", fb.SimFBO()),
        ("local_potential", fb.FedBiO()),
        ("momentum_errors", fb.FedBiO()),
        ("mefbo_potential", fb.F2SA()),
        ("virtual_hypergradient", fb.FedNest()),
    ],
)
def test_diagnostics_say_which_algorithms_they_are_for(name: str, algorithm: fb.Algorithm) -> None:
    with pytest.raises(fb.FedbilevelError, match=f"the diagnostic {name} is for"):
        DIAGNOSTICS[name].check(Snapshot(Simulation(T1.task(), algorithm), None))
