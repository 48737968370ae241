"""MeFBO, and MeFBO with STORM."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp

from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.core.schedules import Schedule, constant, largest, power
from fedbilevel.core.vectors import Vector, add
from fedbilevel.errors import FedbilevelError


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
class MoreauPenalty(Algorithm):
    """What MeFBO does with and without momenta: local steps along the directions of the penalised problem, and the
    server's step along what it makes of their means. Its state has the point z and the number t of the next round.
    """

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

    def move(self, clients: Clients, server: Any, h: Triple) -> Triple:
        """The server's step, to a feasible point."""
        z = server.z
        x = clients.project_x(z.x - self.lr_upper(server.t) * h.x)
        y = clients.project_y(z.y - self.lr_lower(server.t) * h.y)
        theta = clients.project_y(z.theta - self.lr_prox(server.t) * h.theta)
        return Triple(x, y, theta)

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

    def solution(self, server: Any, memory: None) -> tuple[Vector, Vector]:
        return server.z.x, server.z.y


@dataclass(frozen=True)
class MeFBO(MoreauPenalty):
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
    alone = "MEHA with its three steps at once"
    costs = "One exchange per round: p + 2d floats down and up; tau (1 Gf, 2 Gg) per client, no second derivatives"

    @classmethod
    def of_theorem(
        cls,
        rounds: int,
        local_steps: int,
        clients: int,
        c_lambda: float = 1.0,
        c_theta: float = 0.5,
        c_eta: float = 0.1,
        **more: Any,
    ) -> Self:
        """With the constant steps of Theorem 3.4, for T rounds of tau local steps with P clients: lambda_theta =
        c_lambda tau^(1/4) T^(-1/2), lambda_x = lambda_y = c_theta lambda_theta and eta = c_eta tau^(-7/8) T^(-1/4)
        P^(-1/2). The paper leaves the three constants open, up to the bounds of its Lemma D.8.

        >>> MeFBO.of_theorem(rounds=100, local_steps=1, clients=4).lr_prox
        constant(0.1)
        """
        theta = c_lambda * local_steps**0.25 * rounds**-0.5
        eta = c_eta * local_steps**-0.875 * rounds**-0.25 * clients**-0.5
        server = {"lr_prox": theta, "lr_upper": c_theta * theta, "lr_lower": c_theta * theta}
        local = dict.fromkeys(("local_lr_upper", "local_lr_lower", "local_lr_prox"), eta)
        return cls(**{**server, **local, "local_steps": local_steps, **more})

    def init(self, clients: Clients, x: Vector, y: Vector) -> MeFBOState:
        return MeFBOState(Triple(x, y, theta=y), jnp.asarray(0))

    def round(self, clients: Clients, server: MeFBOState) -> MeFBOState:
        h = clients.run(self.descend, *server).estimate()
        return MeFBOState(self.move(clients, server, h), server.t + 1)


class MeFBOStormState(NamedTuple):
    """The point, the one before, the momenta, how much of them is kept, and the number t of the next round."""

    z: Triple
    old: Triple
    d: Triple
    keep: jax.Array
    t: jax.Array


@dataclass(frozen=True)
class MeFBOStorm(MoreauPenalty):
    """MeFBO with STORM: the server steps along momenta that are corrected on the same batches at the last two points.

    The authors of MeFBO name this as the next step; how is ours. With H_i(z; B) the mean direction that client i of
    MeFBO sends, when it starts at z and draws the batches B, the server takes the step of MeFBO along d instead::

        d <- (n / |C|) sum_{i in C} w_i ( H_i(z_t; B) - (1 - a) H_i(z_{t-1}; B) ) + (1 - a) d

    In the first round d is the mean of the H_i.

    ==============  ==============   =====================
    paper           name             meaning
    ==============  ==============   =====================
    lambda_x        lr_upper         step of x on the server
    lambda_y        lr_lower         ... of y
    lambda_theta    lr_prox          ... of theta
    eta_x           local_lr_upper   step of x on the clients
    eta_y           local_lr_lower   ... of y
    eta_theta       local_lr_prox    ... of theta
    c_t             penalty          penalty, as in MeFBO
    gamma           prox             proximal parameter
    tau             local_steps      local steps between exchanges
    -               forgetting       a, the share of the momenta that is new in every round
    ==============  ==============   =====================

    Both points have the penalty of the current round.
    """

    citation = "Ours, from MeFBO and the momenta of Cutkosky, Orabona, NeurIPS 2019"
    source = "reconstruction: the paper names STORM as the next step and gives no listing"
    assumes = MeFBO.assumes
    exact = MeFBO.exact
    alone = "MEHA with its three steps at once, and STORM momenta"
    costs = (
        "One exchange per round: p + 2d floats down with full participation (p + 2d more for a client that missed the "
        "last round) and up; tau (2 Gf, 4 Gg) per client, no second derivatives"
    )

    forgetting: float = parameter(0.3, "share of the momenta that is new in every round", above=0, tune=(0.05, 1.0))

    def check(self) -> None:
        if largest(self.forgetting) > 1:
            raise FedbilevelError(f"MeFBOStorm: forgetting must be at most 1, not {self.forgetting}.")

    def init(self, clients: Clients, x: Vector, y: Vector) -> MeFBOStormState:
        z = Triple(x, y, theta=1 * y)  # a vector of its own, as later
        old, d = (Triple(*(factor * v for v in z)) for factor in (1, 0))
        return MeFBOStormState(z, old, d, jnp.zeros(()), jnp.asarray(0))

    def round(self, clients: Clients, server: MeFBOStormState) -> MeFBOStormState:
        z, old, d, keep, t = server
        change = clients.run(self.compare, z, old, keep, t).estimate()
        d = add(Triple(*(keep * v for v in d)), change)
        kept = jnp.full((), 1 - self.forgetting, keep.dtype)
        return MeFBOStormState(self.move(clients, server, d), z, d, kept, t + 1)

    def compare(self, client: Client, key: Key, z: Triple, old: Triple, keep: jax.Array, t: jax.Array) -> Triple:
        """The direction at one point minus what is kept of that at the other, on the same batches."""
        new, past = client.at_both(lambda point: self.descend(client, key, point, t), z, old)
        return Triple(*(n - keep * p for n, p in zip(new, past, strict=True)))
