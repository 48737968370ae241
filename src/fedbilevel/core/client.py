"""What a client function may touch."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedbilevel.core.objective import Objective, Tally
from fedbilevel.core.problem import Problem
from fedbilevel.core.rows import Rows
from fedbilevel.core.sampling import advance
from fedbilevel.core.types import Carry, Key, Value
from fedbilevel.core.vectors import Vector


@dataclass(frozen=True)
class Client:
    """What a client function may touch: its own data through f and g, its weight, the constraints. Nothing else.

    ``id`` is its number, from 0 to ``clients - 1``.
    """

    problem: Problem
    train: Rows
    val: Rows
    weight: jax.Array | float
    batch_sizes: tuple[int | None, int | None]
    id: jax.Array | int
    clients: int
    tally: Tally | None = None

    @property
    def f(self) -> Objective:
        """The upper loss on this client's validation rows."""
        return Objective(self.problem.upper_on, "f", self.val, self.batch_sizes[1], self.tally)

    @property
    def g(self) -> Objective:
        """The lower loss on this client's training rows; with client weights, M x_m times its own loss, so that the
        mean over clients is the weighted sum.
        """
        lower, id, clients = self.problem.lower_on, self.id, self.clients
        if not self.problem.weighting:
            return self.own
        weighted = lambda x, y, batch, key: clients * x[id] * lower(x, y, batch, key)
        return Objective(weighted, "g", self.train, self.batch_sizes[0], self.tally)

    @property
    def own(self) -> Objective:
        """The lower loss on this client's training rows, without the client's weight."""
        return Objective(self.problem.lower_on, "g", self.train, self.batch_sizes[0], self.tally)

    def larger_batches(self, factor: int) -> "Client":
        """The same client drawing batches this many times larger."""
        sizes = tuple(None if size is None else size * factor for size in self.batch_sizes)
        return dataclasses.replace(self, batch_sizes=sizes)

    def project_x(self, x: Vector) -> Vector:
        """The nearest feasible x."""
        return self.problem.nearest(x)

    def project_y(self, y: Vector) -> Vector:
        """The nearest feasible y."""
        return self.problem.nearest(y)

    def repeat(self, times: int, body: Callable[[Carry, Key, Any], Carry], carry: Carry, key: Key) -> Carry:
        """Local steps: ``carry = body(carry, key_i, i)`` for i = 0 .. times-1, compiled as one loop."""
        if self.tally is not None:
            with self.tally.repeated(times):
                return body(carry, key, jnp.asarray(0))
        if times <= 1:
            return body(carry, advance(key, 0, times), 0) if times else carry
        return lax.fori_loop(0, times, lambda i, carry: body(carry, advance(key, i, times), i), carry)

    def at_both(self, function: Callable[[Carry], Value], one: Carry, other: Carry) -> tuple[Value, Value]:
        """``function(one), function(other)``, compiled once and run one after the other: for slow compilations."""
        if self.tally is not None:
            with self.tally.repeated(2):
                value = function(one)
            return value, value
        values = lax.map(function, jax.tree.map(lambda *both: jnp.stack(both), one, other))
        return jax.tree.map(lambda pair: pair[0], values), jax.tree.map(lambda pair: pair[1], values)
