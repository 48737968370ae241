"""F2SA."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.core.schedules import Schedule, constant, power
from fedbilevel.core.vectors import Vector


class LowerPair(NamedTuple):
    """y, which minimises f / lambda + g, and z, which minimises g; or a direction for each."""

    y: Vector
    z: Vector


class F2SAState(NamedTuple):
    """The upper variable, the two lower variables, and the number k of the next round, from 0."""

    x: Vector
    lower: LowerPair
    k: jax.Array


@dataclass(frozen=True)
class F2SA(Algorithm):
    """F2SA: gradients only; the hypergradient is a difference of gradients at two lower variables. Federated here.

    The paper's method is for one party. All its directions are linear in f and g, so the clients' means are exact.

    In round k, with fresh batches for f, for g at y and for g at z, T exchanges of the form::

        y <- y - alpha_k lambda_k ( grad_y f(x, y) / lambda_k + grad_y g(x, y) )
        z <- z - gamma_k grad_y g(x, z)

    then one exchange for x (as lambda grows, this tends to the hypergradient)::

        x <- x - xi alpha_k ( grad_x f(x, y) + lambda_k ( grad_x g(x, y) - grad_x g(x, z) ) )

    ================  ==============   =====================
    paper             name             meaning
    ================  ==============   =====================
    xi alpha_k        lr_upper         step of x; k^(-5/7) in the theory
    alpha_k lambda_k  lr_lower         step of y, along the direction divided by lambda; k^(-4/7) in the theory
    gamma_k           lr_auxiliary     step of z; k^(-4/7) in the theory
    lambda_k          penalty          weight of g against f, constant or growing; k^(1/7) in the theory
    T                 lower_steps      steps of y and z, of one exchange each, before every step of x
    -                 returns          which of z and y is the solution
    ================  ==============   =====================

    The exponents, for noise at both levels, are from memory of the paper. They fit the rate that its abstract states,
    K^(-2/7): both the squared bias, 1 / lambda_K^2, and 1 / sum alpha_k are of this order.

    The solution is x with z, the model that is trained on g alone, as y*(x) is. ``returns="y"`` gives the paper's y,
    which also descends on f / lambda and lies O(1 / lambda) from it.

    With partial participation the cohort's weights are renormalised. Clients evaluate at feasible points, since the
    server projects x, y and z.
    """

    citation = 'Kwon, Kwon, Wright, Nowak: "A Fully First-Order Method for Stochastic Bilevel Optimization", ICML 2023'
    source = "reconstruction without the paper's text; the federation is ours"
    assumes = "g strongly convex in y"
    exact = (
        "off the solution by a term of order 1 / lambda, on identical clients, too; heterogeneity adds nothing, as "
        "there are no local steps"
    )
    alone = "F2SA"
    costs = (
        "T + 1 exchanges per round: p + 2 T d floats down with full participation (a client that missed the last "
        "round needs y and z again: 2d more) and p + 2 T d up; (T + 1) (1 Gf, 2 Gg) per client, no second derivatives"
    )

    steps: ClassVar[Mapping[str, str]] = {**Algorithm.steps, "z": "lr_auxiliary"}

    lr_upper: Schedule = parameter(constant(0.1), "step size of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: Schedule = parameter(constant(0.1), "step size of the lower variable y", above=0, tune=(1e-3, 2.0))
    lr_auxiliary: Schedule = parameter(
        constant(0.1), "step size of z, the minimiser of g alone", above=0, tune=(1e-3, 2.0)
    )
    penalty: Schedule = parameter(
        power(10.0, 1 / 7), "weight of g relative to f; the bias is of order 1 / penalty", above=0
    )
    lower_steps: int = parameter(10, "exchanges for y and z before every step of x", least=1)
    returns: str = parameter("z", "which lower variable is the solution: z or y", choices=("z", "y"))

    def init(self, clients: Clients, x: Vector, y: Vector) -> F2SAState:
        return F2SAState(x, LowerPair(y, z=y), jnp.asarray(0))

    def round(self, clients: Clients, server: F2SAState) -> F2SAState:
        x, lower, k = server

        def step(clients: Clients, lower: LowerPair) -> LowerPair:
            d = clients.run(self.lower, x, lower, k).mean()
            y = clients.project_y(lower.y - self.lr_lower(k) * d.y)
            return LowerPair(y, clients.project_y(lower.z - self.lr_auxiliary(k) * d.z))

        lower = step(clients, lower)  # before the loop, as it is the one that sends x
        if self.lower_steps > 1:
            lower = clients.repeat(self.lower_steps - 1, step, lower)
        h = clients.run(self.upper, x, lower, k).mean()
        return F2SAState(clients.project_x(x - self.lr_upper(k) * h), lower, k + 1)

    def lower(self, client: Client, key: Key, x: Vector, lower: LowerPair, k: Any) -> LowerPair:
        """Directions of y and z."""
        (y, z), (xi, at_y, at_z) = lower, jax.random.split(key, 3)
        dy = client.f.dy(x, y, xi) / self.penalty(k) + client.g.dy(x, y, at_y)
        return LowerPair(dy, client.g.dy(x, z, at_z))

    def upper(self, client: Client, key: Key, x: Vector, lower: LowerPair, k: Any) -> Vector:
        """The direction of x."""
        (y, z), (xi, at_y, at_z) = lower, jax.random.split(key, 3)
        difference = client.g.dx(x, y, at_y) - client.g.dx(x, z, at_z)
        return client.f.dx(x, y, xi) + self.penalty(k) * difference

    def solution(self, server: F2SAState, memory: None) -> tuple[Vector, Vector]:
        return server.x, server.lower.z if self.returns == "z" else server.lower.y
