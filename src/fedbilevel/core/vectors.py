"""Vectors of the space of x or of y, and what algorithms do with them besides adding and scaling.

Users write losses on pytrees, algorithms are written on vectors: ``y - lr * g.dy(x, y, key)``. A :class:`Vector` is a
pytree that adds and scales like a vector. It is *not* copied into one flat array: on a CPU the slices and
concatenations between a flat array and the layers of a network cost 23 % of a FedBiO round (MLP 784-200-10), see
docs/design.md. ``v.flat()`` gives the flat array where one is needed.

A vector knows its *space* ("x" or "y"). So adding vectors of different spaces is an error, and engines recognise what
belongs to a private upper variable.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

Scalar = float | jax.Array
Tree = Any
T = TypeVar("T")


@jax.tree_util.register_pytree_with_keys_class
class Vector:
    """A pytree of arrays with the arithmetic of a vector.

    Args:
        tree: the arrays, in the user's own structure.
        space: "x" or "y".
        owned: on the server of a private problem: every client owns its block. In simulation the arrays then have a
            leading axis of clients. Such vectors can be added and scaled, nothing else.

    >>> v = Vector({"w": jnp.array([3.0, 4.0])}, "y")
    >>> (2 * v - v / 2).tree["w"].tolist()
    [4.5, 6.0]
    >>> float(norm(v))
    5.0
    """

    __slots__ = ("owned", "space", "tree")
    __array_ufunc__ = None  # numpy scalars on the left leave the product to us

    def __init__(self, tree: Tree, space: str, owned: bool = False) -> None:
        self.tree = tree
        self.space = space
        self.owned = owned

    def tree_flatten_with_keys(self) -> tuple[Any, tuple[str, bool]]:
        return ((jax.tree_util.GetAttrKey("tree"), self.tree),), (self.space, self.owned)

    def tree_flatten(self) -> tuple[Any, tuple[str, bool]]:
        return (self.tree,), (self.space, self.owned)

    @classmethod
    def tree_unflatten(cls, aux: tuple[str, bool], children: Any) -> "Vector":
        return cls(children[0], *aux)

    def map(self, function: Callable[..., Any], *others: "Vector") -> "Vector":
        """Apply a function to the arrays of this vector and of others of the same space."""
        for other in others:
            if other.space != self.space or other.owned != self.owned:
                raise TypeError(
                    f"a vector of the space of {self.space} cannot be combined with one of the space of {other.space}"
                    f"{' (one is owned by the clients)' if self.owned != other.owned else ''}"
                )
        return Vector(jax.tree.map(function, self.tree, *(o.tree for o in others)), self.space, self.owned)

    def __add__(self, other: "Vector") -> "Vector":
        return self.map(jnp.add, other) if isinstance(other, Vector) else NotImplemented

    def __sub__(self, other: "Vector") -> "Vector":
        return self.map(jnp.subtract, other) if isinstance(other, Vector) else NotImplemented

    def __mul__(self, scale: Scalar) -> "Vector":
        # The scale takes the precision of the vector, never the other way round.
        return self.map(lambda a: a * jnp.asarray(scale, a.dtype))

    __rmul__ = __mul__

    def __truediv__(self, scale: Scalar) -> "Vector":
        return self.map(lambda a: a / jnp.asarray(scale, a.dtype))

    def __neg__(self) -> "Vector":
        return self.map(jnp.negative)

    def __repr__(self) -> str:
        shapes = jax.tree.map(jnp.shape, self.tree)
        return f"Vector({shapes}, space={self.space!r}{', owned' if self.owned else ''})"

    @property
    def size(self) -> int:
        """The dimension."""
        return sum(jnp.size(leaf) for leaf in jax.tree.leaves(self.tree))

    def flat(self) -> jax.Array:
        """The entries in one flat array (a copy)."""
        return ravel_pytree(self.tree)[0]

    def like(self, flat: jax.Array) -> "Vector":
        """The vector of this space whose entries are those of a flat array."""
        return Vector(ravel_pytree(self.tree)[1](flat), self.space, self.owned)


def is_vector(value: object) -> bool:
    return isinstance(value, Vector)


def dot(a: Vector, b: Vector) -> jax.Array:
    """Inner product."""
    if a.owned or b.owned:
        raise TypeError("the server does not see private blocks, so it cannot compute inner products of them")
    products = a.map(jnp.vdot, b)
    return jnp.asarray(sum(jax.tree.leaves(products.tree)))


def norm(v: Vector) -> jax.Array:
    """Euclidean norm."""
    return jnp.sqrt(dot(v, v))


def _combine(operation: Callable[[Any, Any], Any], a: T, b: T) -> T:
    """Combine two states (nested NamedTuples) vector by vector; other leaves are combined by the same operation."""
    leaf = lambda value: not isinstance(value, tuple | list | dict)
    return jax.tree.map(operation, a, b, is_leaf=leaf)


def add(a: T, b: T) -> T:
    """Sum of two states of the same structure, for instance ``Point(x, y, u)``."""
    return _combine(lambda p, q: p + q, a, b)


def sub(a: T, b: T) -> T:
    """Difference of two states of the same structure."""
    return _combine(lambda p, q: p - q, a, b)


def project_ball(v: Vector, radius: Scalar) -> Vector:
    """P_r: the nearest point in the ball of this radius around 0 (no operation for an infinite radius).

    >>> project_ball(Vector(jnp.array([3.0, 4.0]), "y"), 1.0).tree.tolist()
    [0.6000000238418579, 0.800000011920929]
    """
    if isinstance(radius, float) and math.isinf(radius):
        return v
    length = norm(v)
    return v * jnp.where(length > radius, radius / length, 1.0)


# Projections of user variables: functions of a pytree, for Problem(project_x=..., project_y=...).


@dataclass(frozen=True)
class Box:
    """The projection onto low <= entry <= high, whose bounds can be read."""

    low: float
    high: float

    def __call__(self, tree: Tree) -> Tree:
        return jax.tree.map(lambda a: jnp.clip(a, self.low, self.high), tree)

    def tangent(self, v: Vector, at: Vector) -> Vector:
        """A gradient v at a point of the box, without the entries whose descent would leave the box: the norm of what
        remains is the distance of -v from the normal cone.
        """
        leaves = lambda v, z: ((z <= self.low) & (v > 0)) | ((z >= self.high) & (v < 0))
        return v.map(lambda v, z: jnp.where(leaves(v, z), 0, v), at)


def box(low: float, high: float) -> Box:
    """The projection onto low <= entry <= high.

    >>> box(0.0, 1.0)(jnp.array([-1.0, 0.5, 2.0])).tolist()
    [0.0, 0.5, 1.0]
    """
    return Box(low, high)


def ball(radius: float) -> Callable[[Tree], Tree]:
    """The projection onto the Euclidean ball around 0 of the whole pytree."""
    return lambda tree: project_ball(Vector(tree, "x"), radius).tree


def simplex(tree: Tree) -> Tree:
    """The projection onto the probability simplex of all entries (sort-based, Wang and Carreira-Perpinan 2013).

    >>> simplex(jnp.array([0.5, 0.5, -3.0])).tolist()
    [0.5, 0.5, 0.0]
    """
    flat, restore = ravel_pytree(tree)
    falling = jnp.sort(flat)[::-1]
    excess = (jnp.cumsum(falling) - 1) / jnp.arange(1, flat.size + 1)
    last = jnp.sum(falling > excess) - 1
    return restore(jnp.maximum(flat - excess[last], 0))
