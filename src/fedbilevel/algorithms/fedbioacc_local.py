"""FedBiOAcc-Local and DistBiOAcc."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.core.schedules import Schedule, constant
from fedbilevel.core.vectors import Vector
from fedbilevel.mathematics.hypergradient import Pair, feasible
from fedbilevel.mathematics.momenta import check_forgetting
from fedbilevel.mathematics.neumann import check_restart, neumann_hypergradient, trained


class FedBiOAccLocalState(NamedTuple):
    """The averaged x, its averaged momentum, and the time t of the next step."""

    x: Vector
    nu: Vector
    t: jax.Array


class Memory(NamedTuple):
    """A client's point, its momenta there, the time of the step that they are for, and with ``restart`` the y to start
    again from. Between rounds only y and omega matter; x and nu are kept from exchange A to exchange B.
    """

    z: Pair
    d: Pair
    t: jax.Array
    first: Vector | None


@dataclass(frozen=True)
class FedBiOAccLocal(Algorithm):
    """FedBiOAcc-Local: FedBiO-Local with STORM momenta for x and y, which also cancel client drift.

    With z = (x, y), its directions D_m(z; B) = (Phi_m(z; B_x), grad_y g_m(z; B_y)), where Phi_m is the client's own
    hypergradient (a Neumann series with Q Hessian products), and its momenta d = (nu, omega), every client at time t =
    1, 2, ...::

        z_{t+1} = z_t - (eta, gamma) alpha_t d_t                                 x averaged if t mod I = 0 (exchange A)
        d_{t+1} = D_m(z_{t+1}; B) + (1 - c alpha_t^2) (d_t - D_m(z_t; B))        nu averaged if t mod I = 0 (exchange B)

    The same batches B serve both points. y and omega never leave their client. On averaging steps x_{t+1} is the
    average while x_t is the client's own, so the two exchanges cannot be merged.

    The paper does not say how y follows if it has a part for every task of a client, as in few-shot learning (section
    5.2). There are three options. K = ``lower_steps`` takes K steps of y for each step of x: all but the first at
    x_{t+1}, each with a batch for omega at both its ends, and Phi_m at the last y. With ``shared_batch`` one key names
    all batches of a step, for g and f alike, so that both see the same tasks if row n of either is about task n. With
    it, ``restart`` gives y no momentum and trains it for the batch, by K plain gradient steps from y_1 at every x::

        nu_{t+1} = Phi_m(x_{t+1}, y(x_{t+1}; B); B) + (1 - c_nu alpha_t^2) (nu_t - Phi_m(x_t, y(x_t; B); B))

    =========  ==============   =====================
    paper      name             meaning
    =========  ==============   =====================
    eta        lr_upper         step of x
    gamma      lr_lower         step of y
    tau        lr_adjoint       step of the Neumann series, below 1 / L
    Q          neumann_steps    Hessian products of the Neumann series
    alpha_t    rate             common rate, constant or delta / (u0 + t)^(1/3)
    c_nu       c_upper          forgetting of the momentum of x
    c_omega    c_lower          ... of y
    I          local_steps      steps between averages
    b_1 / b    first_batch      how many times larger the batches of the first momenta are
    =========  ==============   =====================

    The first momenta are each client's own until the first average, so ``init`` takes the first I steps (a round of its
    own). The paper does not treat partial participation; here a client that was away starts omega again with the
    gradient at its first step, because its old omega belongs to an old x. If the problem has constraints, every local
    step is projected.
    """

    citation = (
        'Li, Huang, Huang: "Communication-Efficient Federated Bilevel Optimization with Global and Local Lower Level '
        'Problems", NeurIPS 2023, Algorithm 4 and eq. (11)'
    )
    source = "follows the paper with K = 1 and independent batches, the defaults"
    assumes = "a local lower level, g strongly convex in y, bounded heterogeneity and 0 <= c alpha_t^2 <= 1"
    exact = (
        "exact for every I up to the truncation of the series, with exact oracles and c = 0; c > 0 leaves a drift of "
        "order c alpha^2. With restart, y is K steps from y_1 in the limit: y* up to an error of order (1 - gamma "
        "mu)^K"
    )
    alone = "MRBO"
    costs = (
        "Two exchanges per round: 2p floats down and up with full participation (a client that missed the last round "
        "needs x again: p more down); I (2 Gf, 2K Gg, 2 J, 2Q H) per client"
    )

    lower_level = "local"
    remembers = "run"

    lr_upper: float = parameter(1.0, "step size of the upper variable x", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(0.4, "step size of the lower variable y", above=0, tune=(1e-3, 2.0))
    lr_adjoint: float = parameter(0.1, "step size of the Neumann series, below 1 / L", above=0, tune=(1e-3, 2.0))
    neumann_steps: int = parameter(10, "Hessian products of the Neumann series", least=0)
    rate: Schedule = parameter(constant(1.0), "common rate alpha_t: a number or cube_root(delta, u0)", above=0)
    c_upper: float = parameter(0.2, "forgetting rate of the momentum of x", least=0, tune=(1e-3, 1.0))
    c_lower: float = parameter(0.2, "forgetting rate of the momentum of y", least=0, tune=(1e-3, 1.0))
    local_steps: int = parameter(5, "local steps between averages", least=1)
    first_batch: int = parameter(5, "how many times larger the first batch is", least=1)
    lower_steps: int = parameter(1, "steps of y for each step of x", least=1)
    shared_batch: bool = parameter(
        False, "use one batch for all terms of a step, with the same row numbers for f and g"
    )
    restart: bool = parameter(
        False, "restart y in every step of x and train it on the batch of that step, without momentum"
    )

    def check(self) -> None:
        check_forgetting(self, ("c_upper", "c_lower"), self.rate.largest(), when=" at t = 1")

        check_restart(type(self).__name__, self.restart, self.shared_batch)

    def memory(self, x: Vector, y: Vector) -> Memory:
        return Memory(Pair(x, y), Pair(0 * x, 0 * y), jnp.zeros((), int), y if self.restart else None)

    def init(self, clients: Clients, x: Vector, y: Vector) -> FedBiOAccLocalState:
        t = jnp.asarray(1)
        x = clients.project_x(x + clients.run(self.start, x, t).mean())
        return self.synchronise_momentum(clients, x, t)

    def round(self, clients: Clients, server: FedBiOAccLocalState) -> FedBiOAccLocalState:
        x = clients.project_x(server.x + clients.run(self.descend, *server).mean())  # exchange A
        return self.synchronise_momentum(clients, x, server.t)

    def synchronise_momentum(self, clients: Clients, x: Vector, t: jax.Array) -> FedBiOAccLocalState:
        nu = clients.run(self.correct, x, t).mean()  # exchange B
        return FedBiOAccLocalState(x, nu, t + self.local_steps)

    def start(self, client: Client, memory: Memory, key: Key, x: Vector, t: jax.Array) -> tuple[Memory, Vector]:
        """The first momenta, on a larger batch, and the first local steps with them."""
        first, key = jax.random.split(key)
        z = feasible(client, Pair(x, memory.z.y))
        larger, (b_y, b_x) = client.larger_batches(self.first_batch), self.batches(first)
        if memory.first is None:
            d = Pair(self.hypergradient(larger, z, b_x), larger.g.dy(*z, b_y))
        else:
            z = self.restarted(larger, memory.first, first, x)
            d = Pair(self.hypergradient(larger, z, first), memory.d.y)
        return self.descend(client, Memory(z, d, t, memory.first), key, x, d.x, t)

    def descend(
        self, client: Client, memory: Memory, key: Key, x: Vector, nu: Vector, t: jax.Array
    ) -> tuple[Memory, Vector]:
        """I - 1 local steps, then the half of the I-th that precedes exchange A: only x moves."""

        def step(local: Memory, key: Key, i: Any) -> Memory:
            return self.step(client, key, local, self.move(local, t + i), t + i)

        local = memory._replace(z=Pair(x, memory.z.y), d=Pair(nu, memory.d.y))
        local = client.repeat(self.local_steps - 1, step, local, key)
        return local, self.move(local, t + self.local_steps - 1) - x

    def correct(self, client: Client, memory: Memory, key: Key, x: Vector, t: jax.Array) -> tuple[Memory, Vector]:
        """The other half: y moves, and the momenta follow to the averaged x."""
        local = self.step(client, key, memory, x, t + self.local_steps - 1)
        return local, local.d.x

    def move(self, local: Memory, t: jax.Array) -> Vector:
        return local.z.x - self.lr_upper * self.rate(t) * local.d.x

    def step(self, client: Client, key: Key, local: Memory, x: Vector, t: jax.Array) -> Memory:
        """The step of time t, to the given x."""
        alpha, (b_y, b_x) = self.rate(t), self.batches(key)
        if local.first is None:
            old = local.z
            z, omega = self.follow(client, b_y, local, x, t)
        else:
            restarted = partial(self.restarted, client, local.first, key)
            (z, old), omega = client.at_both(restarted, x, local.z.x), local.d.y
        new, past = client.at_both(lambda point: self.hypergradient(client, point, b_x), z, old)
        nu = new + (1 - self.c_upper * alpha**2) * (local.d.x - past)
        return Memory(z, Pair(nu, omega), t + 1, local.first)

    def follow(self, client: Client, key: Key, local: Memory, x: Vector, t: jax.Array) -> tuple[Pair, Vector]:
        """The point with the new x, where y has followed, and the momentum of y there."""
        alpha = self.rate(t)

        def step(carry: tuple[Pair, Vector], own: Key, i: Any) -> tuple[Pair, Vector]:
            z, omega = carry
            own = key if self.shared_batch else own
            past = client.g.dy(*z, own)
            away = (local.t != t) & (i == 0)
            omega = omega.map(lambda old, new: jnp.where(away, new, old), past)
            z = feasible(client, Pair(x, z.y - self.lr_lower * alpha * omega))
            return z, client.g.dy(*z, own) + (1 - self.c_lower * alpha**2) * (omega - past)

        return client.repeat(self.lower_steps, step, (local.z, local.d.y), key)

    def restarted(self, client: Client, first: Vector, key: Key, x: Vector) -> Pair:
        """x with the y that is trained for this batch."""
        z = feasible(client, Pair(x, first))
        return Pair(z.x, trained(client, z, key, self.lr_lower, self.lower_steps, shared_batch=True))

    def hypergradient(self, client: Client, z: Pair, key: Key) -> Vector:
        return neumann_hypergradient(client, z, key, self.lr_adjoint, self.neumann_steps, self.shared_batch)

    def batches(self, key: Key) -> tuple[Key, Key]:
        """The names of the batches for y and for x."""
        return (key, key) if self.shared_batch else tuple(jax.random.split(key))

    def solution(self, server: FedBiOAccLocalState, memory: Memory) -> tuple[Vector, Vector]:
        return server.x, memory.z.y


@dataclass(frozen=True)
class DistBiOAcc(FedBiOAccLocal):
    """DistBiOAcc: FedBiOAcc-Local with an average after every step.

    =========  ==============   =====================
    paper      name             meaning
    =========  ==============   =====================
    eta        lr_upper         step of x
    gamma      lr_lower         step of y
    tau        lr_adjoint       step of the Neumann series, below 1 / L
    Q          neumann_steps    Hessian products of the Neumann series
    alpha_t    rate             common rate, constant or delta / (u0 + t)^(1/3)
    c_nu       c_upper          forgetting of the momentum of x
    c_omega    c_lower          ... of y
    b_1 / b    first_batch      how many times larger the batches of the first momenta are
    =========  ==============   =====================

    Partial participation, constraints, ``lower_steps``, ``shared_batch`` and ``restart`` are as in FedBiOAcc-Local.
    """

    citation = (
        'Li, Huang, Huang: "Communication-Efficient Federated Bilevel Optimization with Global and Local Lower Level '
        'Problems", NeurIPS 2023, section 5.2: Algorithm 4 with I = 1'
    )
    exact = "exact up to the truncation of the series"
    alone = "MRBO"
    costs = "Two exchanges per round: 2p floats down and up; 2 Gf, 2K Gg, 2 J, 2Q H per client, with K = lower_steps"

    local_steps: ClassVar[int] = 1  # pyright: ignore[reportIncompatibleVariableOverride] - no longer a hyper-parameter
