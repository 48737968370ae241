"""The exact lower solution, adjoint, hypergradient and objective at x, and how far a point is from them.

x and y are pytrees in the user's structure.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedbilevel.core import Problem, Tree, as_float
from fedbilevel.core.data import Data, Layout
from fedbilevel.core.task import Task
from fedbilevel.core.vectors import Vector, norm
from fedbilevel.diagnostics.average import KEY, Average, Solved
from fedbilevel.errors import FedbilevelError


class NotDefined(FedbilevelError):
    """A quantity that does not exist at this point; in a history it is NaN."""


class Exact(NamedTuple):
    """The exact lower solution at x, the adjoint there, and the hypergradient."""

    y: Tree
    u: Tree
    hypergradient: Tree


@partial(jax.jit, static_argnames=("problem", "layout"))
def _solve(problem: Problem, layout: Layout, data: Data, x: Vector, y: Vector) -> Solved:
    if problem.lower_level == "global":
        return Average(problem, layout, data, x).solve(y)

    def alone(m: tuple[jax.Array, Vector]) -> Solved:
        id, y = m
        return Average(problem, layout, data, x, id[None], jnp.ones(1, data.weights.dtype)).solve(y)

    solved = lax.map(alone, (jnp.arange(layout.clients), y))

    def weighted(a: jax.Array) -> jax.Array:
        weights = data.weights.astype(a.dtype)
        if problem.private_x:  # every client found the gradient of its own block
            return weights.reshape(-1, *(1,) * (a.ndim - 2)) * a[:, 0]
        return jnp.tensordot(weights, a, 1)

    return solved._replace(
        hypergradient=solved.hypergradient.map(weighted),
        value=jnp.dot(data.weights.astype(solved.value.dtype), solved.value),
        positive=jnp.all(solved.positive),
        converged=jnp.all(solved.converged),
    )


def vectors(x: Tree, y: Tree) -> tuple[Vector, Vector]:
    """x and y as vectors of floats."""
    return Vector(jax.tree.map(as_float, x), "x"), Vector(jax.tree.map(as_float, y), "y")


def solved_at(task: Task, x: Tree, y: Tree = None) -> Solved:
    """The lower problem at x, solved or not, from y or from the start."""
    problem = task.problem
    if y is None:
        y = problem.start(jax.random.key(0))[1].tree
        if problem.lower_level == "local":
            y = jax.tree.map(lambda a: jnp.broadcast_to(a, (len(task.clients), *a.shape)), y)
    return _solve(problem, task.layout, task.data, *vectors(x, y))


def defined(solved: Solved) -> Solved:
    """Raise NotDefined where the lower problem was not solved."""
    if not solved.positive:
        raise NotDefined(
            "the Hessian of the lower loss is not positive definite here, so y*(x) and the hypergradient are not "
            "defined: add a strongly convex term (for instance L2 regularisation) to the lower loss."
        )
    if not solved.converged:
        raise NotDefined("the lower problem could not be solved to the required precision in 100 Newton steps.")
    return solved


def exact(task: Task, x: Tree, y: Tree = None) -> Exact:
    """Solve the lower problem at x (from y) and give y*(x), u*(x) and grad h(x).

    With a local lower level, y and u have a leading axis of clients. With a private x, so has the hypergradient; it
    is the gradient of h = sum w_m f_m, so every block carries its client's weight.
    """
    solved = defined(solved_at(task, x, y))
    return Exact(solved.y.tree, solved.u.tree, solved.hypergradient.tree)


def lower_solution(task: Task, x: Tree, y: Tree = None) -> Tree:
    """y*(x)."""
    return exact(task, x, y).y


def hypergradient(task: Task, x: Tree, y: Tree = None) -> Tree:
    """grad h(x) at the exact lower solution."""
    return exact(task, x, y).hypergradient


def objective(task: Task, x: Tree, y: Tree = None) -> float:
    """h(x) = f(x, y*(x)); with a local lower level sum w_m f_m(x, y_m*(x))."""
    return float(defined(solved_at(task, x, y)).value)


def upper_loss(task: Task, x: Tree, y: Tree) -> float:
    """f(x, y) = sum w_m f_m(x, y) on all validation rows, at a y that need not solve the lower problem; with a local
    lower level y has a leading axis of clients.
    """
    return float(_upper_loss(task.problem, task.layout, task.data, *vectors(x, y)))


def stationarity(task: Task, x: Tree, y: Tree = None, step: float = 0.001) -> float:
    """|x - Proj(x - step grad h)| / step with the projection of x: 0 where no feasible direction descends, and
    |grad h| without constraints.
    """
    return stationarity_of(task.problem, vectors(x, ())[0], defined(solved_at(task, x, y)).hypergradient, step)


def stationarity_of(problem: Problem, x: Vector, gradient: Vector, step: float) -> float:
    """|x - Proj(x - step gradient)| / step."""
    if problem.project_x is None:
        return float(norm(gradient))
    return float(norm(x - nearest(problem, x - step * gradient)) / step)


@partial(jax.jit, static_argnames=("problem", "layout"))
def _upper_loss(problem: Problem, layout: Layout, data: Data, x: Vector, y: Vector) -> jax.Array:
    local = problem.lower_level == "local"
    own = lambda client: y.map(lambda a: a[client.id]) if local else y
    # What the server holds, all clients would evaluate alike.
    ids = jnp.arange(1 if layout.server and not local else layout.clients)
    weights = jnp.ones(1) if len(ids) == 1 else data.weights
    return Average(problem, layout, data, x, ids, weights).sum(lambda c, x: c.f.value(x, own(c), KEY))


def distance(a: Tree, b: Tree) -> float:
    """|a - b|."""
    return float(norm(Vector(jax.tree.map(lambda p, q: as_float(p) - as_float(q), a, b), "y")))


def lower_gap(task: Task, x: Tree, y: Tree) -> float:
    """|y - y*(x)|; with a local lower level, the mean over clients of |y_m - y_m*(x)|, with their weights."""
    return gap_to(task, y, exact(task, x, y).y)


def gap_to(task: Task, y: Tree, solution: Tree) -> float:
    """|y - solution|; with a local lower level, the weighted mean over clients."""
    if task.problem.lower_level == "global":
        return distance(y, solution)
    one = lambda tree, m: jax.tree.map(lambda a: a[m], tree)
    each = [distance(one(y, m), one(solution, m)) for m in range(len(task.clients))]
    return float(np.dot(task.normalised_weights, each))


@partial(jax.jit, static_argnames=("problem", "layout"))
def _adjoint(problem: Problem, layout: Layout, data: Data, x: Vector, y: Vector) -> tuple[Vector, jax.Array]:
    return Average(problem, layout, data, x).adjoint(y)


def adjoint_gap(task: Task, x: Tree, y: Tree, u: Tree) -> float:
    """|u - u*(x, y)|: how well the adjoint system is solved at the current point (global lower level)."""
    if task.problem.lower_level == "local":
        raise FedbilevelError("adjoint_gap needs a problem with a global lower level.")
    solution, positive = _adjoint(task.problem, task.layout, task.data, *vectors(x, y))
    if not positive:
        raise NotDefined("the Hessian of the lower loss is not positive definite here, so the adjoint is not defined.")
    return distance(u, solution.tree)


def nearest(problem: Problem, v: Vector) -> Vector:
    """The nearest feasible point; a private x comes as an array of blocks."""
    owned = problem.private_x and v.space == "x"
    return Vector(problem.nearest(Vector(v.tree, v.space, owned)).tree, v.space)
