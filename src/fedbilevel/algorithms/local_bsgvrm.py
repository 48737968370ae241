"""Local-BSGVRM and Local-BSGM."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.core.schedules import largest
from fedbilevel.core.vectors import Vector, add, sub
from fedbilevel.mathematics.hypergradient import Pair, feasible
from fedbilevel.mathematics.momenta import check_forgetting
from fedbilevel.mathematics.neumann import local_directions


class LocalBSGVRMState(NamedTuple):
    """A point and the momenta there: of the server, or of a client from exchange A to exchange B."""

    z: Pair
    d: Pair


@dataclass(frozen=True)
class LocalBSGVRM(Algorithm):
    """Local-BSGVRM: local steps with STORM momenta along each client's own hypergradient; for identical clients only.

    With z = (x, y), the client's own directions D_m(z; xi) = (Phi_m(z; xi), grad_y g_m(z; xi)), where Phi_m inverts the
    client's own Hessian by a Neumann series with Q products, and momenta d = (u, v)::

        z_{t+1} = z_t - (beta_1, beta_2) eta d_t
        d_{t+1} = (1 - alpha eta^2) (d_t - D_m(z_t; xi)) + D_m(z_{t+1}; xi)

    The same batches xi serve both points. Every P steps the server averages x and y, and then u and v.

    ========  ==============   =====================
    paper     name             meaning
    ========  ==============   =====================
    beta_1    lr_upper         step of x
    beta_2    lr_lower         step of y
    1 / L     lr_adjoint       step of the Neumann series
    Q         neumann_steps    Hessian products of the Neumann series
    eta       rate             common rate
    alpha_1   c_upper          forgetting of the momentum of x
    alpha_2   c_lower          ... of y
    P         local_steps      steps between averages
    ========  ==============   =====================

    This takes the whole Neumann series, not a randomly truncated one. The paper does not treat partial participation.
    If the problem has constraints, every local step is projected.
    """

    citation = (
        'Gao: "On the Convergence of Momentum-Based Algorithms for Federated Bilevel Optimization Problems", arXiv '
        "2204.13299, 2022"
    )
    source = "reconstruction without the paper's text"
    assumes = "identical clients and g strongly convex in y"
    exact = (
        "not exact: the mean of inverses is not the inverse of the mean, and it goes to a zero of the mean of the "
        "clients' own hypergradients at the shared y"
    )
    alone = "MRBO"
    costs = (
        "Two exchanges per round: 2 (p + d) floats down and up with full participation (a client that missed the last "
        "round needs the point again: p + d more down); P (2 Gf, 2 Gg, 2 J, 2Q H) per client"
    )

    remembers = "round"

    lr_upper: float = parameter(20.0, "step size of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(0.5, "step size of the lower variable y", above=0, tune=(1e-3, 2.0))
    lr_adjoint: float = parameter(0.1, "step size of the Neumann series, below 1 / L", above=0, tune=(1e-3, 2.0))
    neumann_steps: int = parameter(10, "Hessian products of the Neumann series", least=0)
    rate: float = parameter(1.0, "common rate eta", above=0)
    c_upper: float = parameter(0.2, "forgetting rate of the momentum of x", least=0, tune=(1e-3, 1.0))
    c_lower: float = parameter(0.2, "forgetting rate of the momentum of y", least=0, tune=(1e-3, 1.0))
    local_steps: int = parameter(5, "local steps between averages", least=1)

    def check(self) -> None:
        check_forgetting(self, ("c_upper", "c_lower"), largest(self.rate))

    def init(self, clients: Clients, x: Vector, y: Vector) -> LocalBSGVRMState:
        return self.synchronise(clients, Pair(x, y), clients.run(self.start, Pair(x, y)).mean())

    def round(self, clients: Clients, server: LocalBSGVRMState) -> LocalBSGVRMState:
        return self.synchronise(clients, server.z, clients.run(self.descend, *server).mean())  # exchange A

    def synchronise(self, clients: Clients, z: Pair, moved: Pair) -> LocalBSGVRMState:
        z = feasible(clients, add(z, moved))
        return LocalBSGVRMState(z, clients.run(self.correct, z).mean())  # exchange B

    def start(self, client: Client, memory: None, key: Key, z: Pair) -> tuple[LocalBSGVRMState, Pair]:
        """The first momenta are each client's own."""
        first, key = jax.random.split(key)
        return self.descend(client, memory, key, z, self.directions(client, z, first))

    def descend(self, client: Client, memory: None, key: Key, z: Pair, d: Pair) -> tuple[LocalBSGVRMState, Pair]:
        """P - 1 local steps, then the half of the P-th that precedes exchange A."""

        def step(local: LocalBSGVRMState, key: Key, _: Any) -> LocalBSGVRMState:
            z = feasible(client, self.move(local))
            return LocalBSGVRMState(z, self.momenta(client, key, z, local))

        local = client.repeat(self.local_steps - 1, step, LocalBSGVRMState(z, d), key)
        return local, sub(self.move(local), z)

    def correct(self, client: Client, memory: LocalBSGVRMState, key: Key, z: Pair) -> tuple[LocalBSGVRMState, Pair]:
        """The other half: momenta at the averaged point."""
        return memory, self.momenta(client, key, z, memory)

    def move(self, local: LocalBSGVRMState) -> Pair:
        (x, y), (u, v) = local
        return Pair(x - self.lr_upper * self.rate * u, y - self.lr_lower * self.rate * v)

    def momenta(self, client: Client, key: Key, z: Pair, old: LocalBSGVRMState) -> Pair:
        new, past = (self.directions(client, point, key) for point in (z, old.z))
        u = (1 - self.c_upper * self.rate**2) * (old.d.x - past.x) + new.x
        v = (1 - self.c_lower * self.rate**2) * (old.d.y - past.y) + new.y
        return Pair(u, v)

    def directions(self, client: Client, z: Pair, key: Key) -> Pair:
        return local_directions(client, z, key, self.lr_adjoint, self.neumann_steps)

    def solution(self, server: LocalBSGVRMState, memory: None) -> tuple[Vector, Vector]:
        return server.z


@dataclass(frozen=True)
class LocalBSGM(Algorithm):
    """Local-BSGM: local steps along moving averages of each client's own directions; for identical clients only.

    With z = (x, y), the directions D_m(z; xi) = (Phi_m(z; xi), grad_y g_m(z; xi)) of Local-BSGVRM, and momenta d = (u,
    v), which start at 0, every client takes P steps::

        d_t     = (1 - alpha eta) d_{t-1} + alpha eta D_m(z_t; xi)
        z_{t+1} = z_t - (beta_1, beta_2) eta d_t

    and then the server averages x, y, u and v.

    ========  ==============   =====================
    paper     name             meaning
    ========  ==============   =====================
    beta_1    lr_upper         step of x
    beta_2    lr_lower         step of y
    1 / L     lr_adjoint       step of the Neumann series
    Q         neumann_steps    Hessian products of the Neumann series
    eta       rate             common rate
    alpha_1   c_upper          how much of the momentum of x is new in a step
    alpha_2   c_lower          ... of y
    P         local_steps      steps between averages
    ========  ==============   =====================

    This takes the whole Neumann series, not a randomly truncated one. The paper does not treat partial participation.
    If the problem has constraints, every local step is projected.
    """

    citation = LocalBSGVRM.citation
    source = LocalBSGVRM.source
    assumes = LocalBSGVRM.assumes
    exact = f"{LocalBSGVRM.exact}; with P > 1 and constant steps, client drift displaces the limit further"
    alone = "one step of x and y along moving averages of their directions"
    costs = "One exchange per round: 2 (p + d) floats down and up; P (1 Gf, 1 Gg, 1 J, Q H) per client"

    lr_upper: float = parameter(20.0, "step size of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(0.5, "step size of the lower variable y", above=0, tune=(1e-3, 2.0))
    lr_adjoint: float = parameter(0.1, "step size of the Neumann series, below 1 / L", above=0, tune=(1e-3, 2.0))
    neumann_steps: int = parameter(10, "Hessian products of the Neumann series", least=0)
    rate: float = parameter(1.0, "common rate eta", above=0)
    c_upper: float = parameter(0.2, "share of the momentum of x that is new", above=0, tune=(1e-3, 1.0))
    c_lower: float = parameter(0.2, "share of the momentum of y that is new", above=0, tune=(1e-3, 1.0))
    local_steps: int = parameter(5, "local steps between averages", least=1)

    def check(self) -> None:
        check_forgetting(self, ("c_upper", "c_lower"), largest(self.rate), power=1)

    def init(self, clients: Clients, x: Vector, y: Vector) -> LocalBSGVRMState:
        return LocalBSGVRMState(Pair(x, y), Pair(0 * x, 0 * y))

    def round(self, clients: Clients, server: LocalBSGVRMState) -> LocalBSGVRMState:
        z, d = add(server, clients.run(self.descend, server).mean())
        return LocalBSGVRMState(feasible(clients, z), d)

    def descend(self, client: Client, key: Key, server: LocalBSGVRMState) -> LocalBSGVRMState:
        def step(local: LocalBSGVRMState, key: Key, _: Any) -> LocalBSGVRMState:
            z, (u, v) = feasible(client, local.z), local.d
            D = local_directions(client, z, key, self.lr_adjoint, self.neumann_steps)
            u = u + self.c_upper * self.rate * (D.x - u)
            v = v + self.c_lower * self.rate * (D.y - v)
            z = Pair(z.x - self.lr_upper * self.rate * u, z.y - self.lr_lower * self.rate * v)
            return LocalBSGVRMState(z, Pair(u, v))

        return sub(client.repeat(self.local_steps, step, server, key), server)

    def solution(self, server: LocalBSGVRMState, memory: None) -> tuple[Vector, Vector]:
        return server.z
