"""Exact quantities on all the data, outside of any communication budget: how far a run really is.

Everything is matrix-free: the lower problem is solved by Newton's method with conjugate gradients, the adjoint system
by conjugate gradients on the weighted mean of the clients' Hessians. x and y are pytrees in the user's structure.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedbilevel.core import Client, Problem, Tree, as_float
from fedbilevel.engines.simulation import Simulation, State
from fedbilevel.errors import FedbilevelError
from fedbilevel.hypergradient import conjugate_gradient
from fedbilevel.task import Data, Layout, Task
from fedbilevel.vectors import Vector, norm

KEY: Any = None  # batches are all the data: their names do not matter


class Exact(NamedTuple):
    """The exact lower solution at x, the adjoint there, and the hypergradient."""

    y: Tree
    u: Tree
    hypergradient: Tree


class _Solved(NamedTuple):
    y: Vector
    u: Vector
    hypergradient: Vector
    positive: jax.Array
    converged: jax.Array


class _Average:
    """Weighted sums of client quantities over some clients, at given x: exact oracles of f and g."""

    def __init__(
        self, problem: Problem, layout: Layout, data: Data, x: Vector, ids: jax.Array, weights: jax.Array
    ) -> None:
        self.problem, self.data, self.x, self.ids, self.weights = problem, data, x, ids, weights
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

    def solve(self, y: Vector) -> _Solved:
        tolerance, steps = _precision(y)
        value = lambda y: self.sum(lambda c, x: c.g.value(x, y, KEY))
        slope = lambda y: self.sum(lambda c, x: c.g.dy(x, y, KEY))
        goal = tolerance * (1 + norm(slope(0 * y)))

        def newton(state: tuple[Any, ...]) -> tuple[Any, ...]:
            y, gradient, _, count = state
            direction, positive, _ = conjugate_gradient(self.hessian(y), gradient, 0.1 * tolerance, steps)
            now = value(y)
            # Halve the step until the loss does not grow (beyond rounding); at most 30 times.
            slack = 1e-6 * jnp.abs(now)
            longer = lambda s: (value(y - s[0] * direction) > now + slack) & (s[1] < 30)
            length, _ = lax.while_loop(longer, lambda s: (s[0] / 2, s[1] + 1), (jnp.ones((), now.dtype), 0))
            y = y - jnp.where(positive, length, 0) * direction
            return y, slope(y), positive, count + 1

        go_on = lambda s: (norm(s[1]) > goal) & s[2] & (s[3] < 100)
        y, gradient, positive, _ = lax.while_loop(go_on, newton, (y, slope(y), jnp.asarray(True), 0))
        u, definite = self.adjoint(y)
        hyper = self.in_x(lambda c, x: c.f.dx(x, y, KEY) - c.g.dxy(x, y, u, KEY))
        return _Solved(y, u, hyper, positive & definite, norm(gradient) <= 10 * goal)

    def adjoint(self, y: Vector) -> tuple[Vector, jax.Array]:
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


@partial(jax.jit, static_argnames=("problem", "layout"))
def _solve(problem: Problem, layout: Layout, data: Data, x: Vector, y: Vector) -> _Solved:
    ids = jnp.arange(layout.clients)
    if problem.lower_level == "global":
        return _Average(problem, layout, data, x, ids, data.weights).solve(y)

    def alone(m: tuple[jax.Array, Vector]) -> _Solved:
        id, y = m
        return _Average(problem, layout, data, x, id[None], jnp.ones(1, data.weights.dtype)).solve(y)

    solved = lax.map(alone, (ids, y))

    def weighted(a: jax.Array) -> jax.Array:
        weights = data.weights.astype(a.dtype)
        if problem.private_x:  # every client found the gradient of its own block
            return weights.reshape(-1, *(1,) * (a.ndim - 2)) * a[:, 0]
        return jnp.tensordot(weights, a, 1)

    hyper = solved.hypergradient.map(weighted)
    return solved._replace(hypergradient=hyper, positive=jnp.all(solved.positive), converged=jnp.all(solved.converged))


def exact(task: Task, x: Tree, y: Tree = None) -> Exact:
    """Solve the lower problem at x (from y) and give y*(x), u*(x) and grad h(x).

    With a local lower level, y and u have a leading axis of clients. With a private x, so has the hypergradient; it
    is the gradient of h = sum w_m f_m, so every block carries its client's weight.
    """
    problem = task.problem
    if y is None:
        y = problem.start(jax.random.key(0))[1].tree
        if problem.lower_level == "local":
            y = jax.tree.map(lambda a: jnp.broadcast_to(a, (len(task.clients), *a.shape)), y)
    given = [jax.tree.map(as_float, tree) for tree in (x, y)]
    solved = _solve(problem, task.layout, task.data, Vector(given[0], "x"), Vector(given[1], "y"))
    if not solved.positive:
        raise FedbilevelError(
            "the Hessian of the lower loss is not positive definite here, so that y*(x) and the hypergradient are not "
            "defined: add a strongly convex term (for instance L2 regularisation) to the lower loss."
        )
    if not solved.converged:
        raise FedbilevelError("the lower problem could not be solved to the required precision in 100 Newton steps.")
    return Exact(solved.y.tree, solved.u.tree, solved.hypergradient.tree)


def lower_solution(task: Task, x: Tree, y: Tree = None) -> Tree:
    """y*(x)."""
    return exact(task, x, y).y


def hypergradient(task: Task, x: Tree, y: Tree = None) -> Tree:
    """grad h(x) at the exact lower solution."""
    return exact(task, x, y).hypergradient


def _distance(a: Tree, b: Tree) -> float:
    return float(norm(Vector(jax.tree.map(lambda p, q: as_float(p) - as_float(q), a, b), "y")))


def lower_gap(task: Task, x: Tree, y: Tree) -> float:
    """|y - y*(x)|; with a local lower level, the mean over clients of |y_m - y_m*(x)|, with their weights."""
    solution = exact(task, x, y).y
    if task.problem.lower_level == "global":
        return _distance(y, solution)
    one = lambda tree, m: jax.tree.map(lambda a: a[m], tree)
    each = [_distance(one(y, m), one(solution, m)) for m in range(len(task.clients))]
    return float(np.dot(task.normalised_weights, each))


@partial(jax.jit, static_argnames=("problem", "layout"))
def _adjoint(problem: Problem, layout: Layout, data: Data, x: Vector, y: Vector) -> tuple[Vector, jax.Array]:
    return _Average(problem, layout, data, x, jnp.arange(layout.clients), data.weights).adjoint(y)


def adjoint_gap(task: Task, x: Tree, y: Tree, u: Tree) -> float:
    """|u - u*(x, y)|: how well the adjoint system is solved at the current point (global lower level)."""
    if task.problem.lower_level == "local":
        raise FedbilevelError("adjoint_gap is for problems with a global lower level.")
    x, y = (jax.tree.map(as_float, tree) for tree in (x, y))
    solution, positive = _adjoint(task.problem, task.layout, task.data, Vector(x, "x"), Vector(y, "y"))
    if not positive:
        raise FedbilevelError(
            "the Hessian of the lower loss is not positive definite here, so that the adjoint is not defined."
        )
    return _distance(u, solution.tree)


def client_drift(engine: Simulation, state: State) -> dict[str, float]:
    """How far clients end up from their mean in the first exchange of the next round: sum w_m |z_m - mean|^2 for
    every vector they upload.

    The names are those of the upload (``x``, ``y``, ``u``); blocks of a private x have no mean and are left out.
    """
    return {name: float(value) for name, value in engine.spread(state).items()}
