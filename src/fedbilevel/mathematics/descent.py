"""Local steps that several algorithms share, as functions of a client: each returns how far the client moved.

The corrected ones (SVRG) take at every point the client's own gradient minus that at the start, on the same batch,
plus the mean of all clients at the start: without noise, clients that differ do not drift apart.
"""

from typing import Any

from fedbilevel.core import Client, Key, Objective
from fedbilevel.core.vectors import Vector


def local_sgd(
    client: Client, key: Key, x: Vector, y: Vector, lr: float, steps: int, loss: Objective | None = None
) -> Vector:
    """Steps on y along the gradient of the client's g, or of another of its losses."""
    loss = client.g if loss is None else loss

    def step(y: Vector, key: Key, _: Any) -> Vector:
        y = client.project_y(y)
        return y - lr * loss.dy(x, y, key)

    return client.repeat(steps, step, y, key) - y


def corrected_lower(client: Client, key: Key, x: Vector, y: Vector, q: Vector, lr: float, steps: int) -> Vector:
    """Corrected steps on y; q is the mean of grad_y g at the start."""

    def step(y_nu: Vector, key: Key, _: Any) -> Vector:
        y_nu = client.project_y(y_nu)
        return y_nu - lr * (client.g.dy(x, y_nu, key) - client.g.dy(x, y, key) + q)

    return client.repeat(steps, step, y, key) - y


def corrected_upper(client: Client, key: Key, x: Vector, y: Vector, h: Vector, lr: float, steps: int) -> Vector:
    """Corrected steps on x; h is the mean hypergradient at the start, of which only the direct part follows x."""

    def step(x_nu: Vector, key: Key, _: Any) -> Vector:
        x_nu = client.project_x(x_nu)
        return x_nu - lr * (client.f.dx(x_nu, y, key) - client.f.dx(x, y, key) + h)

    return client.repeat(steps, step, x, key) - x
