"""Alternating."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.core.schedules import Schedule, constant
from fedbilevel.core.vectors import Vector, sub
from fedbilevel.mathematics.hypergradient import Pair, feasible


class AlternatingState(NamedTuple):
    """The averaged x and y, the server's moments of the direction of y, and how many rounds it has seen."""

    x: Vector
    y: Vector
    mean: Vector
    square: Vector
    t: jax.Array


@dataclass(frozen=True)
class Alternating(Algorithm):
    """Alternating: x and y each descend along their own gradient; no adjoint, no second derivatives.

    Every client takes I local steps, both at its own (x, y) of time t::

        x <- x - eta grad_x f(x, y)
        y <- y - gamma grad_y g(x, y)

    The server averages x, and y unless it has an optimizer of its own: with Adam, y moves along the mean D of what the
    clients moved, divided by - I gamma, which is the mean gradient if I = 1::

        m <- b_1 m + (1 - b_1) D,     v <- b_2 v + (1 - b_2) D^2
        y <- y - alpha_t (m / (1 - b_1^t)) / (sqrt(v / (1 - b_2^t)) + eps)

    ==========  ==============   =====================
    paper       name             meaning
    ==========  ==============   =====================
    eta         lr_upper         step of x
    gamma       lr_lower         the clients' step of y
    I           local_steps      steps between averages
    -           server           "average", or "adam"
    alpha_t     lr_server        the server's step of y with Adam: a number or a schedule
    b_1, b_2    beta1, beta2     how long Adam remembers
    eps         epsilon          keeps Adam's denominators positive
    ==========  ==============   =====================

    It leaves out how y*(x) depends on x, so in general its limit is not the bilevel solution but a point where
    grad_x f = 0 and grad_y g = 0. That is what one wants where x explains the validation rows directly, as the noise
    model of label errors does: grad_x f is then the step of expectation maximization. A private x costs nothing. With
    one local step on all rows, y moves exactly as on one machine with all clients' rows, however much clients differ.
    """

    citation = (
        'Liu, Simonyan, Yang: "DARTS: Differentiable Architecture Search", ICLR 2019 (first order); He, Annavaram, '
        'Avestimehr: "Towards Non-I.I.D. and Invisible Data with FedNAS", 2020; with the server\'s Adam of Reddi and '
        'others: "Adaptive Federated Optimization", ICLR 2021'
    )
    source = "reconstruction: both variables step at once, FedNAS alternates by epochs; Adam as on one machine"
    assumes = "that grad_x f alone is the direction that is wanted"
    exact = "not the bilevel solution; with I > 1 and constant steps, client drift displaces the limit further"
    alone = "first-order DARTS, with one local step"
    costs = "One exchange per round: p + d floats down and up (d if x is private); I (1 Gf, 1 Gg) per client"

    lr_upper: float = parameter(0.5, "step size of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(0.5, "step size of the model y", above=0, tune=(1e-3, 2.0))
    local_steps: int = parameter(1, "local steps between averages", least=1)
    server: str = parameter("average", "how the server moves y: average or adam", choices=("average", "adam"))
    lr_server: Schedule = parameter(constant(0.02), "the server's step of y with Adam", above=0)
    beta1: float = parameter(0.9, "how much of its first moment Adam keeps", least=0)
    beta2: float = parameter(0.99, "how much of its second moment Adam keeps", least=0)
    epsilon: float = parameter(1e-8, "added to Adam's denominators", above=0)

    def init(self, clients: Clients, x: Vector, y: Vector) -> AlternatingState:
        return AlternatingState(x, y, 0 * y, 0 * y, jnp.asarray(0))

    def round(self, clients: Clients, server: AlternatingState) -> AlternatingState:
        x, y, mean, square, t = server
        moved = clients.run(self.descend, Pair(x, y)).mean()
        x = clients.project_x(x + moved.x)
        if self.server == "average":
            return AlternatingState(x, clients.project_y(y + moved.y), mean, square, t + 1)
        direction = moved.y / (-self.lr_lower * self.local_steps)
        mean = self.beta1 * mean + (1 - self.beta1) * direction
        square = self.beta2 * square + (1 - self.beta2) * direction.map(jnp.square)
        first, second = mean / (1 - self.beta1 ** (t + 1)), square / (1 - self.beta2 ** (t + 1))
        step = first.map(lambda m, v: m / (jnp.sqrt(v) + self.epsilon), second)
        y = clients.project_y(y - self.lr_server(t + 1) * step)
        return AlternatingState(x, y, mean, square, t + 1)

    def descend(self, client: Client, key: Key, z: Pair) -> Pair:
        def step(z: Pair, key: Key, _: Any) -> Pair:
            z, (upper, lower) = feasible(client, z), jax.random.split(key)
            return Pair(
                x=z.x - self.lr_upper * client.f.dx(*z, upper),
                y=z.y - self.lr_lower * client.g.dy(*z, lower),
            )

        return sub(client.repeat(self.local_steps, step, z, key), z)

    def solution(self, server: AlternatingState, memory: None) -> tuple[Vector, Vector]:
        return server.x, server.y
