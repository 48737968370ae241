"""Derivatives against dense autodiff and finite differences."""

from typing import Any
from unittest.mock import ANY

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel.core import Objective, Rows
from fedbilevel.core.vectors import Vector
from fedbilevel.diagnostics import upper_loss


def loss(x: Any, y: Any, batch: Any, key: Any = None) -> jax.Array:
    """Smooth, with every mixed derivative alive."""
    hidden = jnp.tanh(batch["a"] @ y["w"] + x["shift"])
    out = hidden @ y["v"] + y["c"]
    return jnp.mean(jnp.exp(-x["scale"]) * (out - batch["b"]) ** 2) + 0.1 * jnp.sum(jnp.cos(y["v"]) * x["shift"] ** 2)


def make(
    inputs: int, width: int, rows: int, seed: int, size: int | None = None
) -> tuple[Objective, Vector, Vector, Vector]:
    rng = np.random.default_rng(seed)
    arrays = {"a": jnp.asarray(rng.normal(size=(rows + 3, inputs))), "b": jnp.asarray(rng.normal(size=rows + 3))}
    x = {"shift": jnp.asarray(rng.normal(size=width)), "scale": jnp.asarray(rng.normal())}
    y, v = (
        {
            "w": jnp.asarray(rng.normal(size=(inputs, width))),
            "v": jnp.asarray(rng.normal(size=width)),
            "c": jnp.asarray(rng.normal()),
        }
        for _ in range(2)
    )
    return (
        Objective(loss, "g", Rows(arrays, 2, rows, rows, False), size),
        Vector(x, "x"),
        Vector(y, "y"),
        Vector(v, "y"),
    )


shapes = given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 10**6), st.sampled_from([None, 2])
)


@shapes
@pytest.mark.slow
def test_derivatives_match_dense_autodiff(inputs: int, width: int, rows: int, seed: int, size: int | None) -> None:
    g, x, y, v = make(inputs, width, rows, seed, size)
    key = jax.random.key(seed)
    flat = lambda p, q: g.value(x.like(p), y.like(q), key)
    p, q, w = x.flat(), y.flat(), v.flat()

    @jax.jit
    def dense() -> Any:
        cross = jax.jacobian(jax.grad(flat, 1), 0)(p, q).T  # p-by-d
        return *jax.grad(flat, (0, 1))(p, q), cross @ w, jax.hessian(flat, 1)(p, q) @ w

    @jax.jit
    def ours() -> Any:
        single = g.dx(x, y, key), g.dy(x, y, key), g.dxy(x, y, v, key), g.dyy(x, y, v, key)
        return single, g.gradients(x, y, key), g.second_order(x, y, v, key)

    gx, gy, cross, hessian = dense()
    single, both, second = ours()
    for got, expected in zip(
        (*single, *both, *second), (gx, gy, cross, hessian, gx, gy, gy, cross, hessian), strict=True
    ):
        np.testing.assert_allclose(got.flat(), expected, atol=1e-10)


@shapes
def test_derivatives_match_finite_differences(inputs: int, width: int, rows: int, seed: int, size: int | None) -> None:
    g, x, y, v = make(inputs, width, rows, seed, size)
    key, h = jax.random.key(seed), 1e-5

    @jax.jit
    def differences() -> Any:
        slope = (g.value(x, y + h * v, key) - g.value(x, y - h * v, key)) / (2 * h)
        hessian = (g.dy(x, y + h * v, key) - g.dy(x, y - h * v, key)) / (2 * h)
        cross = (g.dx(x, y + h * v, key) - g.dx(x, y - h * v, key)) / (2 * h)
        return slope, hessian, cross

    @jax.jit
    def ours() -> Any:
        return fb.vectors.dot(g.dy(x, y, key), v), g.dyy(x, y, v, key), g.dxy(x, y, v, key)

    for got, expected in zip(jax.tree.leaves(ours()), jax.tree.leaves(differences()), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_a_key_names_a_batch() -> None:
    g, x, y, _ = make(3, 4, 50, seed=0, size=5)
    one, two = jax.random.key(1), jax.random.key(2)
    assert g.value(x, y, one) == g.value(x, y, one)
    assert g.value(x, y, one) != g.value(x, y, two)


def noisy(x: Any, y: Any, batch: Any, key: Any) -> jax.Array:
    """A loss that is random itself: every row is left out with probability one half."""
    kept = 1.0 if key is None else 2.0 * jax.random.bernoulli(key, 0.5, batch["b"].shape)
    return jnp.mean(kept * (batch["a"] @ y - batch["b"]) ** 2) + jnp.sum((x - y) ** 2)


NOISY = fb.Problem(noisy, noisy, lambda key: (jnp.zeros(2), jnp.zeros(2)), noise=True)


def noisy_task(batch_size: int | None) -> fb.Task:
    rng = np.random.default_rng(0)
    rows = lambda: {"a": rng.normal(size=(6, 2)), "b": rng.normal(size=6)}
    return fb.Task(NOISY, [{"train": rows(), "val": rows()} for _ in range(3)], batch_size=batch_size)


def test_the_name_of_a_batch_also_names_the_noise_of_a_loss() -> None:
    task, x, y = noisy_task(4), Vector(jnp.ones(2), "x"), Vector(jnp.ones(2), "y")
    client = task.layout.client(NOISY, task.data, jnp.asarray(0), jnp.asarray(1.0))
    one, two = jax.random.key(1), jax.random.key(2)
    assert client.g.value(x, y, one) == client.g.value(x, y, one)
    assert client.g.value(x, y, one) != client.g.value(x, y, two)
    # The noise is drawn apart from the rows: the mean over both is the loss without noise.
    keys = jax.random.split(jax.random.key(0), 20000)
    values = jax.vmap(lambda k: client.g.value(x, y, k))(keys)
    exact = noisy(x.tree, y.tree, task.clients[0]["train"], None)
    assert abs(np.mean(values) - exact) < 4 * np.std(values) / np.sqrt(len(keys))
    plain = jnp.mean((client.g._rows.draw(one, 4)["a"] @ y.tree - client.g._rows.draw(one, 4)["b"]) ** 2)
    assert client.g.value(x, y, one) != plain


def test_engines_agree_on_noisy_losses_and_evaluate_without_noise() -> None:
    task, algorithm = noisy_task(4), fb.FedBiO(lr_upper=0.1, lr_lower=0.1, lr_adjoint=0.1, local_steps=2)
    one, other = (fb.solve(task, algorithm, 5, seed=1, engine=engine, every=5) for engine in ("simulation", "local"))
    np.testing.assert_allclose(one.x, other.x, rtol=1e-12)
    exact = np.mean([noisy(one.x, one.y, client["val"], None) for client in task.clients])
    assert upper_loss(task, one.x, one.y) == pytest.approx(exact, rel=1e-12)
    still = fb.solve(noisy_task(None), algorithm, 5, seed=1)
    assert still.metrics == fb.solve(noisy_task(None), algorithm, 5, seed=2).metrics | {"seconds": ANY}


def test_batches_are_unbiased() -> None:
    g, x, y, _ = make(2, 3, 7, seed=0, size=4)
    full, _, _, _ = make(2, 3, 7, seed=0)
    keys = jax.random.split(jax.random.key(0), 20000)
    values = jax.vmap(lambda k: g.value(x, y, k))(keys)
    error = np.std(values) / np.sqrt(len(keys))
    assert abs(np.mean(values) - full.value(x, y, keys[0])) < 4 * error


def test_ragged_clients_average_over_their_own_rows() -> None:
    """A client with fewer rows than the longest must not see repeated or foreign rows."""
    rng = np.random.default_rng(0)
    arrays = {"a": jnp.asarray(rng.normal(size=(10, 2))), "b": jnp.asarray(rng.normal(size=10))}
    _, x, y, v = make(2, 3, 5, seed=1)
    ragged = Objective(loss, "g", Rows(arrays, 4, 3, 6, True), None)
    alone = Objective(loss, "g", Rows({k: a[4:7] for k, a in arrays.items()}, 0, 3, 3, False), None)
    key = jax.random.key(0)
    np.testing.assert_allclose(ragged.value(x, y, key), alone.value(x, y, key), rtol=1e-14)
    for name in ("dyy", "dxy"):
        got, expected = (getattr(o, name)(x, y, v, key).flat() for o in (ragged, alone))
        np.testing.assert_allclose(got, expected, atol=1e-13)


def test_vectors_of_different_spaces_do_not_mix() -> None:
    x, y = Vector(jnp.ones(2), "x"), Vector(jnp.ones(2), "y")
    with pytest.raises(TypeError, match="space of x cannot be combined with one of the space of y"):
        _ = x + y


def test_scaling_keeps_the_precision_of_the_vector() -> None:
    v = Vector(jnp.ones(2, jnp.float32), "y")
    assert (jnp.asarray(2.0, jnp.float64) * v).tree.dtype == jnp.float32
    assert (np.float64(2.0) * v / 3).tree.dtype == jnp.float32
