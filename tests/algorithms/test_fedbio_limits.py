"""Algorithms against closed-form limits. Expected numbers are derived from the problem, never from a run."""

from typing import Any

import numpy as np
import pytest

import fedbilevel as fb
from derivations import drifted
from fedbilevel.tasks import Quadratic
from helpers import LocalHypergradients

T1 = Quadratic.random(clients=5, p=4, d=6)
T2 = Quadratic.scalar()


def distance(problem: Quadratic, algorithm: fb.Algorithm, rounds: int, **options: Any) -> float:
    result = fb.solve(problem.task(), algorithm, rounds=rounds, every=rounds, **options)
    return float(np.linalg.norm(result.x - problem.solution()))


def test_the_scalar_example_has_the_solution_4() -> None:
    assert T2.solution() == pytest.approx([4.0])
    assert T2.local().solution() == pytest.approx([0.5])


def test_the_displacement_is_linear_in_the_steps() -> None:
    far, near = (np.linalg.norm(drifted(T1, s, 2 * s, 2 * s, 5) - T1.solution()) for s in (1e-3, 1e-4))
    assert far / near == pytest.approx(10, rel=0.05)


@pytest.mark.slow
def test_forgetting_leaves_a_drift_that_vanishes_with_the_rate() -> None:
    """c > 0 leaves a drift of order c alpha^2."""
    drifts = [distance(T1, fb.FedBiOAcc(0.1, 0.2, 0.2, rate=rate, local_steps=5), 40000) for rate in (0.2, 0.1)]
    assert 1e-6 < drifts[1] < drifts[0] / 2.5


def test_the_mean_of_local_hypergradients_goes_to_2() -> None:
    """The library can express the mistake, and it has exactly the known bias."""
    result = fb.solve(T2.task(), LocalHypergradients(), rounds=2000, every=2000)
    np.testing.assert_allclose(result.x, [2.0], atol=1e-8)


@pytest.mark.slow
def test_identical_clients_remove_the_bias_of_local_hypergradients() -> None:
    T3 = Quadratic.random(heterogeneity=0.0)
    assert distance(T3, LocalHypergradients(lr=0.1, terms=300), 4000) < 1e-6


def test_fedavg_trains_at_a_fixed_upper_variable() -> None:
    result = fb.solve(T1.task(), fb.FedAvg(lr_lower=0.2, local_steps=1), rounds=2000, every=2000, x=np.ones(4))
    np.testing.assert_allclose(result.x, np.ones(4))
    np.testing.assert_allclose(result.y, T1.lower(np.ones(4)), atol=1e-10)


@pytest.mark.slow
def test_the_adjoint_stays_in_its_ball(steps: dict[str, float]) -> None:
    radius = 0.5 * float(np.linalg.norm(T1.adjoint(T1.solution())))
    for kind in (fb.FedBiO, fb.FedBiOAcc):
        result = fb.solve(T1.task(), kind(**steps, radius=radius), rounds=200)
        point = result.state.server if kind is fb.FedBiO else result.state.server.z
        assert float(fb.vectors.norm(point.u)) <= radius * (1 + 1e-12)


@pytest.mark.parametrize("kind", [fb.FedBiO, fb.FedBiOAcc])
def test_projections_keep_x_and_y_feasible(kind: Any, steps: dict[str, float]) -> None:
    """The constrained solution: the projection of the gradient step stands still."""
    task = T1.task()
    box = fb.vectors.box(-0.05, 0.05)
    problem = fb.Problem(task.problem.upper, task.problem.lower, task.problem.init, project_x=box)
    task = fb.Task(problem, task.clients, batch_size=None)
    x = np.asarray(fb.solve(task, kind(**steps, local_steps=1), rounds=3000).x)
    assert np.max(np.abs(x)) <= 0.05
    np.testing.assert_allclose(x, np.clip(x - 0.1 * T1.hypergradient(x), -0.05, 0.05), atol=1e-10)


@pytest.mark.slow
def test_stochastic_runs_average_out() -> None:
    """Mini-batches of a finite sum: with a falling rate FedBiOAcc comes close to the solution of the full problem."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(4, 40, 3)), rng.normal(size=(4, 40))

    def lower(x: Any, y: Any, batch: Any) -> Any:
        return 0.5 * np.mean(1.0) * ((batch["a"] @ y - batch["b"] - x[0]) ** 2).mean() + 0.5 * (y @ y)

    def upper(x: Any, y: Any, batch: Any) -> Any:
        return 0.5 * ((batch["a"] @ y - batch["b"]) ** 2).mean() + 0.05 * (x @ x)

    problem = fb.Problem(upper, lower, lambda key: (np.zeros(1), np.zeros(3)))
    clients = [{"train": {"a": a[m, :20], "b": b[m, :20]}, "val": {"a": a[m, 20:], "b": b[m, 20:]}} for m in range(4)]
    algorithm = fb.FedBiOAcc(0.2, 0.2, 0.2, rate="cube_root(2, 10)", local_steps=2)
    noisy = fb.solve(fb.Task(problem, clients, batch_size=4), algorithm, rounds=6000)
    exact = fb.Task(problem, clients, batch_size=None)
    start, end = (np.linalg.norm(fb.diagnostics.hypergradient(exact, x)) for x in (np.zeros(1), noisy.x))
    assert end < 0.1 * start
