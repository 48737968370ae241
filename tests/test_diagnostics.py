"""Exact quantities against closed forms and finite differences."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.engines.simulation import Simulation
from fedbilevel.tasks import Quadratic
from helpers import largest_difference

RNG = np.random.default_rng(0)
T1 = Quadratic.random()


@pytest.mark.parametrize("problem", [T1, T1.local(), Quadratic.scalar(), Quadratic.scalar().local()])
def test_exact_quantities_of_quadratics(problem: Quadratic) -> None:
    x = RNG.normal(size=problem.B.shape[-1])
    found = fb.diagnostics.exact(problem.task(), x)
    assert largest_difference(found.y, problem.lower(x)) < 1e-9
    assert largest_difference(found.u, problem.adjoint(x)) < 1e-9
    assert largest_difference(found.hypergradient, problem.hypergradient(x)) < 1e-9


@pytest.mark.parametrize("problem", [T1, T1.local()])
def test_closed_forms_against_finite_differences(problem: Quadratic) -> None:
    def h(x: np.ndarray) -> float:
        y = np.broadcast_to(problem.lower(x), problem.s.shape)
        upper = 0.5 * np.einsum("mi,mij,mj->m", y - problem.s, problem.P, y - problem.s)
        return problem.mean(upper + 0.5 * np.einsum("mi,mij,mj->m", x - problem.t, problem.R, x - problem.t))

    x = RNG.normal(size=4)
    slopes = [(h(x + 1e-5 * e) - h(x - 1e-5 * e)) / 2e-5 for e in np.eye(4)]
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
