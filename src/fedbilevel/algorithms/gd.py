"""GD."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fedbilevel.core import Client, Clients, Key, parameter
from fedbilevel.core.vectors import Vector, dot
from fedbilevel.mathematics.averages import Averages, Words, name_batches, named
from fedbilevel.mathematics.hypergradient import Pair


@dataclass(frozen=True)
class GD(Averages):
    """GD: gradient steps on y, then one on x along the hypergradient with the inverse of the estimated Hessian.

    Every round takes K steps on y from where the last round ended, and then, with H the mean Hessian of one batch of
    every client::

        y <- y - beta mean grad_y g(x, y)                                        K times
        u = H^-1 mean grad_y f(x, y)
        x <- P( x - alpha mean ( grad_x f(x, y) - d2xy g(x, y) u ) )

    ========  ==============   =====================
    paper     name             meaning
    ========  ==============   =====================
    alpha     lr_upper         step of x
    beta      lr_lower         step of y
    K         inner_rounds     steps of y in a round
    -         solver           how u is found: conjugate gradients, or the dense matrix of every client
    -         solver_steps     S, the Hessian products of the conjugate gradients; d of them are exact
    ========  ==============   =====================

    The batches of the parts are independent, but the inverse of a random H is not an unbiased estimate of the inverse
    of its mean: mini-batches leave a bias that does not decrease with the steps. With partial participation H is that
    of the clients of the round; if every exchange has new clients, use "dense". "cg" stops at a direction of
    non-positive curvature. If the problem has constraints, the server projects.
    """

    citation = 'The baseline "GD" of section 5.1 of the primal-dual paper on client weights'
    source = "follows the paper, which leaves the solver open"
    assumes = "g strongly convex in y"
    exact = "exact"
    alone = "gradient descent along the hypergradient at an inexact y"
    costs = (
        'K + S + 2 exchanges per round with "cg": p + (K + S + 1)d floats down with full participation (d more for a '
        'client that missed the last round), 2p + (K + S + 1)d up; K Gg, 1 Gf, S H and 1 J per client. With "dense": '
        "K + 3 exchanges, p + (K + 1)d down, 2p + (K + 1)d + d^2 up, and d H. If the server holds f, one exchange, p "
        "+ d floats up and the Gf less"
    )

    lr_upper: float = parameter(0.1, "step size of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(0.3, "step size of the lower variable y", above=0, tune=(1e-3, 2.0))
    inner_rounds: int = parameter(5, "steps of y in a round", least=1)
    solver: str = parameter("cg", "how to solve for u: conjugate gradients or a dense matrix", choices=("cg", "dense"))
    solver_steps: int = parameter(10, "Hessian products of the conjugate gradients", least=1)

    def init(self, clients: Clients, x: Vector, y: Vector) -> Pair:
        return Pair(x, y)

    def round(self, clients: Clients, server: Pair) -> Pair:
        z = self.descend(clients, server, self.lr_lower, self.inner_rounds)
        (f,) = self.upper(clients, z)
        u = (self.dense if self.solver == "dense" else self.conjugate)(clients, z, f.y)
        return Pair(clients.project_x(z.x - self.lr_upper * (f.x - self.cross(clients, z, u))), z.y)

    def dense(self, clients: Clients, z: Pair, fy: Vector) -> Vector:
        """The server inverts the mean of the clients' matrices."""
        H = clients.run(self.hessian, z, name_batches(clients)).mean()
        # The shortest of many solutions: with client weights, all clients that take part may have weight 0.
        return fy.like(jnp.linalg.lstsq(H, fy.flat())[0])

    def conjugate(self, clients: Clients, z: Pair, fy: Vector) -> Vector:
        """Conjugate gradients; all products use the same batches, so that there is one matrix to invert."""
        words = name_batches(clients)
        ratio = lambda a, b: jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)

        def step(
            clients: Clients, carry: tuple[Vector, Vector, Vector, jax.Array]
        ) -> tuple[Vector, Vector, Vector, jax.Array]:
            u, residual, direction, squared = carry
            image = clients.run(self.hessian_product, z, direction, words).mean()
            length = ratio(squared, dot(direction, image))
            u, residual = u + length * direction, residual - length * image
            new = dot(residual, residual)
            return u, residual, residual + ratio(new, squared) * direction, new

        return clients.repeat(self.solver_steps, step, (0 * fy, fy, fy, dot(fy, fy)))[0]

    def hessian(self, client: Client, key: Key, z: Pair, words: Words) -> jax.Array:
        return client.g.hessian(*z, named(client, words))

    def hessian_product(self, client: Client, key: Key, z: Pair, v: Vector, words: Words) -> Vector:
        return client.g.dyy(*z, v, named(client, words))

    def solution(self, server: Pair, memory: None) -> tuple[Vector, Vector]:
        return server
