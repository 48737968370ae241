"""One client's loss, seen through its batches: value, gradients, second-order products."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.core.rows import Rows
from fedbilevel.core.types import Key, Loss, Tree
from fedbilevel.core.vectors import Vector
from fedbilevel.errors import FedbilevelError


class Tally(Counter[str]):
    """Counts oracle calls while a client function is traced: gradients Gf, Gg, cross products J, Hessian products H.

    ``samples`` counts the rows of their batches, a row once for each call. ``rows`` are those of a batch of all the
    data, by the name of the loss.
    """

    times: int = 1
    samples: float = 0
    rows: Mapping[str, float] = MappingProxyType({"f": 1, "g": 1})

    def count(self, oracle: str, loss: str, size: float | None, calls: int = 1) -> None:
        """Some calls of an oracle, each on a batch of this size."""
        self[oracle] += calls * self.times
        self.samples += calls * self.times * (self.rows[loss] if size is None else size)

    def clear(self) -> None:
        super().clear()
        self.samples = 0

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        before, self.times = self.times, self.times * times
        yield
        self.times = before


class Objective:
    """One client's loss, seen through its batches: value and derivatives at (x, y).

    A batch is *named by a key*: the same key gives the same rows, so "the same batch at two points" is one key used
    twice. With ``size=None`` every batch is all the data and the key does not matter.
    """

    def __init__(self, loss: Loss, name: str, rows: Rows, size: int | None, tally: Tally | None = None) -> None:
        self._loss, self._name, self._rows, self._size, self._tally = loss, name, rows, size, tally
        self._whole: tuple[Any, int] | None = None  # of a block: the rows of all blocks, and how many there are

    def block(self, number: int | jax.Array, blocks: int) -> "Objective":
        """The loss on one of so many blocks of neighbouring rows, in shares of the whole: the mean over all blocks is
        the loss on all rows, also where blocks differ in size. Its batches are the whole block, whatever the key.
        """
        rows = self._rows
        first, last = (rows.size * n // blocks for n in (number, number + 1))
        part = rows._replace(
            start=rows.start + first, size=last - first, longest=-(-rows.longest // blocks), ragged=True
        )
        objective = Objective(self._loss, self._name, part, None, self._tally)
        objective._whole = rows.size, blocks
        return objective

    def value(self, x: Vector, y: Vector, key: Key) -> jax.Array:
        """The loss."""
        return self._on(key)(x.tree, y.tree)

    def dx(self, x: Vector, y: Vector, key: Key) -> Vector:
        """The gradient in x."""
        self._count("G")
        return Vector(jax.grad(self._on(key), 0)(x.tree, y.tree), "x")

    def dy(self, x: Vector, y: Vector, key: Key) -> Vector:
        """The gradient in y."""
        self._count("G")
        return Vector(jax.grad(self._on(key), 1)(x.tree, y.tree), "y")

    def gradients(self, x: Vector, y: Vector, key: Key) -> tuple[Vector, Vector]:
        """The gradients in x and in y on one batch: one pass, counted once."""
        self._count("G")
        dx, dy = jax.grad(self._on(key), (0, 1))(x.tree, y.tree)
        return Vector(dx, "x"), Vector(dy, "y")

    def dxy(self, x: Vector, y: Vector, v: Vector, key: Key) -> Vector:
        """The cross product ``d2xy v = grad_x <grad_y, v>``, a vector of the space of x."""
        self._count("J")
        loss = self._on(key)
        return Vector(jax.jvp(lambda y: jax.grad(loss, 0)(x.tree, y), (y.tree,), (v.tree,))[1], "x")

    def dyy(self, x: Vector, y: Vector, v: Vector, key: Key) -> Vector:
        """The Hessian product ``d2yy v``."""
        self._count("H")
        loss = self._on(key)
        return Vector(jax.jvp(lambda y: jax.grad(loss, 1)(x.tree, y), (y.tree,), (v.tree,))[1], "y")

    def hessian(self, x: Vector, y: Vector, key: Key) -> jax.Array:
        """The matrix ``d2yy`` on one batch, in the order of ``y.flat()``; counted as one product per column."""
        self._count("H", y.size)
        loss = self._on(key)
        return jax.hessian(lambda flat: loss(x.tree, y.like(flat).tree))(y.flat())

    def second_order(self, x: Vector, y: Vector, v: Vector, key: Key) -> tuple[Vector, Vector, Vector]:
        """(gradient in y, cross product, Hessian product) on one batch, in one pass."""
        for oracle in "GJH":
            self._count(oracle)
        loss = self._on(key)
        # d/dt grad(x, y + t v) at t = 0: its x part is d2xy v, its y part d2yy v, and the primal holds grad_y.
        (_, dy), (dxy, dyy) = jax.jvp(lambda y: jax.grad(loss, (0, 1))(x.tree, y), (y.tree,), (v.tree,))
        return Vector(dy, "y"), Vector(dxy, "x"), Vector(dyy, "y")

    def _count(self, oracle: str, calls: int = 1) -> None:
        if self._tally is not None:
            name = oracle + self._name if oracle == "G" else oracle
            size = self._size if self._whole is None else self._tally.rows[self._name] / self._whole[1]
            self._tally.count(name, self._name, size, calls)

    def _on(self, key: Key) -> Callable[[Tree, Tree], jax.Array]:
        """The loss on the batch of this name, as a function of (x, y)."""
        rows = self._rows
        if self._size is not None:
            batch, noise = rows.draw(key, self._size), jax.random.fold_in(key, 0)
            return lambda x, y: self._scalar(x, y, batch, noise)
        batch = rows.all()
        if not rows.ragged:
            return lambda x, y: self._scalar(x, y, batch)
        # Clients of different sizes share one shape: a client's mean is taken row by row, over its own rows only.
        own = jnp.arange(rows.longest) < rows.size

        def mean(x: Tree, y: Tree) -> jax.Array:
            each = jax.vmap(lambda row: self._scalar(x, y, jax.tree.map(lambda a: a[None], row)))(batch)
            total = jnp.sum(jnp.where(own, each, 0))
            return total / rows.size if self._whole is None else total * self._whole[1] / self._whole[0]

        return mean

    def _scalar(self, x: Tree, y: Tree, batch: Tree, key: Key | None = None) -> jax.Array:
        value = self._loss(x, y, batch, key)
        if jnp.shape(value) != ():
            level = "upper" if self._name == "f" else "lower"
            raise FedbilevelError(
                f"{level}(x, y, batch) must return one number, but returned an array of shape {jnp.shape(value)}."
            )
        return value
