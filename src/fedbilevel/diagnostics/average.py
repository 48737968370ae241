"""Exact oracles: weighted sums over clients, on all their rows, and the minimisers that follow from them.

Everything is matrix-free: the lower problem is solved by Newton's method with conjugate gradients, the adjoint system
by conjugate gradients on the weighted mean of the clients' Hessians.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedbilevel.core import Client, Problem
from fedbilevel.core.data import Data, Layout
from fedbilevel.core.vectors import Vector, dot, norm
from fedbilevel.mathematics.hypergradient import conjugate_gradient

KEY: Any = None  # batches are all the data: their names do not matter


class Solved(NamedTuple):
    """The lower solution at x, the adjoint and the hypergradient there, h(x), and whether they are defined."""

    y: Vector
    u: Vector
    hypergradient: Vector
    value: jax.Array
    positive: jax.Array
    converged: jax.Array


class Minimum(NamedTuple):
    """A minimiser, whether the Hessian was positive definite on the way, and whether it was reached."""

    y: Vector
    positive: jax.Array
    converged: jax.Array


class Function(NamedTuple):
    """A function of y with its gradient and the products with its Hessian."""

    value: Callable[[Vector], jax.Array]
    slope: Callable[[Vector], Vector]
    hessian: Callable[[Vector], Callable[[Vector], Vector]]


class Average:
    """Weighted sums of client quantities over some clients, at given x: exact oracles of f and g."""

    def __init__(
        self,
        problem: Problem,
        layout: Layout,
        data: Data,
        x: Vector,
        ids: jax.Array | None = None,
        weights: jax.Array | None = None,
    ) -> None:
        """Of all clients with their weights, unless told otherwise."""
        self.problem, self.data, self.x = problem, data, x
        self.ids = jnp.arange(layout.clients) if ids is None else ids
        self.weights = data.weights if weights is None else weights
        self.layout = layout._replace(batch_sizes=(None, None))

    def _each(self, quantity: Callable[[Client, Vector], Any]) -> Callable[[jax.Array, jax.Array], Any]:
        def of_client(id: jax.Array, weight: jax.Array) -> Any:
            x = self.x if not self.problem.private_x else self.x.map(lambda a: a[id])
            client = self.layout.client(self.problem, self.data, id, weight)
            return jax.tree.map(lambda a: weight.astype(a.dtype) * a, quantity(client, x))

        return of_client

    def sum(self, quantity: Callable[[Client, Vector], Any]) -> Any:
        """sum_m w_m quantity_m, one client after the other."""
        each = self._each(quantity)
        shapes = jax.eval_shape(each, self.ids[0], self.weights[0])
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return lax.scan(lambda t, m: (jax.tree.map(jnp.add, t, each(*m)), None), zero, (self.ids, self.weights))[0]

    def in_x(self, quantity: Callable[[Client, Vector], Vector]) -> Vector:
        """The same for a vector of the space of x; blocks of a private x stay apart."""
        if not self.problem.private_x:
            return self.sum(quantity)
        return lax.map(lambda m: self._each(quantity)(*m), (self.ids, self.weights))

    def solve(self, y: Vector) -> Solved:
        """The lower solution, from y, and what follows from it."""
        y, positive, converged = self.minimise(self.lower, y)
        u, definite = self.adjoint(y)
        hyper = self.in_x(lambda c, x: c.f.dx(x, y, KEY) - c.g.dxy(x, y, u, KEY))
        value = self.sum(lambda c, x: c.f.value(x, y, KEY))
        return Solved(y, u, hyper, value, positive & definite, converged)

    @property
    def lower(self) -> Function:
        """The lower loss as a function of y."""
        value = lambda y: self.sum(lambda c, x: c.g.value(x, y, KEY))
        return Function(value, lambda y: self.sum(lambda c, x: c.g.dy(x, y, KEY)), self.hessian)

    def minimise(self, function: Function, y: Vector) -> Minimum:
        """Newton's method with conjugate gradients, from y."""
        value, slope, hessian = function
        tolerance, steps = _precision(y)
        goal = tolerance * (1 + norm(slope(0 * y)))

        def newton(state: tuple[Any, ...]) -> tuple[Any, ...]:
            y, gradient, _, count = state
            direction, positive, _ = conjugate_gradient(hessian(y), gradient, 0.1 * tolerance, steps)
            now = value(y)
            # Halve the step until the loss does not grow (beyond rounding); at most 30 times.
            slack = 1e-6 * jnp.abs(now)
            longer = lambda s: (value(y - s[0] * direction) > now + slack) & (s[1] < 30)
            length, _ = lax.while_loop(longer, lambda s: (s[0] / 2, s[1] + 1), (jnp.ones((), now.dtype), 0))
            y = y - jnp.where(positive, length, 0) * direction
            return y, slope(y), positive, count + 1

        go_on = lambda s: (norm(s[1]) > goal) & s[2] & (s[3] < 100)
        y, gradient, positive, _ = lax.while_loop(go_on, newton, (y, slope(y), jnp.asarray(True), 0))
        return Minimum(y, positive, norm(gradient) <= 10 * goal)

    def proximal(self, y: Vector, prox: jax.Array) -> Minimum:
        """theta* = argmin over feasible theta of g(x, theta) + |theta - y|^2 / (2 prox)."""
        value, slope, hessian = self.lower
        near = Function(
            lambda theta: value(theta) + dot(theta - y, theta - y) / (2 * prox),
            lambda theta: slope(theta) + (theta - y) / prox,
            lambda theta: lambda v: hessian(theta)(v) + v / prox,
        )
        free = self.minimise(near, y)
        if self.problem.project_y is None:
            return free
        # Projected gradient steps from there; over when the free minimum is feasible. The step is halved where the
        # gradient changes faster than it allows.
        goal = _precision(y)[0] * (1 + norm(near.slope(0 * y)))

        def descend(state: tuple[Any, ...]) -> tuple[Any, ...]:
            theta, gradient, step, left, count = state
            new = self.problem.nearest(theta - step * gradient)
            slope, moved = near.slope(new), norm(new - theta)
            short = norm(slope - gradient) <= moved / step
            keep = lambda new, old: jax.tree.map(partial(jnp.where, short), new, old)
            return *keep((new, slope), (theta, gradient)), *keep((step, moved / step), (step / 2, left)), count + 1

        theta = self.problem.nearest(free.y)
        first = (theta, near.slope(theta), prox, jnp.full_like(prox, jnp.inf), 0)
        theta, _, _, left, _ = lax.while_loop(lambda s: (s[3] > goal) & (s[4] < 10_000), descend, first)
        return Minimum(theta, free.positive, left <= 10 * goal)

    def adjoint(self, y: Vector) -> tuple[Vector, jax.Array]:
        """u*(x, y), and whether the Hessian is positive definite."""
        right = self.sum(lambda c, x: c.f.dy(x, y, KEY))
        solved = conjugate_gradient(self.hessian(y), right, *_precision(y))
        return solved.solution, solved.positive

    def hessian(self, y: Vector) -> Callable[[Vector], Vector]:
        """Products with the mean Hessian at y."""
        return lambda v: self.sum(lambda c, x: c.g.dyy(x, y, v, KEY))


def _precision(y: Vector) -> tuple[float, int]:
    """The relative residual of conjugate gradients that this precision allows, and the most steps to get there."""
    double = jnp.result_type(*jax.tree.leaves(y.tree)) == jnp.float64
    return 1e-10 if double else 1e-5, 2 * y.size + 10
