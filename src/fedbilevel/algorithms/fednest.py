"""FedNest."""

from dataclasses import dataclass
from typing import Any

import jax

from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.core.vectors import Vector
from fedbilevel.errors import FedbilevelError
from fedbilevel.mathematics.descent import corrected_lower, corrected_upper, local_sgd
from fedbilevel.mathematics.hypergradient import Pair


@dataclass(frozen=True)
class FedNest(Algorithm):
    """FedNest: corrected local steps on y, a federated Neumann series, corrected local steps on x.

    Every round runs FedInn T times, then FedIHGP and FedOut. nu counts local steps, and the same batch serves both
    gradients of a correction::

        FedInn    q = mean grad_y g(x, y)
                  y_{nu+1} = y_nu - beta / tau_in ( grad_y g(x, y_nu) - grad_y g(x, y) + q )           averaged
        FedIHGP   p_0 = N / l mean grad_y f,   p_n = mean (I - d2yy g / l) p_{n-1} for n = 1 .. N'
        FedOut    h = mean ( grad_x f - d2xy g p_{N'} )
                  x_{nu+1} = x_nu - alpha / tau_out ( grad_x f(x_nu, y) - grad_x f(x, y) + h )         averaged

    N' is uniform on 0 .. N-1, so that the mean of p_{N'} is the Neumann series of N terms; its variance grows with N.
    ``full_series`` sums these N terms instead: N' = N - 1 exchanges, and no randomness of its own. Without
    ``correction`` FedInn is local SGD, y - beta / tau_in grad_y g (FedNest_SGD). ``released_code`` replaces FedIHGP by
    what the authors' published code computes, in which every client continues with its own Hessian, and a list of
    uploads grows where it should be emptied::

        p = p_0 + sum_{k=1..N} 1 / k mean_m (I - d2yy g_m / l)^k p_0,   p_0 = 1 / l mean grad_y f

    This does not approximate the adjoint, even on identical clients. That code uses N + 1 exchanges for it; the powers
    are local, so 2 are enough here: p_0, and the clients' sums. (One of its experiments leaves out the factor 1 / l.)

    ========  =================   =====================
    paper     name                meaning
    ========  =================   =====================
    alpha     lr_upper            step of x, over all local steps of a round together
    beta      lr_lower            step of y, over all local steps of a FedInn together
    1 / l     lr_adjoint          step of the series; l bounds the curvature of g in y
    T         inner_rounds        how often FedInn runs
    tau_in    local_steps         local steps on y
    tau_out   local_steps_upper   local steps on x
    N         terms               terms of the series
    -         full_series         all terms of the series instead of a random one
    -         correction          whether FedInn is corrected, or local SGD
    -         released_code       the p of the authors' code instead of the series
    ========  =================   =====================

    The paper draws new clients for every exchange. Here the clients of the round serve all its exchanges (unless the
    cohort is sampled with ``resample``), so with partial participation the series is that of their own Hessian. If the
    problem has constraints, every local step is projected. If the server holds the upper loss, it takes the steps of
    FedOut itself.
    """

    citation = (
        'Tarzanagh, Li, Thrampoulidis, Oymak: "FedNest: Federated Bilevel, Minimax, and Compositional Optimization", '
        "ICML 2022, Algorithms 1 to 4"
    )
    source = "reconstruction without the paper's text"
    assumes = "g strongly convex in y"
    exact = (
        "exact for any number of local steps, up to the remainder (I - d2yy g / l)^N of the series; without "
        "correction, client drift displaces the limit, to first order in proportion to beta (1 - 1 / tau_in)"
    )
    alone = "BSA: steps of y, then one of x with a random product of the Neumann series"
    costs = (
        "2T + N' + 3 exchanges per round: 2p + (2T + N' + 1)d floats down and up with full participation (a client "
        "that missed the last round also needs y: d more down); T (1 + 2 tau_in) Gg, 2 + 2 tau_out Gf, N' H and 1 J "
        "per client. Without correction, T fewer exchanges, T d fewer floats each way, and T tau_in Gg; with "
        "released_code, N' is 1 in the numbers of exchanges and floats, and there are N H. If the server holds the "
        "upper loss, two fewer exchanges, and no Gf at the clients"
    )

    upper_at = "either"

    lr_upper: float = parameter(20.0, "step size of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(0.5, "step size of the lower variable y", above=0, tune=(1e-3, 2.0))
    lr_adjoint: float = parameter(0.1, "step size of the Neumann series", above=0, tune=(1e-3, 2.0))
    inner_rounds: int = parameter(1, "how often y is averaged in a round", least=1)
    local_steps: int = parameter(5, "local steps on y between averages", least=1)
    local_steps_upper: int = parameter(1, "local steps on x between averages", least=1)
    terms: int = parameter(5, "terms of the Neumann series", least=1)
    full_series: bool = parameter(False, "sum all terms of the series instead of drawing one")
    correction: bool = parameter(True, "correct the local steps on y for client drift")
    released_code: bool = parameter(False, "compute the adjoint as the authors' published code does")

    def check(self) -> None:
        if self.full_series and self.released_code:
            raise FedbilevelError("FedNest: full_series and released_code are two ways to compute one thing.")

    def init(self, clients: Clients, x: Vector, y: Vector) -> Pair:
        return Pair(x, y)

    def round(self, clients: Clients, server: Pair) -> Pair:
        x, y = server
        y = clients.repeat(self.inner_rounds, lambda clients, y: self.inner(clients, x, y), y)
        p = self.adjoint(clients, x, y)
        if clients.holds_upper:
            return Pair(self.descend_alone(clients, x, y, clients.run(self.cross, x, y, p).mean()), y)
        h = clients.run(self.hypergradient, x, y, p).mean()
        return Pair(clients.project_x(x + clients.run(self.descend_upper, x, y, h).mean()), y)

    def inner(self, clients: Clients, x: Vector, y: Vector) -> Vector:
        """FedInn."""
        if not self.correction:
            return clients.project_y(y + clients.run(self.local_sgd, x, y).mean())
        q = clients.run(self.lower_gradient, x, y).mean()
        return clients.project_y(y + clients.run(self.descend_lower, x, y, q).mean())

    def adjoint(self, clients: Clients, x: Vector, y: Vector) -> Vector:
        """FedIHGP: [d2yy g]^-1 grad_y f, with the Hessian of all clients."""

        def following(clients: Clients, p: Vector) -> Vector:
            return p - self.lr_adjoint * clients.run(self.hessian, x, y, p).mean()

        def add_term(clients: Clients, carry: tuple[Vector, Vector]) -> tuple[Vector, Vector]:
            p, series = carry
            p = following(clients, p)
            return p, series + p

        on_server = clients.holds_upper
        fy = clients.f.dy(x, y, clients.next_key()) if on_server else clients.run(self.upper_gradient, x, y).mean()
        p = self.lr_adjoint * fy
        if self.released_code:
            return p + clients.run(self.own_powers, x, y, p).mean()
        if self.terms == 1:
            return p
        if self.full_series:
            return clients.repeat(self.terms - 1, add_term, (p, p))[1]
        last = jax.random.randint(clients.next_key(), (), 0, self.terms)
        return clients.repeat(last, following, self.terms * p)

    def lower_gradient(self, client: Client, key: Key, x: Vector, y: Vector) -> Vector:
        return client.g.dy(x, y, key)

    def descend_lower(self, client: Client, key: Key, x: Vector, y: Vector, q: Vector) -> Vector:
        return corrected_lower(client, key, x, y, q, self.lr_lower / self.local_steps, self.local_steps)

    def local_sgd(self, client: Client, key: Key, x: Vector, y: Vector) -> Vector:
        """FedInn without correction."""
        return local_sgd(client, key, x, y, self.lr_lower / self.local_steps, self.local_steps)

    def upper_gradient(self, client: Client, key: Key, x: Vector, y: Vector) -> Vector:
        return client.f.dy(x, y, key)

    def hessian(self, client: Client, key: Key, x: Vector, y: Vector, p: Vector) -> Vector:
        return client.g.dyy(x, y, p, key)

    def own_powers(self, client: Client, key: Key, x: Vector, y: Vector, p: Vector) -> Vector:
        """What the authors' code sums: powers of the client's own matrix, divided by k."""

        def add_power(carry: tuple[Vector, Vector], key: Key, i: Any) -> tuple[Vector, Vector]:
            power, total = carry
            power = power - self.lr_adjoint * client.g.dyy(x, y, power, key)
            return power, total + power / (i + 1)

        return client.repeat(self.terms, add_power, (p, 0 * p), key)[1]

    def hypergradient(self, client: Client, key: Key, x: Vector, y: Vector, p: Vector) -> Vector:
        xi, zeta = jax.random.split(key)
        return client.f.dx(x, y, xi) - client.g.dxy(x, y, p, zeta)

    def descend_upper(self, client: Client, key: Key, x: Vector, y: Vector, h: Vector) -> Vector:
        """Only the direct part follows x; the indirect part stays as in h."""
        steps = self.local_steps_upper
        return corrected_upper(client, key, x, y, h, self.lr_upper / steps, steps)

    def descend_alone(self, clients: Clients, x: Vector, y: Vector, indirect: Vector) -> Vector:
        """The same steps on the server, if it holds the upper loss."""

        def step(clients: Clients, x: Vector) -> Vector:
            h = clients.f.dx(x, y, clients.next_key()) - indirect
            return clients.project_x(x - self.lr_upper / self.local_steps_upper * h)

        return clients.repeat(self.local_steps_upper, step, x)

    def cross(self, client: Client, key: Key, x: Vector, y: Vector, p: Vector) -> Vector:
        return client.g.dxy(x, y, p, key)

    def solution(self, server: Pair, memory: None) -> tuple[Vector, Vector]:
        return server.x, server.y
