"""SimFBO, ShroFBO, MeFBO, F2SA and FedMSA: limits, costs, engines. Expected numbers are derived from the problem."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import derivations
import fedbilevel as fb
from fedbilevel.algorithms.f2sa import F2SA
from fedbilevel.algorithms.fedmsa import FedMSA
from fedbilevel.algorithms.mefbo import MeFBO
from fedbilevel.algorithms.simfbo import ShroFBO, SimFBO
from fedbilevel.engines.simulation import Simulation
from fedbilevel.tasks import Quadratic

T1 = Quadratic.random(clients=5, p=4, d=6)
T2 = Quadratic.scalar()
STEPS = {"lr_upper": 0.1, "lr_lower": 0.2, "lr_adjoint": 0.2}
STILL = {"local_lr_upper": 0.0, "local_lr_lower": 0.0, "local_lr_adjoint": 0.0}
PROX = {"lr_lower": 0.3, "lr_prox": 0.3, "prox": 1.0}  # the step of x grows with the penalty


def limit(problem: Quadratic, algorithm: fb.Algorithm, rounds: int, **options: Any) -> np.ndarray:
    return np.asarray(fb.solve(problem.task(), algorithm, rounds=rounds, every=rounds, **options).x)


def distance(problem: Quadratic, algorithm: fb.Algorithm, rounds: int, **options: Any) -> float:
    return float(np.linalg.norm(limit(problem, algorithm, rounds, **options) - problem.solution()))


# Limits.


@pytest.mark.parametrize("kind", [SimFBO, ShroFBO])
def test_local_steps_of_size_0_leave_no_drift(kind: Any) -> None:
    """The clients stay at the server's point: three local steps are one step three times as long."""
    slow = {name: step / 3 for name, step in STEPS.items()}
    assert distance(T1, kind(**slow, **STILL, local_steps=3), 3000) < 1e-8
    np.testing.assert_allclose(
        limit(T1, kind(**slow, **STILL, local_steps=3), 20), limit(T1, SimFBO(**STEPS), 20), atol=1e-12
    )


def test_simfbo_keeps_the_adjoint_in_its_ball() -> None:
    radius = 0.5 * float(np.linalg.norm(T1.adjoint(T1.solution())))
    state = fb.solve(T1.task(), SimFBO(**STEPS, radius=radius), rounds=100).state
    assert float(fb.vectors.norm(state.server.u)) <= radius * (1 + 1e-12)


def test_the_error_of_mefbo_falls_like_one_over_the_penalty() -> None:
    """gamma = 1 and mu > 0.9, so that c gamma mu^2 is large."""
    expected = [np.linalg.norm(derivations.mefbo(T1, c, 1.0) - T1.solution()) for c in (1e3, 1e4)]
    assert expected[0] / expected[1] == pytest.approx(10, rel=0.05)
    found = [distance(T1, MeFBO(0.1 * c, **PROX, penalty=c), 1000) for c in (1e3, 1e4)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found[1] < 1e-3


def test_the_error_of_f2sa_falls_like_one_over_the_penalty() -> None:
    """Of its derived limit, to which the contract holds it."""
    errors = [np.linalg.norm(derivations.f2sa(T1, penalty) - T1.solution()) for penalty in (1e2, 1e3, 1e4)]
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.05)
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.01)


def test_penalties_leave_no_error_where_the_upper_gradient_vanishes() -> None:
    """On T2 grad_y f = 0 at the solution."""
    assert derivations.mefbo(T2, 10.0, 1.0) == pytest.approx(T2.solution())
    assert distance(T2, MeFBO(1.0, **PROX, penalty=10.0), 4000) < 1e-8
    assert derivations.f2sa(T2, 10.0) == pytest.approx(T2.solution())
    assert distance(T2, F2SA(0.2, 0.2, 0.2, penalty=10.0, lower_steps=2), 4000) < 1e-8


def test_the_penalty_of_mefbo_grows() -> None:
    """c_t = c (t + 1)^p, from c at t = 0: the first round uses c, the second 2^p c."""
    x0, y0 = np.ones(4), np.ones(6)
    A, B, b, P, Ps, R, Rt = derivations.means(T1)
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


def test_the_momenta_of_fedmsa_forget() -> None:
    """After the first round nothing is kept; the second keeps 1 - rho of the first and adds the difference."""
    algorithm = FedMSA(0.1, 0.2, 0.2, forgetting=0.25, local_steps=1)
    engine = Simulation(T1.task(), algorithm)
    states = [engine.advance(engine.start(seed=0, x=np.ones(4), y=np.ones(6)), rounds) for rounds in (0, 1, 2)]

    def directions(state: Any) -> np.ndarray:
        A, B, b, P, Ps, R, Rt = derivations.means(T1)
        x, y, u = (np.asarray(v.tree) for v in state.server.z)
        return np.concatenate([R @ x - Rt + B.T @ u, A @ y - B @ x - b, A @ u - P @ y + Ps])

    first, second = (np.concatenate([np.asarray(v.tree) for v in s.server.d]) for s in states[1:])
    np.testing.assert_allclose(first, directions(states[0]), atol=1e-12)
    expected = directions(states[1]) + 0.75 * (first - directions(states[0]))
    np.testing.assert_allclose(second, expected, atol=1e-12)
    remembered = np.asarray(states[2].memory.x.tree)  # the point of the last exchange, by everybody
    np.testing.assert_allclose(remembered, np.tile(states[1].server.z.x.tree, (5, 1)))


# Costs.


# What holds for all of them.


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
        (SimFBO, {"lr_upper": 0.0}, "SimFBO: lr_upper must be greater than 0, not 0.0."),
        (ShroFBO, {"local_lr_lower": -0.1}, "ShroFBO: local_lr_lower must be at least 0, not -0.1."),
        (MeFBO, {"penalty": "power(-1, 0.1)"}, "MeFBO: penalty must be greater than 0, not -1.0."),
        (MeFBO, {"prox": 0.0}, "MeFBO: prox must be greater than 0, not 0.0."),
        (F2SA, {"lower_steps": 0}, "F2SA: lower_steps must be at least 1, not 0."),
        (F2SA, {"penalty": 0.0}, "F2SA: penalty must be greater than 0, not 0.0."),
        (FedMSA, {"forgetting": 1.5}, "FedMSA: forgetting must be at most 1, not 1.5."),
        (FedMSA, {"local_steps": 0}, "FedMSA: local_steps must be at least 1, not 0."),
    ],
)
def test_bad_parameters_are_refused(kind: Any, wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fb.FedbilevelError) as caught:
        kind(**wrong)
    assert str(caught.value) == sentence
