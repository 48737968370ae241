"""FedMBO: the mean of its chains, its limit, its costs. Expected numbers are derived from the problem."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from derivations import series
from fedbilevel.algorithms.fedmbo import FedMBO
from fedbilevel.core import Clients, Each
from fedbilevel.engines.participation import Everyone, Uniform
from fedbilevel.engines.simulation import Simulation, compiled_advance
from fedbilevel.tasks import Quadratic

T2 = Quadratic.scalar()
X, Y = np.array([1.0, -2.0, 0.5]), np.array([0.3, 1.0, -1.0, 2.0])
WEIGHTS = (1.0, 2.0, 2.0, 3.0)
ROWS = Quadratic.random(clients=8, p=3, d=4)  # of which every client has two


@dataclass(frozen=True)
class OneClientPerChain(FedMBO):
    """The mistake: every client goes on with its own chain."""

    def next_clients(self, clients: Clients, v: Each) -> Each:
        return v


def two_rows(weights: tuple[float, ...] | None, batch_size: int | None = 1) -> tuple[fb.Task, Quadratic]:
    """Four clients with two rows of matrices each, so that batches of one row are random; and all rows together, whose
    means are those of the federation."""
    rows = lambda names, m: {k: getattr(ROWS, k)[2 * m : 2 * m + 2] for k in names}
    data = [{"train": rows(("A", "B", "b"), m), "val": rows(("P", "s", "R", "t"), m)} for m in range(4)]
    task = fb.Task(ROWS.task().problem, data, weights=weights, batch_size=batch_size)
    return task, replace(ROWS, weights=np.repeat(weights or np.ones(4), 2))


def lower_steps(q: Quadratic, a: FedMBO, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    for _ in range(a.inner_rounds):
        y = y - a.lr_lower * (q.mean(q.A) @ y - q.mean(q.B) @ x - q.mean(q.b))
    return y


def upper_step(q: Quadratic, a: FedMBO, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The step of x with the truncated series of the mean Hessian. With two local steps each client goes h / 2, and
    then h / 2 + R_m (x_1 - x) / 2."""
    pull = q.mean(np.einsum("mij,mj->mi", q.P, y - q.s))
    direct = q.mean(np.einsum("mij,mj->mi", q.R, x - q.t))
    step = -a.lr_upper * (direct + q.mean(q.B).T @ series(q.mean(q.A), a.lr_adjoint, a.terms) @ pull)
    return step if a.local_steps_upper == 1 else step - a.lr_upper / 4 * q.mean(q.R) @ step


def expected_step(q: Quadratic, a: FedMBO, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return upper_step(q, a, x, lower_steps(q, a, x, y))


def mean_of_local_steps(q: Quadratic, a: FedMBO, x: np.ndarray, y: np.ndarray, own_y: bool) -> np.ndarray:
    """The mean of the steps of x that clients would make alone: with their own Hessian (and the means of their own two
    rows), at their own y or at that of all."""
    alone = [replace(q, weights=np.eye(4)[m].repeat(2)) for m in range(4)]
    return np.mean([upper_step(m, a, x, lower_steps(m if own_y else q, a, x, y)) for m in alone], axis=0)


def steps(task: fb.Task, algorithm: fb.Algorithm, cohort: Any, samples: int, rounds: int = 1) -> np.ndarray:
    """How far x gets from X, for many seeds."""
    engine = Simulation(task, algorithm, cohort)
    x, y = (X, Y) if rounds == 1 else (np.zeros(1), np.zeros(1))
    state = engine.start(0, x, y)

    def one(key: jax.Array) -> jax.Array:
        moved = compiled_advance(engine.program, engine.task.data, state._replace(key=key), jnp.asarray(rounds))
        return moved.server.x.tree

    return np.asarray(jax.vmap(one)(jax.random.split(jax.random.key(5), samples))) - x


def deviation(each: np.ndarray, expected: np.ndarray) -> float:
    """The largest error of a mean, in standard errors."""
    error = each.std(axis=0, ddof=1) / np.sqrt(len(each))
    assert np.all(error > 0)
    return float(np.max(np.abs(each.mean(axis=0) - expected) / error))


@pytest.mark.parametrize(
    ("cohort", "weights", "tau"),
    [
        (Everyone(), WEIGHTS, 1),
        pytest.param(Everyone(), None, 2, marks=pytest.mark.slow),
        pytest.param(Uniform(2, resample=True), WEIGHTS, 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_mean_over_chains_is_the_truncated_series(cohort: Any, weights: Any, tau: int) -> None:
    algorithm = FedMBO(1.0, 0.2, 0.2, inner_rounds=2, terms=4, local_steps_upper=tau)
    task, q = two_rows(weights)
    expected = expected_step(q, algorithm, X, Y)
    each = steps(task, algorithm, cohort, 10_000)
    assert deviation(each, expected) < 4
    assert np.all(each.std(axis=0) / 100 < 0.02 * np.abs(expected).max())  # a wrong factor would be noticed


@pytest.mark.parametrize(
    ("kind", "cohort"), [(OneClientPerChain, Everyone()), (FedMBO, Uniform(1))], ids=["no shuffle", "kept cohort"]
)
def test_one_client_along_a_chain_gives_local_hypergradients(kind: Any, cohort: Any) -> None:
    """Then v_m = N / l (I - H_m / l)^N' grad_y f_m meets d2xy g_m again: the mean of local hypergradients. A cohort of
    one client that is kept for the round has the same fault, at y of its own, so that new clients are needed for every
    exchange. (It is noisier, hence more samples.)"""
    algorithm = kind(1.0, 0.2, 0.5, inner_rounds=2, terms=4)
    task, q = two_rows(None, batch_size=None)
    each = steps(task, algorithm, cohort, 40_000 if kind is FedMBO else 10_000)
    assert deviation(each, mean_of_local_steps(q, algorithm, X, Y, own_y=kind is FedMBO)) < 4
    assert deviation(each, expected_step(q, algorithm, X, Y)) > 2 * 4  # twice what passes for unbiased


def test_the_noise_of_the_chains_falls_with_the_number_of_clients() -> None:
    """Copies of clients change no mean, so what falls is the noise of chains alone: oracles are exact. One N' for all
    chains leaves the variance that N' itself makes, with v = N / l (I - H / l)^N' grad_y f for the mean H."""
    q, algorithm = Quadratic.random(clients=4, p=3, d=4), FedMBO(1.0, 0.2, 0.2, inner_rounds=1, terms=4)
    variance = {}
    for common in (False, True):
        for copies in (4, 32):
            task = q.task(copies=copies)
            each = steps(task, replace(algorithm, common_length=common), Everyone(), 2_000)
            assert deviation(each, expected_step(q, algorithm, X, Y)) < 4
            variance[common, copies] = each.var(axis=0, ddof=1).sum()
    assert variance[False, 4] / variance[False, 32] == pytest.approx(8, rel=0.25)
    pull = q.mean(np.einsum("mij,mj->mi", q.P, lower_steps(q, algorithm, X, Y) - q.s))
    step = np.eye(4) - 0.2 * q.mean(q.A)
    ends = [q.mean(q.B).T @ (4 * 0.2 * np.linalg.matrix_power(step, n) @ pull) for n in range(4)]
    assert variance[True, 32] == pytest.approx(np.var(ends, axis=0).sum(), rel=0.2)
    assert variance[True, 32] > 10 * variance[False, 32]


@pytest.mark.slow
def test_the_scalar_example_goes_to_4_in_the_mean() -> None:
    """A round is affine in (x, y) with random coefficients that do not depend on (x, y), so that the means follow the
    round with the mean coefficients. Its limit is 4. The noise stays: of the clients' grad_y f = y - s_m only the mean
    vanishes there."""
    algorithm = FedMBO(0.3, 0.4, 0.3, inner_rounds=2, terms=3)
    x, y = np.zeros(1), np.zeros(1)
    for _ in range(150):
        x, y = x + expected_step(T2, algorithm, x, y), lower_steps(T2, algorithm, x, y)
    np.testing.assert_allclose(x, [4.0], atol=1e-3)
    each = steps(T2.task(), algorithm, Everyone(), 1000, rounds=150)
    assert deviation(each, x) < 4
    assert 0.02 < each.std() < 1


@pytest.mark.parametrize(("T", "N", "tau"), [(1, 1, 1), (3, 4, 1), (2, 4, 3)])
def test_costs(T: int, N: int, tau: int) -> None:
    p, d = 3, 5
    task = Quadratic.random(clients=3, p=p, d=d).task()
    algorithm = FedMBO(inner_rounds=T, terms=N, local_steps_upper=tau)
    last, more = min(1, N - 1), int(tau > 1)  # the plan counts loops of random length once
    cost = fb.plan(task, algorithm)
    assert cost.exchanges == T + last + 2 + more
    assert cost.down == cost.up == (1 + more) * p + (T + last + 1) * d
    assert fb.plan(task, algorithm, Uniform(2)).down == cost.down + d  # newcomers do not hold y
    fresh = fb.plan(task, algorithm, Uniform(2, resample=True))  # they hold nothing
    assert fresh.down == (T + last + 2 + 2 * more) * p + (T + 2 * last + 3 + more) * d
    assert fresh.up == cost.up
    assert cost.oracles == {"Gg": T, "Gf": 2 + 2 * tau * more, "J": 1} | ({"H": 1} if last else {})
