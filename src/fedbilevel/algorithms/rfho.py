"""RFHO."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.core import Client, Clients, Key, parameter
from fedbilevel.core.vectors import Vector
from fedbilevel.errors import FedbilevelError
from fedbilevel.mathematics.averages import Averages, Words, name_batches, named
from fedbilevel.mathematics.hypergradient import Pair


class RFHOState(NamedTuple):
    """The upper and the lower variable, and the y that steps start from without a warm start."""

    x: Vector
    y: Vector
    first: Vector


@dataclass(frozen=True)
class RFHO(Averages):
    """RFHO: T gradient steps on y, and the derivative of f(x, y_T(x)) through them, backwards or forwards.

    Every gradient and product is the mean over the clients. With y_t = y_{t-1} - lambda grad_y g(x, y_{t-1})::

        reverse   a = grad_y f(x, y_T),   h = grad_x f(x, y_T)
                  h <- h - lambda d2xy g(x, y_{t-1}) a,   a <- a - lambda d2yy g(x, y_{t-1}) a       t = T .. 1
        forward   Z <- Z - lambda ( d2yy g(x, y_{t-1}) Z + [d2xy g(x, y_{t-1})]' )                   t = 1 .. T
                  h = grad_x f(x, y_T) + Z' grad_y f(x, y_T),   Z = 0 at first, one column for each entry of x
        both      x <- P( x - alpha h )

    The batches of step t serve the products at t, too, so that h is the derivative of what was computed.

    ========  ==============   =====================
    paper     name             meaning
    ========  ==============   =====================
    alpha     lr_upper         step of x
    lambda    lr_lower         step of y
    T         inner_rounds     steps of y in a round
    -         mode             "reverse" or "forward"
    -         warm_start       start from the y of the last round, not from the first one
    ========  ==============   =====================

    With partial participation the clients of the round serve all its exchanges. If the problem has constraints, the
    server projects; the derivative of a projection of y is taken to be the identity.
    """

    citation = (
        'Franceschi, Donini, Frasconi, Pontil: "Forward and Reverse Gradient-Based Hyperparameter Optimization", ICML '
        "2017"
    )
    source = "reconstruction without the paper's text"
    assumes = "nothing but smoothness for the derivative, and g strongly convex in y for the limit"
    exact = (
        "exact up to the remainder (I - lambda d2yy g)^T of the series, as the y of the last round counts as constant"
    )
    alone = "RFHO"
    costs = (
        "In reverse, 2T + 1 exchanges per round: p + (3T - 1)d floats down with full participation and a warm start "
        "(d more for a client that missed the last round), of which (T - 1)d are points y_t sent again; p + 2Td up, "
        "as clients sum up their share of h; T Gg, 1 Gf, T - 1 H and T J per client. Forward, T + 1 exchanges: p + "
        "Td(1 + p) down, p + d + Td(1 + p) up; T Gg, 1 Gf, pT H and pT J. If the server holds f, one exchange, d "
        "floats (forward: p + d) up and the Gf less"
    )

    remembers = "round"

    lr_upper: float = parameter(0.1, "step size of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(0.3, "step size of the lower variable y", above=0, tune=(1e-3, 2.0))
    inner_rounds: int = parameter(10, "steps of y in a round", least=1)
    mode: str = parameter("reverse", "the direction of differentiation", choices=("reverse", "forward"))
    warm_start: bool = parameter(True, "start from the y of the last round")

    def init(self, clients: Clients, x: Vector, y: Vector) -> RFHOState:
        if self.mode == "forward" and x.owned:
            raise FedbilevelError("RFHO: mode forward needs an x that the server sees, so use reverse for a private x.")
        return RFHOState(x, y, y)

    def round(self, clients: Clients, server: RFHOState) -> RFHOState:
        x, first = server.x, server.first
        start = server.y if self.warm_start else first
        y, h = (self.reverse if self.mode == "reverse" else self.forward)(clients, x, start, name_batches(clients))
        return RFHOState(clients.project_x(x - self.lr_upper * h), y, first)

    def reverse(self, clients: Clients, x: Vector, start: Vector, words: Words) -> tuple[Vector, Vector]:
        T = self.inner_rounds

        def there(clients: Clients, carry: tuple[Vector, Vector, jax.Array]) -> tuple[Vector, Vector, jax.Array]:
            y, path, t = carry
            path = path.map(lambda points, y: points.at[t].set(y), y)
            return self.move(clients, y, clients.run(self.gradient, x, y, words, t).mean()), path, t + 1

        def back(clients: Clients, carry: tuple[Vector, jax.Array]) -> tuple[Vector, jax.Array]:
            a, t = carry
            y = path.map(lambda points: points[t])
            return a - self.lr_lower * clients.run(self.pull_back, x, y, a, words, t).mean(), t - 1

        path = start.map(lambda y: jnp.zeros((T, *y.shape), y.dtype))  # y_0 .. y_{T-1}
        y, path, _ = clients.repeat(T, there, (start, path, jnp.asarray(0)))
        if clients.holds_upper:
            fx, a = clients.f.gradients(x, y, clients.next_key())
        else:
            fx, a = None, clients.run(self.begin, x, y).mean()
        a, t = clients.repeat(T - 1, back, (a, jnp.asarray(T - 1)))
        h = clients.run(self.finish, x, start, a, words, t).mean()
        return y, h if fx is None else fx + h

    def forward(self, clients: Clients, x: Vector, start: Vector, words: Words) -> tuple[Vector, Vector]:
        def step(clients: Clients, carry: tuple[Vector, jax.Array, jax.Array]) -> tuple[Vector, jax.Array, jax.Array]:
            y, Z, t = carry
            omega, change = clients.run(self.push_forward, x, y, Z, words, t).mean()
            return self.move(clients, y, omega), Z - self.lr_lower * change, t + 1

        Z = jnp.zeros((x.size, start.size), start.flat().dtype)
        y, Z, _ = clients.repeat(self.inner_rounds, step, (start, Z, jnp.asarray(0)))
        (f,) = self.upper(clients, Pair(x, y))
        return y, f.x + x.like(Z @ f.y.flat())

    def move(self, clients: Clients, y: Vector, omega: Vector) -> Vector:
        return clients.project_y(y - self.lr_lower * omega)

    def gradient(
        self, client: Client, memory: None, key: Key, x: Vector, y: Vector, words: Words, t: jax.Array
    ) -> tuple[None, Vector]:
        return memory, client.g.dy(x, y, named(client, words, t))

    def begin(self, client: Client, memory: None, key: Key, x: Vector, y: Vector) -> tuple[Vector, Vector]:
        """A client keeps its share of h, and sends what a starts from."""
        return client.f.gradients(x, y, key)

    def pull_back(
        self, client: Client, memory: Vector | None, key: Key, x: Vector, y: Vector, a: Vector, words: Words,
        t: jax.Array,
    ) -> tuple[Vector, Vector]:  # fmt: skip
        """A step back: the client's share of h grows before a changes."""
        h, _ = self.finish(client, memory, key, x, y, a, words, t)
        return h, client.g.dyy(x, y, a, named(client, words, t))

    def finish(
        self, client: Client, memory: Vector | None, key: Key, x: Vector, y: Vector, a: Vector, words: Words,
        t: jax.Array,
    ) -> tuple[Vector, Vector]:  # fmt: skip
        h = -self.lr_lower * client.g.dxy(x, y, a, named(client, words, t))
        h = h if memory is None else memory + h
        return h, h

    def push_forward(
        self, client: Client, memory: None, key: Key, x: Vector, y: Vector, Z: jax.Array, words: Words, t: jax.Array
    ) -> tuple[None, tuple[Vector, jax.Array]]:
        """The direction of y and that of every column of Z (a row of the array)."""
        batch = named(client, words, t)

        def column(change: jax.Array, _: Key, i: int | jax.Array) -> jax.Array:
            unit = x.like(jnp.zeros(x.size, x.flat().dtype).at[i].set(1))
            cross = jax.vjp(lambda v: client.g.dxy(x, y, v, batch), 0 * y)[1](unit)[0]  # [d2xy g]' unit
            return change.at[i].set((client.g.dyy(x, y, y.like(Z[i]), batch) + cross).flat())

        return memory, (client.g.dy(x, y, batch), client.repeat(x.size, column, jnp.zeros_like(Z), key))

    def solution(self, server: RFHOState, memory: None) -> tuple[Vector, Vector]:
        return server.x, server.y
