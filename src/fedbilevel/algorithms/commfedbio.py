"""CommFedBiO."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.core import Algorithm, Client, Clients, Key, Replies, parameter
from fedbilevel.core.vectors import Vector
from fedbilevel.mathematics.compression import CountSketch, count_sketch, top_k
from fedbilevel.mathematics.descent import local_sgd
from fedbilevel.mathematics.hypergradient import Point


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


class SketchMemory(NamedTuple):
    """What a client keeps while the server solves the sketched system: its gradient of f in x."""

    fx: Vector


class CommFedBiOSketchState(NamedTuple):
    """The upper variable, the model, and the seed of the last sketches."""

    x: Vector
    y: Vector
    seed: jax.Array


@dataclass(frozen=True)
class CommFedBiO(Algorithm):
    """CommFedBiO: the adjoint system is solved by compressed exchanges, top-k with error feedback.

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

    With k < d a constant alpha leaves an error in u, because the clients' gradients differ at the solution. The error
    is proportional to alpha if alpha n_u is held fixed. One cohort serves all exchanges of a round. If the problem has
    constraints, clients train at feasible points and averages are projected.
    """

    citation = (
        'Li, Pei, Huang: "Communication-Efficient Robust Federated Learning with Noisy Labels", KDD 2022, the '
        "iterative subroutine"
    )
    source = "reconstruction without the paper's text"
    assumes = "g strongly convex in y"
    exact = "exact with k = d and T = 1; with T > 1 client drift displaces the limit"
    costs = (
        "2 + n_u exchanges per round: p + (1 + n_u) d floats down with full participation (u is sent whole; d more "
        "without a warm start), p + d + 2k n_u up (k values and k indices); T Gg, n_u H, 1 Gf, 1 J per client"
    )

    remembers = "round"

    lr_upper: float = parameter(20.0, "step size of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(0.5, "step size of the lower variable y", above=0, tune=(1e-3, 2.0))
    lr_adjoint: float = parameter(0.1, "step size of the adjoint u", above=0, tune=(1e-3, 2.0))
    local_steps: int = parameter(5, "local steps of y", least=1)
    adjoint_steps: int = parameter(10, "compressed exchanges for the adjoint u", least=1)
    entries: int = parameter(100, "entries that a client uploads per compressed exchange", least=1)
    warm_start: bool = parameter(True, "start u from where it was in the last round, not from 0")

    def init(self, clients: Clients, x: Vector, y: Vector) -> Point:
        return Point(x, y, clients.adjoint(y))

    def round(self, clients: Clients, server: Point) -> Point:
        x, y, u = server
        y = clients.project_y(y + clients.run(self.train, x, y).mean())
        u = u if self.warm_start else 0 * u
        u = subtract(u, clients.run(self.compress_first, x, y, u))

        def step(clients: Clients, u: Vector) -> Vector:
            return subtract(u, clients.run(self.compress, x, y, u))

        u = clients.repeat(self.adjoint_steps - 1, step, u)
        return Point(clients.project_x(x - self.lr_upper * clients.run(self.upper, x, y, u).mean()), y, u)

    def train(self, client: Client, memory: None, key: Key, x: Vector, y: Vector) -> tuple[None, Vector]:
        return memory, local_sgd(client, key, x, y, self.lr_lower, self.local_steps)

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

    def solution(self, server: Point, memory: Any) -> tuple[Vector, Vector]:
        return server.x, server.y


def subtract(u: Vector, replies: Replies) -> Vector:
    """u minus the weighted mean of sparse replies; a client that did not reply has weight 0 here."""
    values, indices, weights = replies.stack()
    total = weights.sum()
    shares = (weights / jnp.where(total > 0, total, 1)).astype(values.dtype)
    return u - u.like(jnp.zeros(u.size, values.dtype).at[indices].add(shares[:, None] * values))


@dataclass(frozen=True)
class CommFedBiOSketch(Algorithm):
    """CommFedBiO, not iterative: the adjoint system is sketched, uploaded once, and solved by the server.

    A round has one round of local SGD on y, the adjoint, and a step of x. S1 (r1 x d) and S2 (r2 x d) are count
    sketches, with one +1 or -1 in each column. Server and clients make them from the same seed::

        y <- mean of  T  steps  y - gamma grad_y g_m(x, y)
        C = mean S2 d2yy g_m S1',   c = mean S2 grad_y f_m
        omega = argmin | C omega - c |  (the shortest),   u = S1' omega
        x <- x - eta mean ( grad_x f_m - d2xy g_m u )

    ========  ==============   =====================
    paper     name             meaning
    ========  ==============   =====================
    eta       lr_upper         step of x
    gamma     lr_lower         step of y
    T         local_steps      local steps of y
    r1        columns          rows of S1: unknowns of the sketched system, and Hessian products of a client
    r2        rows             rows of S2: equations of the sketched system
    -         fresh_sketch     whether every round draws sketches of its own, or all rounds use the same
    ========  ==============   =====================

    The sketches are exact if the adjoint lies in the range of S1' (entries in one bucket are equal up to their signs)
    and S2 d2yy g is injective on that range. This always holds if no two entries share a bucket, of S1 or of S2; r1 =
    r2 = d is not enough for that, r1 and r2 of order d^2 would be. Otherwise u has an error that no step size reduces.
    It is large for an adjoint without small entries, and larger if r2 is barely more than r1, where the system is badly
    conditioned. One cohort serves all exchanges of a round. If the problem has constraints, clients train at feasible
    points and averages are projected.
    """

    citation = (
        'Li, Pei, Huang: "Communication-Efficient Robust Federated Learning with Noisy Labels", KDD 2022, the '
        "subroutine that compresses the Hessian"
    )
    source = "reconstruction without the paper's text"
    assumes = "g strongly convex in y"
    exact = "the system is that of all clients, so with T = 1 only the sketches displace x"
    costs = (
        "3 exchanges per round: p + d + r1 floats down with full participation (omega is sent, not u; a client that "
        "missed the last round also needs y: d more) and the seed, p + d + r1 r2 + r2 up; T Gg, r1 H, 1 Gf, 1 J per "
        "client, all products on one batch"
    )

    remembers = "round"

    lr_upper: float = parameter(0.1, "step size of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(0.1, "step size of the lower variable y", above=0, tune=(1e-3, 2.0))
    local_steps: int = parameter(5, "local steps of y", least=1)
    columns: int = parameter(50, "unknowns of the sketched system, and Hessian products per client", least=1)
    rows: int = parameter(200, "equations of the sketched system", least=1)
    fresh_sketch: bool = parameter(True, "draw new sketches in every round")

    def init(self, clients: Clients, x: Vector, y: Vector) -> CommFedBiOSketchState:
        return CommFedBiOSketchState(x, y, seed_from(clients.next_key()))

    def round(self, clients: Clients, server: CommFedBiOSketchState) -> CommFedBiOSketchState:
        x, y, seed = server
        y = clients.project_y(y + clients.run(self.train, x, y).mean())
        seed = seed_from(clients.next_key()) if self.fresh_sketch else seed
        matrix, right = clients.run(self.sketch, x, y, seed).mean()
        omega = jnp.linalg.lstsq(matrix, right)[0]
        return CommFedBiOSketchState(
            clients.project_x(x - self.lr_upper * clients.run(self.upper, x, y, seed, omega).mean()), y, seed
        )

    def sketches(self, seed: jax.Array, size: int) -> tuple[CountSketch, CountSketch]:
        """S1 and S2."""
        one, two = jax.random.split(jax.random.key(seed))
        return count_sketch(one, self.columns, size), count_sketch(two, self.rows, size)

    def train(self, client: Client, memory: None, key: Key, x: Vector, y: Vector) -> tuple[None, Vector]:
        return memory, local_sgd(client, key, x, y, self.lr_lower, self.local_steps)

    def sketch(
        self, client: Client, memory: None, key: Key, x: Vector, y: Vector, seed: jax.Array
    ) -> tuple[SketchMemory, tuple[jax.Array, jax.Array]]:
        """S2 d2yy g S1', column by column, and S2 grad_y f."""
        S1, S2 = self.sketches(seed, y.size)
        xi, psi = jax.random.split(key)
        fx, fy = client.f.gradients(x, y, xi)
        right = S2.of(fy)

        def fill(matrix: jax.Array, _: Key, j: Any) -> jax.Array:
            unit = jnp.zeros(self.columns, right.dtype).at[j].set(1)
            return matrix.at[:, j].set(S2.of(client.g.dyy(x, y, S1.back(unit, y), psi)))

        matrix = client.repeat(self.columns, fill, jnp.zeros((self.rows, self.columns), right.dtype), key)
        return SketchMemory(fx), (matrix, right)

    def upper(
        self, client: Client, memory: SketchMemory, key: Key, x: Vector, y: Vector, seed: jax.Array, omega: jax.Array
    ) -> tuple[SketchMemory, Vector]:
        u = self.sketches(seed, y.size)[0].back(omega, y)
        return memory, memory.fx - client.g.dxy(x, y, u, key)

    def solution(self, server: CommFedBiOSketchState, memory: Any) -> tuple[Vector, Vector]:
        return server.x, server.y


def seed_from(key: Key) -> jax.Array:
    """A number from which server and clients make the same sketches."""
    return jax.random.bits(key, (), jnp.uint32)
