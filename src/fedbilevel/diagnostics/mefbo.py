"""The residual of the MeFBO paper."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.core import Problem, Tree
from fedbilevel.core.data import Data, Layout
from fedbilevel.core.task import Task
from fedbilevel.core.vectors import Box, Vector, dot, norm
from fedbilevel.diagnostics.average import KEY, Average, Solved
from fedbilevel.diagnostics.quantities import NotDefined, distance, nearest, solved_at, vectors
from fedbilevel.errors import FedbilevelError


class MeFBOResidual(NamedTuple):
    """``residual`` is R_t, and ``name`` says of which kind: "tangent cone", the paper's (no constraints, or boxes), or
    "prox" (other sets). ``hypergradient`` is c |rx|, near |grad h| for large c and small ry; ``lower_gap`` is
    |y - y*(x)|, NaN where the free y*(x) does not exist or is not feasible.
    """

    residual: float
    hypergradient: float
    lower_gap: float
    name: str


class _Upsilon(NamedTuple):
    rx: Vector
    ry: Vector
    positive: jax.Array
    converged: jax.Array


@partial(jax.jit, static_argnames=("problem", "layout"))
def _upsilon(
    problem: Problem, layout: Layout, data: Data, x: Vector, y: Vector, c: jax.Array, prox: jax.Array
) -> _Upsilon:
    """The gradient of f / c + g - v, v the Moreau envelope of g."""
    average = Average(problem, layout, data, x)
    theta, positive, converged = average.proximal(y, prox)
    rx = average.in_x(lambda m, x: m.f.dx(x, y, KEY) / c + m.g.dx(x, y, KEY) - m.g.dx(x, theta, KEY))
    ry = average.sum(lambda m, x: m.f.dy(x, y, KEY) / c + m.g.dy(x, y, KEY)) - (y - theta) / prox
    return _Upsilon(rx, ry, positive, converged)


def mefbo_residual(task: Task, x: Tree, y: Tree, penalty: float, prox: float) -> MeFBOResidual:
    """R_t(x, y) = dist(0, grad Upsilon_c(x, y) + N(x, y))^2, the measure of the MeFBO paper, eq. (13).

    Upsilon_c = f / c + g - v with v(x, y) = min over feasible theta of g(x, theta) + |theta - y|^2 / (2 prox), and N
    is the normal cone of the constraints. With theta* the minimiser::

        rx = grad_x f / c + grad_x g(x, y) - grad_x g(x, theta*)
        ry = grad_y f / c + grad_y g(x, y) - (y - theta*) / prox          R_t = |rx|^2 + |ry|^2

    On a box, entries on the bound whose descent leaves the box do not count. Other sets have
    |z - Proj(z - r)|^2 instead, which vanishes at the same points. R_t = 0 is not grad h = 0: the penalised problem
    has other solutions, by an error of order 1 / c. g need not be convex, if prox is small enough.
    """
    if task.problem.lower_level == "local":
        raise FedbilevelError("mefbo_residual needs a problem with a global lower level.")
    return residual_of(task, x, y, penalty, prox, solved_at(task, x, y))


def residual_of(task: Task, x: Tree, y: Tree, penalty: float, prox: float, solved: Solved) -> MeFBOResidual:
    """The residual, where the free lower problem at x has been tried already."""
    problem, at = task.problem, vectors(x, y)
    numbers = (jnp.asarray(a, jnp.result_type(*jax.tree.leaves(at[1].tree))) for a in (penalty, prox))
    gradient = _upsilon(problem, task.layout, task.data, *at, *numbers)
    if not (gradient.positive and gradient.converged):
        raise _no_envelope(prox)
    parts = [_feasible_part(problem, z, r) for z, r in zip(at, (gradient.rx, gradient.ry), strict=True)]
    gap = float("nan")
    if solved.positive and solved.converged and distance(problem.nearest(solved.y).tree, solved.y.tree) == 0:
        gap = distance(y, solved.y.tree)
    residual = float(sum(dot(part, part) for part in parts))
    return MeFBOResidual(residual, float(penalty * norm(gradient.rx)), gap, kind_of_residual(problem))


def envelope_gap(task: Task, x: Vector, y: Vector, penalty: float, prox: float) -> tuple[float, Vector]:
    """f / c + g - v at (x, y), with the Moreau envelope v of g, and the theta at which v is attained."""
    numbers = (jnp.asarray(a, jnp.result_type(*jax.tree.leaves(y.tree))) for a in (penalty, prox))
    value, theta, reached = _gap(task.problem, task.layout, task.data, x, y, *numbers)
    if not reached:
        raise _no_envelope(prox)
    return float(value), theta


@partial(jax.jit, static_argnames=("problem", "layout"))
def _gap(
    problem: Problem, layout: Layout, data: Data, x: Vector, y: Vector, c: jax.Array, prox: jax.Array
) -> tuple[jax.Array, Vector, jax.Array]:
    average = Average(problem, layout, data, x)
    theta, positive, converged = average.proximal(y, prox)
    value = average.sum(lambda m, x: m.f.value(x, y, KEY) / c + m.g.value(x, y, KEY) - m.g.value(x, theta, KEY))
    return value - dot(theta - y, theta - y) / (2 * prox), theta, positive & converged


def _no_envelope(prox: float) -> NotDefined:
    return NotDefined(
        f"the lower loss with the proximal term of prox = {prox:g} is not strongly convex here, or could not be "
        "minimised to the required precision: try a smaller prox."
    )


def kind_of_residual(problem: Problem) -> str:
    """What the residual of a problem is called."""
    boxes = all(project is None or isinstance(project, Box) for project in (problem.project_x, problem.project_y))
    return "tangent cone" if boxes else "prox"


def _feasible_part(problem: Problem, z: Vector, r: Vector) -> Vector:
    """The part of a gradient r at z that feasible descent sees; for sets other than boxes the prox residual."""
    project = problem.project_x if z.space == "x" else problem.project_y
    if project is None:
        return r
    if isinstance(project, Box):
        return project.tangent(r, z)
    return z - nearest(problem, z - r)
