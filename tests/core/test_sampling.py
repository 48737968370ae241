"""Rows of batches that walk through all rows: each exactly as often as promised, the same everywhere, and better."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.sampling import advance, draw, is_walking, shuffled, walking, wrapped
from fedbilevel.engines.messaging.local import Local
from fedbilevel.engines.participation import Uniform
from fedbilevel.engines.simulation import Simulation
from fedbilevel.testing import identical, largest_difference, noisy

KEY = walking(jax.random.key(1), jax.random.key(2), 0)


def rows(key: Any, batches: int, size: int, n: int, sampling: Any) -> np.ndarray:
    """The first batches of a series."""
    draws = jax.jit(jax.vmap(lambda i: draw(advance(key, i, 10**6), size, n, sampling)))
    return np.asarray(draws(jnp.arange(batches)))


@pytest.mark.parametrize(("n", "size"), [(1, 3), (2, 1), (3, 2), (10, 10), (64, 7), (100, 250)])
def test_every_epoch_has_all_rows_once(n: int, size: int) -> None:
    epochs = rows(KEY, 3 * n, size, n, "epochs").reshape(-1, n)
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    if n >= 10:
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


@pytest.mark.parametrize(("n", "size"), [(12, 4), (10, 4), (5, 7), (7, 7)])
def test_blocks_are_neighbours_in_an_order_that_stays(n: int, size: int) -> None:
    many = n // np.gcd(n, size)
    blocks = rows(KEY, 2 * many, size, n, "blocks")
    assert np.all((blocks[:, 1:] - blocks[:, :-1]) % n == 1 % n)
    assert np.array_equal(blocks[:many], blocks[many:])
    assert len(set(np.bincount(blocks[:many].ravel(), minlength=n))) == 1


def test_orders_are_drawn_uniformly() -> None:
    """All 24 orders of 4 rows, and all pairs of places of 50 rows: chi-square, within five standard deviations."""
    series = jax.random.key_data(jax.random.key(5))
    orders = lambda n: jax.jit(
        jax.vmap(lambda epoch: shuffled(jnp.arange(n, dtype=jnp.uint32), jnp.uint32(n), series, epoch))
    )
    four = Counter(map(tuple, np.asarray(orders(4)(jnp.arange(24000, dtype=jnp.uint32))).tolist()))
    assert len(four) == 24
    assert sum((count - 1000) ** 2 / 1000 for count in four.values()) < 23 + 5 * 46**0.5
    fifty = np.asarray(orders(50)(jnp.arange(20000, dtype=jnp.uint32)))
    for one, other in ((0, 1), (0, 7), (20, 49)):
        pairs = np.bincount(50 * fifty[:, one] + fifty[:, other], minlength=2500).reshape(50, 50)
        free, expected = ~np.eye(50, dtype=bool), 20000 / 2450
        assert not pairs[~free].any()
        assert abs(((pairs[free] - expected) ** 2 / expected).sum() - 2449) < 5 * 4898**0.5


def test_a_walking_key_is_a_random_key() -> None:
    """What is drawn with it changes with the batch; ``split`` and ``fold_in`` name other series at the same place."""
    first, second = advance(KEY, 0, 5), advance(KEY, 1, 5)
    assert float(jax.random.uniform(first)) != float(jax.random.uniform(second))
    assert all(is_walking(key) for key in (first, jax.random.fold_in(first, 3), *jax.random.split(first)))
    one, other = jax.random.split(first)
    assert not np.array_equal(*(rows(key, 4, 5, 20, "epochs") for key in (one, other)))
    assert identical(jax.random.key_data(wrapped(jax.random.key_data(first))), jax.random.key_data(first))
    assert identical(draw(second, 5, 20, "epochs"), rows(KEY, 2, 5, 20, "epochs")[1])
    nested = advance(advance(KEY, 2, 10), 3, 7)  # a loop of 7 in a loop: batch 2 * 7 + 3
    assert identical(draw(nested, 5, 20, "epochs"), rows(KEY, 18, 5, 20, "epochs")[17])
    assert not is_walking(advance(jax.random.key(0), 3, 5))
    assert identical(
        *(jax.random.key_data(k) for k in (advance(jax.random.key(0), 3, 5), jax.random.fold_in(jax.random.key(0), 3)))
    )


def counting(sampling: Any, clients: int = 3, n: int = 12, size: int = 3) -> fb.Task:
    """x is moved by exactly the rows that it sees: f is linear in x, and entry i of x counts row i."""
    upper = lambda x, y, batch: -jnp.sum(jnp.mean(jax.nn.one_hot(batch["i"], clients * n), 0) * x) * size
    lower = lambda x, y, batch: 0.5 * jnp.sum(y**2) + 0 * jnp.mean(batch["i"])
    problem = fb.Problem(upper, lower, lambda key: (np.zeros(clients * n), np.zeros(1)))
    data = [{split: {"i": m * n + np.arange(n, dtype=np.int32)} for split in ("train", "val")} for m in range(clients)]
    return fb.Task(problem, data, batch_size=size, sampling=sampling)


@pytest.mark.parametrize("local_steps", [1, 2])
def test_rounds_and_local_steps_walk_through_the_rows(local_steps: int) -> None:
    """After 12 rows of each client, x has counted every row once; with replacement that has a chance of 1e-10."""
    algorithm = fb.FedBiO(lr_upper=3.0, lr_lower=0.1, lr_adjoint=0.1, local_steps=local_steps)
    rounds = 4 // local_steps
    for sampling in ("epochs", "blocks"):
        engines = (engine(counting(sampling), algorithm) for engine in (Simulation, Local))
        for engine in engines:
            x, _ = engine.solution(engine.advance(engine.start(seed=1), rounds))
            np.testing.assert_allclose(x, 1)
    x = fb.solve(counting("replacement"), algorithm, rounds=rounds).x
    assert np.max(np.abs(np.asarray(x) - 1)) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["epochs", "blocks"])
@pytest.mark.parametrize(
    "algorithm",
    [
        fb.FedBiOAcc(0.1, 0.2, 0.2, local_steps=2),
        fb.FedNest(0.1, 0.2, 0.2, local_steps=2, terms=3),
        fb.RFHO(0.1, 0.2, inner_rounds=2),  # batches that several exchanges share
        fb.FedMBO(0.1, 0.2, 0.2, terms=3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, fb.Algorithm) else value,
)
def test_engines_agree(algorithm: fb.Algorithm, sampling: Any) -> None:
    task = replace(noisy("global", weighting=False), sampling=sampling)
    simulation, local = Simulation(task, algorithm, Uniform(3)), Local(task, algorithm, Uniform(3))
    a, b = (engine.advance(engine.start(seed=3), 3) for engine in (simulation, local))
    assert not local.failures
    assert largest_difference(simulation.solution(a), local.solution(b)) < 1e-10


def test_a_run_continues_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    algorithm, task = fb.FedBiO(0.5, 0.1, 0.1, local_steps=1), counting("epochs")
    fb.solve(task, algorithm, rounds=3, checkpoint=tmp_path, every=10)
    continued = fb.solve(task, algorithm, rounds=7, checkpoint=tmp_path, every=10)
    assert identical(continued.x, fb.solve(task, algorithm, rounds=7, every=10).x)


def test_epochs_reach_further_than_replacement() -> None:
    """On a noisy quadratic, whose rows have their own shift of y: the floor of |x - x*| is far lower."""
    rng = np.random.default_rng(0)
    n, clients = 64, 4
    b = rng.normal(size=(clients, n, 3))
    lower = lambda x, y, batch: jnp.mean(jnp.sum(0.5 * y**2 - y * (x + batch["b"]), -1))
    upper = lambda x, y, batch: 0.5 * jnp.sum((y - 1) ** 2) + 0 * jnp.mean(batch["b"])
    problem = fb.Problem(upper, lower, lambda key: (np.zeros(3), np.zeros(3)))
    data = [{"train": {"b": b[m]}, "val": {"b": b[m, :1]}} for m in range(clients)]
    expected = 1 - b.mean((0, 1))  # y*(x) = x + mean b, and f is least at y* = 1
    errors = {}
    for sampling in ("replacement", "epochs", "blocks"):
        task = fb.Task(problem, data, batch_size=8, sampling=sampling)
        algorithm = fb.FedBiO(0.02, 0.1, 0.1, local_steps=1)
        ends = [fb.solve(task, algorithm, rounds=2000, seed=seed, every=2000).x for seed in range(4)]
        errors[sampling] = np.mean([np.sum((np.asarray(x) - expected) ** 2) for x in ends]) ** 0.5
    assert errors["epochs"] < 0.4 * errors["replacement"]
    assert errors["blocks"] < 0.4 * errors["replacement"]


def test_an_unknown_sampling_is_refused() -> None:
    with pytest.raises(fb.FedbilevelError, match="no sampling called 'epoch': did you mean 'epochs'"):
        counting("epoch")
