"""Averages over clients for algorithms that were designed for one machine: each average is one exchange.

Such an algorithm sees f and g only through gradients and products. All of these are linear in f and g, so the average
over clients is the gradient or product of the whole, and the algorithm is as exact as on one machine. Gradients of f
cost no exchange if the server holds the upper loss.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.core.sampling import wrapped
from fedbilevel.core.schedules import Schedule, cube_root, power
from fedbilevel.core.vectors import Vector, add
from fedbilevel.errors import FedbilevelError
from fedbilevel.mathematics.hypergradient import Pair, feasible

Words = tuple[jax.Array, ...]


def name_batches(clients: Clients) -> Words:
    """A name for batches that serve several exchanges: a key as scalars, which do not count as floats of a message."""
    return tuple(jax.random.key_data(clients.next_key()))


def named(client: Client, words: Words, t: int | jax.Array = 0) -> Key:
    """The key of batch number t of this name, a different one for every client."""
    key = wrapped(jnp.stack(words))
    return jax.random.fold_in(jax.random.fold_in(key, client.id), t)


@dataclass(frozen=True)
class Averages(Algorithm):
    """Steps on y, gradients of f, Hessian products, Neumann series and cross products, averaged over clients.

    Functions of several points evaluate them all on the same batches.
    """

    upper_at: ClassVar[Literal["clients", "server", "either"]] = "either"

    def descend(self, clients: Clients, z: Pair, step: float, times: int) -> Pair:
        """Gradient steps on y, one exchange each."""

        def once(clients: Clients, y: Vector) -> Vector:
            return clients.project_y(y - step * clients.run(self.lower_gradient, Pair(z.x, y)).mean())

        return Pair(z.x, clients.repeat(times, once, z.y))

    def upper(self, clients: Clients, *points: Pair) -> Sequence[Pair]:
        """Both gradients of f at every point: of the server's own loss, or by an exchange."""
        if clients.holds_upper:
            key = clients.next_key()
            return [Pair(*clients.f.gradients(*z, key)) for z in points]
        return clients.run(self.upper_gradients, *points).mean()

    def cross(self, clients: Clients, z: Pair, v: Vector) -> Vector:
        """d2xy g v."""
        return clients.run(self.cross_product, z, v).mean()

    def neumann(
        self, clients: Clients, points: Sequence[Pair], v: tuple[Vector, ...], tau: float, last: int | jax.Array,
        whole: bool,
    ) -> tuple[Vector, ...]:  # fmt: skip
        """Term number ``last`` of the series tau sum_k (I - tau d2yy g)^k v at every point, or the ``whole`` sum up to
        it. Every factor has a batch of its own and is one exchange.
        """

        def multiply(clients: Clients, v: tuple[Vector, ...]) -> tuple[Vector, ...]:
            images = clients.run(self.hessian_products, points, v).mean()
            return tuple(p - tau * image for p, image in zip(v, images, strict=True))

        def add_term(clients: Clients, carry: tuple[tuple[Vector, ...], ...]) -> tuple[tuple[Vector, ...], ...]:
            v, series = carry
            v = multiply(clients, v)
            return v, add(series, v)

        series = clients.repeat(last, add_term, (v, v))[1] if whole else clients.repeat(last, multiply, v)
        return tuple(tau * s for s in series)

    def lower_gradient(self, client: Client, key: Key, z: Pair) -> Vector:
        return client.g.dy(*z, key)

    def upper_gradients(self, client: Client, key: Key, *points: Pair) -> Sequence[Pair]:
        return [Pair(*client.f.gradients(*z, key)) for z in points]

    def hessian_products(
        self, client: Client, key: Key, points: Sequence[Pair], v: Sequence[Vector]
    ) -> tuple[Vector, ...]:
        return tuple(client.g.dyy(*z, p, key) for z, p in zip(points, v, strict=True))

    def cross_product(self, client: Client, key: Key, z: Pair, v: Vector) -> Vector:
        return client.g.dxy(*z, v, key)


class DoubleMomentumState(NamedTuple):
    """The point, the momenta there (for x and for y), and the time of the next step."""

    z: Pair
    d: Pair
    t: jax.Array


@dataclass(frozen=True)
class DoubleMomentum(Averages):
    """One step on x and y at once along STORM momenta; subclasses say how the inverse of the Hessian is estimated.

    With the directions D(z; xi) = (Phi(z; xi), grad_y g(z; xi))::

        z_{t+1} = P( z_t - (alpha_t, beta_t) d_t )
        d_{t+1} = D(z_{t+1}; xi) + (1 - eta_{t+1}) (d_t - D(z_t; xi)),     d_1 = D(z_1; xi)
    """

    lr_upper: Schedule = parameter(cube_root(0.1, 1.0), "step size of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: Schedule = parameter(cube_root(0.5, 1.0), "step size of the lower variable y", above=0, tune=(1e-3, 2.0))
    lr_adjoint: float = parameter(0.3, "step size of the Neumann series, below 1 / L", above=0, tune=(1e-3, 2.0))
    forget_upper: Schedule = parameter(
        power(1.0, -2 / 3), "forgetting rate of the momentum of x, from 0 to 1", least=0, tune=(0.05, 1.0)
    )
    forget_lower: Schedule = parameter(
        power(1.0, -2 / 3), "forgetting rate of the momentum of y, from 0 to 1", least=0, tune=(0.05, 1.0)
    )

    def check(self) -> None:
        for name in ("forget_upper", "forget_lower"):
            worst = getattr(self, name).largest()
            if not worst <= 1:
                raise FedbilevelError(f"{type(self).__name__}: {name} must be at most 1, not {worst:.3g}.")

    def init(self, clients: Clients, x: Vector, y: Vector) -> DoubleMomentumState:
        t = jnp.asarray(1)
        return DoubleMomentumState(Pair(x, y), self.directions(clients, [Pair(x, y)], t), t)

    def round(self, clients: Clients, server: DoubleMomentumState) -> DoubleMomentumState:
        z, d, t = server
        new = feasible(clients, Pair(z.x - self.lr_upper(t) * d.x, z.y - self.lr_lower(t) * d.y))
        change, keep = self.directions(clients, [new, z], t + 1), self.keep(t + 1)
        return DoubleMomentumState(new, Pair(change.x + keep[0] * d.x, change.y + keep[1] * d.y), t + 1)

    def directions(self, clients: Clients, points: Sequence[Pair], t: jax.Array) -> Pair:
        """D(z; xi) at a point; with two points, minus D at the second, as far as the momenta are kept."""
        f = self.upper(clients, *points)
        u = self.adjoints(clients, points, tuple(gradients.y for gradients in f))
        indirect, omega = clients.run(self.finish, points, u, t).mean()
        return Pair(self.newest([gradients.x for gradients in f], self.keep(t)[0]) - indirect, omega)

    @abstractmethod
    def adjoints(self, clients: Clients, points: Sequence[Pair], fy: tuple[Vector, ...]) -> tuple[Vector, ...]:
        """Estimates of [d2yy g]^-1 fy at every point, on the same batches."""

    def keep(self, t: jax.Array) -> tuple[float | jax.Array, float | jax.Array]:
        """1 - eta_t, for x and for y."""
        return 1 - self.forget_upper(t), 1 - self.forget_lower(t)

    def newest(self, values: Sequence[Vector], keep: float | jax.Array) -> Vector:
        """The value at the first point, minus what is kept of the value at the second."""
        return values[0] if len(values) == 1 else values[0] - keep * values[1]

    def finish(self, client: Client, key: Key, points: Sequence[Pair], u: Sequence[Vector], t: jax.Array) -> Pair:
        """Cross products, and the direction of y in the same message; of two points the difference, not both."""
        psi, zeta = jax.random.split(key)
        keep_x, keep_y = self.keep(t)
        indirect = [client.g.dxy(*z, v, psi) for z, v in zip(points, u, strict=True)]
        omega = [client.g.dy(*z, zeta) for z in points]
        return Pair(self.newest(indirect, keep_x), self.newest(omega, keep_y))

    def solution(self, server: DoubleMomentumState, memory: None) -> tuple[Vector, Vector]:
        return server.z
