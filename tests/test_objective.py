"""Derivatives against dense autodiff and finite differences."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel.core import Objective, Rows
from fedbilevel.vectors import Vector


def loss(x: Any, y: Any, batch: Any) -> jax.Array:
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
