"""The hypergradient of one client alone, with a Neumann series for the inverse of its own Hessian."""

from typing import Any

import jax

from fedbilevel.core import Client, Key
from fedbilevel.core.vectors import Vector
from fedbilevel.errors import FedbilevelError
from fedbilevel.mathematics.hypergradient import Pair


def neumann_hypergradient(
    client: Client, z: Pair, key: Key, tau: float, steps: int, shared_batch: bool = False
) -> Vector:
    """Phi_m of Li, Huang, Huang (NeurIPS 2023), eq. (11), with Q = ``steps`` Hessian products::

        Phi_m = grad_x f(xi_f) - tau d2xy g(xi_g) s
            s = sum_{q=-1}^{Q-1} prod_{j=Q-q}^{Q} ( I - tau d2yy g(xi_j) ) grad_y f(xi_f)

    The product for q = -1 is empty, so the series has Q + 1 terms. xi_Q acts first, then xi_{Q-1}, and so on. xi_f,
    xi_g and xi_1 .. xi_Q are independent, so that the mean of a product is the product of the means; one batch xi_f
    serves both gradients of f. The bias is at most kappa (1 - tau mu)^(Q+1) |grad f|, for tau < 1 / L. Costs 1 Gf, Q
    H and 1 J. The same key gives the same xi. With ``shared_batch`` the key itself names all of them: f and g then see
    the same row numbers.
    """
    xi_f, xi_g, xi = (key, key, key) if shared_batch else jax.random.split(key, 3)
    fx, fy = client.f.gradients(*z, xi_f)

    def multiply(carry: tuple[Vector, Vector], xi_j: Key, _: Any) -> tuple[Vector, Vector]:
        v, series = carry
        v = v - tau * client.g.dyy(*z, v, key if shared_batch else xi_j)
        return v, series + v

    _, series = client.repeat(steps, multiply, (fy, fy), xi)
    return fx - tau * client.g.dxy(*z, series, xi_g)


def local_directions(client: Client, z: Pair, key: Key, tau: float, steps: int) -> Pair:
    """What a client can do alone: its own hypergradient for x and grad_y g for y, on independent batches."""
    b_y, b_x = jax.random.split(key)
    return Pair(neumann_hypergradient(client, z, b_x, tau, steps), client.g.dy(*z, b_y))


def check_restart(name: str, restart: bool, shared_batch: bool) -> None:
    """Refuse restart without shared_batch: a y that was trained for one batch would then see others."""
    if restart and not shared_batch:
        raise FedbilevelError(f"{name}: restart trains y for one batch, so it needs shared_batch as well.")


def trained(client: Client, z: Pair, key: Key, lr: float, steps: int, shared_batch: bool) -> Vector:
    """y after gradient steps on g at a fixed x, each on a batch of its own or all on the one that the key names."""

    def step(y: Vector, own: Key, _: Any) -> Vector:
        return client.project_y(y - lr * client.g.dy(z.x, y, key if shared_batch else own))

    return client.repeat(steps, step, z.y, key)
