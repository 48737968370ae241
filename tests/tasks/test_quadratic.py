"""The quadratic task with noise: its means are those of the closed forms, and its batches are random."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.vectors import Vector
from fedbilevel.diagnostics import exact
from fedbilevel.tasks import Quadratic, WeightedQuadratics
from fedbilevel.tasks.quadratic import scattered

X, Y = np.array([0.3, -1.0, 0.5]), np.array([1.0, 0.2, -0.4, 2.0])


def test_the_mean_over_rows_has_no_noise() -> None:
    rng = np.random.default_rng(0)
    A, b = rng.normal(size=(4, 4)), rng.normal(size=4)
    A = A + A.T
    matrices, vectors = scattered(A, 800, 0.5, rng), scattered(b, 800, 0.5, rng)
    np.testing.assert_allclose(matrices.mean(axis=0), A, atol=1e-14)
    np.testing.assert_allclose(vectors.mean(axis=0), b, atol=1e-14)
    np.testing.assert_allclose(np.einsum("nij,nj->i", matrices, vectors) / 800, A @ b, atol=1e-13)
    np.testing.assert_array_equal(matrices, matrices.swapaxes(1, 2))
    noise = matrices - A
    assert np.std(noise[:, ~np.eye(4, dtype=bool)]) == pytest.approx(0.5 / 2, rel=0.1)  # 0.5 / sqrt(4)
    assert np.std(vectors - b) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("variant", ["T1", "T4"])
def test_noise_and_copies_leave_the_solution_as_it_is(variant: str, copies: int) -> None:
    """Solved on all rows by the exact diagnostics, which know nothing of the closed forms."""
    shape = {"clients": 3, "p": 3, "d": 4, "seed": 5}
    task = fb.tasks.quadratic(variant, **shape, noise=0.3, rows=20, batch_size=2, copies=copies)
    q = Quadratic.random(**shape)
    q = q.local() if variant == "T4" else q
    assert len(task.clients) == 3 * copies
    at = exact(task, X)
    np.testing.assert_allclose(at.hypergradient, q.hypergradient(X), atol=1e-8)
    np.testing.assert_allclose(at.y, np.tile(q.lower(X), (copies, 1)) if variant == "T4" else q.lower(X), atol=1e-8)
    np.testing.assert_allclose(task.metrics(X, Y)["hypergradient"], np.linalg.norm(q.hypergradient(X)))  # pyright: ignore[reportOptionalCall]


def test_noise_leaves_the_solution_of_weighting_as_it_is() -> None:
    task = fb.tasks.quadratic("T5", clients=3, d=4, noise=0.3, rows=40, batch_size=2, seed=2)
    w, x = WeightedQuadratics.random(3, 4, 2), np.array([0.5, 0.2, 0.3])
    at = exact(task, x)
    np.testing.assert_allclose(at.y, w.lower(x), atol=1e-8)
    np.testing.assert_allclose(at.hypergradient, w.gradient(x), atol=1e-8)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_variance_of_a_batch_falls_with_its_size(batch_size: int) -> None:
    """grad_y g = A y - B x - b on one row has the covariance of its noise; with replacement, batches divide it."""
    shape = {"clients": 2, "p": 3, "d": 4, "seed": 1}
    task = fb.tasks.quadratic("T1", **shape, noise=0.5, rows=48, batch_size=batch_size)
    train = task.clients[1]["train"]
    each = np.einsum("nij,j->ni", train["A"], Y) - np.einsum("nij,j->ni", train["B"], X) - train["b"]
    client = task.layout.client(task.problem, task.data, 1, task.data.weights[1])
    keys = jax.random.split(jax.random.key(0), 20_000)
    x, y = Vector(jnp.asarray(X), "x"), Vector(jnp.asarray(Y), "y")
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: client.g.dy(x, y, key).tree))(keys))
    q = Quadratic.random(**shape)
    np.testing.assert_allclose(drawn.mean(axis=0), q.A[1] @ Y - q.B[1] @ X - q.b[1], atol=0.05)
    np.testing.assert_allclose(drawn.var(axis=0), each.var(axis=0) / batch_size, rtol=0.06)


def test_copies_draw_batches_of_their_own() -> None:
    """The mean of the first steps of y over M copies has a variance that falls like 1 / M."""
    variances = []
    for copies in (1, 16):
        task = fb.tasks.quadratic("T3", clients=1, p=2, d=2, noise=1.0, copies=copies)
        algorithm = fb.FedBiO(lr_upper=0.1, lr_lower=0.1, lr_adjoint=0.1, local_steps=1)
        found = fb.sweep(task, algorithm, 1, seeds=range(300), metrics=False, way="lanes")
        variances.append(np.var([run.y for run in found if isinstance(run, fb.Result)], axis=0).sum())
    assert 10 < variances[0] / variances[1] < 25


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"noise": -1.0}, "noise"),
        ({"copies": 0}, "copies"),
        ({"noise": 1.0, "rows": 2}, "a multiple of 4"),
        ({"variant": "T5", "noise": 1.0, "rows": 6}, "a multiple of 4"),
        ({"variant": "T5", "copies": 2}, "no copies"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, float], said: str) -> None:
    with pytest.raises(fb.FedbilevelError, match=said):
        fb.tasks.quadratic(**options)  # pyright: ignore[reportArgumentType]
