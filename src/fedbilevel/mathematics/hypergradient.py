"""Points and directions that several algorithms share, and conjugate gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from fedbilevel.core import Client, Clients, Key
from fedbilevel.core.vectors import Vector, dot

Z = TypeVar("Z", bound=Any)  # a NamedTuple with the fields x and y, such as Pair or Point


class Pair(NamedTuple):
    """The upper variable x and the lower variable y; or a direction for each."""

    x: Vector
    y: Vector


class Point(NamedTuple):
    """The upper variable x, the lower variable y, and the adjoint u ~ [d2yy g]^-1 grad_y f; or a direction for each."""

    x: Vector
    y: Vector
    u: Vector


def feasible(where: Client | Clients, z: Z) -> Z:
    """A state with its x and y projected onto the problem's constraints, by a client or by the server."""
    return z._replace(x=where.project_x(z.x), y=where.project_y(z.y))


def directions(client: Client, z: Point, key: Key, shared_batch: bool) -> Point:
    """The three directions that move (x, y, u) together towards the solution (a client's share of them)::

        x:  grad_x f - d2xy g u           (the hypergradient, if u is right)
        y:  grad_y g
        u:  d2yy g u - grad_y f           (the gradient of 1/2 u' d2yy g u - <grad_y f, u>)

    Linear in f and g, so that averages over clients are exact. With ``shared_batch`` one batch of f and one of g
    serve all terms, in one pass each; otherwise the five terms have five independent batches, as the theory requires.
    """
    x, y, u = z
    if shared_batch:
        key_f, key_g = jax.random.split(key)
        fx, fy = client.f.gradients(x, y, key_f)
        gy, cross, hessian = client.g.second_order(x, y, u, key_g)
    else:
        y_, f1, g1, f2, g2 = jax.random.split(key, 5)
        gy = client.g.dy(x, y, y_)
        fx, cross = client.f.dx(x, y, f1), client.g.dxy(x, y, u, g1)
        fy, hessian = client.f.dy(x, y, f2), client.g.dyy(x, y, u, g2)
    return Point(fx - cross, gy, hessian - fy)


class Solved(NamedTuple):
    """The solution of a linear system by conjugate gradients, and whether the matrix looked positive definite on the
    way.
    """

    solution: Vector
    positive: jax.Array
    steps: jax.Array


def conjugate_gradient(product: Callable[[Vector], Vector], right: Vector, tolerance: float, steps: int) -> Solved:
    """Solve ``H v = right`` with products only, until the residual is below ``tolerance |right|``.

    Stops at a direction of non-positive curvature: the matrix is then not positive definite, and the answer is
    meaningless.
    """

    def go_on(state: tuple[Any, ...]) -> jax.Array:
        _, _, _, squared, positive, count = state
        return (squared > (tolerance**2) * dot(right, right)) & positive & (count < steps)

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        solution, residual, direction, squared, _, count = state
        image = product(direction)
        curvature = dot(direction, image)
        positive = curvature > 0
        length = jnp.where(positive, squared / jnp.where(positive, curvature, 1), 0)
        solution, residual = solution + length * direction, residual - length * image
        new = dot(residual, residual)
        return solution, residual, residual + (new / squared) * direction, new, positive, count + 1

    first = (0 * right, right, right, dot(right, right), jnp.asarray(True), jnp.asarray(0))
    solution, _, _, _, positive, count = lax.while_loop(go_on, step, first)
    return Solved(solution, positive, count)
