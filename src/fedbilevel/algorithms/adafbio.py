"""AdaFBiO."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.core.schedules import Schedule, cube_root, largest
from fedbilevel.core.vectors import Vector, add, norm, sub
from fedbilevel.errors import FedbilevelError
from fedbilevel.mathematics.hypergradient import Pair, feasible
from fedbilevel.mathematics.momenta import check_forgetting
from fedbilevel.mathematics.neumann import local_directions


class AdaFBiOState(NamedTuple):
    """The averaged point and momenta, the second moments a (of every entry of x) and b (of y as a whole), and t."""

    z: Pair
    d: Pair
    a: Vector
    b: jax.Array
    t: jax.Array


class Memory(NamedTuple):
    """A client's point and its momenta there, from exchange A to exchange B."""

    z: Pair
    d: Pair


@dataclass(frozen=True)
class AdaFBiO(Algorithm):
    """AdaFBiO: local steps with STORM momenta, scaled as in Adam; for identical clients only.

    With the client's own directions D_m = (Phi_m, grad_y g_m), where Phi_m inverts the client's own Hessian by a
    Neumann series with Q products, and momenta d = (w, v), every client at time t = 1, 2, ...::

        x_{t+1} = x_t - gamma  eta_t w_t / ( sqrt(a) + lambda_0 )                     every entry by itself
        y_{t+1} = y_t - lambda eta_t v_t / ( b + lambda_0 )
        d_{t+1} = D_m(z_{t+1}; xi) + (1 - c eta_t^2) ( d_t - D_m(z_t; xi) )

    The same batches xi serve both points. After I steps the server averages x and y, and then w and v. With these::

        a <- rho a + (1 - rho) w^2,     b <- rho b + (1 - rho) |v|

    ==========  ==============   =====================
    paper       name             meaning
    ==========  ==============   =====================
    gamma       lr_upper         step of x
    lambda      lr_lower         step of y
    1 / L       lr_adjoint       step of the Neumann series
    Q           neumann_steps    Hessian products of the Neumann series
    eta_t       rate             common rate, k_0 / (n_0 + t)^(1/3) in the theory
    c_1         c_upper          forgetting of the momentum of x
    c_2         c_lower          ... of y
    rho         decay            how much a and b keep
    lambda_0    epsilon          keeps the denominators positive
    I           local_steps      steps between averages
    ==========  ==============   =====================

    a and b start at 0, and the first momenta are means of the clients'. Clients compute a from the w that they receive
    and send it back, so that every owner of a private x scales its own block.
    """

    citation = 'Huang: "Fast Adaptive Federated Bilevel Optimization", arXiv 2211.01122, 2022'
    source = "reconstruction without the paper's text, of which details are not certain"
    assumes = "identical clients and g strongly convex in y"
    exact = (
        "not exact: the mean of inverses is not the inverse of the mean, and it goes to a zero of the mean of the "
        "clients' own hypergradients at the shared y"
    )
    alone = "MRBO, scaled as in Adam"
    costs = (
        "Two exchanges per round: 2 (p + d) + p floats down and up with full participation (a client that missed the "
        "last round needs the point again: p + d more down); I (2 Gf, 2 Gg, 2 J, 2Q H) per client"
    )

    remembers = "round"

    lr_upper: float = parameter(0.1, "step size of the upper variable x", above=0, tune=(1e-3, 1e1))
    lr_lower: float = parameter(0.1, "step size of the lower variable y", above=0, tune=(1e-3, 2.0))
    lr_adjoint: float = parameter(0.1, "step size of the Neumann series, below 1 / L", above=0, tune=(1e-3, 2.0))
    neumann_steps: int = parameter(10, "Hessian products of the Neumann series", least=0)
    rate: Schedule = parameter(cube_root(1.0, 1.0), "common rate eta_t: a number or cube_root(k0, n0)", above=0)
    c_upper: float = parameter(0.2, "forgetting rate of the momentum of x", least=0, tune=(1e-3, 1.0))
    c_lower: float = parameter(0.2, "forgetting rate of the momentum of y", least=0, tune=(1e-3, 1.0))
    decay: float = parameter(0.9, "how much of the second moments is kept", least=0)
    epsilon: float = parameter(0.1, "added to the denominators", above=0)
    local_steps: int = parameter(5, "local steps between averages", least=1)

    def check(self) -> None:
        check_forgetting(self, ("c_upper", "c_lower"), self.rate.largest(), when=" at t = 1")
        if not largest(self.decay) < 1:
            raise FedbilevelError(f"AdaFBiO: decay must be below 1, not {self.decay}.")

    def init(self, clients: Clients, x: Vector, y: Vector) -> AdaFBiOState:
        z = Pair(x, y)
        return AdaFBiOState(z, clients.run(self.start, z).mean(), 0 * x, 0 * norm(y), jnp.asarray(1))

    def round(self, clients: Clients, server: AdaFBiOState) -> AdaFBiOState:
        z, d, a, _, t = server
        b = self.decay * server.b + (1 - self.decay) * norm(d.y)
        moved, change = clients.run(self.descend, z, d, a, b, t).mean()  # exchange A
        z, a = feasible(clients, add(z, moved)), a + change
        d = clients.run(self.correct, z, t).mean()  # exchange B
        return AdaFBiOState(z, d, a, b.astype(server.b.dtype), t + self.local_steps)

    def start(self, client: Client, memory: None, key: Key, z: Pair) -> tuple[Memory, Pair]:
        d = self.directions(client, z, key)
        return Memory(z, d), d

    def descend(
        self, client: Client, memory: Any, key: Key, z: Pair, d: Pair, a: Vector, b: jax.Array, t: jax.Array
    ) -> tuple[Memory, tuple[Pair, Vector]]:
        """I - 1 local steps, then the half of the I-th that precedes exchange A; also what a gains."""
        change = (1 - self.decay) * (d.x.map(jnp.square) - a)
        a = a + change

        def move(local: Memory, t: jax.Array) -> Pair:
            (x, y), (w, v), eta = local.z, local.d, self.rate(t)
            scaled = w.map(lambda w, a: w / (jnp.sqrt(a) + self.epsilon), a)
            return Pair(x - self.lr_upper * eta * scaled, y - self.lr_lower * eta / (b + self.epsilon) * v)

        def step(local: Memory, key: Key, i: Any) -> Memory:
            z = feasible(client, move(local, t + i))
            return Memory(z, self.momenta(client, key, z, local, t + i))

        local = client.repeat(self.local_steps - 1, step, Memory(z, d), key)
        return local, (sub(move(local, t + self.local_steps - 1), z), change)

    def correct(self, client: Client, memory: Memory, key: Key, z: Pair, t: jax.Array) -> tuple[Memory, Pair]:
        """The other half: momenta at the averaged point."""
        return memory, self.momenta(client, key, z, memory, t + self.local_steps - 1)

    def momenta(self, client: Client, key: Key, z: Pair, old: Memory, t: jax.Array) -> Pair:
        new, past = (self.directions(client, point, key) for point in (z, old.z))
        kept = (1 - c * self.rate(t) ** 2 for c in (self.c_upper, self.c_lower))
        return Pair(*(n + keep * (d - p) for n, d, p, keep in zip(new, old.d, past, kept, strict=True)))

    def directions(self, client: Client, z: Pair, key: Key) -> Pair:
        return local_directions(client, z, key, self.lr_adjoint, self.neumann_steps)

    def solution(self, server: AdaFBiOState, memory: None) -> tuple[Vector, Vector]:
        return server.z
