"""What must not change when something irrelevant changes."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.engines.simulation import traces
from fedbilevel.tasks import Quadratic
from fedbilevel.testing import identical, largest_difference
from helpers import sample_weights

T1 = Quadratic.random(clients=5, p=4, d=6)
KINDS = [fb.FedBiO, pytest.param(fb.FedBiOAcc, marks=pytest.mark.slow)]


def solve(task: fb.Task, kind: Any, steps: dict[str, float], rounds: int = 20, **options: Any) -> fb.Result:
    return fb.solve(task, kind(**steps, local_steps=3), rounds=rounds, **options)


def permuted(q: Quadratic, order: Any) -> Quadratic:
    return Quadratic(*(getattr(q, k)[np.asarray(order)] for k in ("A", "B", "b", "P", "s", "R", "t", "weights")))


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_clients_does_not_matter(kind: Any, steps: dict[str, float]) -> None:
    a, b = solve(T1.task(), kind, steps), solve(permuted(T1, [3, 1, 4, 0, 2]).task(), kind, steps)
    assert largest_difference((a.x, a.y), (b.x, b.y)) < 1e-13


@pytest.mark.parametrize("kind", KINDS)
def test_scaled_weights_give_the_same_result(kind: Any, steps: dict[str, float]) -> None:
    weights = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    a, b = (solve(replace(T1.task(), weights=w), kind, steps) for w in (weights, 7 * weights))
    assert largest_difference((a.x, a.y), (b.x, b.y)) < 1e-13
    assert largest_difference(a.x, solve(T1.task(), kind, steps).x) > 1e-3  # and weights do matter


def test_one_client_and_one_step_is_centralised(steps: dict[str, float]) -> None:
    """Against a loop in numpy that knows nothing of clients."""
    q = permuted(T1, [2])
    A, B, b, P, s, R, t = (getattr(q, k)[0] for k in ("A", "B", "b", "P", "s", "R", "t"))
    x, y, u = np.zeros(4), np.zeros(6), np.zeros(6)
    for _ in range(50):
        x, y, u = (
            x - 0.1 * (R @ (x - t) + B.T @ u),
            y - 0.2 * (A @ y - B @ x - b),
            u - 0.2 * (A @ u - P @ (y - s)),
        )
    result = fb.solve(q.task(), fb.FedBiO(**steps, local_steps=1), rounds=50)
    assert largest_difference((result.x, result.y), (x, y)) < 1e-13


@pytest.mark.slow
def test_equal_clients_merge_into_one_with_their_weights(steps: dict[str, float]) -> None:
    doubled = permuted(T1, [0, 0, 1])
    merged = replace(permuted(T1, [0, 1]).task(), weights=[2, 1])
    a, b = solve(replace(doubled.task(), weights=None), fb.FedBiOAcc, steps), solve(merged, fb.FedBiOAcc, steps)
    assert largest_difference((a.x, a.y), (b.x, b.y)) < 1e-13


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["simulation", "local"])
def test_a_client_that_never_takes_part_changes_nothing(kind: Any, engine: Any, steps: dict[str, float]) -> None:
    task = T1.task()
    clients = list(task.clients)
    clients[3] = jax.tree.map(lambda a: 1e6 * a, clients[3])
    a, b = (
        solve(replace(task, clients=c), kind, steps, rounds=5, sample=[0, 1, 4], engine=engine)
        for c in (task.clients, clients)
    )
    assert identical((a.x, a.y), (b.x, b.y))


@pytest.mark.slow
def test_how_rounds_are_divided_into_calls_does_not_matter(steps: dict[str, float]) -> None:
    task = sample_weights()
    a, b = (solve(task, fb.FedBiOAcc, steps, rounds=12, every=k) for k in (1, 5))
    assert identical((a.x, a.y), (b.x, b.y))


@pytest.mark.slow
def test_nothing_is_compiled_twice(steps: dict[str, float]) -> None:
    """Neither for later rounds, nor another number of rounds, nor another seed of the run or of the task."""
    options = {"clients": 7, "hidden": 0}
    algorithm = fb.FedBiOAcc(**steps)
    before = len(traces)
    fb.solve(fb.tasks.data_cleaning(**options, seed=0), algorithm, rounds=7, every=2)
    assert traces[before:] == ["start", "advance"]
    fb.solve(fb.tasks.data_cleaning(**options, seed=1), algorithm, rounds=5, every=3, seed=3)
    assert traces[before:] == ["start", "advance"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_private_blocks_are_the_shared_vector_with_larger_steps(kind: Any) -> None:
    """With one local step, a private x moves like the shared one if its step is 1/M of it: averaging divides by M."""
    shared, private = (sample_weights(clients=4, private=p) for p in (False, True))
    a = fb.solve(shared, kind(lr_upper=8.0, lr_lower=0.1, lr_adjoint=0.1, local_steps=1), rounds=40)
    b = fb.solve(private, kind(lr_upper=2.0, lr_lower=0.1, lr_adjoint=0.1, local_steps=1), rounds=40)
    assert largest_difference((np.reshape(a.x, b.x.shape), a.y), (b.x, b.y)) < 1e-11
    assert np.max(np.abs(b.x)) > 0.1


@pytest.mark.slow
def test_batching_does_not_matter(steps: dict[str, float]) -> None:
    task = sample_weights()
    for sample in (None, fb.Independent(0.4)):
        a, b = (solve(task, fb.FedBiOAcc, steps, 5, batching=how, sample=sample) for how in ("scan", "vmap"))
        assert largest_difference((a.x, a.y), (b.x, b.y)) < 1e-12
