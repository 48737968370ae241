"""SimFBO and ShroFBO."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.core.vectors import Vector, add, project_ball
from fedbilevel.errors import FedbilevelError
from fedbilevel.mathematics.hypergradient import Point, directions, feasible


@dataclass(frozen=True)
class LocalDirections(Algorithm):
    """What SimFBO and ShroFBO share: the local steps on z = (x, y, u), and the server's step."""

    citation = (
        'Yang, Xiao, Ji: "SimFBO: Towards Simple, Flexible and Communication-efficient Federated Bilevel Learning", '
        "NeurIPS 2023"
    )
    source = "reconstruction without the paper's text"
    assumes = "g strongly convex in y, bounded heterogeneity, and third-order smoothness of g"

    lr_upper: float = parameter(0.2, "step size of x on the server", above=0, tune=(1e-3, 1e3))
    lr_lower: float = parameter(0.1, "step size of y on the server", above=0, tune=(1e-3, 2.0))
    lr_adjoint: float = parameter(0.05, "step size of u on the server", above=0, tune=(1e-3, 2.0))
    local_lr_upper: float = parameter(0.2, "step size of x on the clients", least=0, tune=(1e-3, 1e3))
    local_lr_lower: float = parameter(0.1, "step size of y on the clients", least=0, tune=(1e-3, 2.0))
    local_lr_adjoint: float = parameter(0.05, "step size of u on the clients", least=0, tune=(1e-3, 2.0))
    local_steps: int = parameter(1, "local steps between exchanges", least=1)
    radius: float = parameter(float("inf"), "bound on the norm of the adjoint u", above=0)
    shared_batch: bool = parameter(False, "use one batch of f and one of g for all terms of a step (cheaper)")
    local_steps_of: tuple[int, ...] = parameter((), "local steps of each client, if they differ", least=1, whole=True)

    def init(self, clients: Clients, x: Vector, y: Vector) -> Point:
        return Point(x, y, clients.adjoint(y))

    def collect(self, client: Client, key: Key, z: Point) -> tuple[Point, jax.Array]:
        """The sums of the directions and of their coefficients along the local path."""

        def step(carry: tuple[Point, Point, jax.Array], key: Key, k: Any) -> tuple[Point, Point, jax.Array]:
            z, q, total = carry
            a = self.coefficient(client, k)
            dx, dy, du = (a * d for d in directions(client, z, key, self.shared_batch))
            moved = Point(
                x=z.x - self.local_lr_upper * dx,
                y=z.y - self.local_lr_lower * dy,
                u=z.u - self.local_lr_adjoint * du,
            )
            return feasible(client, moved), add(q, Point(dx, dy, du)), total + a

        nothing = Point(*(0 * v for v in z))
        steps = max(self.local_steps_of, default=self.local_steps)
        _, q, total = client.repeat(steps, step, (z, nothing, jnp.zeros(())), key)
        return q, total

    def coefficient(self, client: Client, k: Any) -> Any:
        """a_i^k, the weight of the client's step k; 0 after its last step if it takes fewer than the others."""
        steps = self.local_steps_of
        if not steps:
            return 1.0
        if len(steps) != client.clients:
            name = type(self).__name__
            raise FedbilevelError(f"{name}: local_steps_of has {len(steps)} numbers for {client.clients} clients.")
        return jnp.where(k < jnp.asarray(steps)[client.id], 1.0, 0.0)

    def move(self, clients: Clients, z: Point, q: Point) -> Point:
        moved = Point(
            x=z.x - self.lr_upper * q.x,
            y=z.y - self.lr_lower * q.y,
            u=project_ball(z.u - self.lr_adjoint * q.u, self.radius),
        )
        return feasible(clients, moved)

    def solution(self, server: Point, memory: None) -> tuple[Vector, Vector]:
        return server.x, server.y


@dataclass(frozen=True)
class SimFBO(LocalDirections):
    """SimFBO: local steps on x, y and the adjoint u at once; the server steps along the sums of local directions.

    With z = (x, y, u) and D = (grad_x f - d2xy g u, grad_y g, d2yy g u - grad_y f), client i takes the steps k = 0 ..
    tau - 1 from the server's z and sends the sum of its directions, along which the server takes one step::

        z_i <- z_i - eta a_i^k D_i(z_i),    q_i = sum_k a_i^k D_i(z_i)
        z   <- P( z - gamma (n / |C|) sum_{i in C} w_i q_i )

    =============  ================   =====================
    paper          name               meaning
    =============  ================   =====================
    gamma_x        lr_upper           step of x on the server
    gamma_y        lr_lower           ... of y
    gamma_v        lr_adjoint         ... of u (v in the paper)
    eta_x          local_lr_upper     step of x on the clients
    eta_y          local_lr_lower     ... of y
    eta_v          local_lr_adjoint   ... of u
    tau            local_steps        local steps between exchanges
    tau_i          local_steps_of     local steps of each client, if they differ; overrides local_steps
    r              radius             bound on the norm of u; L_f / mu in the theory, infinite by default
    a_i^k          coefficient()      weight of step k on client i: 1, and 0 from step tau_i on
    =============  ================   =====================

    Clients with different tau_i count in proportion to them: see ShroFBO. All compute as long as the one with the most
    steps, which is what is counted here, but do not move after their last step. Cohorts are drawn without replacement,
    with weights n w_i / |C|. Clients evaluate at feasible points; the server projects x and y.
    """

    exact = (
        "exact with one local step, or with local steps of size 0; otherwise client drift displaces the limit, in "
        "proportion to eta and to tau - 1, whatever gamma is"
    )
    alone = "SOBA with constant steps (one local step and a shared batch)"
    costs = (
        "One exchange per round: p + 2d floats down and up; tau (2 Gf, 1 Gg, 1 J, 1 H) per client, 1 Gf with a shared "
        "batch"
    )

    def round(self, clients: Clients, server: Point) -> Point:
        return self.move(clients, server, clients.run(self.descend, server).estimate())

    def descend(self, client: Client, key: Key, z: Point) -> Point:
        """Local steps; what goes up is the sum of the directions along the way."""
        return self.collect(client, key, z)[0]


@dataclass(frozen=True)
class ShroFBO(LocalDirections):
    """ShroFBO: SimFBO made robust to clients that take different numbers of local steps.

    Local steps as in SimFBO, but a client sends its mean direction and how many steps it took, |a_i| = sum_k a_i^k; the
    server steps along the mean of the means, as far as before::

        rho = (n / |C|) sum_{i in C} w_i |a_i|
        z <- P( z - gamma rho (n / |C|) sum_{i in C} w_i q_i / |a_i| )

    =============  ================   =====================
    paper          name               meaning
    =============  ================   =====================
    gamma_x        lr_upper           step of x on the server
    gamma_y        lr_lower           ... of y
    gamma_v        lr_adjoint         ... of u (v in the paper)
    eta_x          local_lr_upper     step of x on the clients
    eta_y          local_lr_lower     ... of y
    eta_v          local_lr_adjoint   ... of u
    tau            local_steps        local steps between exchanges
    tau_i          local_steps_of     local steps of each client, if they differ; overrides local_steps
    r              radius             bound on the norm of u; L_f / mu in the theory, infinite by default
    a_i^k          coefficient()      weight of step k on client i: 1, and 0 from step tau_i on
    =============  ================   =====================

    All clients count with their weights, however many steps they take; with full participation and equal numbers of
    steps this is SimFBO. Cohorts are drawn without replacement, with weights n w_i / |C|; the product with rho is then
    not unbiased if weights differ.
    """

    exact = "exact with one local step, or with local steps of size 0; otherwise client drift displaces the limit"
    alone = "SOBA with constant steps (one local step and a shared batch)"
    costs = (
        "One exchange per round: p + 2d floats down and up (and one number up); tau (2 Gf, 1 Gg, 1 J, 1 H) per "
        "client, 1 Gf with a shared batch"
    )

    def round(self, clients: Clients, server: Point) -> Point:
        q, rho = clients.run(self.descend_mean, server).estimate()
        return self.move(clients, server, Point(*(rho * v for v in q)))

    def descend_mean(self, client: Client, key: Key, z: Point) -> tuple[Point, jax.Array]:
        """Local steps; what goes up is the mean of the directions along the way, and the number of steps."""
        q, total = self.collect(client, key, z)
        return Point(*(v / total for v in q)), total
