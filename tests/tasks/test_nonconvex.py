"""The task whose lower level is not convex: its solution, and who finds it."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.vectors import Vector
from fedbilevel.diagnostics.average import KEY, Average


def test_the_solution_is_the_best_of_all_minimisers() -> None:
    """By trying all valleys of every y_i, and a line of x for each."""
    x = np.linspace(-10, 10, 200_001)
    found = (np.inf, 0.0, ())
    for valleys in itertools.product(range(-2, 4), repeat=3):
        C = -np.pi / 2 + 2 * np.pi * np.array(valleys)
        upper = (x - 2) ** 2 + np.sum((C - x[:, None] - 2) ** 2, axis=1)  # y = C + 2 - x
        at = int(np.argmin(upper))
        found = min(found, (upper[at], x[at], C), key=lambda each: each[0])
    task = fb.tasks.nonconvex(n=3)
    assert task.metrics is not None
    at_best = task.metrics(np.array([found[1]]), found[2] + 2 - found[1])
    assert at_best["error"] < 1e-3
    assert abs(at_best["upper_gap"]) < 1e-6
    assert abs(at_best["lower_gap"]) < 1e-12
    other = task.metrics(np.array([found[1]]), found[2] + 2 - found[1] + 2 * np.pi)  # as deep, and worse for f
    assert abs(other["lower_gap"]) < 1e-12
    assert other["upper_gap"] > 1


@pytest.mark.parametrize("copies", [1, 2])
def test_means_are_free_of_noise_and_differences(copies: int) -> None:
    task = fb.tasks.nonconvex(clients=3, n=2, heterogeneity=0.5, noise=0.4, rows=8, copies=copies)
    x, y = np.array([0.7]), np.array([1.0, -2.0])
    average = Average(task.problem, task.layout, task.data, Vector(jnp.asarray(x), "x"))
    at = Vector(jnp.asarray(y), "y")
    slope = average.sum(lambda c, x: c.g.dy(x, at, KEY))
    np.testing.assert_allclose(slope.tree, np.cos(0.7 + y - 2), atol=1e-12)
    pull = average.sum(lambda c, x: c.f.dx(x, at, KEY))
    np.testing.assert_allclose(pull.tree, 2 * (x - 2), atol=1e-12)
    each = task.clients[0]["train"]["w"]
    assert np.std(each[:, 0]) > 0.1


def test_mefbo_finds_it_from_two_valleys_away_and_fedbio_does_not() -> None:
    """The penalty starts so small that f pulls y over, and grows."""
    task = fb.tasks.nonconvex()
    hyper = task.suggested.hyper
    mefbo = fb.solve(task, fb.MeFBO(**hyper["mefbo"]), rounds=2000, every=2000).history
    assert mefbo[0]["error"] > 5
    assert mefbo[-1]["error"] < 0.05
    fedbio = fb.solve(task, fb.FedBiO(**hyper["*"]), rounds=2000, every=2000).history
    assert fedbio[-1]["error"] > 2


@pytest.mark.parametrize("options", [{"n": 0}, {"noise": 1.0, "rows": 6}, {"start_y": float("inf")}])
def test_options_that_make_no_sense(options: dict[str, float]) -> None:
    with pytest.raises(fb.FedbilevelError, match="nonconvex: "):
        fb.tasks.nonconvex(**options)  # pyright: ignore[reportArgumentType]
