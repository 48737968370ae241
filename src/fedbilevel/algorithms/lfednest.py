"""LFedNest."""

from dataclasses import dataclass
from typing import Any

from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.core.vectors import Vector
from fedbilevel.mathematics.descent import corrected_lower, local_sgd
from fedbilevel.mathematics.hypergradient import Pair
from fedbilevel.mathematics.neumann import neumann_hypergradient


@dataclass(frozen=True)
class LFedNest(Algorithm):
    """LFedNest: local steps on y, then local steps on x with every client's own hypergradient. Biased.

    Every round runs the first line T times, then the second once::

        y <- y - beta grad_y g(x, y)                                            tau_in times, then averaged
        x <- x - alpha ( grad_x f - eta d2xy g sum_{k=0..N} (I - eta d2yy g)^k grad_y f )
                                                                                tau_out times, then averaged

    with the client's own f and g everywhere, and a new batch for each factor of the series. With ``correction``
    (LFedNest_SVRG) the steps on y are those of FedNest, where q = mean grad_y g(x, y) takes one more exchange::

        y_{nu+1} = y_nu - beta ( grad_y g(x, y_nu) - grad_y g(x, y) + q )       tau_in times, then averaged

    ========  =================   =====================
    paper     name                meaning
    ========  =================   =====================
    alpha     lr_upper            step of x
    beta      lr_lower            step of y
    eta       lr_adjoint          step of the series
    T         inner_rounds        how often y is averaged in a round
    tau_in    local_steps         local steps on y
    tau_out   local_steps_upper   local steps on x
    N         hessian_steps       Hessian products of the series, which has N + 1 terms
    -         correction          whether local steps on y are corrected for client drift
    ========  =================   =====================

    With partial participation the clients of the round serve all its exchanges. If the problem has constraints, every
    local step is projected.
    """

    citation = (
        'Tarzanagh, Li, Thrampoulidis, Oymak: "FedNest: Federated Bilevel, Minimax, and Compositional Optimization", '
        "ICML 2022: the light variant of FedNest"
    )
    source = "reconstruction without the paper's text"
    assumes = "clients that are alike"
    exact = (
        "not exact: the mean of local hypergradients is not the hypergradient, so x is displaced whatever the steps, "
        "and local steps on y add client drift unless corrected"
    )
    alone = "stocBiO, with one local step of x"
    costs = (
        "T + 1 exchanges per round: p + T d floats down and up with full participation (a client that missed the last "
        "round also needs y: d more down); T tau_in Gg and tau_out (1 Gf, N H, 1 J) per client. With correction, T "
        "more exchanges, T d more floats each way, and T (1 + 2 tau_in) Gg"
    )

    lr_upper: float = parameter(20.0, "step size of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(0.1, "step size of the lower variable y", above=0, tune=(1e-3, 2.0))
    lr_adjoint: float = parameter(0.1, "step size of the Neumann series", above=0, tune=(1e-3, 2.0))
    inner_rounds: int = parameter(1, "how often y is averaged in a round", least=1)
    local_steps: int = parameter(5, "local steps on y between averages", least=1)
    local_steps_upper: int = parameter(1, "local steps on x between averages", least=1)
    hessian_steps: int = parameter(5, "Hessian products of the Neumann series", least=0)
    correction: bool = parameter(False, "correct the local steps on y for client drift, with one more exchange each")

    def init(self, clients: Clients, x: Vector, y: Vector) -> Pair:
        return Pair(x, y)

    def round(self, clients: Clients, server: Pair) -> Pair:
        x, y = server
        y = clients.repeat(self.inner_rounds, lambda clients, y: self.inner(clients, x, y), y)
        return Pair(clients.project_x(x + clients.run(self.descend_upper, x, y).mean()), y)

    def inner(self, clients: Clients, x: Vector, y: Vector) -> Vector:
        if self.correction:
            q = clients.run(self.lower_gradient, x, y).mean()
            return clients.project_y(y + clients.run(self.descend_corrected, x, y, q).mean())
        return clients.project_y(y + clients.run(self.descend_lower, x, y).mean())

    def descend_lower(self, client: Client, key: Key, x: Vector, y: Vector) -> Vector:
        return local_sgd(client, key, x, y, self.lr_lower, self.local_steps)

    def lower_gradient(self, client: Client, key: Key, x: Vector, y: Vector) -> Vector:
        return client.g.dy(x, y, key)

    def descend_corrected(self, client: Client, key: Key, x: Vector, y: Vector, q: Vector) -> Vector:
        return corrected_lower(client, key, x, y, q, self.lr_lower, self.local_steps)

    def descend_upper(self, client: Client, key: Key, x: Vector, y: Vector) -> Vector:
        def step(x: Vector, key: Key, _: Any) -> Vector:
            x = client.project_x(x)
            own = neumann_hypergradient(client, Pair(x, y), key, self.lr_adjoint, self.hessian_steps)
            return x - self.lr_upper * own

        return client.repeat(self.local_steps_upper, step, x, key) - x

    def solution(self, server: Pair, memory: None) -> tuple[Vector, Vector]:
        return server.x, server.y
