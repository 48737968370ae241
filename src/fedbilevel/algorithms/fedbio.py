"""FedBiO."""

from dataclasses import dataclass
from typing import Any

from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.core.vectors import Vector, add, project_ball, sub
from fedbilevel.mathematics.hypergradient import Point, directions, feasible


@dataclass(frozen=True)
class FedBiO(Algorithm):
    """FedBiO: local steps on x, y and the adjoint u at once, averaged once per round.

    Every client, with independent batches for the five terms, all evaluated at its own (x, y, u) of time t::

        x <- x - eta   ( grad_x f - d2xy g u )
        y <- y - gamma grad_y g
        u <- P_r( u - tau ( d2yy g u - grad_y f ) )

    and after I such steps the server averages x, y and u.

    ========  ==============   =====================
    paper     name             meaning
    ========  ==============   =====================
    eta       lr_upper         step of x
    gamma     lr_lower         step of y
    tau       lr_adjoint       step of u
    I         local_steps      steps between averages
    r         radius           bound on the norm of u; C_f / mu in the theory, infinite by default
    ========  ==============   =====================

    The paper leaves the first u open; here it is 0. If the problem has constraints, clients evaluate at feasible points
    and the server projects the average.
    """

    citation = (
        'Li, Huang, Huang: "Communication-Efficient Federated Bilevel Optimization with Global and Local Lower Level '
        'Problems", NeurIPS 2023, Algorithm 2 and eq. (6) (an earlier preprint has no projection P_r)'
    )
    source = "follows the paper"
    assumes = "g strongly convex in y and bounded heterogeneity"
    exact = (
        "exact with I = 1; with I > 1 and constant steps, client drift displaces the limit, in proportion to the "
        "steps and to I - 1"
    )
    alone = "SOBA with constant steps (one local step and a shared batch)"
    costs = "One exchange per round: p + 2d floats down and up; I (2 Gf, 1 Gg, 1 J, 1 H) per client"

    lr_upper: float = parameter(20.0, "step size of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(0.5, "step size of the lower variable y", above=0, tune=(1e-3, 2.0))
    lr_adjoint: float = parameter(0.02, "step size of the adjoint u", above=0, tune=(1e-3, 2.0))
    local_steps: int = parameter(5, "local steps between averages", least=1)
    radius: float = parameter(float("inf"), "bound on the norm of the adjoint u", above=0)
    shared_batch: bool = parameter(False, "use one batch of f and one of g for all terms of a step (cheaper)")

    def init(self, clients: Clients, x: Vector, y: Vector) -> Point:
        return Point(x, y, clients.adjoint(y))

    def round(self, clients: Clients, server: Point) -> Point:
        return feasible(clients, add(server, clients.run(self.descend, server).mean()))

    def descend(self, client: Client, key: Key, z: Point) -> Point:
        def step(z: Point, key: Key, _: Any) -> Point:
            z = feasible(client, z)
            nu, omega, q = directions(client, z, key, self.shared_batch)
            return Point(
                x=z.x - self.lr_upper * nu,
                y=z.y - self.lr_lower * omega,
                u=project_ball(z.u - self.lr_adjoint * q, self.radius),
            )

        return sub(client.repeat(self.local_steps, step, z, key), z)

    def solution(self, server: Point, memory: None) -> tuple[Vector, Vector]:
        return server.x, server.y
