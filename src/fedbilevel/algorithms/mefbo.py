"""MeFBO."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.core.schedules import Schedule, constant, power
from fedbilevel.core.vectors import Vector, add


class Triple(NamedTuple):
    """The upper variable x, the lower variable y, and theta, the proximal point of y; or a direction for each."""

    x: Vector
    y: Vector
    theta: Vector


class MeFBOState(NamedTuple):
    """The point, and the number t of the next round, from 0."""

    z: Triple
    t: jax.Array


@dataclass(frozen=True)
class MeFBO(Algorithm):
    """MeFBO: gradients only; the lower level becomes a penalty on g minus its Moreau envelope.

    The saddle problem is linear in f and g::

        min_{x, y} max_theta  f(x, y) / c + g(x, y) - g(x, theta) - |theta - y|^2 / (2 gamma)

    Client i takes the steps k = 0 .. tau - 1 on all three variables at once, with one batch of f and one of g for all
    terms of a step, and sends the means of its directions. The server takes one step and projects::

        h_theta = grad_y g(x, theta) + (theta - y) / gamma
        h_y     = grad_y f(x, y) / c_t + grad_y g(x, y) - (y - theta) / gamma
        h_x     = grad_x f(x, y) / c_t + grad_x g(x, y) - grad_x g(x, theta)

        (x, y, theta)_i <- (x, y, theta)_i - eta h_i
        (x, y, theta)   <- Proj( (x, y, theta) - lambda (n / |C|) sum_{i in C} w_i mean_k h_i )

    All steps are constant or change with the round t, from 0. The decreasing steps of Theorem C.1, with P clients per
    round, 1/2 < q < 1 and p < (1 - q) / 2, are lambda_theta = power(c_lambda tau^(1/4), -q), lambda_x = lambda_y =
    power(c_theta c_lambda tau^(1/4), -q) and, for all three, eta = power(c_eta tau^(-7/8) P^(-1/2), -1/4).

    ==============  ==============   =====================
    paper           name             meaning
    ==============  ==============   =====================
    lambda_x        lr_upper         step of x on the server
    lambda_y        lr_lower         ... of y
    lambda_theta    lr_prox          ... of theta
    eta_x           local_lr_upper   step of x on the clients
    eta_y           local_lr_lower   ... of y
    eta_theta       local_lr_prox    ... of theta
    c_t             penalty          penalty c (t + 1)^p, written power(c, p); p in (0, 1/4) in the theory
    gamma           prox             proximal parameter; below 1 / (2 L) in the theory, L the smoothness of g
    tau             local_steps      local steps between exchanges
    ==============  ==============   =====================

    The paper leaves the first theta open; here it is y. h_x is of order 1 / c; with equal steps for y and theta and
    gamma L of order 1, the step of x may grow with c. Theta must keep up with y: if gamma L is small, lambda_y must be
    below lambda_theta. The defaults are stable on quadratics; the steps of the paper's experiments (0.1, 0.1, 0.07 with
    gamma 0.015) are not. Cohorts are drawn without replacement, with weights n w_i / |C|.
    """

    citation = (
        '"MeFBO: A Moreau Envelope Based First-order Stochastic Gradient Method for Nonconvex Federated Bilevel '
        'Optimization", Algorithm 1 and eq. (8)-(12)'
    )
    source = "follows the paper, also in that only the server projects"
    assumes = "f Lipschitz, f and g smooth, bounded heterogeneity; g need not be convex in y"
    exact = (
        "the limit is that of the penalised problem: for g with curvature mu, y misses y*(x) by about (1 + gamma mu) "
        "/ (c gamma mu^2) times grad_y f, on identical clients, too; with tau > 1 and constant eta, client drift "
        "displaces it as well"
    )
    costs = "One exchange per round: p + 2d floats down and up; tau (1 Gf, 2 Gg) per client, no second derivatives"

    steps: ClassVar[Mapping[str, str]] = {**Algorithm.steps, "theta": "lr_prox"}

    lr_upper: Schedule = parameter(constant(0.1), "step size of x on the server", above=0, tune=(1e-3, 1e3))
    lr_lower: Schedule = parameter(constant(0.05), "step size of y on the server", above=0, tune=(1e-3, 2.0))
    lr_prox: Schedule = parameter(constant(0.1), "step size of theta on the server", above=0, tune=(1e-3, 2.0))
    local_lr_upper: Schedule = parameter(constant(0.1), "step size of x on the clients", least=0, tune=(1e-3, 1e3))
    local_lr_lower: Schedule = parameter(constant(0.05), "step size of y on the clients", least=0, tune=(1e-3, 2.0))
    local_lr_prox: Schedule = parameter(constant(0.1), "step size of theta on the clients", least=0, tune=(1e-3, 2.0))
    penalty: Schedule = parameter(power(2.7, 0.001), "weight of the lower level relative to f; may grow", above=0)
    prox: float = parameter(0.1, "proximal parameter of the Moreau envelope", above=0, tune=(1e-3, 1.0))
    local_steps: int = parameter(1, "local steps between exchanges", least=1)

    def init(self, clients: Clients, x: Vector, y: Vector) -> MeFBOState:
        return MeFBOState(Triple(x, y, theta=y), jnp.asarray(0))

    def round(self, clients: Clients, server: MeFBOState) -> MeFBOState:
        z, h = server.z, clients.run(self.descend, *server).estimate()
        x = clients.project_x(z.x - self.lr_upper(server.t) * h.x)
        y = clients.project_y(z.y - self.lr_lower(server.t) * h.y)
        theta = clients.project_y(z.theta - self.lr_prox(server.t) * h.theta)
        return MeFBOState(Triple(x, y, theta), server.t + 1)

    def descend(self, client: Client, key: Key, z: Triple, t: jax.Array) -> Triple:
        def step(carry: tuple[Triple, Triple], key: Key, _: Any) -> tuple[Triple, Triple]:
            z, total = carry
            moved, h = self.step(client, z, t, key)
            return moved, add(total, h)

        nothing = Triple(*(0 * v for v in z))
        _, total = client.repeat(self.local_steps, step, (z, nothing), key)
        return Triple(*(v / self.local_steps for v in total))

    def step(self, client: Client, z: Triple, t: jax.Array, key: Key) -> tuple[Triple, Triple]:
        """A local step: where it leads, and the directions it takes."""
        h = self.directions(client, z, t, key)
        moved = Triple(
            x=z.x - self.local_lr_upper(t) * h.x,
            y=z.y - self.local_lr_lower(t) * h.y,
            theta=z.theta - self.local_lr_prox(t) * h.theta,
        )
        return moved, h

    def directions(self, client: Client, z: Triple, t: jax.Array, key: Key) -> Triple:
        """A client's share of the directions that descend in x and y and ascend in theta."""
        (x, y, theta), c = z, self.penalty(t)
        xi, zeta = jax.random.split(key)
        fx, fy = client.f.gradients(x, y, xi)
        gx, gy = client.g.gradients(x, y, zeta)
        gx_theta, gy_theta = client.g.gradients(x, theta, zeta)
        pull = (theta - y) / self.prox
        return Triple(x=fx / c + gx - gx_theta, y=fy / c + gy + pull, theta=gy_theta + pull)

    def solution(self, server: MeFBOState, memory: None) -> tuple[Vector, Vector]:
        return server.z.x, server.z.y
