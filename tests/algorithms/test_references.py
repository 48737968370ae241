"""GD, RFHO, SUSTAIN, StocBiO and MRBO: derivatives, means of random estimates, costs where the server holds f."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from derivations import root, series
from fedbilevel.algorithms.gd import GD
from fedbilevel.algorithms.mrbo import MRBO
from fedbilevel.algorithms.rfho import RFHO
from fedbilevel.algorithms.stocbio import StocBiO
from fedbilevel.algorithms.sustain import SUSTAIN
from fedbilevel.engines.participation import Uniform
from fedbilevel.engines.simulation import Simulation, compiled_advance
from fedbilevel.tasks import Quadratic
from fedbilevel.tasks.weighted_quadratics import WeightedQuadratics
from fedbilevel.testing import identical, largest_difference
from helpers import sample_weights

T1 = Quadratic.random(clients=3, p=2, d=4)
T2 = Quadratic.scalar()
name = lambda value: f"{type(value).__name__} {getattr(value, 'mode', getattr(value, 'solver', ''))}".strip()


def after(
    task: fb.Task, algorithm: fb.Algorithm, rounds: int, seed: int = 0, x: Any = None, y: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """The x and y after this many rounds."""
    engine = Simulation(task, algorithm)
    return engine.solution(engine.advance(engine.start(seed, x, y), rounds))


def limit(task: fb.Task, algorithm: fb.Algorithm, rounds: int) -> np.ndarray:
    return np.asarray(after(task, algorithm, rounds)[0])


def estimate(q: Quadratic, x: np.ndarray, y: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    """grad_x f - d2xy g inverse grad_y f at (x, y)."""
    pull = q.mean(np.einsum("mij,mj->mi", q.P, y - q.s))
    return q.mean(np.einsum("mij,mj->mi", q.R, x - q.t)) + q.mean(q.B).T @ inverse @ pull


GDS = [GD(0.4, 0.4, inner_rounds=4, solver_steps=6), GD(0.4, 0.4, inner_rounds=4, solver="dense")]


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_rfho_without_a_warm_start_minimises_over_what_T_steps_reach(mode: str) -> None:
    reach = series(T1.mean(T1.A), 0.4, 3)  # y_3(x) = reach (B x + b), as y_0 = 0

    def derivative(x: np.ndarray) -> np.ndarray:
        return estimate(T1, x, reach @ (T1.mean(T1.B) @ x + T1.mean(T1.b)), reach)

    x = limit(T1.task(), RFHO(0.4, 0.4, inner_rounds=3, mode=mode, warm_start=False), 300)
    np.testing.assert_allclose(x, root(derivative, 2), atol=1e-9)


def unrolled(task: fb.Task, x: Any, y: Any, step: float, times: int) -> np.ndarray:
    """The derivative of f(x, y_T(x)) by automatic differentiation through all steps; for a private x, of one row of
    x for each client."""
    problem, weights = task.problem, task.normalised_weights

    def mean(loss: Any, split: str, x: Any, y: Any) -> Any:
        own = lambda m: x[m] if problem.private_x else x
        each = [loss(own(m), y, client[split]) for m, client in enumerate(task.clients)]
        return sum(w * value for w, value in zip(weights, each, strict=True))

    def outcome(x: Any) -> Any:
        moving = y
        for _ in range(times):
            moving = moving - step * jax.grad(lambda y: mean(problem.lower, "train", x, y))(moving)
        return mean(problem.upper, "val", x, moving)

    return np.asarray(jax.grad(outcome)(jnp.asarray(x)))


def curved(private: bool) -> fb.Task:
    """Not quadratic: samples weighted by sigmoids of x. Clients differ in size."""
    return replace(sample_weights(clients=3, samples=3, private=private), batch_size=None)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
@pytest.mark.parametrize(("task", "y"), [(T1.task(), np.arange(4.0)), (curved(False), np.arange(3.0))], ids=["T1", ""])
def test_rfho_is_the_derivative_of_its_steps(task: fb.Task, y: np.ndarray, mode: str) -> None:
    size = jax.eval_shape(task.problem.init, jax.random.key(0))[0].size
    x = np.linspace(-1, 1, size)
    moved, _ = after(task, RFHO(1.0, 0.1, inner_rounds=4, mode=mode), 1, x=x, y=y)
    expected = unrolled(task, x, jnp.asarray(y), 0.1, 4)
    assert np.linalg.norm(expected) > 1e-2
    np.testing.assert_allclose(x - np.asarray(moved), expected, atol=1e-12, rtol=1e-10)


def test_rfho_backwards_is_the_derivative_for_a_private_x() -> None:
    task = curved(True)
    x, y = np.linspace(-1, 1, 9).reshape(3, 3), np.arange(3.0)
    moved, _ = after(task, RFHO(1.0, 0.1, inner_rounds=4), 1, x=x, y=y)
    # An owner's block is not averaged: its gradient is that of its own loss, which counts with its weight.
    expected = unrolled(task, x, jnp.asarray(y), 0.1, 4) / task.normalised_weights[:, None]
    np.testing.assert_allclose(x - np.asarray(moved), expected, atol=1e-12, rtol=1e-10)


@pytest.mark.slow
def test_the_way_back_uses_the_batches_of_the_way_there() -> None:
    """With batches of two rows both modes are the derivative of the same steps."""
    task = replace(curved(False), batch_size={"train": 2, "val": None})
    a, b = (after(task, RFHO(1.0, 0.1, inner_rounds=4, mode=m), 3, seed=4) for m in ("reverse", "forward"))
    assert largest_difference(a, b) < 1e-12
    assert largest_difference(a, after(task, RFHO(1.0, 0.1, inner_rounds=4), 3, seed=5)) > 1e-3


def as_rows(q: Quadratic, clients: int, batch_size: int | None) -> fb.Task:
    """The matrices of a quadratic problem as rows of fewer clients, so that batches of one row are random."""
    size = len(q.A) // clients
    rows = lambda names, m: {k: getattr(q, k)[size * m : size * (m + 1)] for k in names}
    data = [{"train": rows(("A", "B", "b"), m), "val": rows(("P", "s", "R", "t"), m)} for m in range(clients)]
    return fb.Task(q.task().problem, data, batch_size=batch_size)


@pytest.mark.slow
def test_conjugate_gradients_invert_the_same_estimated_hessian() -> None:
    task = as_rows(Quadratic.random(clients=4, p=3, d=4), 2, 1)
    a, b = (after(task, replace(g, lr_upper=0.1, lr_lower=0.1), 3, seed=1) for g in GDS)
    assert largest_difference(a, b) < 1e-10


def many(algorithm: fb.Algorithm, task: fb.Task, x: Any, y: Any, of: Any, size: int = 4000) -> np.ndarray:
    """What one round leads to from the same state with many keys."""
    engine = Simulation(task, algorithm)
    state = engine.start(0, x, y)

    def one(key: jax.Array) -> jax.Array:
        moved = state._replace(key=key)
        return of(compiled_advance(engine.program, engine.task.data, moved, jnp.asarray(1)).server)

    return np.asarray(jax.vmap(one)(jax.random.split(jax.random.key(5), size)))


def assert_mean(each: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The mean is the expected one within four standard errors, which are small; returns these errors."""
    error = each.std(axis=0, ddof=1) / np.sqrt(len(each))
    assert np.all(error > 0)
    assert np.all(np.abs(each.mean(axis=0) - expected) < 4 * error)
    assert np.all(error < 0.05 * np.abs(expected).max())  # so that a wrong factor would be noticed
    return error


@pytest.mark.slow
def test_the_inverse_of_a_noisy_hessian_is_biased_and_the_series_is_not() -> None:
    """One client with two rows, whose Hessians are 1 and 3: the mean of the inverses is 2/3, but the inverse of the
    mean is 1/2."""
    task, x, y = as_rows(T2, 1, 1), np.array([1.0]), np.array([5.0])
    moved = y - 0.1 * (2 * y - x)  # the mean of y after its step
    pull = moved - 2
    of = lambda server: server.x.tree
    for solver in ("cg", "dense"):
        steps = x - many(GD(1.0, 0.1, inner_rounds=1, solver=solver, solver_steps=1), task, x, y, of)
        error = assert_mean(steps, 2 / 3 * pull)
        assert np.all(np.abs(steps.mean(axis=0) - pull / 2) > 5 * error)
    steps = x - many(StocBiO(1.0, 0.1, 0.5, inner_rounds=1, neumann_steps=4), task, x, y, of)
    error = assert_mean(steps, series(np.array([[2.0]]), 0.5, 5) @ pull)
    same_batch = np.mean([series(np.array([[a]]), 0.5, 5) for a in (1.0, 3.0)]) * pull
    assert np.all(np.abs(steps.mean(axis=0) - same_batch) > 4 * error)


@pytest.mark.slow
def test_a_random_term_has_the_mean_of_the_series() -> None:
    """The momentum of x after one round, from a known one, with random batches, too: both points count."""
    q = Quadratic.random(clients=4, p=3, d=4)
    x, y, d = np.array([1.0, -2.0, 0.5]), np.array([0.3, 1.0, -1.0, 2.0]), np.array([0.5, -0.5, 1.0])
    algorithm = SUSTAIN(0.5, 0.1, 0.3, forget_upper=0.6, forget_lower=0.6, terms=4)
    engine = Simulation(as_rows(q, 2, 1), algorithm)
    state = engine.start(0, x, y)
    momenta = type(state.server.d)(state.server.d.x.like(jnp.asarray(d)), 0 * state.server.d.y)
    state = state._replace(server=state.server._replace(d=momenta))

    def one(key: jax.Array) -> jax.Array:
        moved = state._replace(key=key)
        return compiled_advance(engine.program, engine.task.data, moved, jnp.asarray(1)).server.d.x.tree

    each = np.asarray(jax.vmap(one)(jax.random.split(jax.random.key(5), 4000)))
    inverse = series(q.mean(q.A), 0.3, 4)
    assert_mean(each, 0.4 * (d - estimate(q, x, y, inverse)) + estimate(q, x - 0.5 * d, y, inverse))


@pytest.mark.slow
def test_both_points_have_the_same_batches_and_the_same_term() -> None:
    """Where nothing moves and nothing is forgotten, the momenta stay, whatever is drawn."""
    engine = Simulation(as_rows(Quadratic.random(clients=4, p=3, d=4), 2, 1), SUSTAIN(forget_upper=0, forget_lower=0))
    state = engine.start(0)
    still = jax.tree.map(jnp.zeros_like, state.server.d)
    after = engine.advance(state._replace(server=state.server._replace(d=still)), 5).server
    assert largest_difference(after.d, still) < 1e-14
    assert identical(after.z, state.server.z)


def test_momenta_start_as_the_first_gradients() -> None:
    x, y = np.array([1.0, -2.0]), np.arange(4.0)
    d = Simulation(T1.task(), MRBO(lr_adjoint=0.3, neumann_steps=2)).start(0, x, y).server.d
    np.testing.assert_allclose(d.x.tree, estimate(T1, x, y, series(T1.mean(T1.A), 0.3, 3)), atol=1e-12)
    np.testing.assert_allclose(d.y.tree, T1.mean(T1.A) @ y - T1.mean(T1.B) @ x - T1.mean(T1.b), atol=1e-12)


@pytest.mark.slow
def test_mrbo_is_sustain_with_the_full_series() -> None:
    task = as_rows(Quadratic.random(clients=4, p=3, d=4), 2, 1)
    a, b = (after(task, a, 5) for a in (SUSTAIN(terms=4, full_series=True), MRBO(neumann_steps=3)))
    assert identical(a, b)


P, D = 3, 5
CLIENTS = Quadratic.random(clients=2, p=P, d=D).task()
SERVER = WeightedQuadratics.line(0.0, 1.0, 4.0)
SERVER = replace(SERVER, H=np.stack([np.eye(D)] * P), c=np.zeros((P, D)), H0=np.eye(D), c0=np.zeros(D)).task()


def check_cost(
    algorithm: fb.Algorithm, exchanges: int, down: int, up: int, oracles: dict[str, int], saved: int, missed: int
) -> None:
    """With f at the clients, where a client that missed the last round is sent ``missed`` floats more; on the server
    there is one exchange less, ``saved`` floats up less, and no Gf."""
    planned = fb.plan(CLIENTS, algorithm)
    oracles = {k: n for k, n in oracles.items() if n}
    assert (planned.exchanges, planned.down, planned.up, planned.oracles) == (exchanges, down, up, oracles)
    assert fb.plan(CLIENTS, algorithm, Uniform(1)).down == down + missed
    planned = fb.plan(SERVER, algorithm)
    del oracles["Gf"]
    assert (planned.exchanges, planned.down, planned.up) == (exchanges - 1, down, up - saved)
    assert planned.oracles == oracles


@pytest.mark.parametrize(("K", "S"), [(1, 1), (3, 4)])
def test_the_cost_of_gd(K: int, S: int) -> None:
    size = K + S + 1
    oracles = {"Gg": K, "Gf": 1, "H": S, "J": 1}
    check_cost(GD(inner_rounds=K, solver_steps=S), K + S + 2, P + size * D, 2 * P + size * D, oracles, P + D, D)
    up = 2 * P + (K + 1) * D + D * D
    dense = GD(inner_rounds=K, solver="dense", solver_steps=S)
    check_cost(dense, K + 3, P + (K + 1) * D, up, {**oracles, "H": D}, P + D, D)


@pytest.mark.parametrize(("steps", "Q"), [(1, 0), (3, 4)])
def test_the_cost_of_stocbio(steps: int, Q: int) -> None:
    size = (steps + Q + 1) * D
    oracles = {"Gg": steps, "Gf": 1, "H": Q, "J": 1}
    algorithm = StocBiO(inner_rounds=steps, neumann_steps=Q)
    check_cost(algorithm, steps + Q + 2, P + size, 2 * P + size, oracles, P + D, D)


@pytest.mark.parametrize("Q", [1, 4])
def test_the_cost_of_sustain_and_mrbo(Q: int) -> None:
    size = (2 * Q + 3) * D
    oracles = {"Gg": 2, "Gf": 2, "H": 2 * Q, "J": 2}
    # The plan counts loops of random length once.
    for algorithm in (MRBO(neumann_steps=Q), SUSTAIN(terms=5) if Q == 1 else SUSTAIN(terms=5, full_series=True)):
        check_cost(algorithm, Q + 2, P + size, 3 * P + size, oracles, 2 * (P + D), P + D)


@pytest.mark.parametrize("T", [1, 5])
def test_the_cost_of_rfho(T: int) -> None:
    """In reverse the T - 1 inner points are sent again on the way back, as parts of one array."""
    oracles = {"Gg": T, "Gf": 1, "H": T - 1, "J": T}
    reverse = RFHO(inner_rounds=T)
    check_cost(reverse, 2 * T + 1, P + (3 * T - 1) * D, P + 2 * T * D, oracles, D, D)
    matrices = T * D * (1 + P)
    oracles = {"Gg": T, "Gf": 1, "H": T * P, "J": T * P}
    forward = RFHO(inner_rounds=T, mode="forward")
    check_cost(forward, T + 1, P + matrices, P + D + matrices, oracles, P + D, D)


@pytest.mark.parametrize(
    ("kind", "bad", "reason"),
    [
        (GD, {"solver": "lu"}, "solver must be cg or dense, not 'lu'."),
        (RFHO, {"mode": "both"}, "mode must be reverse or forward, not 'both'."),
        (SUSTAIN, {"forget_upper": 1.5}, "forget_upper must be at most 1, not 1.5."),
        (MRBO, {"forget_lower": "power(0.1, 0.5)"}, "forget_lower must be at most 1, not inf."),
        (MRBO, {"lr_lower": float("nan")}, "lr_lower must be greater than 0, not nan."),
    ],
    ids=str,
)
def test_bad_hyper_parameters_are_refused(kind: Any, bad: dict[str, Any], reason: str) -> None:
    with pytest.raises(fb.FedbilevelError) as caught:
        kind(**bad)
    assert str(caught.value) == f"{kind.__name__}: {reason}"


def test_what_rfho_cannot_do_is_refused() -> None:
    with pytest.raises(fb.FedbilevelError) as caught:
        fb.plan(sample_weights(), RFHO(mode="forward"))
    expected = "RFHO: mode forward needs an x that the server sees, so use reverse for a private x."
    assert str(caught.value) == expected
    with pytest.raises(fb.FedbilevelError, match=r"^the clients of RFHO keep state here"):
        fb.plan(CLIENTS, RFHO(), Uniform(1, resample=True))


@pytest.mark.parametrize("solver", ["cg", "dense"])
def test_gd_does_not_divide_by_the_hessian_of_clients_without_weight(solver: str) -> None:
    """Only a client of weight 0 takes part: there is nothing to learn from, and x stays."""
    task, x = WeightedQuadratics.line(0.0, 1.0, 4.0).task(), np.array([0.0, 1.0, 0.0])
    result = fb.solve(task, GD(solver=solver, solver_steps=2), rounds=2, x=x, sample=[0])
    np.testing.assert_array_equal(result.x, x)
    assert np.all(np.isfinite(result.y))
