"""Traced costs against the formulas of the papers."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel.engines.participation import Uniform
from fedbilevel.engines.plan import shared_accounting
from fedbilevel.tasks import Quadratic

sizes = given(p=st.integers(1, 5), d=st.integers(1, 6), I=st.integers(1, 6))


@sizes
def test_fedbio(p: int, d: int, I: int) -> None:  # noqa: E741
    cost = fb.plan(Quadratic.random(clients=2, p=p, d=d).task(), fb.FedBiO(local_steps=I))
    assert (cost.p, cost.d) == (p, d)
    assert (cost.exchanges, cost.down, cost.up) == (1, p + 2 * d, p + 2 * d)
    assert cost.oracles == {"Gf": 2 * I, "Gg": I, "J": I, "H": I}


@pytest.mark.slow
@sizes
def test_fedbioacc(p: int, d: int, I: int) -> None:  # noqa: E741
    task = Quadratic.random(clients=2, p=p, d=d).task()
    cost = fb.plan(task, fb.FedBiOAcc(local_steps=I))
    assert (cost.exchanges, cost.down, cost.up) == (2, 2 * (p + 2 * d), 2 * (p + 2 * d))
    assert cost.oracles == {"Gf": 4 * I, "Gg": 2 * I, "J": 2 * I, "H": 2 * I}
    newcomers = fb.plan(task, fb.FedBiOAcc(local_steps=I), Uniform(1))
    assert newcomers.down == 3 * (p + 2 * d)  # those who missed the last round need the point, too


@sizes
def test_fedavg(p: int, d: int, I: int) -> None:  # noqa: E741
    cost = fb.plan(Quadratic.random(clients=2, p=p, d=d).task(), fb.FedAvg(local_steps=I))
    assert (cost.exchanges, cost.down, cost.up) == (1, d, d)
    assert cost.oracles == {"Gg": I}
    assert cost.once == 8 * p  # x, in double precision


@pytest.mark.parametrize("kind", [fb.FedBiO, fb.FedBiOAcc])
def test_a_shared_batch_needs_one_gradient_of_the_upper_loss(kind: Any) -> None:
    task = Quadratic.scalar().task()
    apart, together = (fb.plan(task, kind(shared_batch=s)).oracles for s in (False, True))
    assert together["Gf"] * 2 == apart["Gf"]
    assert together["H"] == apart["H"]


def test_both_accountings_of_a_private_upper_variable() -> None:
    task = fb.tasks.data_cleaning(hidden=0, clients=4)
    cost = fb.plan(task, fb.FedBiO())
    d = 64 * 10 + 10
    assert (cost.down, cost.up) == (2 * d, 2 * d)
    assert shared_accounting(task, fb.FedBiO()) == (4 * cost.p + 2 * d, 4 * cost.p + 2 * d)
    sent = fb.plan(fb.tasks.data_cleaning(hidden=0, clients=4, private=False), fb.FedBiO())
    assert (sent.down, sent.up) == shared_accounting(task, fb.FedBiO())


def test_a_sample_is_a_row_in_one_oracle_call() -> None:
    """FedBiO: 5 calls in each of I steps, 2 of them of f; a full batch is all rows, in the mean over clients."""
    rng = np.random.default_rng(0)
    rows = lambda n: {"a": rng.normal(size=(n, 2)), "b": rng.normal(size=n)}
    loss = lambda x, y, batch: jnp.mean((batch["a"] @ y - batch["b"]) ** 2) + jnp.sum(jnp.exp(x) * y**2)
    problem = fb.Problem(loss, loss, init=lambda key: (jnp.zeros(2), jnp.zeros(2)))
    clients = [{"train": rows(n), "val": rows(7)} for n in (10, 20)]
    samples = lambda size, **more: fb.plan(fb.Task(problem, clients, batch_size=size), fb.FedBiO(**more)).samples
    assert samples(4, local_steps=3) == 3 * 5 * 4
    assert samples({"train": 4, "val": 1}, local_steps=3) == 3 * (3 * 4 + 2 * 1)
    assert samples(None, local_steps=3) == 3 * (3 * 15 + 2 * 7)


def test_the_history_counts_the_samples_of_all_clients() -> None:
    """The first momenta of FedBiOAcc have larger batches, and their I steps are a round of their own."""
    task = fb.tasks.quadratic(clients=3, p=2, d=2, noise=0.1, batch_size=2)
    result = fb.solve(task, fb.FedBiOAcc(0.1, 0.1, 0.1, local_steps=1, first_batch=4), rounds=5)
    first = 5 * 4 * 2 + 10 * 2  # the momenta at the start, and their first step
    assert result.history[0]["samples"] == 3 * first
    assert result.history[-1]["samples"] == 3 * (first + 5 * 10 * 2)
