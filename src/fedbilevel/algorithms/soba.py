"""SOBA and SABA."""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.core.schedules import power
from fedbilevel.core.vectors import Vector, add, sub
from fedbilevel.mathematics.hypergradient import Point, directions, feasible


@dataclass(frozen=True)
class _OneStep(Algorithm):
    """What SOBA and SABA share: the server's one step on x, y and u at once."""

    assumes = "g strongly convex in y"
    costs = "One exchange per round: p + 2d floats down and up; 1 Gf, 1 Gg, 1 J, 1 H per client"

    def init(self, clients: Clients, x: Vector, y: Vector) -> Point:
        return Point(x, y, clients.adjoint(y))

    def move(self, clients: Clients, z: Point, d: Point, steps: tuple[float, float, float]) -> Point:
        """One step, to a feasible point."""
        return feasible(clients, Point(*(v - step * w for v, w, step in zip(z, d, steps, strict=True))))

    def solution(self, server: Point, memory: object) -> tuple[Vector, Vector]:
        return server.x, server.y


@dataclass(frozen=True)
class SOBA(_OneStep):
    """SOBA: one step on x, y and the adjoint u at once, with steps that fall like 1 / sqrt(t). Federated here.

    The paper's method is for one party. All its directions are linear in f and g, so the clients' means are exact. In
    round t = 1, 2, ..., every client draws one batch of f and one of g for all terms, and the server takes the step::

        x <- P( x - gamma_t mean ( grad_x f - d2xy g u ) )
        y <- P( y - rho_t   mean grad_y g )
        u <-    u - rho_t   mean ( d2yy g u - grad_y f )

    ========  ==============   =====================
    paper     name             meaning
    ========  ==============   =====================
    gamma_t   lr_upper         step of x, by default a constant times t^(-1/2)
    rho_t     lr_lower         step of y, by default a constant times t^(-1/2)
    rho_t     lr_adjoint       step of u; the paper has one step for y and u
    -v        u                the adjoint, with the other sign
    ========  ==============   =====================

    With constant steps this is FedBiO with one local step, and SimFBO with one.
    """

    citation = (
        'Dagreou, Ablin, Vaiter, Moreau: "A framework for bilevel optimization that enables stochastic and global '
        'variance reduction algorithms", NeurIPS 2022'
    )
    source = "reconstruction without the paper's text; the federation is ours"
    exact = "exact: there are no local steps, so that heterogeneity adds nothing"
    alone = "SOBA"

    lr_upper: float = parameter(power(0.1, -0.5), "step size of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(power(0.5, -0.5), "step size of the lower variable y", above=0, tune=(1e-3, 2.0))
    lr_adjoint: float = parameter(power(0.5, -0.5), "step size of the adjoint u", above=0, tune=(1e-3, 2.0))

    def round(self, clients: Clients, server: Point) -> Point:
        d = clients.run(self.descend, server).mean()
        return self.move(clients, server, d, (self.lr_upper, self.lr_lower, self.lr_adjoint))

    def descend(self, client: Client, key: Key, z: Point) -> Point:
        """The three directions."""
        return directions(client, z, key, shared_batch=True)


class Tables(NamedTuple):
    """For every block of a client's rows the last values of the terms of f and of g there, and the means of the tables:
    as directions of x, y and u.
    """

    f: Point
    g: Point
    mean: Point


@dataclass(frozen=True)
class SABA(_OneStep):
    """SABA: SOBA with SAGA's variance reduction: clients remember the terms of every block of their rows.

    The federation is ours. Every client cuts its rows into B blocks. In a round it draws one block i of g and one block
    j of f, takes the directions there, and corrects them by what it remembers of the same blocks::

        D = D_ij(z) - D_ij(remembered) + mean of all that is remembered,   then it remembers D_ij(z)

    and the server takes the step of SOBA along the mean of D, with constant steps.

    ========  ==============   =====================
    paper     name             meaning
    ========  ==============   =====================
    gamma     lr_upper         step of x
    rho       lr_lower         step of y
    rho       lr_adjoint       step of u; the paper has one step for y and u
    n, m      blocks           B; in the paper blocks are single rows
    ========  ==============   =====================

    At first 0 is remembered, which is unbiased; the paper may start with a pass over all rows. Batch sizes do not
    matter: a block is what a batch is elsewhere. A client stores B (2p + 3d) floats. Losses must be means over rows.
    """

    citation = SOBA.citation
    source = SOBA.source
    exact = "exact with mini-batches and constant steps: the noise of the directions vanishes at the solution"
    alone = "SABA"

    remembers: ClassVar[Literal["nothing", "round", "run"]] = "run"

    lr_upper: float = parameter(0.1, "step size of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(0.3, "step size of the lower variable y", above=0, tune=(1e-3, 2.0))
    lr_adjoint: float = parameter(0.3, "step size of the adjoint u", above=0, tune=(1e-3, 2.0))
    blocks: int = parameter(10, "blocks of a client's rows that it remembers", least=1)

    def memory(self, x: Vector, y: Vector) -> Tables:
        table = lambda v: v.map(lambda a: jnp.zeros((self.blocks, *a.shape), a.dtype))
        empty = Point(table(x), table(y), table(y))
        return Tables(empty, empty, Point(0 * x, 0 * y, 0 * y))

    def round(self, clients: Clients, server: Point) -> Point:
        d = clients.run(self.descend, server).mean()
        return self.move(clients, server, d, (self.lr_upper, self.lr_lower, self.lr_adjoint))

    def descend(self, client: Client, memory: Tables, key: Key, z: Point) -> tuple[Tables, Point]:
        """The corrected directions, and what the client remembers from now on."""
        i, j = (jax.random.randint(k, (), 0, self.blocks) for k in jax.random.split(key))
        gy, cross, hessian = client.g.block(i, self.blocks).second_order(*z, key)
        fx, fy = client.f.block(j, self.blocks).gradients(z.x, z.y, key)
        f, g = Point(fx, 0 * gy, -fy), Point(-cross, gy, hessian)
        change = add(sub(f, read(memory.f, j)), sub(g, read(memory.g, i)))
        mean = add(memory.mean, Point(*(v / self.blocks for v in change)))
        return Tables(write(memory.f, j, f), write(memory.g, i, g), mean), add(change, memory.mean)


def read(table: Point, block: jax.Array) -> Point:
    """One row of the tables."""
    return Point(*(v.map(lambda a: a[block]) for v in table))


def write(table: Point, block: jax.Array, values: Point) -> Point:
    """The tables with another row."""
    new = (v.map(lambda a, value: a.at[block].set(value), w) for v, w in zip(table, values, strict=True))
    return Point(*new)
