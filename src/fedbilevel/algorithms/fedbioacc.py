"""FedBiOAcc."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.core.schedules import Schedule, constant
from fedbilevel.core.vectors import Vector, add, project_ball, sub
from fedbilevel.mathematics.hypergradient import Point, directions, feasible
from fedbilevel.mathematics.momenta import check_forgetting


class FedBiOAccState(NamedTuple):
    """The averaged point, the averaged momenta, and the time t of the next step."""

    z: Point
    d: Point
    t: jax.Array


class Memory(NamedTuple):
    """What a client keeps from exchange A to exchange B: where it stood before averaging, and its momenta there."""

    z: Point
    d: Point


@dataclass(frozen=True)
class FedBiOAcc(Algorithm):
    """FedBiOAcc: FedBiO with STORM momenta for x, y and u, which also cancel client drift.

    With z = (x, y, u), its directions D(z; B) = (grad_x f - d2xy g u, grad_y g, d2yy g u - grad_y f) and its momenta d
    = (nu, omega, q), every client at time t = 1, 2, ...::

        z_{t+1} = P( z_t - (eta, gamma, tau) alpha_t d_t )                        averaged if t mod I = 0 (exchange A)
        d_{t+1} = D(z_{t+1}; B) + (1 - c alpha_t^2) (d_t - D(z_t; B))             averaged if t mod I = 0 (exchange B)

    The same batches B serve both points. On averaging steps z_{t+1} is the average while z_t is the client's own point,
    so the two exchanges cannot be merged.

    =========  ==============   =====================
    paper      name             meaning
    =========  ==============   =====================
    eta        lr_upper         step of x
    gamma      lr_lower         step of y
    tau        lr_adjoint       step of u
    alpha_t    rate             common rate, constant or delta / (u0 + t)^(1/3)
    c_nu       c_upper          forgetting of the momentum of x
    c_omega    c_lower          ... of y
    c_u        c_adjoint        ... of u
    I          local_steps      steps between averages
    r          radius           bound on the norm of u
    b_1 / b    first_batch      how many times larger the batches of the first momenta are
    =========  ==============   =====================

    The first momenta are each client's own until the first average, so ``init`` takes the first I steps (a round of its
    own). In the paper, partial participation is empirical (Figure 2). If the problem has constraints, clients evaluate
    at feasible points and the server projects the average.
    """

    citation = (
        'Li, Huang, Huang: "Communication-Efficient Federated Bilevel Optimization with Global and Local Lower Level '
        'Problems", NeurIPS 2023, Algorithm 1 and eq. (7)-(8) (an earlier preprint has no P_r)'
    )
    source = "follows the paper"
    assumes = "g strongly convex in y, bounded heterogeneity and 0 <= c alpha_t^2 <= 1"
    exact = "exact for every I, with exact oracles and c = 0; c > 0 leaves a drift of order c alpha^2"
    alone = "SOBA with STORM momenta"
    costs = (
        "Two exchanges per round: 2 (p + 2d) floats down and up with full participation (a client that missed the "
        "last round needs the point again: p + 2d more down); I (4 Gf, 2 Gg, 2 J, 2 H) per client"
    )

    remembers = "round"

    lr_upper: float = parameter(20.0, "step size of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(0.5, "step size of the lower variable y", above=0, tune=(1e-3, 2.0))
    lr_adjoint: float = parameter(0.02, "step size of the adjoint u", above=0, tune=(1e-3, 2.0))
    rate: Schedule = parameter(constant(1.0), "common rate alpha_t: a number or cube_root(delta, u0)", above=0)
    c_upper: float = parameter(0.2, "forgetting rate of the momentum of x", least=0, tune=(1e-3, 1.0))
    c_lower: float = parameter(0.2, "forgetting rate of the momentum of y", least=0, tune=(1e-3, 1.0))
    c_adjoint: float = parameter(0.2, "forgetting rate of the momentum of u", least=0, tune=(1e-3, 1.0))
    local_steps: int = parameter(5, "local steps between averages", least=1)
    radius: float = parameter(float("inf"), "bound on the norm of the adjoint u", above=0)
    first_batch: int = parameter(5, "how many times larger the first batch is", least=1)
    shared_batch: bool = parameter(False, "use one batch of f and one of g for all terms of a step (cheaper)")

    def check(self) -> None:
        check_forgetting(self, ("c_upper", "c_lower", "c_adjoint"), self.rate.largest(), when=" at t = 1")

    def init(self, clients: Clients, x: Vector, y: Vector) -> FedBiOAccState:
        z, t = Point(x, y, clients.adjoint(y)), jnp.asarray(1)
        z = feasible(clients, add(z, clients.run(self.start, z, t).mean()))
        return self.synchronise_momenta(clients, z, t)

    def round(self, clients: Clients, server: FedBiOAccState) -> FedBiOAccState:
        z = feasible(clients, add(server.z, clients.run(self.descend, *server).mean()))  # exchange A
        return self.synchronise_momenta(clients, z, server.t)

    def synchronise_momenta(self, clients: Clients, z: Point, t: jax.Array) -> FedBiOAccState:
        d = clients.run(self.correct, z, t).mean()  # exchange B
        return FedBiOAccState(z, d, t + self.local_steps)

    def start(self, client: Client, memory: None, key: Key, z: Point, t: jax.Array) -> tuple[Memory, Point]:
        """The first momenta, on a larger batch, and the first local steps with them."""
        first, key = jax.random.split(key)
        d = directions(client.larger_batches(self.first_batch), z, first, self.shared_batch)
        return self.descend(client, memory, key, z, d, t)

    def descend(self, client: Client, memory: None, key: Key, z: Point, d: Point, t: jax.Array) -> tuple[Memory, Point]:
        """I - 1 local steps, then the half of the I-th that precedes exchange A."""

        def step(local: Memory, key: Key, i: Any) -> Memory:
            z = feasible(client, self.move(local, t + i))
            return Memory(z, self.momenta(client, key, z, local, t + i))

        local = client.repeat(self.local_steps - 1, step, Memory(z, d), key)
        return local, sub(self.move(local, t + self.local_steps - 1), z)

    def correct(self, client: Client, memory: Memory, key: Key, z: Point, t: jax.Array) -> tuple[Memory, Point]:
        """The other half: momenta at the averaged point."""
        return memory, self.momenta(client, key, z, memory, t + self.local_steps - 1)

    def move(self, local: Memory, t: jax.Array) -> Point:
        (x, y, u), (nu, omega, q), alpha = local.z, local.d, self.rate(t)
        return Point(
            x=x - self.lr_upper * alpha * nu,
            y=y - self.lr_lower * alpha * omega,
            u=project_ball(u - self.lr_adjoint * alpha * q, self.radius),
        )

    def momenta(self, client: Client, key: Key, z: Point, old: Memory, t: jax.Array) -> Point:
        new, past = (directions(client, point, key, self.shared_batch) for point in (z, old.z))
        kept = (1 - c * self.rate(t) ** 2 for c in (self.c_upper, self.c_lower, self.c_adjoint))
        return Point(*(n + keep * (d - p) for n, d, p, keep in zip(new, old.d, past, kept, strict=True)))

    def solution(self, server: FedBiOAccState, memory: None) -> tuple[Vector, Vector]:
        return server.z.x, server.z.y
