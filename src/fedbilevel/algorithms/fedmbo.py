"""FedMBO."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fedbilevel.core import Algorithm, Client, Clients, Each, Key, parameter
from fedbilevel.core.vectors import Vector
from fedbilevel.mathematics.descent import corrected_upper
from fedbilevel.mathematics.hypergradient import Pair


@dataclass(frozen=True)
class FedMBO(Algorithm):
    """FedMBO: mini-batch steps on y; the hypergradient comes from parallel chains that wander from client to client.

    Every round takes T steps on y. Then it starts one chain at each of the n clients of an exchange, and draws for each
    chain how long it is, N'_j, uniformly from 0 .. N-1::

        T times   y <- y - beta mean grad_y g(x, y)
        chains    v_j = N / l grad_y f_j                               j = 1 .. n
                  v_j <- (I - d2yy g_i / l) v_j                        N'_j times, each time with another client i
        x         h = mean ( grad_x f_i - d2xy g_i v_j ),   x <- x - alpha h

    The server hands the v_j on in random order and never averages them. As client i is drawn uniformly each time, the
    mean of a product is the product of the means, so that the mean of h is the hypergradient with the Neumann series of
    N terms for the Hessian of all clients. Clients with weights w_i count M w_i times in every factor. With tau > 1 the
    step of x becomes FedOut of FedNest: one more exchange, with tau local steps::

        x_{nu+1} = x_nu - alpha / tau ( grad_x f(x_nu, y) - grad_x f(x, y) + h )                       averaged

    ========  =================   =====================
    paper     name                meaning
    ========  =================   =====================
    alpha     lr_upper            step of x, over all local steps of a round together
    beta      lr_lower            step of y
    1 / l     lr_adjoint          step of the series; l bounds the curvature of every client's g in y
    T         inner_rounds        steps of y in a round, of one exchange each
    N         terms               terms of the series
    tau       local_steps_upper   local steps on x; with 1 there are none, and no exchange for them
    -         common_length       one N' for all chains of a round
    ========  =================   =====================

    As every chain has an N' of its own, the chains are independent up to the order of their clients, and the variance
    of h falls like 1 / n: the linear speed-up of the paper. With one N' for all chains (``common_length``) a part of it
    stays, however many clients there are; but a round then has (N - 1) / 2 exchanges for the chains in the mean, not as
    many as the longest chain asks for, which is nearly N - 1 with many clients. Chains that have ended wait for it.

    The noise of the chains does not vanish at the solution unless every client's grad_y f does, so x keeps moving
    around it, by the root of alpha. The only version without this noise averages the chains, which is FedNest with
    ``full_series``. The paper draws new clients for every exchange, which is Uniform(n, resample=True), and h is
    unbiased only then (every exchange then sends x and y again). With one cohort for a round, h is the hypergradient
    with the Hessian of that cohort. The number of clients of an exchange must be fixed. Averages are projected.
    """

    citation = 'Huang, Zhang, Ji: "Achieving Linear Speedup in Non-IID Federated Bilevel Learning", ICML 2023'
    source = "reconstruction without the paper's text"
    assumes = "g strongly convex in y"
    exact = "exact in the mean, up to the remainder (I - d2yy g / l)^N of the series"
    alone = "BSA: steps of y, then one of x with a random product of the Neumann series"
    costs = (
        "T + N' + 2 exchanges per round, N' being the longest chain's: p + (T + N' + 1)d floats down and up with "
        "full participation (a client that missed the last round also needs y: d more down; a v_j is always new to its "
        "receiver); T Gg, 2 Gf (the client that ends a chain is not the one that started it), N' H and 1 J per client. "
        "With tau > 1, one exchange, p down, p up and 2 tau Gf more"
    )

    lr_upper: float = parameter(0.1, "step size of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(0.2, "step size of the lower variable y", above=0, tune=(1e-3, 2.0))
    lr_adjoint: float = parameter(0.2, "step size of the Neumann series", above=0, tune=(1e-3, 2.0))
    inner_rounds: int = parameter(5, "steps of y in a round", least=1)
    terms: int = parameter(5, "terms of the Neumann series", least=1)
    local_steps_upper: int = parameter(1, "local steps on x between averages", least=1)
    common_length: bool = parameter(False, "draw one N' for all chains: fewer exchanges, but no speed-up with clients")

    def init(self, clients: Clients, x: Vector, y: Vector) -> Pair:
        return Pair(x, y)

    def round(self, clients: Clients, server: Pair) -> Pair:
        x, y = server

        def descend(clients: Clients, y: Vector) -> Vector:
            return clients.project_y(y - self.lr_lower * clients.run(self.lower_gradient, x, y).estimate())

        def hand_on(clients: Clients, chains: Each) -> Each:
            chains = self.next_clients(clients, chains)
            v, left = chains.rows
            new = clients.run(self.multiply, x, y, Each(v, chains.alive)).each()
            return Each((new.rows, left - 1), new.alive).where(left > 0, chains)

        y = clients.repeat(self.inner_rounds, descend, y)
        v = clients.run(self.begin, x, y).each()
        if self.terms > 1:
            chains = len(jax.tree.leaves(v.rows)[0])
            drawn = jax.random.randint(clients.next_key(), () if self.common_length else (chains,), 0, self.terms)
            left = jnp.broadcast_to(drawn, (chains,))
            v = clients.repeat(left.max(), hand_on, Each((v.rows, left), v.alive))
            v = Each(v.rows[0], v.alive)
        h = clients.run(self.finish, x, y, self.next_clients(clients, v)).estimate()
        if self.local_steps_upper == 1:
            return Pair(clients.project_x(x - self.lr_upper * h), y)
        return Pair(clients.project_x(x + clients.run(self.descend_upper, x, y, h).mean()), y)

    def next_clients(self, clients: Clients, v: Each) -> Each:
        """Which client continues which chain. The same client all along would give its own, local hypergradient."""
        return clients.shuffle(v)

    def lower_gradient(self, client: Client, key: Key, x: Vector, y: Vector) -> Vector:
        return client.g.dy(x, y, key)

    def begin(self, client: Client, key: Key, x: Vector, y: Vector) -> Vector:
        share = client.clients * client.weight
        return self.terms * self.lr_adjoint * share * client.f.dy(x, y, key)

    def multiply(self, client: Client, key: Key, x: Vector, y: Vector, v: Vector) -> Vector:
        share = client.clients * client.weight
        return v - self.lr_adjoint * share * client.g.dyy(x, y, v, key)

    def finish(self, client: Client, key: Key, x: Vector, y: Vector, v: Vector) -> Vector:
        xi, zeta = jax.random.split(key)
        return client.f.dx(x, y, xi) - client.g.dxy(x, y, v, zeta)

    def descend_upper(self, client: Client, key: Key, x: Vector, y: Vector, h: Vector) -> Vector:
        """Only the direct part follows x; the indirect part stays as in h."""
        steps = self.local_steps_upper
        return corrected_upper(client, key, x, y, h, self.lr_upper / steps, steps)

    def solution(self, server: Pair, memory: None) -> tuple[Vector, Vector]:
        return server.x, server.y
