"""SimFBO, ShroFBO, MeFBO, F2SA and FedMSA: limits, costs, engines. Expected numbers are derived from the problem."""

import dataclasses
import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.f2sa import F2SA
from fedbilevel.algorithms.fedmsa import FedMSA
from fedbilevel.algorithms.mefbo import MeFBO
from fedbilevel.algorithms.simfbo import ShroFBO, SimFBO
from fedbilevel.engines.local import Local
from fedbilevel.engines.participation import Everyone, Uniform
from fedbilevel.engines.simulation import Simulation
from fedbilevel.tasks import Quadratic
from helpers import identical, largest_difference, sample_weights

T1 = Quadratic.random(clients=5, p=4, d=6)
T2 = Quadratic.scalar()
STEPS = {"lr_upper": 0.1, "lr_lower": 0.2, "lr_adjoint": 0.2}
STILL = {"local_lr_upper": 0.0, "local_lr_lower": 0.0, "local_lr_adjoint": 0.0}
PROX = {"lr_lower": 0.3, "lr_prox": 0.3, "prox": 1.0}  # the step of x grows with the penalty
KINDS = {
    "simfbo": SimFBO(**STEPS, local_steps=2, shared_batch=True),
    "shrofbo": ShroFBO(**STEPS, local_steps=2, shared_batch=True),
    "mefbo": MeFBO(local_steps=2),
    "f2sa": F2SA(lower_steps=2),
    "fedmsa": FedMSA(local_steps=2, shared_batch=True),
}
every_kind = pytest.mark.parametrize("algorithm", KINDS.values(), ids=KINDS.keys())


def limit(problem: Quadratic, algorithm: fb.Algorithm, rounds: int, **options: Any) -> np.ndarray:
    return np.asarray(fb.solve(problem.task(), algorithm, rounds=rounds, every=rounds, **options).x)


def distance(problem: Quadratic, algorithm: fb.Algorithm, rounds: int, **options: Any) -> float:
    return float(np.linalg.norm(limit(problem, algorithm, rounds, **options) - problem.solution()))


# Limits.


@pytest.mark.parametrize("kind", [SimFBO, ShroFBO])
@pytest.mark.parametrize("problem", [T1, T2], ids=["T1", "T2"])
def test_simfbo_with_one_local_step_reaches_the_solution(kind: Any, problem: Quadratic) -> None:
    assert distance(problem, kind(**STEPS), 5000) < 1e-8
    assert distance(problem, kind(**STEPS, shared_batch=True), 5000) < 1e-8


@pytest.mark.parametrize("kind", [SimFBO, ShroFBO])
def test_local_steps_of_size_0_leave_no_drift(kind: Any) -> None:
    """The clients stay at the server's point: three local steps are one step three times as long."""
    slow = {name: step / 3 for name, step in STEPS.items()}
    assert distance(T1, kind(**slow, **STILL, local_steps=3), 3000) < 1e-8
    np.testing.assert_allclose(
        limit(T1, kind(**slow, **STILL, local_steps=3), 20), limit(T1, SimFBO(**STEPS), 20), atol=1e-12
    )


def local_path(q: Quadratic, m: int, eta: float, gamma: float, tau: float) -> tuple[np.ndarray, np.ndarray]:
    """z -> S z + c, one local step of client m on (x, y, u)."""
    p, d = q.B.shape[-1], q.B.shape[-2]
    S = np.eye(p + 2 * d)
    S[:p, :p] -= eta * q.R[m]
    S[:p, p + d :] -= eta * q.B[m].T
    S[p : p + d, :p] += gamma * q.B[m]
    S[p : p + d, p : p + d] -= gamma * q.A[m]
    S[p + d :, p : p + d] += tau * q.P[m]
    S[p + d :, p + d :] -= tau * q.A[m]
    return S, np.concatenate([eta * q.R[m] @ q.t[m], gamma * q.b[m], -tau * q.P[m] @ q.s[m]])


def simfbo_limit(q: Quadratic, eta: float, gamma: float, tau: float, local_steps: int) -> np.ndarray:
    """Where the mean of the clients' displacements is 0, which does not depend on the server's steps."""
    powers, constants = 0, 0
    for m, weight in enumerate(q.weights):
        S, c = local_path(q, m, eta, gamma, tau)
        powers = powers + weight * np.linalg.matrix_power(S, local_steps)
        constants = constants + weight * sum(np.linalg.matrix_power(S, k) @ c for k in range(local_steps))
    return np.linalg.solve(np.eye(len(powers)) - powers, constants)[: q.B.shape[-1]]


@pytest.mark.parametrize("kind", [SimFBO, ShroFBO])
def test_only_the_clients_steps_displace_simfbo(kind: Any) -> None:
    eta, gamma, tau = 0.05, 0.1, 0.1
    local = {"local_lr_upper": eta, "local_lr_lower": gamma, "local_lr_adjoint": tau}
    expected = simfbo_limit(T1, eta, gamma, tau, 3)
    assert np.linalg.norm(expected - T1.solution()) > 0.01  # the displacement is real
    for server in (0.5, 1.0):
        lr = {"lr_upper": server * eta, "lr_lower": server * gamma, "lr_adjoint": server * tau}
        np.testing.assert_allclose(limit(T1, kind(**lr, **local, local_steps=3), 6000), expected, atol=1e-8)


def test_unequal_numbers_of_steps_mislead_simfbo_but_not_shrofbo() -> None:
    """With 1 and 3 steps the weights become 1/4 and 3/4: A = 5/2, B = 1/2, y* = x/5, mean s = 5/2, hence x = 12.5."""
    weights = np.array([0.25, 0.75])
    wrong = replace(T2, weights=weights)
    assert wrong.solution() == pytest.approx([12.5])
    slow = {"lr_upper": 0.1, "lr_lower": 0.1, "lr_adjoint": 0.1}
    for kind, expected in ((SimFBO, wrong.solution()), (ShroFBO, T2.solution())):
        found = limit(T2, kind(**slow, **STILL, local_steps_of=(1, 3)), 6000)
        np.testing.assert_allclose(found, expected, atol=1e-8)


def test_simfbo_keeps_the_adjoint_in_its_ball() -> None:
    radius = 0.5 * float(np.linalg.norm(T1.adjoint(T1.solution())))
    state = fb.solve(T1.task(), SimFBO(**STEPS, radius=radius), rounds=100).state
    assert float(fb.vectors.norm(state.server.u)) <= radius * (1 + 1e-12)


def means(q: Quadratic) -> tuple[np.ndarray, ...]:
    """Mean A, B, b, P, P s, R, R t."""
    Ps, Rt = np.einsum("mij,mj->mi", q.P, q.s), np.einsum("mij,mj->mi", q.R, q.t)
    return tuple(q.mean(v) for v in (q.A, q.B, q.b, q.P, Ps, q.R, Rt))


def mefbo_limit(q: Quadratic, c: float, gamma: float) -> np.ndarray:
    """The saddle point: h_x = h_y = h_theta = 0, linear in (x, y, theta)."""
    A, B, b, P, Ps, R, Rt = means(q)
    E = np.eye(len(b)) / gamma
    system = np.block([[R / c, -B.T, B.T], [-B, P / c + A - E, E], [-B, -E, A + E]])
    return np.linalg.solve(system, np.concatenate([Rt / c, Ps / c + b, b]))[: B.shape[1]]


def f2sa_limit(q: Quadratic, penalty: float) -> np.ndarray:
    """The zero of the three directions, linear in (x, y, z)."""
    A, B, b, P, Ps, R, Rt = means(q)
    zero = np.zeros_like(A)
    system = np.block([[R, -penalty * B.T, penalty * B.T], [-B, P / penalty + A, zero], [-B, zero, A]])
    return np.linalg.solve(system, np.concatenate([Rt, Ps / penalty + b, b]))[: B.shape[1]]


def test_mefbo_solves_the_penalised_problem() -> None:
    expected = mefbo_limit(T1, 10.0, 1.0)
    assert np.linalg.norm(expected - T1.solution()) > 0.01
    np.testing.assert_allclose(limit(T1, MeFBO(1.0, **PROX, penalty=10.0), 1000), expected, atol=1e-8)


def test_the_error_of_mefbo_falls_like_one_over_the_penalty() -> None:
    """gamma = 1 and mu > 0.9, so that c gamma mu^2 is large."""
    expected = [np.linalg.norm(mefbo_limit(T1, c, 1.0) - T1.solution()) for c in (1e3, 1e4)]
    assert expected[0] / expected[1] == pytest.approx(10, rel=0.05)
    found = [distance(T1, MeFBO(0.1 * c, **PROX, penalty=c), 1000) for c in (1e3, 1e4)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found[1] < 1e-3


def test_penalties_leave_no_error_where_the_upper_gradient_vanishes() -> None:
    """On T2 grad_y f = 0 at the solution."""
    assert mefbo_limit(T2, 10.0, 1.0) == pytest.approx(T2.solution())
    assert distance(T2, MeFBO(1.0, **PROX, penalty=10.0), 4000) < 1e-8
    assert f2sa_limit(T2, 10.0) == pytest.approx(T2.solution())
    assert distance(T2, F2SA(0.2, 0.2, 0.2, penalty=10.0, lower_steps=2), 4000) < 1e-8


def test_the_penalty_of_mefbo_grows() -> None:
    """c_t = c (t + 1)^p, from c at t = 0: the first round uses c, the second 2^p c."""
    x0, y0 = np.ones(4), np.ones(6)
    A, B, b, P, Ps, R, Rt = means(T1)
    x, y, theta = x0, y0, y0
    for t in range(2):
        c = 3.0 * (t + 1) ** 0.2
        hx, hy = (R @ x - Rt) / c - B.T @ (y - theta), (P @ y - Ps) / c + A @ y - B @ x - b - (y - theta)
        htheta = A @ theta - B @ x - b + theta - y
        x, y, theta = x - 2.0 * hx, y - 0.3 * hy, theta - 0.3 * htheta
    result = fb.solve(T1.task(), MeFBO(2.0, **PROX, penalty="power(3, 0.2)"), rounds=2, x=x0, y=y0)
    np.testing.assert_allclose(result.x, x, atol=1e-12)
    np.testing.assert_allclose(result.y, y, atol=1e-12)


def test_steps_of_mefbo_that_suit_no_quadratic() -> None:
    """theta must keep up with y. The defaults do; these, of the paper's experiments, do not."""
    fb.solve(T1.task(), MeFBO(), rounds=500)
    with pytest.raises(fb.errors.Diverged):
        fb.solve(T1.task(), MeFBO(0.1, 0.1, 0.07, prox=0.015), rounds=2000)


def test_mefbo_solves_constrained_problems() -> None:
    """The projected step stands still, up to the error of order 1 / c."""
    task, c = T1.task(), 1e4
    problem = replace(task.problem, project_x=fb.vectors.box(-0.05, 0.05))
    x = np.asarray(fb.solve(replace(task, problem=problem), MeFBO(0.1 * c, **PROX, penalty=c), rounds=1000).x)
    assert np.max(np.abs(x)) <= 0.05
    np.testing.assert_allclose(x, np.clip(x - 0.1 * T1.hypergradient(x), -0.05, 0.05), atol=1e-4)


def test_f2sa_solves_the_penalised_problem_with_an_error_of_one_over_lambda() -> None:
    for penalty in (10.0, 1e4):
        found = limit(T1, F2SA(0.1, 0.2, 0.2, penalty=penalty, lower_steps=3), 3000)
        np.testing.assert_allclose(found, f2sa_limit(T1, penalty), atol=1e-8)
    errors = [np.linalg.norm(f2sa_limit(T1, penalty) - T1.solution()) for penalty in (1e2, 1e3, 1e4)]
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.05)
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.01)


@pytest.mark.parametrize("local_steps", [1, 4])
def test_fedmsa_is_exact_for_every_number_of_local_steps(local_steps: int) -> None:
    for problem in (T1, T2):
        assert distance(problem, FedMSA(0.1, 0.1, 0.1, local_steps=local_steps), 4000) < 1e-8


def test_fedmsa_is_exact_if_only_some_move() -> None:
    assert distance(T1, FedMSA(0.05, 0.1, 0.1, local_steps=4, movers=2), 3000) < 1e-8


def test_the_momenta_of_fedmsa_forget() -> None:
    """After the first round nothing is kept; the second keeps 1 - rho of the first and adds the difference."""
    algorithm = FedMSA(0.1, 0.2, 0.2, forgetting=0.25, local_steps=1)
    engine = Simulation(T1.task(), algorithm)
    states = [engine.advance(engine.start(seed=0, x=np.ones(4), y=np.ones(6)), rounds) for rounds in (0, 1, 2)]

    def directions(state: Any) -> np.ndarray:
        A, B, b, P, Ps, R, Rt = means(T1)
        x, y, u = (np.asarray(v.tree) for v in state.server.z)
        return np.concatenate([R @ x - Rt + B.T @ u, A @ y - B @ x - b, A @ u - P @ y + Ps])

    first, second = (np.concatenate([np.asarray(v.tree) for v in s.server.d]) for s in states[1:])
    np.testing.assert_allclose(first, directions(states[0]), atol=1e-12)
    expected = directions(states[1]) + 0.75 * (first - directions(states[0]))
    np.testing.assert_allclose(second, expected, atol=1e-12)
    remembered = np.asarray(states[2].memory.x.tree)  # the point of the last exchange, by everybody
    np.testing.assert_allclose(remembered, np.tile(states[1].server.z.x.tree, (5, 1)))


# Costs.


@pytest.mark.parametrize(("p", "d", "tau"), [(3, 5, 1), (4, 2, 3)])
def test_costs(p: int, d: int, tau: int) -> None:
    task = Quadratic.random(clients=2, p=p, d=d).task()
    for kind in (SimFBO, ShroFBO):
        cost = fb.plan(task, kind(local_steps=tau))
        assert (cost.exchanges, cost.down, cost.up) == (1, p + 2 * d, p + 2 * d)
        assert cost.oracles == {"Gf": 2 * tau, "Gg": tau, "J": tau, "H": tau}
        assert fb.plan(task, kind(local_steps=tau, shared_batch=True)).oracles["Gf"] == tau
    cost = fb.plan(task, MeFBO(local_steps=tau))
    assert (cost.exchanges, cost.down, cost.up) == (1, p + 2 * d, p + 2 * d)
    assert cost.oracles == {"Gf": tau, "Gg": 2 * tau}
    cost = fb.plan(task, F2SA(lower_steps=tau))
    assert (cost.exchanges, cost.down, cost.up) == (tau + 1, p + 2 * tau * d, p + 2 * tau * d)
    newcomers = fb.plan(task, F2SA(lower_steps=tau), Uniform(1))
    assert newcomers.down == p + 2 * (tau + 1) * d  # those who missed the last round need y and z, too
    assert cost.oracles == {"Gf": tau + 1, "Gg": 2 * (tau + 1)}
    cost = fb.plan(task, FedMSA(local_steps=tau))
    assert (cost.exchanges, cost.down, cost.up) == (2, 2 * (p + 2 * d), 2 * (p + 2 * d))
    assert cost.oracles == {"Gf": 4 * tau, "Gg": 2 * tau, "J": 2 * tau, "H": 2 * tau}


# What holds for all of them.


@every_kind
def test_identical_clients_are_one_client(algorithm: fb.Algorithm) -> None:
    several = Quadratic.random(heterogeneity=0.0)
    one = Quadratic(*(getattr(several, name)[:1] for name in ("A", "B", "b", "P", "s", "R", "t")))
    np.testing.assert_allclose(limit(several, algorithm, 50), limit(one, algorithm, 50), atol=1e-10)


def same_numbers(task: fb.Task, algorithm: fb.Algorithm, cohort: Any) -> None:
    simulation, local = Simulation(task, algorithm, cohort), Local(task, algorithm, cohort)
    a, b = (engine.advance(engine.start(seed=3), 3) for engine in (simulation, local))
    assert largest_difference(simulation.solution(a), local.solution(b)) < 1e-12
    assert not local.failures
    np.testing.assert_array_equal(a.served, b.served)
    np.testing.assert_array_equal(a.calls, b.calls)


@every_kind
@pytest.mark.parametrize("cohort", [Everyone(), Uniform(3)], ids=str)
def test_engines_give_the_same_numbers(algorithm: fb.Algorithm, cohort: Any) -> None:
    same_numbers(T1.task(), algorithm, cohort)


@every_kind
def test_engines_agree_on_mini_batches_and_a_private_upper_variable(algorithm: fb.Algorithm) -> None:
    same_numbers(sample_weights(), algorithm, Uniform(3))


def test_engines_agree_if_only_some_move() -> None:
    same_numbers(T1.task(), FedMSA(local_steps=2, movers=2, shared_batch=True), Uniform(3))


@every_kind
def test_the_same_seed_gives_the_same_bits(algorithm: fb.Algorithm) -> None:
    first, again, other = (fb.solve(T1.task(), algorithm, rounds=5, seed=seed, sample=3) for seed in (1, 1, 2))
    assert identical((first.x, first.y), (again.x, again.y))
    assert not identical((first.x, first.y), (other.x, other.y))


@pytest.mark.parametrize("kind", [SimFBO, MeFBO])
def test_cohorts_are_weighted_without_bias(kind: Any) -> None:
    """One round from the same point: the mean over all cohorts of one is the round with everybody."""
    task = replace(T2, weights=np.array([0.2, 0.8])).task()
    start = {"x": np.ones(1), "y": np.ones(1)}
    alone, other, everyone = (fb.solve(task, kind(), rounds=1, sample=who, **start) for who in ([0], [1], None))
    np.testing.assert_allclose((alone.y + other.y) / 2, everyone.y, atol=1e-12)
    assert abs(alone.y - other.y) > 1e-3


@pytest.mark.parametrize(
    ("kind", "wrong", "sentence"),
    [
        (SimFBO, {"lr_upper": 0.0}, "SimFBO: lr_upper must be greater than 0, but is 0.0."),
        (ShroFBO, {"local_lr_lower": -0.1}, "ShroFBO: local_lr_lower must be at least 0, but is -0.1."),
        (MeFBO, {"penalty": "power(-1, 0.1)"}, "MeFBO: penalty must be greater than 0, but is -1.0."),
        (MeFBO, {"prox": 0.0}, "MeFBO: prox must be greater than 0, but is 0.0."),
        (F2SA, {"lower_steps": 0}, "F2SA: lower_steps must be at least 1, but is 0."),
        (F2SA, {"penalty": 0.0}, "F2SA: penalty must be greater than 0, but is 0.0."),
        (FedMSA, {"forgetting": 1.5}, "FedMSA: forgetting must be at most 1, but is 1.5."),
        (FedMSA, {"local_steps": 0}, "FedMSA: local_steps must be at least 1, but is 0."),
    ],
)
def test_bad_parameters_are_refused(kind: Any, wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fb.FedbilevelError) as caught:
        kind(**wrong)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("kind", [SimFBO, ShroFBO, MeFBO, F2SA, FedMSA])
def test_everything_is_in_the_docstring(kind: Any) -> None:
    text = inspect.getdoc(kind) or ""
    assert "per round" in text
    assert "per client" in text
    assert "ollows the paper" in text or "reconstruction" in text
    for field in dataclasses.fields(kind):
        assert field.name in text or field.name == "shared_batch", field.name
