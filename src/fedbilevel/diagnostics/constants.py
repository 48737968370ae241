"""The constants that step sizes depend on, estimated by Hessian and cross products: ``measure_constants``.

Curvatures are the extreme eigenvalues that Lanczos' method finds: those of the largest size are found well, the
smallest one is rather over- than underestimated. All hold near the points that are looked at, not everywhere, as the
theory's do.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from fedbilevel.core import Client, Problem, Tree
from fedbilevel.core.data import Data, Layout
from fedbilevel.core.task import Task
from fedbilevel.core.vectors import Vector
from fedbilevel.errors import FedbilevelError

Product = Callable[[jax.Array], jax.Array]
STEPS = 30  # of Lanczos
BATCHES = 16  # that the noise of gradients is estimated from
DESCENT = 30  # steps of y from the first point to the second


class Constants(NamedTuple):
    """What the theorems call L, mu, zeta, sigma and C_f: the largest over clients (mu: the smallest) and over two
    points, the start and where y has descended from there.
    """

    f_smooth: float
    """L of f: the largest curvature of a client's f in (x, y)."""
    g_smooth: float
    """L of g: the same of g."""
    y_smooth: float
    """The largest curvature of a client's g in y alone."""
    convex: float
    """mu: the smallest curvature of a client's g in y. Not positive: g is not strongly convex in y there."""
    cross: float
    """The largest norm of a client's d2xy g."""
    hessian_change: float
    """L_yy: how fast d2yy g changes, as a share of the distance between the two points."""
    cross_change: float
    """L_xy: how fast d2xy g changes."""
    gradient: float
    """C_f: the largest norm of a client's gradient of f."""
    f_differ: float
    """zeta_f: the largest distance of the gradients of f of two clients."""
    g_differ: float
    """zeta_g: the same of grad_y g."""
    hessian_differ: float
    """zeta_g,yy: the largest distance of the d2yy g of two clients."""
    cross_differ: float
    """zeta_g,xy: the largest distance of the d2xy g of two clients."""
    noise: float
    """sigma: the root of the mean squared distance of a batch's gradient from that of all rows (f or g, the larger);
    0 for full batches.
    """
    clients: int
    """How many clients were looked at, evenly spaced among all."""

    @property
    def smooth(self) -> float:
        """L, of f and g."""
        return max(self.f_smooth, self.g_smooth)

    @property
    def condition(self) -> float:
        """kappa = L / mu; infinite if g is not strongly convex in y."""
        return self.smooth / self.convex if self.convex > 0 else float("inf")

    @property
    def radius(self) -> float:
        """r = C_f / mu, a bound on the norm of the adjoint."""
        return self.gradient / self.convex if self.convex > 0 else float("inf")


def lanczos(product: Product, start: jax.Array, steps: int) -> tuple[jax.Array, jax.Array]:
    """The smallest and the largest eigenvalue that Lanczos' method finds of a symmetric matrix; exact, if it may make
    as many steps as there are rows.
    """
    steps = min(steps, start.size)
    first = start / jnp.linalg.norm(start)

    def step(j: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        basis, diagonal, beside, q, found = state
        basis = basis.at[j].set(q)
        image = product(q)
        # Once the space is exhausted, what follows must not add eigenvalues: a first entry again is within their range.
        value = jnp.where(found, jnp.where(j > 0, diagonal[0], 0), q @ image)
        for _ in range(2):  # twice is enough
            image = image - basis.T @ (basis @ image)
        length = jnp.linalg.norm(image)
        scale = jnp.maximum(jnp.abs(value), jnp.max(jnp.abs(diagonal)))
        found = found | (length <= 1e3 * jnp.finfo(q.dtype).eps * scale)
        q = jnp.where(found, 0, image / jnp.where(found, 1, length))
        return basis, diagonal.at[j].set(value), beside.at[j].set(jnp.where(found, 0, length)), q, found

    zeros = jnp.zeros(steps, start.dtype)
    state = (jnp.zeros((steps, start.size), start.dtype), zeros, zeros, first, jnp.asarray(False))
    _, diagonal, beside, _, _ = lax.fori_loop(0, steps, step, state)
    matrix = jnp.diag(diagonal) + jnp.diag(beside[:-1], 1) + jnp.diag(beside[:-1], -1)
    values = jnp.linalg.eigvalsh(matrix)
    return values[0], values[-1]


class _At:
    """One client's losses at a point, as functions of a flat z = (x, y)."""

    def __init__(self, client: Client, x: Tree, y: Tree) -> None:
        self.client = client
        self.z, self.tree = ravel_pytree((x, y))
        self.p = ravel_pytree(x)[0].size

    def f(self, z: jax.Array, key: jax.Array) -> jax.Array:
        x, y = self.tree(z)
        return self.client.f.value(Vector(x, "x"), Vector(y, "y"), key)

    def g(self, z: jax.Array, key: jax.Array) -> jax.Array:
        x, y = self.tree(z)
        return self.client.g.value(Vector(x, "x"), Vector(y, "y"), key)

    def curvature(self, loss: Callable[..., jax.Array], key: jax.Array) -> Product:
        """Products with the Hessian in z."""
        return lambda v: jax.jvp(lambda z: jax.grad(loss)(z, key), (self.z,), (v,))[1]


def _curvatures(at: "list[tuple[float, _At]]", key: jax.Array, loss: str) -> Product:
    """The Hessian of a sum of losses with these factors."""
    products = [(factor, each.curvature(getattr(each, loss), key)) for factor, each in at]
    return lambda v: sum((factor * product(v) for factor, product in products), jnp.zeros_like(v))


def _in_y(product: Product, p: int) -> Product:
    """The block of a Hessian in y."""
    return lambda v: product(jnp.concatenate([jnp.zeros(p, v.dtype), v]))[p:]


def _across(product: Product, p: int) -> Product:
    """C' C, where C is the block of a Hessian that takes y to x."""

    def squared(v: jax.Array) -> jax.Array:
        w = product(jnp.concatenate([jnp.zeros(p, v.dtype), v]))[:p]
        return product(jnp.concatenate([w, jnp.zeros_like(v)]))[p:]

    return squared


def _size(ends: tuple[jax.Array, jax.Array]) -> jax.Array:
    return jnp.maximum(jnp.abs(ends[0]), jnp.abs(ends[1]))


def _root(ends: tuple[jax.Array, jax.Array]) -> jax.Array:
    return jnp.sqrt(jnp.maximum(ends[1], 0))


@partial(jax.jit, static_argnames=("problem", "layout"))
def _measure(
    problem: Problem, layout: Layout, data: Data, ids: jax.Array, x: Tree, y: Tree, key: jax.Array
) -> dict[str, jax.Array]:
    """Everything, at one point and where y has descended from it; one client or pair of clients after the other."""
    full, noisy = layout._replace(batch_sizes=(None, None)), layout._replace(sampling="replacement")
    own = lambda id: jax.tree.map(lambda a: a[id], x) if problem.private_x else x
    at = lambda id, y, layout=full: _At(layout.client(problem, data, id, data.weights[id]), own(id), y)
    flat_y, tree_y = ravel_pytree(y)
    size, p = flat_y.size, at(ids[0], y).p
    of_z, of_y = jax.random.split(key)
    begin, begin_y = jax.random.normal(of_z, (p + size,), flat_y.dtype), jax.random.normal(of_y, (size,), flat_y.dtype)
    grad_y = lambda id, y: jax.grad(at(id, y).g)(at(id, y).z, key)[p:]

    def in_y(id: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lanczos(_in_y(_curvatures([(1.0, at(id, y))], key, "g"), p), begin_y, STEPS)

    rate = 1 / jnp.maximum(jnp.max(_size(lax.map(in_y, ids))), 1e-12)
    mean = lambda flat: jnp.mean(lax.map(lambda id: grad_y(id, tree_y(flat)), ids), 0)
    moved = lax.fori_loop(0, DESCENT, lambda _, flat: flat - rate * mean(flat), flat_y)
    moved = jnp.where(jnp.all(jnp.isfinite(moved)), moved, flat_y)
    distance = jnp.linalg.norm(moved - flat_y)

    def here(y: Tree) -> dict[str, jax.Array]:
        def alone(id: jax.Array) -> dict[str, jax.Array]:
            one = at(id, y)
            f, g = (_curvatures([(1.0, one)], key, loss) for loss in "fg")
            low, high = lanczos(_in_y(g, p), begin_y, STEPS)
            gradient = jax.grad(one.f)(one.z, key)
            return {
                "f_smooth": _size(lanczos(f, begin, STEPS)),
                "g_smooth": _size(lanczos(g, begin, STEPS)),
                "y_smooth": _size((low, high)),
                "convex": -low,
                "cross": _root(lanczos(_across(g, p), begin_y, STEPS)),
                "gradient": jnp.linalg.norm(gradient),
                "noise": _noise(one, at(id, y, noisy), key),
            }

        return jax.tree.map(jnp.max, lax.map(alone, ids))

    def differ(pair: jax.Array) -> dict[str, jax.Array]:
        one, other = (at(id, y) for id in pair)
        g = _curvatures([(1.0, one), (-1.0, other)], key, "g")
        f = jax.grad(one.f)(one.z, key) - jax.grad(other.f)(other.z, key)
        return {
            "f_differ": jnp.linalg.norm(f),
            "g_differ": jnp.linalg.norm(grad_y(pair[0], y) - grad_y(pair[1], y)),
            "hessian_differ": _size(lanczos(_in_y(g, p), begin_y, STEPS)),
            "cross_differ": _root(lanczos(_across(g, p), begin_y, STEPS)),
        }

    def change(id: jax.Array) -> dict[str, jax.Array]:
        g = _curvatures([(1.0, at(id, tree_y(moved))), (-1.0, at(id, y))], key, "g")
        far = jnp.maximum(distance, 1e-12)
        return {
            "hessian_change": _size(lanczos(_in_y(g, p), begin_y, STEPS)) / far,
            "cross_change": _root(lanczos(_across(g, p), begin_y, STEPS)) / far,
        }

    points = jax.tree.map(jnp.maximum, here(y), here(tree_y(moved)))
    count = ids.shape[0]
    pairs = ids[jnp.array([(a, b) for a in range(count) for b in range(a)] or [(0, 0)])]
    others = jax.tree.map(jnp.max, {**lax.map(differ, pairs), **lax.map(change, ids)})
    return {**points, **others, "convex": -points["convex"]}


def _noise(full: _At, noisy: _At, key: jax.Array) -> jax.Array:
    """The noise of the gradients of f and g of one batch, whichever is larger."""

    def spread(key: jax.Array) -> jax.Array:
        far = (jax.grad(getattr(noisy, n))(full.z, key) - jax.grad(getattr(full, n))(full.z, key) for n in "fg")
        return jnp.array([d @ d for d in far])

    return jnp.sqrt(jnp.max(jnp.mean(lax.map(spread, jax.random.split(key, BATCHES)), 0)))


def measure_constants(task: Task, x: Tree = None, y: Tree = None, clients: int = 6, seed: int = 0) -> Constants:
    """Estimate the smoothness and convexity of f and g, how clients differ, and the noise of batches.

    Args:
        task: the problem and its clients; the lower level is looked at with one y for all clients.
        x, y: where; by default at the problem's start.
        clients: how many clients to look at, evenly spaced; differences are those of all their pairs.
        seed: of the start, of the first vectors of Lanczos' method, and of batches.

    >>> from fedbilevel import tasks
    >>> found = measure_constants(tasks.quadratic("T2"))
    >>> round(found.convex, 3), round(found.y_smooth, 3), round(found.cross, 3)
    (1.0, 3.0, 2.0)
    """
    if clients < 1:
        raise FedbilevelError(f"clients must be at least 1, but is {clients}.")
    many = len(task.clients)
    ids = jnp.asarray(np.unique(np.linspace(0, many - 1, min(clients, many)).round().astype(int)))
    first_x, first_y = task.problem.start(jax.random.fold_in(jax.random.key(seed), 0))
    if x is None:
        spread = lambda a: jnp.broadcast_to(a, (many, *a.shape))
        x = jax.tree.map(spread, first_x.tree) if task.problem.private_x else first_x.tree
    y = first_y.tree if y is None else y
    found = _measure(task.problem, task.layout, task.data, ids, x, y, jax.random.key(seed))
    return Constants(**{name: float(value) for name, value in found.items()}, clients=len(ids))
