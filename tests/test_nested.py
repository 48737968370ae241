"""FedNest, LFedNest and AggITD: limits, costs, engines, and the means of their random estimates."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.aggitd import AggITD
from fedbilevel.algorithms.fednest import FedNest
from fedbilevel.algorithms.lfednest import LFedNest
from fedbilevel.engines.local import Local
from fedbilevel.engines.participation import Everyone, Uniform
from fedbilevel.engines.simulation import Simulation, _advance
from fedbilevel.tasks import Quadratic
from helpers import identical, largest_difference

T1 = Quadratic.random(clients=5, p=4, d=6)
T2 = Quadratic.scalar()
FOUR = Quadratic.random(clients=4, p=2, d=3).task()
RANDOM = [FedNest(0.1, 0.2, 0.2, local_steps=2, terms=4), AggITD(0.1, 0.2, inner_rounds=4)]
EXACT = [
    FedNest(0.1, 0.2, 0.2, inner_rounds=2, local_steps=2, local_steps_upper=2, terms=3, full_series=True),
    LFedNest(0.1, 0.2, 0.2, inner_rounds=2, local_steps=2, local_steps_upper=2),
    AggITD(0.1, 0.2, inner_rounds=3, full_sum=True),
]
name = lambda value: type(value).__name__


def limit(problem: Quadratic, algorithm: fb.Algorithm, rounds: int) -> np.ndarray:
    return np.asarray(fb.solve(problem.task(), algorithm, rounds=rounds, every=rounds).x)


def root(affine: Callable[[np.ndarray], np.ndarray], size: int) -> np.ndarray:
    """The zero of an affine function."""
    offset = affine(np.zeros(size))
    return np.linalg.solve(np.stack([affine(e) - offset for e in np.eye(size)], axis=1), -offset)


def series(A: np.ndarray, step: float, terms: int) -> np.ndarray:
    """step sum_{k < terms} (I - step A)^k, which tends to the inverse of A."""
    return step * sum(np.linalg.matrix_power(np.eye(len(A)) - step * A, k) for k in range(terms))  # type: ignore


def truncated_solution(q: Quadratic, step: float, terms: int) -> np.ndarray:
    """Where the hypergradient vanishes if the inverse of the mean Hessian is a series of so many terms."""

    def hypergradient(x: np.ndarray) -> np.ndarray:
        pull = q.mean(np.einsum("mij,mj->mi", q.P, q.lower(x) - q.s))
        direct = q.mean(np.einsum("mij,mj->mi", q.R, x - q.t))
        return direct + q.mean(q.B).T @ series(q.mean(q.A), step, terms) @ pull

    return root(hypergradient, q.B.shape[-1])


def test_the_series_of_many_terms_is_exact() -> None:
    np.testing.assert_allclose(truncated_solution(T1, 0.5, 60), T1.solution(), atol=1e-12)
    np.testing.assert_allclose(truncated_solution(T2, 0.3, 1), [4.0])  # the pull vanishes at the solution


@pytest.mark.parametrize("terms", [2, 40])
def test_fednest_reaches_the_solution_with_local_steps(terms: int) -> None:
    """Corrections remove client drift, so that only the rest of the series is left."""
    steps = {"inner_rounds": 2, "local_steps": 3, "local_steps_upper": 2, "full_series": True}
    x = limit(T1, FedNest(0.4, 0.5, 0.5, terms=terms, **steps), 150)
    np.testing.assert_allclose(x, truncated_solution(T1, 0.5, terms), atol=1e-9)
    error = float(np.linalg.norm(x - T1.solution()))
    assert error < 1e-9 if terms == 40 else error > 1e-3


@pytest.mark.parametrize("rounds", [2, 40])
def test_aggitd_reaches_the_solution(rounds: int) -> None:
    x = limit(T1, AggITD(0.4, 0.5, inner_rounds=rounds, full_sum=True), 300)
    np.testing.assert_allclose(x, truncated_solution(T1, 0.5, rounds), atol=1e-9)
    error = float(np.linalg.norm(x - T1.solution()))
    assert error < 1e-9 if rounds == 40 else error > 1e-3


@pytest.mark.parametrize(
    "algorithm",
    [
        FedNest(0.5, 0.4, 0.4, inner_rounds=2, local_steps=3, terms=4, full_series=True),
        FedNest(0.5, 0.4, 0.4, inner_rounds=2, local_steps=3, terms=4),
        AggITD(0.5, 0.4, inner_rounds=4, full_sum=True),
        AggITD(0.5, 0.4, inner_rounds=4),
    ],
    ids=repr,
)
def test_the_scalar_example_goes_to_4(algorithm: fb.Algorithm) -> None:
    """Even with random truncation: the pull, and with it the noise, vanishes at the solution."""
    np.testing.assert_allclose(limit(T2, algorithm, 500), [4.0], atol=1e-9)


def lfednest_fixed_point(q: Quadratic, a: LFedNest) -> np.ndarray:
    """Where a round of LFedNest stands still, from the matrices: averages of local steps, with x and y as unknowns."""
    p, d = q.B.shape[-1], q.B.shape[-2]

    def moves(z: np.ndarray) -> np.ndarray:
        x, y = z[:p], z[p:]
        move = np.zeros(p + d)
        for m, weight in enumerate(q.weights):
            y_m, x_m = y, x
            for _ in range(a.local_steps):
                y_m = y_m - a.lr_lower * (q.A[m] @ y_m - q.B[m] @ x - q.b[m])
            u = series(q.A[m], a.lr_adjoint, a.hessian_steps + 1) @ q.P[m] @ (y - q.s[m])
            for _ in range(a.local_steps_upper):
                x_m = x_m - a.lr_upper * (q.R[m] @ (x_m - q.t[m]) + q.B[m].T @ u)
            move += weight * np.concatenate([x_m - x, y_m - y])
        return move

    return root(moves, p + d)[:p]


def test_lfednest_goes_to_2_on_the_scalar_example() -> None:
    single = LFedNest(0.5, 0.2, 0.2, inner_rounds=2, local_steps=1)
    np.testing.assert_allclose(lfednest_fixed_point(T2, single), [2.0], atol=1e-12)
    np.testing.assert_allclose(limit(T2, single, 500), [2.0], atol=1e-9)


@pytest.mark.parametrize("problem", [T1, T2])
def test_lfednest_is_displaced_exactly_as_predicted(problem: Quadratic) -> None:
    several = LFedNest(0.1, 0.04, 0.2, inner_rounds=2, local_steps=5, local_steps_upper=3)
    expected = lfednest_fixed_point(problem, several)
    np.testing.assert_allclose(limit(problem, several, 2000), expected, atol=1e-9)
    assert np.linalg.norm(expected - problem.solution()) > 0.05
    if problem is T2:  # client 2 has B = 0, so y = s_1 = 1 is the mean of (a + (1 - a) 2x) and b
        a, b = (1 - 0.04) ** 5, (1 - 3 * 0.04) ** 5
        np.testing.assert_allclose(expected, [(2 - a - b) / (2 * (1 - a))])


@pytest.mark.parametrize("steps", [1, 60])
def test_lfednest_is_exact_for_identical_clients_up_to_the_series(steps: int) -> None:
    T3 = Quadratic.random(clients=2, heterogeneity=0.0)
    algorithm = LFedNest(0.1, 0.1, 0.25, inner_rounds=2, local_steps=3, hessian_steps=steps)
    x = limit(T3, algorithm, 3000)
    np.testing.assert_allclose(x, truncated_solution(T3, 0.25, steps + 1), atol=1e-8)


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


def cost(algorithm: fb.Algorithm, cohort: Any = None) -> Any:
    return fb.plan(Quadratic.random(clients=2, p=3, d=5).task(), algorithm, cohort)


P, D = 3, 5


@pytest.mark.parametrize(("T", "inner", "outer", "N"), [(1, 1, 1, 1), (1, 5, 1, 2), (3, 2, 4, 6)])
def test_the_cost_of_fednest(T: int, inner: int, outer: int, N: int) -> None:
    sizes = {"inner_rounds": T, "local_steps": inner, "local_steps_upper": outer, "terms": N}
    for full in (True, False):
        algorithm = FedNest(**sizes, full_series=full)
        last = N - 1 if full else min(1, N - 1)  # the plan counts loops of random length once
        planned = cost(algorithm)
        assert planned.exchanges == 2 * T + last + 3
        assert planned.down == planned.up == 2 * P + (2 * T + last + 1) * D
        assert cost(algorithm, Uniform(1)).down == planned.down + D  # newcomers do not hold y
        assert planned.oracles == {"Gg": T * (1 + 2 * inner), "Gf": 2 + 2 * outer, "J": 1} | (
            {"H": last} if last else {}
        )


@pytest.mark.parametrize(("T", "inner", "outer", "N"), [(1, 1, 1, 1), (1, 5, 1, 2), (3, 2, 4, 6)])
def test_the_cost_of_lfednest(T: int, inner: int, outer: int, N: int) -> None:
    algorithm = LFedNest(inner_rounds=T, local_steps=inner, local_steps_upper=outer, hessian_steps=N)
    planned = cost(algorithm)
    assert planned.exchanges == T + 1
    assert planned.down == planned.up == P + T * D
    assert cost(algorithm, Uniform(1)).down == P + (T + 1) * D
    assert planned.oracles == {"Gg": T * inner, "Gf": outer, "J": outer, "H": outer * N}


@pytest.mark.parametrize("Q", [1, 2, 5])
def test_the_cost_of_aggitd_with_the_full_sum(Q: int) -> None:
    planned = cost(AggITD(inner_rounds=Q, full_sum=True))
    assert planned.exchanges == Q + 1
    assert planned.down == planned.up == P + 2 * Q * D
    assert cost(AggITD(inner_rounds=Q, full_sum=True), Uniform(1)).down == P + (2 * Q + 1) * D
    assert planned.oracles == {"Gg": Q, "Gf": Q + 1, "J": 1} | ({"H": Q - 1} if Q > 1 else {})


@pytest.mark.parametrize("Q", [2, 5])
def test_the_cost_of_aggitd(Q: int) -> None:
    """The split of the Q exchanges is random, so the plan is weighted with how often each was made."""
    rounds = 8
    engine = Simulation(Quadratic.random(clients=2, p=P, d=D).task(), AggITD(0.1, 0.2, inner_rounds=Q))
    calls = np.asarray(engine.advance(engine.start(seed=0), rounds).calls)
    exchanges = engine.plan.round
    of = lambda method: sum(int(n) for n, e in zip(calls, exchanges, strict=True) if e.method == method)
    skipped = of("descend")  # the sum of Q'
    assert 0 < skipped < rounds * (Q - 1)
    assert (of("begin"), of("aggregate"), of("hypergradient")) == (rounds, rounds * (Q - 1) - skipped, rounds)
    assert calls.sum() == rounds * (Q + 1)
    up = sum(n * e.up for n, e in zip(calls, exchanges, strict=True))
    assert up == rounds * (P + 2 * Q * D) - skipped * D
    oracles = {k: sum(n * e.oracles[k] for n, e in zip(calls, exchanges, strict=True)) for k in ("Gg", "Gf", "H", "J")}
    assert oracles == {"Gg": rounds * Q, "Gf": 2 * rounds, "H": rounds * (Q - 1) - skipped, "J": rounds}
    down = sum(n * e.down for n, e in zip(calls, exchanges, strict=True))
    late = rounds - calls[0]  # with Q' = 0 the plan has "begin" send y, which clients hold, and not x
    assert down == rounds * (P + 2 * Q * D) - skipped * D - late * (P - D)


@pytest.mark.parametrize("algorithm", [*RANDOM, *EXACT], ids=repr)
def test_identical_clients_are_one_client(algorithm: fb.Algorithm) -> None:
    many = Quadratic.random(clients=3, heterogeneity=0.0)
    one = Quadratic(*(getattr(many, k)[:1] for k in ("A", "B", "b", "P", "s", "R", "t", "weights")))
    a, b = (fb.solve(q.task(), algorithm, rounds=10, every=10) for q in (many, one))
    assert largest_difference((a.x, a.y), (b.x, b.y)) < 1e-10


def two_rows(batch_size: int | None) -> fb.Task:
    """Two clients with two rows of matrices each, so that batches of one row are random."""
    q = Quadratic.random(clients=4, p=3, d=4)
    rows = lambda names, m: {k: getattr(q, k)[2 * m : 2 * m + 2] for k in names}
    data = [{"train": rows(("A", "B", "b"), m), "val": rows(("P", "s", "R", "t"), m)} for m in range(2)]
    return fb.Task(q.task().problem, data, batch_size=batch_size)


@pytest.mark.parametrize("algorithm", [*RANDOM, EXACT[1]], ids=name)
def test_the_same_seed_gives_the_same_bits(algorithm: fb.Algorithm) -> None:
    a, b, other = (fb.solve(two_rows(1), algorithm, rounds=5, seed=seed, every=5) for seed in (7, 7, 8))
    assert identical((a.x, a.y), (b.x, b.y))
    assert not identical((a.x, a.y), (other.x, other.y))


@pytest.mark.parametrize("cohort", [Everyone(), Uniform(3)], ids=str)
@pytest.mark.parametrize("algorithm", EXACT, ids=name)
def test_engines_give_the_same_numbers(algorithm: fb.Algorithm, cohort: Any) -> None:
    engines = Simulation(FOUR, algorithm, cohort), Local(FOUR, algorithm, cohort)
    a, b = (e.advance(e.start(seed=3), 2) for e in engines)
    assert largest_difference(engines[0].solution(a), engines[1].solution(b)) < 1e-12
    assert not engines[1].failures
    np.testing.assert_array_equal(a.served, b.served)


def loop_is_empty(engine: Simulation, state: Any) -> bool:
    """Whether an exchange of some loop was not made at all."""
    made = {e.method: 0 for e in engine.plan.round}
    for e, calls in zip(engine.plan.round, np.asarray(state.calls), strict=True):
        made[e.method] += int(calls)
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
    np.testing.assert_array_equal(a.calls, b.calls)


@pytest.mark.parametrize(
    ("drawn", "summed"),
    [
        (FedNest(1.0, 0.2, 0.3, local_steps=1, terms=4), {"full_series": True}),
        (AggITD(1.0, 0.3, inner_rounds=4), {"full_sum": True}),
    ],
    ids=["FedNest", "AggITD"],
)
@pytest.mark.parametrize("batch_size", [None, 1], ids=["all rows", "one row"])
def test_random_estimates_have_the_right_mean(drawn: Any, summed: dict[str, bool], batch_size: int | None) -> None:
    """One hypergradient at a fixed point: the mean over random truncations (and batches, on which everything here
    depends linearly, factor by factor) is the full series with all rows."""
    x, y = np.array([1.0, -2.0, 0.5]), np.array([0.3, 1.0, -1.0, 2.0])

    def moved(algorithm: fb.Algorithm, rows: int | None, keys: jax.Array) -> np.ndarray:
        engine = Simulation(two_rows(rows), algorithm)
        state = engine.start(0, x, y)

        def one(key: jax.Array) -> jax.Array:
            return _advance(engine.program, 0, engine.task.data, state._replace(key=key), jnp.asarray(1)).server.x.tree

        return np.asarray(jax.vmap(one)(keys)) - x

    keys = jax.random.split(jax.random.key(5), 3000)
    expected = moved(replace(drawn, **summed), None, keys[:1])[0]
    each = moved(drawn, batch_size, keys)
    error = each.std(axis=0, ddof=1) / np.sqrt(len(each))
    assert np.all(error > 0)
    assert np.all(np.abs(each.mean(axis=0) - expected) < 4 * error)
    assert np.all(error < 0.02 * np.abs(expected).max())  # so that a wrong factor would be noticed


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (FedNest, {"lr_upper": 0.0}),
        (FedNest, {"lr_adjoint": -1.0}),
        (FedNest, {"inner_rounds": 0}),
        (FedNest, {"local_steps": 0}),
        (FedNest, {"local_steps_upper": 0}),
        (FedNest, {"terms": 0}),
        (LFedNest, {"lr_lower": 0.0}),
        (LFedNest, {"inner_rounds": 0}),
        (LFedNest, {"hessian_steps": -1}),
        (AggITD, {"lr_lower": float("nan")}),
        (AggITD, {"inner_rounds": 0}),
    ],
    ids=str,
)
def test_bad_hyper_parameters_are_refused(kind: Any, bad: dict[str, float]) -> None:
    with pytest.raises(fb.FedbilevelError, match=rf"^{kind.__name__}: {next(iter(bad))} must be [^.]*[\d.]+, but is "):
        kind(**bad)
