"""FedMSA."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.core.schedules import largest
from fedbilevel.core.vectors import Vector, add, sub
from fedbilevel.errors import FedbilevelError
from fedbilevel.mathematics.hypergradient import Point, directions, feasible


class FedMSAState(NamedTuple):
    """The point, its momenta, and how much of them the next exchange keeps: nothing at first, then 1 - rho."""

    z: Point
    d: Point
    keep: jax.Array


@dataclass(frozen=True)
class FedMSA(Algorithm):
    """FedMSA (FedBLO): momenta from all clients, then local steps along them that correct for client drift.

    With z = (x, y, v) and D = (grad_x f - d2xy g v, grad_y g, d2yy g v - grad_y f), in round r::

        (A)  d^r = mean_m( D_m(z^r) - (1 - rho) D_m(z^{r-1}) ) + (1 - rho) d^{r-1}          with rho = 1 at first
        (B)  some clients, from z_0 = z^r and d_0 = d^r:   z_{k+1} = z_k - (alpha, beta, beta) d_k
                                                           d_{k+1} = d_k + D_m(z_{k+1}) - D_m(z_k),   k = 0 .. tau - 1
             z^{r+1} = the mean of their z_tau

    Both terms of a difference are taken on the same batch. Every client remembers z^{r-1} itself.

    ========  ==============   =====================
    paper     name             meaning
    ========  ==============   =====================
    alpha     lr_upper         step of x
    beta      lr_lower         step of y
    beta      lr_adjoint       step of v
    rho       forgetting       share of the momenta that is new in every round; 1 means no momentum
    tau       local_steps      local steps between averages
    |S|       movers           clients that take local steps, drawn from those that take part; 0 means all of them
    ========  ==============   =====================

    The authors' code uses all the data in every evaluation, so it need not repeat those at the last point, and it
    begins with rounds that train y and v alone; here the first v is 0. With partial participation a client that missed
    rounds compares with the last point that it saw. If the problem has constraints, every local step is projected.
    """

    citation = (
        'Tarzanagh, Li, Sharma, Oymak: "Federated Multi-Sequence Stochastic Approximation with Local Hypergradient '
        'Estimation", 2023'
    )
    source = "reconstruction without the paper's text, from the code its authors released"
    assumes = "g strongly convex in y and bounded heterogeneity"
    exact = "exact for every tau, with exact oracles and if all clients take part in (A), as the method intends"
    alone = "SOBA with STORM momenta"
    costs = "Two exchanges per round: 2 (p + 2d) floats down and up; 2 tau (2 Gf, 1 Gg, 1 J, 1 H) per client"

    remembers = "run"

    lr_upper: float = parameter(0.05, "step size of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(0.1, "step size of the lower variable y", above=0, tune=(1e-3, 2.0))
    lr_adjoint: float = parameter(0.1, "step size of the adjoint v", above=0, tune=(1e-3, 2.0))
    forgetting: float = parameter(0.5, "share of the momenta that is new in every round", above=0, tune=(0.05, 1.0))
    local_steps: int = parameter(4, "local steps between averages", least=1)
    movers: int = parameter(0, "clients that take local steps (0: all that take part)", least=0)
    shared_batch: bool = parameter(False, "use one batch of f and one of g for all terms of a step (cheaper)")

    def check(self) -> None:
        if largest(self.forgetting) > 1:
            raise FedbilevelError(f"FedMSA: forgetting must be at most 1, not {self.forgetting}.")

    def memory(self, x: Vector, y: Vector) -> Point:
        return Point(x, y, u=0 * y)

    def init(self, clients: Clients, x: Vector, y: Vector) -> FedMSAState:
        return FedMSAState(Point(x, y, clients.adjoint(y)), Point(0 * x, 0 * y, 0 * y), jnp.zeros(()))

    def round(self, clients: Clients, server: FedMSAState) -> FedMSAState:
        z, keep = server.z, server.keep
        d = add(Point(*(keep * v for v in server.d)), clients.run(self.compare, z, keep).mean())
        movers = clients.sample(self.movers) if self.movers else clients
        z = feasible(clients, add(z, movers.run(self.descend, z, d).mean()))
        return FedMSAState(z, d, jnp.full((), 1 - self.forgetting))

    def compare(self, client: Client, memory: Point, key: Key, z: Point, keep: jax.Array) -> tuple[Point, Point]:
        """What the momenta gain from the last server point to this one; the client remembers this one."""
        new, old = (directions(client, point, key, self.shared_batch) for point in (z, memory))
        return z, Point(*(n - keep * o for n, o in zip(new, old, strict=True)))

    def descend(self, client: Client, memory: Point, key: Key, z: Point, d: Point) -> tuple[Point, Point]:
        """Local steps; the momenta follow the client's own directions."""

        def step(carry: tuple[Point, Point], key: Key, _: Any) -> tuple[Point, Point]:
            z, d = carry
            moved = feasible(client, self.move(z, d))
            new, old = (directions(client, point, key, self.shared_batch) for point in (moved, z))
            return moved, add(d, sub(new, old))

        # The last step has no use for new momenta.
        last = self.move(*client.repeat(self.local_steps - 1, step, (z, d), key))
        return memory, sub(last, z)

    def move(self, z: Point, d: Point) -> Point:
        return Point(
            x=z.x - self.lr_upper * d.x,
            y=z.y - self.lr_lower * d.y,
            u=z.u - self.lr_adjoint * d.u,
        )

    def solution(self, server: FedMSAState, memory: Point) -> tuple[Vector, Vector]:
        return server.z.x, server.z.y
