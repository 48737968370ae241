"""Estimates of the hypergradient that several algorithms share, as functions of a client."""

from typing import NamedTuple

import jax

from fedbilevel.core import Client, Key
from fedbilevel.vectors import Vector


class Point(NamedTuple):
    """The upper variable x, the lower variable y, and the adjoint u ~ [d2yy g]^-1 grad_y f; or a direction for each."""

    x: Vector
    y: Vector
    u: Vector


def directions(client: Client, z: Point, key: Key, shared_batch: bool) -> Point:
    """The three directions that move (x, y, u) together towards the solution (a client's share of them)::

        x:  grad_x f - d2xy g u           (the hypergradient, if u is right)
        y:  grad_y g
        u:  d2yy g u - grad_y f           (the gradient of 1/2 u' d2yy g u - <grad_y f, u>)

    Linear in f and g, so that averages over clients are exact. With ``shared_batch`` one batch of f and one of g serve all
    terms, in one pass each; otherwise the five terms have five independent batches, as the theory asks for.
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
