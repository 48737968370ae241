"""Exact quantities on all the data, outside of any communication budget: how far a run really is.

Everything is matrix-free: the lower problem is solved by Newton's method with conjugate gradients, the adjoint system
by conjugate gradients on the weighted mean of the clients' Hessians. x and y are pytrees in the user's structure.

``solve(..., diagnostics=["hypergradient", "lower_gap"])`` puts them into the history; :data:`DIAGNOSTICS` has the
names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedbilevel.algorithms.fedbioacc import Server as FedBiOAccServer
from fedbilevel.core import Client, Problem, Tree, as_float
from fedbilevel.core.data import Data, Layout
from fedbilevel.core.schedules import Schedule
from fedbilevel.core.task import Task
from fedbilevel.core.vectors import Box, Vector, dot, is_vector, norm, sub
from fedbilevel.engines.simulation import Simulation, State
from fedbilevel.errors import FedbilevelError, Names
from fedbilevel.mathematics.hypergradient import Point, conjugate_gradient, directions

KEY: Any = None  # batches are all the data: their names do not matter


class NotDefined(FedbilevelError):
    """A quantity that does not exist at this point; in a history it is NaN."""


class Exact(NamedTuple):
    """The exact lower solution at x, the adjoint there, and the hypergradient."""

    y: Tree
    u: Tree
    hypergradient: Tree


class _Solved(NamedTuple):
    y: Vector
    u: Vector
    hypergradient: Vector
    value: jax.Array
    positive: jax.Array
    converged: jax.Array


class _Minimum(NamedTuple):
    y: Vector
    positive: jax.Array
    converged: jax.Array


class _Function(NamedTuple):
    value: Callable[[Vector], jax.Array]
    slope: Callable[[Vector], Vector]
    hessian: Callable[[Vector], Callable[[Vector], Vector]]


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
        y, positive, converged = self.minimise(self.lower, y)
        u, definite = self.adjoint(y)
        hyper = self.in_x(lambda c, x: c.f.dx(x, y, KEY) - c.g.dxy(x, y, u, KEY))
        value = self.sum(lambda c, x: c.f.value(x, y, KEY))
        return _Solved(y, u, hyper, value, positive & definite, converged)

    @property
    def lower(self) -> _Function:
        """The lower loss as a function of y."""
        value = lambda y: self.sum(lambda c, x: c.g.value(x, y, KEY))
        return _Function(value, lambda y: self.sum(lambda c, x: c.g.dy(x, y, KEY)), self.hessian)

    def minimise(self, function: _Function, y: Vector) -> _Minimum:
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
        return _Minimum(y, positive, norm(gradient) <= 10 * goal)

    def proximal(self, y: Vector, prox: jax.Array) -> _Minimum:
        """theta* = argmin over feasible theta of g(x, theta) + |theta - y|^2 / (2 prox)."""
        value, slope, hessian = self.lower
        near = _Function(
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
        return _Minimum(theta, free.positive, left <= 10 * goal)

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

    return solved._replace(
        hypergradient=solved.hypergradient.map(weighted),
        value=jnp.dot(data.weights.astype(solved.value.dtype), solved.value),
        positive=jnp.all(solved.positive),
        converged=jnp.all(solved.converged),
    )


@partial(jax.jit, static_argnames=("problem", "layout"))
def _upper_loss(problem: Problem, layout: Layout, data: Data, x: Vector, y: Vector) -> jax.Array:
    local = problem.lower_level == "local"
    own = lambda client: y.map(lambda a: a[client.id]) if local else y
    # What the server holds, all clients would evaluate alike.
    ids = jnp.arange(1 if layout.server and not local else layout.clients)
    weights = jnp.ones(1) if len(ids) == 1 else data.weights
    return _Average(problem, layout, data, x, ids, weights).sum(lambda c, x: c.f.value(x, own(c), KEY))


def _vectors(x: Tree, y: Tree) -> tuple[Vector, Vector]:
    return Vector(jax.tree.map(as_float, x), "x"), Vector(jax.tree.map(as_float, y), "y")


def _solved(task: Task, x: Tree, y: Tree = None) -> _Solved:
    problem = task.problem
    if y is None:
        y = problem.start(jax.random.key(0))[1].tree
        if problem.lower_level == "local":
            y = jax.tree.map(lambda a: jnp.broadcast_to(a, (len(task.clients), *a.shape)), y)
    return _solve(problem, task.layout, task.data, *_vectors(x, y))


def _defined(solved: _Solved) -> _Solved:
    if not solved.positive:
        raise NotDefined(
            "the Hessian of the lower loss is not positive definite here, so that y*(x) and the hypergradient are not "
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
    solved = _defined(_solved(task, x, y))
    return Exact(solved.y.tree, solved.u.tree, solved.hypergradient.tree)


def lower_solution(task: Task, x: Tree, y: Tree = None) -> Tree:
    """y*(x)."""
    return exact(task, x, y).y


def hypergradient(task: Task, x: Tree, y: Tree = None) -> Tree:
    """grad h(x) at the exact lower solution."""
    return exact(task, x, y).hypergradient


def objective(task: Task, x: Tree, y: Tree = None) -> float:
    """h(x) = f(x, y*(x)); with a local lower level sum w_m f_m(x, y_m*(x))."""
    return float(_defined(_solved(task, x, y)).value)


def upper_loss(task: Task, x: Tree, y: Tree) -> float:
    """f(x, y) = sum w_m f_m(x, y) on all validation rows, at a y that need not solve the lower problem; with a local
    lower level y has a leading axis of clients.
    """
    return float(_upper_loss(task.problem, task.layout, task.data, *_vectors(x, y)))


def stationarity(task: Task, x: Tree, y: Tree = None, step: float = 0.001) -> float:
    """|x - Proj(x - step grad h)| / step with the projection of x: 0 where no feasible direction descends, and
    |grad h| without constraints.
    """
    return _stationarity(task.problem, _vectors(x, ())[0], _defined(_solved(task, x, y)).hypergradient, step)


def _stationarity(problem: Problem, x: Vector, gradient: Vector, step: float) -> float:
    if problem.project_x is None:
        return float(norm(gradient))
    return float(norm(x - _nearest(problem, x - step * gradient)) / step)


def weighting_stationarity(task: Task, x: Tree, y: Tree = None, step: float = 0.001) -> float:
    """|x - Proj(x - step grad)| on the simplex of client weights, at the exact model of these weights.

    The measure of the primal-dual paper (section 5.1). It is at most step |grad|: compare methods by it, not problems.
    """
    _check_weighting(task)
    return step * stationarity(task, x, y, step)


def weighting_value(task: Task, x: Tree, y: Tree = None) -> float:
    """f_0(w*(x)): the server's loss at the exact model of these client weights."""
    _check_weighting(task)
    return objective(task, x, y)


def _check_weighting(task: Task) -> None:
    if not task.problem.weighting:
        raise FedbilevelError(f"this diagnostic is for {NEEDS['weighting'][0]}.")


def _distance(a: Tree, b: Tree) -> float:
    return float(norm(Vector(jax.tree.map(lambda p, q: as_float(p) - as_float(q), a, b), "y")))


def lower_gap(task: Task, x: Tree, y: Tree) -> float:
    """|y - y*(x)|; with a local lower level, the mean over clients of |y_m - y_m*(x)|, with their weights."""
    return _lower_gap(task, y, exact(task, x, y).y)


def _lower_gap(task: Task, y: Tree, solution: Tree) -> float:
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
    solution, positive = _adjoint(task.problem, task.layout, task.data, *_vectors(x, y))
    if not positive:
        raise NotDefined(
            "the Hessian of the lower loss is not positive definite here, so that the adjoint is not defined."
        )
    return _distance(u, solution.tree)


def client_drift(engine: Simulation, state: State) -> dict[str, float]:
    """How far clients end up from their mean in the first exchange of the next round: sum w_m |z_m - mean|^2 for
    every vector they upload.

    The names are those of the upload (``x``, ``y``, ``u``); blocks of a private x have no mean and are left out.
    """
    return {name: float(value) for name, value in engine.spread(state).items()}


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
    average = _Average(problem, layout, data, x, jnp.arange(layout.clients), data.weights)
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
        raise FedbilevelError("mefbo_residual is for problems with a global lower level.")
    return _mefbo_residual(task, x, y, penalty, prox, _solved(task, x, y))


def _mefbo_residual(task: Task, x: Tree, y: Tree, penalty: float, prox: float, solved: _Solved) -> MeFBOResidual:
    problem, at = task.problem, _vectors(x, y)
    numbers = (jnp.asarray(a, jnp.result_type(*jax.tree.leaves(at[1].tree))) for a in (penalty, prox))
    found = _upsilon(problem, task.layout, task.data, *at, *numbers)
    if not (found.positive and found.converged):
        raise NotDefined(
            f"the lower loss with the proximal term of prox = {prox:g} is not strongly convex here, or could not be "
            "minimised to the required precision: try a smaller prox."
        )
    parts = [_feasible_part(problem, z, r) for z, r in zip(at, (found.rx, found.ry), strict=True)]
    gap = float("nan")
    if solved.positive and solved.converged and _distance(problem.nearest(solved.y).tree, solved.y.tree) == 0:
        gap = _distance(y, solved.y.tree)
    residual = float(sum(dot(part, part) for part in parts))
    return MeFBOResidual(residual, float(penalty * norm(found.rx)), gap, _kind_of_residual(problem))


def _kind_of_residual(problem: Problem) -> str:
    known = all(project is None or isinstance(project, Box) for project in (problem.project_x, problem.project_y))
    return "tangent cone" if known else "prox"


def _feasible_part(problem: Problem, z: Vector, r: Vector) -> Vector:
    """The part of a gradient r at z that feasible descent sees; for sets other than boxes the prox residual."""
    project = problem.project_x if z.space == "x" else problem.project_y
    if project is None:
        return r
    if isinstance(project, Box):
        return project.tangent(r, z)
    return z - _nearest(problem, z - r)


def _nearest(problem: Problem, v: Vector) -> Vector:
    """The nearest feasible point; a private x comes as an array of blocks."""
    owned = problem.private_x and v.space == "x"
    return Vector(problem.nearest(Vector(v.tree, v.space, owned)).tree, v.space)


@partial(jax.jit, static_argnames=("problem", "layout"))
def _directions(problem: Problem, layout: Layout, data: Data, z: Point) -> Point:
    """The mean of what the momenta estimate."""
    average = _Average(problem, layout, data, z.x, jnp.arange(layout.clients), data.weights)
    return average.sum(lambda c, x: directions(c, z, jax.random.key(0), shared_batch=True))


def lyapunov(
    engine: Any, state: Any, curvature: float = 1.0, smoothness: float = 1.0, batch: int | None = None
) -> float:
    """The Lyapunov function of a state of FedBiOAcc, eq. (9) of its paper::

        G_t = h(x) + 18 eta Lt^2 / (mu gamma) ( |y - y*(x)|^2 + |u - u*(x)|^2 )
                   + 9 b M eta / (64 alpha_t) ( |nu - grad_x f + d2xy g u|^2 + |omega - grad_y g|^2
                                                + |q - d2yy g u + grad_y f|^2 )

    with u*(x) at y*(x), and exact means over all M clients in place of what the momenta nu, omega and q estimate.
    (After a round all clients are at the server's point.) eta, gamma and alpha_t are the algorithm's.

    Args:
        engine, state: of FedBiOAcc.
        curvature: mu, the strong convexity of g in y.
        smoothness: Lt with Lt^2 = L^2 + 2 L2^2 C^2 / mu^2: L and L2 are the Lipschitz constants of the first and
            second derivatives of f and g, C bounds grad f. On quadratics Lt = L. (The proof, in the appendix, gives
            the gap of u the factor 18 eta L^2 / (mu tau) instead.)
        batch: b; by default that of the task for g.
    """
    moment = Snapshot(engine, state)
    DIAGNOSTICS["lyapunov"].check(moment)
    return _lyapunov(moment, curvature, smoothness, batch)


def _lyapunov(moment: "Snapshot", curvature: float = 1.0, smoothness: float = 1.0, batch: int | None = None) -> float:
    task, algorithm, (z, d, t) = moment.task, moment.algorithm, moment.state.server
    layout, solved = task.layout, moment.solved
    squared = lambda v: float(dot(v, v))
    gaps = squared(z.y - solved.y) + squared(z.u - solved.u)
    errors = sum(squared(v) for v in sub(d, _directions(task.problem, layout, task.data, z)))
    eta, gamma, alpha = algorithm.lr_upper, algorithm.lr_lower, float(algorithm.rate(t))
    b = batch or layout.batch_sizes[0] or layout.longest[0]
    return (
        float(solved.value)
        + 18 * eta * smoothness**2 / (curvature * gamma) * gaps
        + 9 * b * layout.clients * eta / (64 * alpha) * errors
    )


# What solve puts into the history.

Measure = Callable[[Task, Tree, Tree], float | Mapping[str, float]]


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment: what diagnostics look at. The lower problem is solved at most once for all of them."""

    engine: Any
    state: Any

    @property
    def task(self) -> Task:
        return self.engine.task

    @property
    def algorithm(self) -> Any:
        return self.engine.program.algorithm

    @cached_property
    def point(self) -> tuple[Tree, Tree]:
        """x and y in the user's structure."""
        return self.engine.solution(self.state)

    @cached_property
    def attempt(self) -> _Solved:
        """The lower problem at x, solved or not."""
        return _solved(self.task, *self.point)

    @property
    def solved(self) -> _Solved:
        """The exact solution at x; raises NotDefined where there is none."""
        return _defined(self.attempt)

    @property
    def adjoint(self) -> Vector | None:
        """The adjoint u that the server keeps, if the algorithm has one: the first vector of this name."""
        parts, _ = jax.tree_util.tree_flatten_with_path(self.state.server, is_leaf=is_vector)
        named = (v for path, v in parts if jax.tree_util.keystr(path[-1:], simple=True) == "u" and is_vector(v))
        return next(named, None)


NEEDS: Mapping[str, tuple[str, Callable[[Snapshot], bool]]] = {
    "global": ("problems with a global lower level", lambda s: s.task.problem.lower_level == "global"),
    "shared": ("problems whose x is not private", lambda s: not s.task.problem.private_x),
    "weighting": ("problems with weighting=True, whose x is the clients' weights", lambda s: s.task.problem.weighting),
    "adjoint": (
        "algorithms that keep the adjoint u, such as FedBiO, FedBiOAcc, SimFBO and FedMSA",
        lambda s: s.adjoint is not None,
    ),
    "envelope": (
        "MeFBO and others with a penalty and a prox",
        lambda s: isinstance(getattr(s.algorithm, "penalty", None), Schedule) and hasattr(s.algorithm, "prox"),
    ),
    "momenta": ("FedBiOAcc", lambda s: isinstance(s.state.server, FedBiOAccServer)),
    "simulation": ("engine='simulation'", lambda s: isinstance(s.engine, Simulation)),
}
"""What a diagnostic may ask for: who has it, and whether this run does."""


@dataclass(frozen=True)
class Diagnostic:
    """A column (or some) of the history: ``function(snapshot, **options)`` is a number or {column: number}.

    >>> DIAGNOSTICS["lyapunov"].using(curvature=0.5, smoothness=2.0).options
    {'curvature': 0.5, 'smoothness': 2.0}
    """

    name: str
    function: Callable[..., Any]
    needs: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def using(self, **options: Any) -> "Diagnostic":
        """The same with other constants (those of the function of this name)."""
        return replace(self, options={**self.options, **options})

    def check(self, moment: Snapshot) -> None:
        """Refuse runs that do not have what it needs."""
        for who, has in (NEEDS[need] for need in self.needs):
            if not has(moment):
                raise FedbilevelError(f"the diagnostic {self.name} is for {who}.")

    def columns(self, moment: Snapshot) -> dict[str, float]:
        """The values by column, NaN where they are not defined."""
        try:
            value = self.function(moment, **self.options)
        except NotDefined:
            value = float("nan")
        if not isinstance(value, Mapping):
            value = {self.name: value}
        return {name: float(number) for name, number in value.items()}


def _drift(moment: Snapshot) -> dict[str, float]:
    return {f"client_drift_{name}": value for name, value in client_drift(moment.engine, moment.state).items()}


def _envelope(moment: Snapshot) -> dict[str, float]:
    algorithm = moment.algorithm
    penalty = float(algorithm.penalty(max(0, int(moment.state.round) - 1)))  # R_t is for the point that c_t led to
    try:
        found = _mefbo_residual(moment.task, *moment.point, penalty, algorithm.prox, moment.attempt)
    except NotDefined:
        found = MeFBOResidual(*3 * [float("nan")], name="")
    exact = _kind_of_residual(moment.task.problem) == "tangent cone"
    return {
        "mefbo_residual" if exact else "mefbo_prox_residual": found.residual,
        "mefbo_hypergradient": found.hypergradient,
        "mefbo_lower_gap": found.lower_gap,
    }


def _adjoint_gap(moment: Snapshot) -> float:
    u = moment.adjoint
    return adjoint_gap(moment.task, *moment.point, u.tree if u is not None else None)


def _stationary(moment: Snapshot, step: float = 0.001) -> float:
    x, _ = _vectors(*moment.point)
    return _stationarity(moment.task.problem, x, moment.solved.hypergradient, step)


def _stationary_weights(moment: Snapshot, step: float = 0.001) -> float:
    return step * _stationary(moment, step)


DIAGNOSTICS: Names[Diagnostic] = Names(
    "diagnostic",
    {
        each.name: each
        for each in (
            Diagnostic("hypergradient", lambda moment: norm(moment.solved.hypergradient)),
            Diagnostic("objective", lambda moment: moment.solved.value),
            Diagnostic("upper_loss", lambda moment: upper_loss(moment.task, *moment.point)),
            Diagnostic("lower_gap", lambda moment: _lower_gap(moment.task, moment.point[1], moment.solved.y.tree)),
            Diagnostic("stationarity", _stationary),
            Diagnostic("adjoint_gap", _adjoint_gap, ("global", "adjoint")),
            Diagnostic("client_drift", _drift, ("simulation",)),
            Diagnostic("mefbo_residual", _envelope, ("global", "envelope")),
            Diagnostic("lyapunov", _lyapunov, ("momenta", "shared")),
            Diagnostic("weighting_stationarity", _stationary_weights, ("weighting",)),
            Diagnostic("weighting_value", lambda moment: moment.solved.value, ("weighting",)),
        )
    },
)
"""The diagnostics that ``solve`` knows by name. The columns have these names, with two exceptions: client_drift_x and
so on, one for each upload; and mefbo_residual (mefbo_prox_residual if it is the prox residual), mefbo_hypergradient
and mefbo_lower_gap.
"""


def find(entry: "str | Diagnostic | Measure") -> Diagnostic:
    """A diagnostic by its name, or made of a function ``f(task, x, y) -> number or {name: number}``."""
    if isinstance(entry, str):
        return DIAGNOSTICS[entry]
    if isinstance(entry, Diagnostic):
        return entry
    if not callable(entry):
        raise FedbilevelError(f"a diagnostic is a name or a function f(task, x, y), not {entry!r}.")
    name = getattr(entry, "__name__", "")
    if name.isidentifier():
        return Diagnostic(name, lambda moment: entry(moment.task, *moment.point))

    def named(moment: Snapshot) -> Mapping[str, float]:
        value = entry(moment.task, *moment.point)
        if not isinstance(value, Mapping):
            raise FedbilevelError("a diagnostic without a name of its own must return {name: number}.")
        return value

    return Diagnostic("function", named)


def measure(diagnostics: Sequence[Diagnostic], moment: Snapshot) -> dict[str, float]:
    """The columns of all of them."""
    return {name: value for each in diagnostics for name, value in each.columns(moment).items()}
