"""MEHA."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax

from fedbilevel.algorithms.mefbo import Triple
from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.core.schedules import power
from fedbilevel.core.vectors import Vector


@dataclass(frozen=True)
class MEHA(Algorithm):
    """MEHA: gradients only; the lower level becomes a penalty on g minus its Moreau envelope. Federated here.

    The paper's method is for one party. All its directions are linear in f and g, so the clients' means are exact. In
    round k = 0, 1, ..., one exchange each, and each with the newest values of the others::

        theta <- P( theta - eta   mean ( grad_y g(x, theta) + (theta - y) / gamma ) )
        x     <- P( x     - alpha mean ( grad_x f(x, y) / c_k + grad_x g(x, y) - grad_x g(x, theta) ) )
        y     <- P( y     - beta  mean ( grad_y f(x, y) / c_k + grad_y g(x, y) - (y - theta) / gamma ) )

    ========  ==============   =====================
    paper     name             meaning
    ========  ==============   =====================
    alpha     lr_upper         step of x
    beta      lr_lower         step of y
    eta       lr_prox          step of theta
    c_k       penalty          penalty c (k + 1)^p, written power(c, p); p in (0, 1/2) in the theory
    gamma     prox             proximal parameter of the Moreau envelope
    ========  ==============   =====================

    MeFBO takes the three steps at once, and local ones. The step of x may grow with c, as in MeFBO.
    """

    citation = (
        'Liu, Liu, Yao, Zeng, Zhang: "Moreau Envelope for Nonconvex Bi-Level Optimization: A Single-Loop and '
        'Hessian-Free Solution Strategy", ICML 2024'
    )
    source = "reconstruction without the paper's text; the federation is ours"
    assumes = "f and g smooth; g need not be convex in y"
    exact = "the limit is that of the penalised problem, as for MeFBO; there are no local steps, so clients may differ"
    alone = "MEHA"
    costs = (
        "Three exchanges per round: p + 2d floats down with full participation (p + d more for a client that missed "
        "the last round) and p + 2d up; 2 Gf and 4 Gg per client, no second derivatives"
    )

    steps: ClassVar[Mapping[str, str]] = {**Algorithm.steps, "theta": "lr_prox"}

    lr_upper: float = parameter(0.1, "step size of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(0.05, "step size of the lower variable y", above=0, tune=(1e-3, 2.0))
    lr_prox: float = parameter(0.1, "step size of theta", above=0, tune=(1e-3, 2.0))
    penalty: float = parameter(power(2.7, 0.25), "weight of the lower level relative to f; may grow", above=0)
    prox: float = parameter(0.1, "proximal parameter of the Moreau envelope", above=0, tune=(1e-3, 1.0))

    def init(self, clients: Clients, x: Vector, y: Vector) -> Triple:
        return Triple(x, y, theta=y)

    def round(self, clients: Clients, server: Triple) -> Triple:
        x, y, theta = server
        theta = clients.project_y(theta - self.lr_prox * clients.run(self.envelope, x, y, theta).mean())
        x = clients.project_x(x - self.lr_upper * clients.run(self.upper, x, y, theta).mean())
        y = clients.project_y(y - self.lr_lower * clients.run(self.lower, x, y, theta).mean())
        return Triple(x, y, theta)

    def envelope(self, client: Client, key: Key, x: Vector, y: Vector, theta: Vector) -> Vector:
        return client.g.dy(x, theta, key) + (theta - y) / self.prox

    def upper(self, client: Client, key: Key, x: Vector, y: Vector, theta: Vector) -> Vector:
        """The same batch of g at y and at theta."""
        xi, zeta = self.batches(key)
        return client.f.dx(x, y, xi) / self.penalty + client.g.dx(x, y, zeta) - client.g.dx(x, theta, zeta)

    def lower(self, client: Client, key: Key, x: Vector, y: Vector, theta: Vector) -> Vector:
        xi, zeta = self.batches(key)
        return client.f.dy(x, y, xi) / self.penalty + client.g.dy(x, y, zeta) - (y - theta) / self.prox

    def batches(self, key: Key) -> tuple[Key, Key]:
        """The names of the batches of f and of g."""
        xi, zeta = jax.random.split(key)
        return xi, zeta

    def solution(self, server: Triple, memory: None) -> tuple[Vector, Vector]:
        return server.x, server.y
