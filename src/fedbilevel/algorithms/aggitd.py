"""FBO-AggITD."""

from dataclasses import dataclass

import jax

from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.core.vectors import Vector
from fedbilevel.errors import FedbilevelError
from fedbilevel.mathematics.descent import corrected_lower
from fedbilevel.mathematics.hypergradient import Pair


@dataclass(frozen=True)
class AggITD(Algorithm):
    """FBO-AggITD: the exchanges that move y also carry the products of the hypergradient.

    Every round draws Q' uniformly from 0 .. Q-1. Then, for q = 0 .. Q-1::

        r <- mean grad_y f(x, y_q)                       if q = Q'
        r <- mean (I - lambda d2yy g(x, y_q)) r          if q > Q'
        y_{q+1} = y_q - lambda mean grad_y g(x, y_q)     in the same exchange

    and finally, at y = y_Q and with u = lambda Q r::

        x <- x - alpha mean ( grad_x f(x, y) - d2xy g(x, y) u )

    The mean of u over Q' is lambda sum_q prod_{s>q} (I - lambda d2yy g(x, y_s)) grad_y f(x, y_q). ``full_sum`` computes
    this sum itself, with u = lambda r and without the randomness of Q'::

        r <- mean ( (I - lambda d2yy g(x, y_q)) r + grad_y f(x, y_q) )     for q = 0 .. Q-1, from r = 0

    With lower = "svrg" a second exchange follows every step of y. It replaces the step by tau corrected local steps
    from y_q, as in FedNest, where omega is the mean of grad_y g(x, y_q)::

        y_{nu+1} = y_nu - lambda / tau ( grad_y g(x, y_nu) - grad_y g(x, y_q) + omega )                averaged

    ========  ==============   =====================
    paper     name             meaning
    ========  ==============   =====================
    alpha     lr_upper         step of x
    lambda    lr_lower         step of y and of the products
    Q         inner_rounds     steps of y in a round
    -         full_sum         the whole sum instead of a random Q'
    -         lower            "sgd": one step of y per exchange; "svrg": corrected local steps
    tau       local_steps      local steps of y, with "svrg"
    ========  ==============   =====================

    With partial participation the clients of a round serve all its exchanges. If the problem has constraints, averages
    and local steps are projected.
    """

    citation = (
        'Xiao, Ji: "Communication-Efficient Federated Hypergradient Computation via Aggregated Iterative '
        'Differentiation", ICML 2023'
    )
    source = "reconstruction without the paper's text, which may have local steps in fewer exchanges"
    assumes = "g strongly convex in y"
    exact = "exact up to the remainder (I - lambda d2yy g)^Q of the series, with corrected local steps, too"
    alone = "steps of y, then one of x by iterative differentiation"
    costs = (
        "Q + 1 exchanges per round: p + (2Q - Q') d floats down and up with full participation (a client that missed "
        "the last round also needs y: d more down); Q Gg, 2 Gf, Q - 1 - Q' H and 1 J per client. With full_sum, Q' is "
        '0 in these numbers, and there are Q + 1 Gf. With "svrg", Q more exchanges, Q d more floats each way, and Q '
        "(1 + 2 tau) Gg"
    )

    lr_upper: float = parameter(20.0, "step size of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(0.1, "step size of the lower variable y and of the products", above=0, tune=(1e-3, 2.0))
    inner_rounds: int = parameter(5, "steps of y in a round", least=1)
    full_sum: bool = parameter(False, "sum the whole series instead of a random part of it")
    lower: str = parameter(
        "sgd", "how y moves: one step per exchange, or corrected local steps", choices=("sgd", "svrg")
    )
    local_steps: int = parameter(1, "corrected local steps of y (svrg)", least=1)

    def check(self) -> None:
        if self.lower == "sgd" and self.local_steps > 1:
            raise FedbilevelError("AggITD: local_steps greater than 1 need lower = svrg.")

    def init(self, clients: Clients, x: Vector, y: Vector) -> Pair:
        return Pair(x, y)

    def round(self, clients: Clients, server: Pair) -> Pair:
        x, y = server

        def before(clients: Clients, y: Vector) -> Vector:
            return self.move(clients, x, y, clients.run(self.descend, x, y).mean())

        def after(clients: Clients, carry: tuple[Vector, Vector]) -> tuple[Vector, Vector]:
            y, r = carry
            omega, change = clients.run(self.aggregate, x, y, r).mean()
            return self.move(clients, x, y, omega), r + change

        Q, many = self.inner_rounds, self.inner_rounds > 1
        first = 0  # Q'
        if many and not self.full_sum:
            first = jax.random.randint(clients.next_key(), (), 0, Q)
            y = clients.repeat(first, before, y)
        omega, r = clients.run(self.begin, x, y).mean()
        y = self.move(clients, x, y, omega)
        if many:
            y, r = clients.repeat(Q - 1 - first, after, (y, r))
        u = self.lr_lower * (1 if self.full_sum else Q) * r
        return Pair(clients.project_x(x - self.lr_upper * clients.run(self.hypergradient, x, y, u).mean()), y)

    def move(self, clients: Clients, x: Vector, y: Vector, omega: Vector) -> Vector:
        if self.lower == "svrg":
            return clients.project_y(y + clients.run(self.descend_corrected, x, y, omega).mean())
        return clients.project_y(y - self.lr_lower * omega)

    def descend(self, client: Client, key: Key, x: Vector, y: Vector) -> Vector:
        """q < Q'."""
        return client.g.dy(x, y, key)

    def descend_corrected(self, client: Client, key: Key, x: Vector, y: Vector, omega: Vector) -> Vector:
        return corrected_lower(client, key, x, y, omega, self.lr_lower / self.local_steps, self.local_steps)

    def begin(self, client: Client, key: Key, x: Vector, y: Vector) -> tuple[Vector, Vector]:
        """q = Q'."""
        zeta, xi = jax.random.split(key)
        return client.g.dy(x, y, zeta), client.f.dy(x, y, xi)

    def aggregate(self, client: Client, key: Key, x: Vector, y: Vector, r: Vector) -> tuple[Vector, Vector]:
        """q > Q': the direction of y, and the change of r."""
        zeta, psi, xi = jax.random.split(key, 3)
        change = -self.lr_lower * client.g.dyy(x, y, r, psi)
        if self.full_sum:
            change = change + client.f.dy(x, y, xi)
        return client.g.dy(x, y, zeta), change

    def hypergradient(self, client: Client, key: Key, x: Vector, y: Vector, u: Vector) -> Vector:
        xi, zeta = jax.random.split(key)
        return client.f.dx(x, y, xi) - client.g.dxy(x, y, u, zeta)

    def solution(self, server: Pair, memory: None) -> tuple[Vector, Vector]:
        return server.x, server.y
