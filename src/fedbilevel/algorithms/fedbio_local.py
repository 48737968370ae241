"""FedBiO-Local and DistBiO."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.hypergradient import feasible
from fedbilevel.neumann import Pair, local_directions
from fedbilevel.vectors import Vector


class Server(NamedTuple):
    """The averaged upper variable: all that is ever sent."""

    x: Vector


class Memory(NamedTuple):
    """A client's own lower variable."""

    y: Vector


@dataclass(frozen=True)
class FedBiOLocal(Algorithm):
    """FedBiO-Local: every client trains its own y; local steps on x and y at once, x averaged once per round.

    Li, Huang, Huang: "Communication-Efficient Federated Bilevel Optimization with Global and Local Lower Level
    Problems", NeurIPS 2023, Algorithm 3 and eq. (11).

    Every client, with independent batches for the two directions, both at its own (x, y) of time t::

        x <- x - eta   Phi_m(x, y)            the client's own hypergradient, a Neumann series with Q Hessian products
        y <- y - gamma grad_y g_m(x, y)

    and after I such steps the server averages x. y never leaves its client.

    ========  ==============   =====================
    paper     name             meaning
    ========  ==============   =====================
    eta       lr_upper         step of x
    gamma     lr_lower         step of y
    tau       lr_adjoint       step of the Neumann series, below 1 / L
    Q         neumann_steps    Hessian products of the Neumann series
    I         local_steps      steps between averages
    ========  ==============   =====================

    One exchange per round: p floats down and up; I (1 Gf, 1 Gg, 1 J, Q H) per client. Assumes a local lower level, g
    strongly convex in y, and bounded heterogeneity of f, of the second derivatives of g and of the y*. Follows the
    paper. With I = 1 the limit is exact on heterogeneous clients up to the truncation of the series, of order (1 -
    tau mu)^(Q+1); with I > 1 and constant steps it is displaced by client drift. With partial participation, which
    the paper does not treat, the y of a client that does not take part waits as it is. Where the problem has
    constraints, every local step is projected.
    """

    lr_upper: float = parameter(1.0, "step of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(0.4, "step of the lower variable y", above=0, tune=(1e-3, 2.0))
    lr_adjoint: float = parameter(0.1, "step of the Neumann series, below 1 / L", above=0, tune=(1e-3, 2.0))
    neumann_steps: int = parameter(10, "Hessian products of the Neumann series", least=0)
    local_steps: int = parameter(5, "local steps between averages", least=1)

    lower_level: ClassVar[str] = "local"
    remembers: ClassVar[Literal["nothing", "round", "run"]] = "run"

    def memory(self, x: Vector, y: Vector) -> Memory:
        return Memory(y)

    def init(self, clients: Clients, x: Vector, y: Vector) -> Server:
        return Server(x)

    def round(self, clients: Clients, server: Server) -> Server:
        return Server(clients.project_x(server.x + clients.run(self.descend, server.x).mean()))

    def descend(self, client: Client, memory: Memory, key: Key, x: Vector) -> tuple[Memory, Vector]:
        def step(z: Pair, key: Key, _: Any) -> Pair:
            z = feasible(client, z)
            nu, omega = local_directions(client, z, key, self.lr_adjoint, self.neumann_steps)
            return Pair(z.x - self.lr_upper * nu, z.y - self.lr_lower * omega)

        z = client.repeat(self.local_steps, step, Pair(x, memory.y), key)
        return Memory(client.project_y(z.y)), z.x - x

    def solution(self, server: Server, memory: Memory) -> tuple[Vector, Vector]:
        return server.x, memory.y


@dataclass(frozen=True)
class DistBiO(FedBiOLocal):
    """DistBiO: FedBiO-Local with an average after every step.

    Li, Huang, Huang: "Communication-Efficient Federated Bilevel Optimization with Global and Local Lower Level
    Problems", NeurIPS 2023, section 5.2: Algorithm 3 with I = 1.

    ========  ==============   =====================
    paper     name             meaning
    ========  ==============   =====================
    eta       lr_upper         step of x
    gamma     lr_lower         step of y
    tau       lr_adjoint       step of the Neumann series, below 1 / L
    Q         neumann_steps    Hessian products of the Neumann series
    ========  ==============   =====================

    One exchange per round: p floats down and up; 1 Gf, 1 Gg, 1 J, Q H per client. Assumes what FedBiO-Local does.
    Follows the paper. The limit is exact on heterogeneous clients up to the truncation of the series. Partial
    participation and constraints are as in FedBiO-Local.
    """

    local_steps: ClassVar[int] = 1  # pyright: ignore[reportIncompatibleVariableOverride] - no hyper-parameter any more
