"""CommFedBiO."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedbilevel.core import Algorithm, Client, Clients, Key, Replies, parameter
from fedbilevel.vectors import Vector


class Server(NamedTuple):
    """The upper variable, the model, and the adjoint."""

    x: Vector
    y: Vector
    u: Vector


class Memory(NamedTuple):
    """What a client keeps while the adjoint is computed: its gradients of f, and what it has not uploaded yet."""

    fx: Vector
    fy: Vector
    error: Vector


class Sparse(NamedTuple):
    """Some entries of a flat vector, and a client's weight. All others are 0."""

    values: jax.Array
    indices: jax.Array
    weight: jax.Array


def top_k(v: Vector, k: int) -> tuple[jax.Array, jax.Array, Vector]:
    """The k entries of a vector that are largest in size: their values, their indices, and the vector without them.

    >>> values, indices, rest = top_k(Vector(jnp.array([1.0, -3.0, 2.0]), "y"), 1)
    >>> values.tolist(), indices.tolist(), rest.tree.tolist()
    ([-3.0], [1], [1.0, 0.0, 2.0])
    """
    flat = v.flat()
    indices = lax.top_k(jnp.abs(flat), min(k, flat.size))[1]
    return flat[indices], indices, v.like(flat.at[indices].set(0))


@dataclass(frozen=True)
class CommFedBiO(Algorithm):
    """CommFedBiO: the adjoint system solved by compressed exchanges, top-k with error feedback.

    Li, Pei, Huang: "Communication-Efficient Robust Federated Learning with Noisy Labels", KDD 2022, the iterative
    subroutine.

    A round has one round of local SGD on y, the adjoint, and a step of x::

        y <- mean of  T  steps  y - gamma grad_y g_m(x, y)
        n_u times, from e_m = 0:   v_m = e_m + alpha ( d2yy g_m u - grad_y f_m )
                                   c_m = top-k(v_m),   e_m = v_m - c_m,   u <- u - mean c_m
        x <- x - eta mean ( grad_x f_m - d2xy g_m u )

    ========  ==============   =====================
    paper     name             meaning
    ========  ==============   =====================
    eta       lr_upper         step of x
    gamma     lr_lower         step of y
    alpha     lr_adjoint       step of u
    T         local_steps      local steps of y
    n_u       adjoint_steps    compressed exchanges for u
    k         entries          entries of v_m that a client uploads (all, if y has no more)
    u_0       warm_start       whether u starts where it was, or at 0
    ========  ==============   =====================

    2 + n_u exchanges per round: p + (1 + n_u) d floats down with full participation (u is sent whole; d more without
    a warm start), p + d + 2k n_u up (k values and k indices); T Gg, n_u H, 1 Gf, 1 J per client. Assumes g strongly
    convex in y. The body does not follow the paper's text, which was not at hand: a reconstruction. With k = d and T
    = 1 it is exact on heterogeneous clients. With k < d a constant alpha leaves an error of u in proportion to alpha
    (if alpha n_u is held), because the clients' gradients differ at the solution; with T > 1 the limit is displaced
    by client drift. Partial participation is not treated here; a cohort is the same for all exchanges of a round.
    Where the problem has constraints, clients train at feasible points and averages are projected.
    """

    lr_upper: float = parameter(20.0, "step of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(0.5, "step of the lower variable y", above=0, tune=(1e-3, 2.0))
    lr_adjoint: float = parameter(0.1, "step of the adjoint u", above=0, tune=(1e-3, 2.0))
    local_steps: int = parameter(5, "local steps of y", least=1)
    adjoint_steps: int = parameter(10, "compressed exchanges for the adjoint u", least=1)
    entries: int = parameter(100, "entries that a client uploads per compressed exchange", least=1)
    warm_start: bool = parameter(True, "start u where it was in the last round, not at 0")

    remembers: ClassVar[Literal["nothing", "round", "run"]] = "round"

    def init(self, clients: Clients, x: Vector, y: Vector) -> Server:
        return Server(x, y, u=0 * y)

    def round(self, clients: Clients, server: Server) -> Server:
        x, y, u = server
        y = clients.project_y(y + clients.run(self.train, x, y).mean())
        u = u if self.warm_start else 0 * u
        u = subtract(u, clients.run(self.compress_first, x, y, u))

        def step(clients: Clients, u: Vector) -> Vector:
            return subtract(u, clients.run(self.compress, x, y, u))

        u = clients.repeat(self.adjoint_steps - 1, step, u)
        return Server(clients.project_x(x - self.lr_upper * clients.run(self.upper, x, y, u).mean()), y, u)

    def train(self, client: Client, memory: None, key: Key, x: Vector, y: Vector) -> tuple[None, Vector]:
        def step(y: Vector, key: Key, _: Any) -> Vector:
            y = client.project_y(y)
            return y - self.lr_lower * client.g.dy(x, y, key)

        return memory, client.repeat(self.local_steps, step, y, key) - y

    def compress_first(
        self, client: Client, memory: None, key: Key, x: Vector, y: Vector, u: Vector
    ) -> tuple[Memory, Sparse]:
        """One batch of f serves the whole round."""
        batch, key = jax.random.split(key)
        fx, fy = client.f.gradients(x, y, batch)
        return self.compress(client, Memory(fx, fy, error=0 * y), key, x, y, u)

    def compress(
        self, client: Client, memory: Memory, key: Key, x: Vector, y: Vector, u: Vector
    ) -> tuple[Memory, Sparse]:
        v = memory.error + self.lr_adjoint * (client.g.dyy(x, y, u, key) - memory.fy)
        values, indices, error = top_k(v, self.entries)
        return memory._replace(error=error), Sparse(values, indices, jnp.asarray(client.weight))

    def upper(self, client: Client, memory: Memory, key: Key, x: Vector, y: Vector, u: Vector) -> tuple[Memory, Vector]:
        return memory, memory.fx - client.g.dxy(x, y, u, key)

    def solution(self, server: Server, memory: Any) -> tuple[Vector, Vector]:
        return server.x, server.y


def subtract(u: Vector, replies: Replies) -> Vector:
    """u minus the weighted mean of sparse replies; a client that did not reply has weight 0 here."""
    values, indices, weights = replies.stack()
    total = weights.sum()
    shares = (weights / jnp.where(total > 0, total, 1)).astype(values.dtype)
    return u - u.like(jnp.zeros(u.size, values.dtype).at[indices].add(shares[:, None] * values))
