"""FedBiO-Local and DistBiO."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax

from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.core.vectors import Vector
from fedbilevel.mathematics.hypergradient import Pair, feasible
from fedbilevel.mathematics.neumann import check_restart, neumann_hypergradient, trained


class FedBiOLocalState(NamedTuple):
    """The averaged upper variable: all that is ever sent."""

    x: Vector


class Memory(NamedTuple):
    """A client's own lower variable, and with ``restart`` the y to restart from."""

    y: Vector
    first: Vector | None


@dataclass(frozen=True)
class FedBiOLocal(Algorithm):
    """FedBiO-Local: every client trains its own y; local steps on x and y at once, x averaged once per round.

    Every client, with independent batches for the two directions, both at its own (x, y) of time t::

        x <- x - eta   Phi_m(x, y)            the client's own hypergradient, a Neumann series with Q Hessian products
        y <- y - gamma grad_y g_m(x, y)

    and after I such steps the server averages x. y never leaves its client.

    The paper does not say how y follows if it has a part for every task of a client, as in few-shot learning (section
    5.2). There are three options. K = ``lower_steps`` takes K steps of y for each step of x; the hypergradient is still
    taken at the y before them. With ``shared_batch`` one key names all batches of a step, for g and f alike, so that
    both see the same tasks if row n of either is about task n. With it, ``restart`` trains y for the batch::

        y <- y_1;   K times:  y <- y - gamma grad_y g_m(x, y; B)
        x <- x - eta Phi_m(x, y; B)           at the y that was trained for this batch

    ========  ==============   =====================
    paper     name             meaning
    ========  ==============   =====================
    eta       lr_upper         step of x
    gamma     lr_lower         step of y
    tau       lr_adjoint       step of the Neumann series, below 1 / L
    Q         neumann_steps    Hessian products of the Neumann series
    I         local_steps      steps between averages
    ========  ==============   =====================

    The paper does not treat partial participation; here the y of a client that does not take part stays as it is. If
    the problem has constraints, every local step is projected.
    """

    citation = (
        'Li, Huang, Huang: "Communication-Efficient Federated Bilevel Optimization with Global and Local Lower Level '
        'Problems", NeurIPS 2023, Algorithm 3 and eq. (11)'
    )
    source = "follows the paper with K = 1 and independent batches, the defaults"
    assumes = (
        "a local lower level, g strongly convex in y, and bounded heterogeneity of f, of the second derivatives of g "
        "and of the y*"
    )
    exact = (
        "exact with I = 1, up to the truncation of the series, of order (1 - tau mu)^(Q+1); with I > 1 and constant "
        "steps, client drift displaces the limit. With restart, y is K steps from y_1 in the limit: y* up to an error "
        "of order (1 - gamma mu)^K"
    )
    alone = "TTSA with the whole Neumann series, and one time scale"
    costs = "One exchange per round: p floats down and up; I (1 Gf, K Gg, 1 J, Q H) per client"

    lower_level = "local"
    remembers = "run"

    lr_upper: float = parameter(1.0, "step size of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(0.4, "step size of the lower variable y", above=0, tune=(1e-3, 2.0))
    lr_adjoint: float = parameter(0.1, "step size of the Neumann series, below 1 / L", above=0, tune=(1e-3, 2.0))
    neumann_steps: int = parameter(10, "Hessian products of the Neumann series", least=0)
    local_steps: int = parameter(5, "local steps between averages", least=1)
    lower_steps: int = parameter(1, "steps of y for each step of x", least=1)
    shared_batch: bool = parameter(
        False, "use one batch for all terms of a step, with the same row numbers for f and g"
    )
    restart: bool = parameter(False, "restart y in every step of x and train it on the batch of that step")

    def check(self) -> None:
        check_restart(type(self).__name__, self.restart, self.shared_batch)

    def memory(self, x: Vector, y: Vector) -> Memory:
        return Memory(y, y if self.restart else None)

    def init(self, clients: Clients, x: Vector, y: Vector) -> FedBiOLocalState:
        return FedBiOLocalState(x)

    def round(self, clients: Clients, server: FedBiOLocalState) -> FedBiOLocalState:
        return FedBiOLocalState(clients.project_x(server.x + clients.run(self.descend, server.x).mean()))

    def descend(self, client: Client, memory: Memory, key: Key, x: Vector) -> tuple[Memory, Vector]:
        def step(z: Pair, key: Key, _: Any) -> Pair:
            z = feasible(client, z if memory.first is None else Pair(z.x, memory.first))
            b_y, b_x = (key, key) if self.shared_batch else jax.random.split(key)
            y = trained(client, z, b_y, self.lr_lower, self.lower_steps, self.shared_batch)
            at = Pair(z.x, y) if self.restart else z
            nu = neumann_hypergradient(client, at, b_x, self.lr_adjoint, self.neumann_steps, self.shared_batch)
            return Pair(z.x - self.lr_upper * nu, y)

        z = client.repeat(self.local_steps, step, Pair(x, memory.y), key)
        return memory._replace(y=z.y), z.x - x

    def solution(self, server: FedBiOLocalState, memory: Memory) -> tuple[Vector, Vector]:
        return server.x, memory.y


@dataclass(frozen=True)
class DistBiO(FedBiOLocal):
    """DistBiO: FedBiO-Local with an average after every step.

    ========  ==============   =====================
    paper     name             meaning
    ========  ==============   =====================
    eta       lr_upper         step of x
    gamma     lr_lower         step of y
    tau       lr_adjoint       step of the Neumann series, below 1 / L
    Q         neumann_steps    Hessian products of the Neumann series
    ========  ==============   =====================

    Partial participation, constraints, ``lower_steps``, ``shared_batch`` and ``restart`` are as in FedBiO-Local.
    """

    citation = (
        'Li, Huang, Huang: "Communication-Efficient Federated Bilevel Optimization with Global and Local Lower Level '
        'Problems", NeurIPS 2023, section 5.2: Algorithm 3 with I = 1'
    )
    exact = "exact up to the truncation of the series"
    alone = "the same as FedBiO-Local"
    costs = "One exchange per round: p floats down and up; 1 Gf, K Gg, 1 J, Q H per client, with K = lower_steps"

    local_steps: ClassVar[int] = 1  # pyright: ignore[reportIncompatibleVariableOverride] - no longer a hyper-parameter
