"""FedNest, LFedNest and AggITD: limits, costs, engines, and the means of their random estimates."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from derivations import truncated
from fedbilevel.algorithms.aggitd import AggITD
from fedbilevel.algorithms.fednest import FedNest
from fedbilevel.algorithms.lfednest import LFedNest
from fedbilevel.engines.messaging.local import Local
from fedbilevel.engines.participation import Everyone, Uniform
from fedbilevel.engines.simulation import Simulation, compiled_advance
from fedbilevel.tasks import Quadratic
from fedbilevel.testing import largest_difference
from helpers import assert_same_counts

T1 = Quadratic.random(clients=5, p=4, d=6)
T2 = Quadratic.scalar()
FOUR = Quadratic.random(clients=4, p=2, d=3).task()
RANDOM = [FedNest(0.1, 0.2, 0.2, local_steps=2, terms=4), AggITD(0.1, 0.2, inner_rounds=4)]
name = lambda value: type(value).__name__


def limit(problem: Quadratic, algorithm: fb.Algorithm, rounds: int) -> np.ndarray:
    return np.asarray(fb.solve(problem.task(), algorithm, rounds=rounds, every=rounds).x)


def test_the_series_of_many_terms_is_exact() -> None:
    np.testing.assert_allclose(truncated(T1, 0.5, 60), T1.solution(), atol=1e-12)
    np.testing.assert_allclose(truncated(T2, 0.3, 1), [4.0])  # the pull vanishes at the solution


@pytest.mark.parametrize("steps", [1, 60])
def test_lfednest_is_exact_for_identical_clients_up_to_the_series(steps: int) -> None:
    T3 = Quadratic.random(clients=2, heterogeneity=0.0)
    algorithm = LFedNest(0.1, 0.1, 0.25, inner_rounds=2, local_steps=3, hessian_steps=steps)
    x = limit(T3, algorithm, 3000)
    np.testing.assert_allclose(x, truncated(T3, 0.25, steps + 1), atol=1e-8)


@pytest.mark.parametrize(
    "algorithm",
    [
        FedNest(0.3, 0.5, 0.5, local_steps=2, local_steps_upper=2, terms=40, full_series=True),
        AggITD(0.3, 0.5, inner_rounds=40, full_sum=True),
    ],
    ids=name,
)
def test_the_constrained_solution(algorithm: fb.Algorithm) -> None:
    task = T1.task()
    task = replace(task, problem=replace(task.problem, project_x=fb.vectors.box(-0.05, 0.4)))
    x = np.asarray(fb.solve(task, algorithm, rounds=200, every=200).x)
    assert -0.05 <= x.min() <= x.max() <= 0.4
    np.testing.assert_allclose(x, np.clip(x - 0.1 * T1.hypergradient(x), -0.05, 0.4), atol=1e-9)


P, D = 3, 5


@pytest.mark.parametrize("Q", [2, 5])
def test_the_cost_of_aggitd(Q: int) -> None:
    """The split of the Q exchanges is random, so the plan is weighted with how often each was made."""
    rounds = 8
    engine = Simulation(Quadratic.random(clients=2, p=P, d=D).task(), AggITD(0.1, 0.2, inner_rounds=Q))
    calls = engine.advance(engine.start(seed=0), rounds).calls
    made = [(int(calls[e.name][at]), e, e.down[at]) for e in engine.plan.round for at in np.ndindex(e.down.shape)]
    of = lambda method: sum(n for n, e, _ in made if e.method == method)
    skipped = of("descend")  # the sum of Q'
    assert 0 < skipped < rounds * (Q - 1)
    assert (of("begin"), of("aggregate"), of("hypergradient")) == (rounds, rounds * (Q - 1) - skipped, rounds)
    assert sum(n for n, _, _ in made) == rounds * (Q + 1)
    up = sum(n * e.up for n, e, _ in made)
    assert up == rounds * (P + 2 * Q * D) - skipped * D
    oracles = {k: sum(n * e.oracles[k] for n, e, _ in made) for k in ("Gg", "Gf", "H", "J")}
    assert oracles == {"Gg": rounds * Q, "Gf": 2 * rounds, "H": rounds * (Q - 1) - skipped, "J": rounds}
    down = sum(n * sent for n, _, sent in made)
    late = rounds - made[0][0]  # with Q' = 0 the plan has "begin" send y, which clients hold, and not x
    assert down == rounds * (P + 2 * Q * D) - skipped * D - late * (P - D)


def two_rows(batch_size: int | None) -> fb.Task:
    """Two clients with two rows of matrices each, so that batches of one row are random."""
    q = Quadratic.random(clients=4, p=3, d=4)
    rows = lambda names, m: {k: getattr(q, k)[2 * m : 2 * m + 2] for k in names}
    data = [{"train": rows(("A", "B", "b"), m), "val": rows(("P", "s", "R", "t"), m)} for m in range(2)]
    return fb.Task(q.task().problem, data, batch_size=batch_size)


def loop_is_empty(engine: Simulation, state: Any) -> bool:
    """Whether an exchange of some loop was not made at all."""
    made = {e.method: 0 for e in engine.plan.round}
    for e in engine.plan.round:
        made[e.method] += int(np.sum(state.calls[e.name]))
    return min(made.values()) == 0


@pytest.mark.parametrize(
    ("empty_loop", "cohort"), [(False, Everyone()), (True, Everyone()), (True, Uniform(3))], ids=str
)
@pytest.mark.parametrize("algorithm", RANDOM, ids=name)
def test_engines_draw_the_same_loops(algorithm: fb.Algorithm, empty_loop: bool, cohort: Any) -> None:
    simulation, local = (kind(FOUR, algorithm, cohort) for kind in (Simulation, Local))
    for seed in range(50):
        a = simulation.advance(simulation.start(seed), 1)
        if loop_is_empty(simulation, a) == empty_loop:
            break
    b = local.advance(local.start(seed), 1)
    assert largest_difference(simulation.solution(a), local.solution(b)) < 1e-12
    assert_same_counts(a.calls, b.calls)


@pytest.mark.parametrize(
    ("drawn", "summed"),
    [
        (FedNest(1.0, 0.2, 0.3, local_steps=1, terms=4), {"full_series": True}),
        (AggITD(1.0, 0.3, inner_rounds=4), {"full_sum": True}),
    ],
    ids=["FedNest", "AggITD"],
)
@pytest.mark.parametrize("batch_size", [pytest.param(None, marks=pytest.mark.slow), 1], ids=["all rows", "one row"])
@pytest.mark.slow
def test_random_estimates_have_the_right_mean(drawn: Any, summed: dict[str, bool], batch_size: int | None) -> None:
    """One hypergradient at a fixed point: the mean over random truncations (and batches, on which everything here
    depends linearly, factor by factor) is the full series with all rows."""
    x, y = np.array([1.0, -2.0, 0.5]), np.array([0.3, 1.0, -1.0, 2.0])

    def moved(algorithm: fb.Algorithm, rows: int | None, keys: jax.Array) -> np.ndarray:
        engine = Simulation(two_rows(rows), algorithm)
        state = engine.start(0, x, y)

        def one(key: jax.Array) -> jax.Array:
            return compiled_advance(
                engine.program, engine.task.data, state._replace(key=key), jnp.asarray(1)
            ).server.x.tree

        return np.asarray(jax.vmap(one)(keys)) - x

    keys = jax.random.split(jax.random.key(5), 3000)
    expected = moved(replace(drawn, **summed), None, keys[:1])[0]
    each = moved(drawn, batch_size, keys)
    error = each.std(axis=0, ddof=1) / np.sqrt(len(each))
    assert np.all(error > 0)
    assert np.all(np.abs(each.mean(axis=0) - expected) < 4 * error)
    assert np.all(error < 0.02 * np.abs(expected).max())  # so that a wrong factor would be noticed
