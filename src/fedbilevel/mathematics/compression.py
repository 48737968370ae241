"""Smaller messages: the largest entries of a vector, and count sketches."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from fedbilevel.core.vectors import Vector


def top_k(v: Vector, k: int) -> tuple[jax.Array, jax.Array, Vector]:
    """The k entries of largest magnitude of a vector: their values, their indices, and the vector without them.

    With error feedback the rest is added to what is compressed next.

    >>> values, indices, rest = top_k(Vector(jnp.array([1.0, -3.0, 2.0]), "y"), 1)
    >>> values.tolist(), indices.tolist(), rest.tree.tolist()
    ([-3.0], [1], [1.0, 0.0, 2.0])
    """
    flat = v.flat()
    indices = lax.top_k(jnp.abs(flat), min(k, flat.size))[1]
    return flat[indices], indices, v.like(flat.at[indices].set(0))


@dataclass(frozen=True)
class CountSketch:
    """A matrix S with ``rows`` rows and one +1 or -1 in each column: every entry of a vector is added to, or
    subtracted from, one of ``rows`` buckets. S S' is diagonal; S has full rank only if every bucket is hit, and is
    injective only if no two entries share one.

    >>> S = CountSketch(jnp.array([0, 1, 0]), jnp.array([1, 1, -1]), 2)
    >>> S.of(Vector(jnp.array([5.0, 7.0, 1.0]), "y")).tolist()
    [4.0, 7.0]
    >>> S.back(jnp.array([4.0, 7.0]), Vector(jnp.zeros(3), "y")).tree.tolist()
    [4.0, 7.0, -4.0]
    """

    buckets: jax.Array
    signs: jax.Array
    rows: int

    def of(self, v: Vector) -> jax.Array:
        """S v."""
        flat = v.flat()
        return jnp.zeros(self.rows, flat.dtype).at[self.buckets].add(self.signs.astype(flat.dtype) * flat)

    def back(self, w: jax.Array, like: Vector) -> Vector:
        """S' w, in the space of another vector."""
        return like.like(self.signs.astype(w.dtype) * w[self.buckets])


def count_sketch(key: jax.Array, rows: int, size: int) -> CountSketch:
    """A random count sketch of vectors of this size; the same key gives the same sketch."""
    where, sign = jax.random.split(key)
    return CountSketch(jax.random.randint(where, (size,), 0, rows), jax.random.rademacher(sign, (size,)), rows)
