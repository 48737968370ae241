"""Options of existing algorithms and the sketched CommFedBiO: limits and costs, derived from the problem."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from derivations import root, series
from fedbilevel.algorithms.aggitd import AggITD
from fedbilevel.algorithms.commfedbio import CommFedBiOSketch
from fedbilevel.algorithms.fednest import FedNest
from fedbilevel.algorithms.lfednest import LFedNest
from fedbilevel.algorithms.mefbo import MeFBO
from fedbilevel.algorithms.simfbo import ShroFBO, SimFBO
from fedbilevel.core.schedules import power
from fedbilevel.core.vectors import Vector
from fedbilevel.engines.simulation import Simulation
from fedbilevel.mathematics.compression import CountSketch, count_sketch
from fedbilevel.tasks import Quadratic

T1 = Quadratic.random(clients=5, p=4, d=6)
T2 = Quadratic.scalar()
P, D = 3, 5
SMALL = Quadratic.random(clients=2, p=P, d=D).task()


def limit(problem: Quadratic, algorithm: fb.Algorithm, rounds: int) -> np.ndarray:
    return np.asarray(fb.solve(problem.task(), algorithm, rounds=rounds, every=rounds).x)


def linear_part(affine: Callable[[np.ndarray], np.ndarray], size: int) -> np.ndarray:
    return np.stack([affine(e) - affine(np.zeros(size)) for e in np.eye(size)], axis=1)


def pulls(q: Quadratic, y: np.ndarray) -> np.ndarray:
    return np.einsum("mij,mj->mi", q.P, y - q.s)


def direct(q: Quadratic, x: np.ndarray) -> np.ndarray:
    return q.mean(np.einsum("mij,mj->mi", q.R, x - q.t))


# Count sketches.


def matrix(S: CountSketch) -> np.ndarray:
    size = len(S.buckets)
    return np.stack([np.asarray(S.of(Vector(jnp.eye(size)[i], "y"))) for i in range(size)], axis=1)


def test_a_count_sketch_has_one_sign_per_column() -> None:
    S = matrix(count_sketch(jax.random.key(3), 4, 40))
    assert S.shape == (4, 40)
    np.testing.assert_array_equal(np.abs(S).sum(axis=0), np.ones(40))
    assert np.array_equal(S, matrix(count_sketch(jax.random.key(3), 4, 40)))
    assert not np.array_equal(S, matrix(count_sketch(jax.random.key(4), 4, 40)))
    assert len(np.unique(S)) == 3  # both signs
    w, v = np.arange(1.0, 5.0), Vector(jnp.arange(40.0), "y")
    np.testing.assert_allclose(count_sketch(jax.random.key(3), 4, 40).back(jnp.asarray(w), v).tree, S.T @ w)


def find_seed(a: CommFedBiOSketch, size: int, wanted: Callable[[bool, bool], bool], skip: int = 0) -> int:
    """The first seed whose sketches have two entries in one bucket, or not, as wanted."""
    seeds = np.arange(skip, 3000 + skip, dtype=np.uint32)
    buckets = jax.vmap(lambda seed: tuple(S.buckets for S in a.sketches(seed, size)))(seeds)
    collide = [np.array([len(set(row)) < size for row in np.asarray(b)]) for b in buckets]
    return next(int(s) for s, one, two in zip(seeds, *collide, strict=True) if wanted(one, two))


def sketched_inverse(q: Quadratic, a: CommFedBiOSketch, seed: int) -> np.ndarray:
    """S1' (S2 A S1')^+ S2 in the place of the inverse of A."""
    S1, S2 = (matrix(S) for S in a.sketches(jnp.uint32(seed), q.A.shape[-1]))
    return S1.T @ np.linalg.pinv(S2 @ q.mean(q.A) @ S1.T) @ S2


def sketched_round(q: Quadratic, a: CommFedBiOSketch, seed: int, z: np.ndarray) -> np.ndarray:
    """One round with one local step, as a map of (x, y)."""
    p = q.B.shape[-1]
    x, y = z[:p], z[p:]
    y = y - a.lr_lower * (q.mean(q.A) @ y - q.mean(q.B) @ x - q.mean(q.b))
    u = sketched_inverse(q, a, seed) @ q.mean(pulls(q, y))
    return np.concatenate([x - a.lr_upper * (direct(q, x) + q.mean(q.B).T @ u), y])


def sketched_limit(q: Quadratic, a: CommFedBiOSketch, seed: int) -> tuple[np.ndarray, float]:
    """Where x stands still, and how fast it gets there."""
    size = sum(q.B.shape[1:])
    round = lambda z: sketched_round(q, a, seed, z)
    rate = max(abs(np.linalg.eigvals(linear_part(round, size))))
    return root(lambda z: round(z) - z, size)[: q.B.shape[-1]], float(rate)


def run_sketched(q: Quadratic, a: CommFedBiOSketch, seed: int, rounds: int) -> np.ndarray:
    engine = Simulation(q.task(), a)
    state = engine.start(seed=0)
    state = state._replace(server=state.server._replace(seed=jnp.uint32(seed)))
    return np.asarray(engine.advance(state, rounds).server.x.tree)


def test_sketches_without_collisions_are_exact() -> None:
    a = CommFedBiOSketch(0.3, 0.3, 1, columns=9, rows=12, fresh_sketch=False)
    seed = find_seed(a, 6, lambda one, two: not one and not two)
    np.testing.assert_allclose(sketched_inverse(T1, a, seed), np.linalg.inv(T1.mean(T1.A)), atol=1e-12)
    np.testing.assert_allclose(run_sketched(T1, a, seed, 800), T1.solution(), atol=1e-9)


@pytest.mark.slow
def test_as_many_rows_as_entries_are_not_enough() -> None:
    """With two entries in one bucket, x goes where the sketched adjoint leads it. That is not the solution."""
    a = CommFedBiOSketch(0.3, 0.3, 1, columns=6, rows=6, fresh_sketch=False)
    seed, rate = -1, 1.0
    while rate > 0.98:  # sketched systems may be so bad that x runs away
        seed = find_seed(a, 6, lambda one, two: one and two, seed + 1)
        expected, rate = sketched_limit(T1, a, seed)
    np.testing.assert_allclose(run_sketched(T1, a, seed, 1500), expected, atol=1e-8)
    assert np.linalg.norm(expected - T1.solution()) > 0.01


def test_an_adjoint_in_the_range_of_the_sketch_is_found() -> None:
    """A problem made for a sketch with collisions: at x = 1 the adjoint is u = S1' w. With s_m = y - P_m^-1 A u and
    t_m = x + R_m^-1 B' u the adjoint is u there, and the hypergradient 0."""
    a = CommFedBiOSketch(0.1, 0.3, 1, columns=5, rows=30, fresh_sketch=False)
    seed = find_seed(a, 6, lambda one, two: one and not two)
    S1 = matrix(a.sketches(jnp.uint32(seed), 6)[0])
    assert np.linalg.matrix_rank(S1) < 6
    x, u = np.ones(4), S1.T @ np.array([1.0, -2.0, 0.5, 1.5, -1.0])
    y = T1.lower(x)
    s = y - np.linalg.solve(T1.P, np.tile(T1.mean(T1.A) @ u, (5, 1))[..., None])[..., 0]
    t = x + np.linalg.solve(T1.R, np.tile(T1.mean(T1.B).T @ u, (5, 1))[..., None])[..., 0]
    made = replace(T1, s=s, t=t)
    np.testing.assert_allclose(made.solution(), x, atol=1e-10)
    np.testing.assert_allclose(made.adjoint(x), u, atol=1e-10)
    expected, rate = sketched_limit(made, a, seed)
    assert rate < 0.995
    np.testing.assert_allclose(expected, x, atol=1e-9)
    np.testing.assert_allclose(run_sketched(made, a, seed, 5000), x, atol=1e-8)


@pytest.mark.parametrize("fresh", [True, False])
def test_sketches_are_kept_or_drawn_anew(fresh: bool) -> None:
    engine = Simulation(T1.task(), CommFedBiOSketch(columns=3, rows=4, fresh_sketch=fresh))
    state = engine.start(seed=0)
    seeds = [int(state.server.seed)]
    for _ in range(3):
        state = engine.advance(state, 1)
        seeds.append(int(state.server.seed))
    assert len(set(seeds)) == (4 if fresh else 1)


# Numbers of local steps that differ.


@pytest.mark.parametrize("kind", [SimFBO, ShroFBO])
def test_clients_stop_after_their_own_number_of_steps(kind: Any) -> None:
    """Where the mean of the clients' displacements is 0; for ShroFBO, of displacements over numbers of steps."""
    q, numbers, (eta, gamma, tau) = Quadratic.random(clients=3, p=2, d=3), (1, 4, 2), (0.05, 0.1, 0.1)

    def displacement(z: np.ndarray) -> np.ndarray:
        total = np.zeros_like(z)
        for m, steps in enumerate(numbers):
            x, y, u = z[:2], z[2:5], z[5:]
            for _ in range(steps):
                dx = q.R[m] @ (x - q.t[m]) + q.B[m].T @ u
                dy, du = q.A[m] @ y - q.B[m] @ x - q.b[m], q.A[m] @ u - q.P[m] @ (y - q.s[m])
                x, y, u = x - eta * dx, y - gamma * dy, u - tau * du
            share = 1 if kind is SimFBO else 1 / steps
            total += share * (np.concatenate([x, y, u]) - z)
        return total

    expected = root(displacement, 8)[:2]
    algorithm = kind(eta, gamma, tau, eta, gamma, tau, local_steps_of=numbers)
    np.testing.assert_allclose(limit(q, algorithm, 4000), expected, atol=1e-8)


@pytest.mark.parametrize("kind", [SimFBO, ShroFBO])
def test_equal_numbers_of_steps_are_local_steps(kind: Any) -> None:
    a, b = kind(local_steps=2), kind(local_steps_of=[2] * 5)
    np.testing.assert_allclose(limit(T1, a, 5), limit(T1, b, 5), atol=1e-12)
    assert b.local_steps_of == (2,) * 5
    assert fb.plan(T1.task(), a).oracles == fb.plan(T1.task(), b).oracles
    assert fb.plan(SMALL, kind(local_steps_of=(1, 3))).oracles["H"] == 3  # all compute as long as the longest


def test_numbers_of_steps_are_checked() -> None:
    with pytest.raises(fb.FedbilevelError) as caught:
        fb.plan(T2.task(), ShroFBO(local_steps_of=(1, 2, 3)))
    assert str(caught.value) == "ShroFBO: local_steps_of has 3 numbers for 2 clients."
    with pytest.raises(fb.FedbilevelError, match=r"^SimFBO: local_steps_of must be at least 1, not 0\.$"):
        SimFBO(local_steps_of=(1, 0))
    with pytest.raises(fb.FedbilevelError, match=r"^SimFBO: local_steps_of must be a whole number, not 1\.5\.$"):
        SimFBO(local_steps_of=(1, 1.5))  # pyright: ignore[reportArgumentType]


# Decreasing steps.


def test_mefbo_with_the_steps_of_theorem_c1() -> None:
    """Three rounds by hand, with two local steps."""
    q, tau, gamma = Quadratic.random(clients=3, p=2, d=3), 2, 0.2
    c_lambda, c_theta, c_eta, decay, c0, growth = 0.1, 0.5, 0.3, 0.6, 2.0, 0.15  # 0 < 0.15 < (1 - 0.6) / 2
    z = [np.ones(2), np.ones(3), np.ones(3)]
    for t in range(3):
        c, prox = c0 * (t + 1) ** growth, c_lambda * tau**0.25 * (t + 1) ** -decay
        eta = c_eta / (tau ** (7 / 8) * np.sqrt(3)) * (t + 1) ** -0.25
        means = [np.zeros(2), np.zeros(3), np.zeros(3)]
        for m in range(3):
            x, y, theta = z
            for _ in range(tau):
                slope = lambda at, x=x, m=m: q.A[m] @ at - q.B[m] @ x - q.b[m]
                hx = q.R[m] @ (x - q.t[m]) / c - q.B[m].T @ (y - theta)
                hy = q.P[m] @ (y - q.s[m]) / c + slope(y) - (y - theta) / gamma
                htheta = slope(theta) + (theta - y) / gamma
                means = [total + h / (3 * tau) for total, h in zip(means, (hx, hy, htheta), strict=True)]
                x, y, theta = x - eta * hx, y - eta * hy, theta - eta * htheta
        lr = (c_theta * prox, c_theta * prox, prox)
        z = [v - step * h for v, step, h in zip(z, lr, means, strict=True)]
    upper, local = power(c_theta * c_lambda * tau**0.25, -decay), power(c_eta * tau ** (-7 / 8) * 3**-0.5, -0.25)
    algorithm = MeFBO(
        upper, upper, power(c_lambda * tau**0.25, -decay), local, local, local, power(c0, growth), gamma, tau
    )
    result = fb.solve(q.task(), algorithm, rounds=3, x=np.ones(2), y=np.ones(3))
    for found, expected in zip((result.x, result.y, result.state.server.z.theta.tree), z, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-12)
    assert MeFBO("power(0.1, -0.6)").lr_upper == power(0.1, -0.6)  # pyright: ignore[reportArgumentType]


# FedNest, LFedNest, AggITD.


def test_the_adjoint_of_the_released_code() -> None:
    """One round by hand. Weights 1, 1, 1/2, 1/3 and means of powers: not a Neumann series."""
    algorithm, x, y = FedNest(0.7, 0.3, 0.4, local_steps=1, terms=3, released_code=True), np.ones(4), np.ones(6)
    result = fb.solve(T1.task(), algorithm, rounds=1, x=x, y=y)
    y = y - 0.3 * (T1.mean(T1.A) @ y - T1.mean(T1.B) @ x - T1.mean(T1.b))
    p0 = 0.4 * T1.mean(pulls(T1, y))
    power_of = lambda k: T1.mean(np.stack([np.linalg.matrix_power(np.eye(6) - 0.4 * A, k) for A in T1.A]))
    p = p0 + sum(power_of(k) @ p0 / k for k in (1, 2, 3))
    np.testing.assert_allclose(result.y, y, atol=1e-12)
    np.testing.assert_allclose(result.x, x - 0.7 * (direct(T1, x) + T1.mean(T1.B).T @ p), atol=1e-12)


def test_fednest_without_correction_is_displaced_by_drift() -> None:
    """On T2 the mean of grad_y f is 0 at y = 2. There y is also the mean of where five local steps lead: a y + (1 - a)
    2x and b y, with a = (1 - 0.04)^5 and b = (1 - 3 * 0.04)^5. This gives x = 3.56."""
    a, b = (1 - 0.04) ** 5, (1 - 3 * 0.04) ** 5
    expected = (2 - a - b) / (1 - a)
    assert abs(expected - 4) == pytest.approx(0.44, abs=0.005)
    options = {"local_steps": 5, "terms": 3, "full_series": True}
    drifting = limit(T2, FedNest(0.5, 0.2, 0.3, **options, correction=False), 800)
    np.testing.assert_allclose(drifting, [expected], atol=1e-9)
    np.testing.assert_allclose(limit(T2, FedNest(0.5, 0.2, 0.3, **options), 800), [4.0], atol=1e-9)


@pytest.mark.parametrize(("T", "inner", "N"), [(1, 5, 2), (3, 2, 6)])
def test_the_cost_of_options_of_fednest(T: int, inner: int, N: int) -> None:
    sizes = {"inner_rounds": T, "local_steps": inner, "terms": N}
    cost = fb.plan(SMALL, FedNest(**sizes, full_series=True, correction=False))
    assert cost.exchanges == T + (N - 1) + 3
    assert cost.down == cost.up == 2 * P + (T + (N - 1) + 1) * D
    assert cost.oracles == {"Gg": T * inner, "Gf": 4, "H": N - 1, "J": 1}
    cost = fb.plan(SMALL, FedNest(**sizes, released_code=True))
    assert cost.exchanges == 2 * T + 4
    assert cost.down == cost.up == 2 * P + (2 * T + 2) * D
    assert cost.oracles == {"Gg": T * (1 + 2 * inner), "Gf": 4, "H": N, "J": 1}


@pytest.mark.parametrize("problem", [T1, T2], ids=["T1", "T2"])
def test_corrected_lfednest_keeps_only_the_bias_of_local_hypergradients(problem: Quadratic) -> None:
    """y is y*(x), whatever the number of local steps; on T2 this gives x = 2."""
    inverses = [series(A, 0.2, 6) for A in problem.A]

    def hypergradient(x: np.ndarray) -> np.ndarray:
        own = [B.T @ v @ pull for B, v, pull in zip(problem.B, inverses, pulls(problem, problem.lower(x)), strict=True)]
        return direct(problem, x) + problem.mean(np.stack(own))

    expected = root(hypergradient, problem.B.shape[-1])
    if problem is T2:
        assert expected == pytest.approx([2.0])
    algorithm = LFedNest(0.3, 0.1, 0.2, inner_rounds=2, local_steps=5, hessian_steps=5, correction=True)
    np.testing.assert_allclose(limit(problem, algorithm, 1500), expected, atol=1e-9)


@pytest.mark.parametrize(("T", "inner"), [(1, 5), (3, 2)])
def test_the_cost_of_corrected_lfednest(T: int, inner: int) -> None:
    cost = fb.plan(SMALL, LFedNest(inner_rounds=T, local_steps=inner, hessian_steps=4, correction=True))
    assert (cost.exchanges, cost.down, cost.up) == (2 * T + 1, P + 2 * T * D, P + 2 * T * D)
    assert cost.oracles == {"Gg": T * (1 + 2 * inner), "Gf": 1, "H": 4, "J": 1}


@pytest.mark.parametrize("Q", [2, 30])
def test_aggitd_with_corrected_local_steps_is_not_displaced(Q: int) -> None:
    """Only the rest of the series is left."""
    algorithm = AggITD(0.4, 0.5, inner_rounds=Q, full_sum=True, lower="svrg", local_steps=3)
    inverse = series(T1.mean(T1.A), 0.5, Q)
    hyper = lambda x: direct(T1, x) + T1.mean(T1.B).T @ inverse @ T1.mean(pulls(T1, T1.lower(x)))
    expected = root(hyper, 4)
    np.testing.assert_allclose(limit(T1, algorithm, 300), expected, atol=1e-9)
    if Q == 30:
        np.testing.assert_allclose(expected, T1.solution(), atol=1e-6)


@pytest.mark.parametrize(("Q", "tau"), [(1, 2), (4, 3)])
def test_the_cost_of_corrected_aggitd(Q: int, tau: int) -> None:
    cost = fb.plan(SMALL, AggITD(inner_rounds=Q, full_sum=True, lower="svrg", local_steps=tau))
    assert cost.exchanges == 2 * Q + 1
    assert cost.down == cost.up == P + 3 * Q * D
    assert cost.oracles == {"Gg": Q * (1 + 2 * tau), "Gf": Q + 1, "J": 1} | ({"H": Q - 1} if Q > 1 else {})


def test_one_corrected_step_of_aggitd_is_a_step() -> None:
    steps = {"lr_upper": 0.2, "lr_lower": 0.3, "inner_rounds": 3, "full_sum": True}
    np.testing.assert_allclose(limit(T1, AggITD(**steps), 5), limit(T1, AggITD(**steps, lower="svrg"), 5), atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "bad", "sentence"),
    [
        (
            FedNest,
            {"full_series": True, "released_code": True},
            "full_series and released_code are two ways to compute",
        ),
        (FedNest, {"correction": 1}, "correction must be true or false, not 1."),
        (AggITD, {"local_steps": 2}, "local_steps greater than 1 need lower = svrg."),
        (AggITD, {"lower": "adam"}, "lower must be sgd or svrg, not 'adam'."),
        (AggITD, {"lower": "svrg", "local_steps": 0}, "local_steps must be at least 1, not 0."),
        (CommFedBiOSketch, {"columns": 0}, "columns must be at least 1, not 0."),
        (CommFedBiOSketch, {"rows": -1}, "rows must be at least 1, not -1."),
        (CommFedBiOSketch, {"lr_lower": 0.0}, "lr_lower must be greater than 0, not 0.0."),
        (MeFBO, {"local_lr_upper": "power(-1, 0.1)"}, "local_lr_upper must be at least 0, not -1.0."),
    ],
    ids=str,
)
def test_bad_hyper_parameters_are_refused(kind: Any, bad: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fb.FedbilevelError) as caught:
        kind(**bad)
    assert str(caught.value).startswith(f"{kind.__name__}: {sentence}")
