"""FedAvg."""

import math
from dataclasses import dataclass

import jax.numpy as jnp

from fedbilevel.core import Algorithm, Client, Clients, Key, parameter
from fedbilevel.core.vectors import Vector
from fedbilevel.errors import FedbilevelError
from fedbilevel.mathematics.descent import local_sgd
from fedbilevel.mathematics.hypergradient import Pair


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """FedAvg: train y at a fixed x, the reference without bilevel learning.

    Every client takes tau steps on its training loss; the server averages::

        y <- y - eta grad_y g(x, y)

    The weights are the task's; ``Task(weights="size")`` gives the paper's n_m / n. If x is the clients' weights, local
    steps are on the client's own loss, and the average has the weights x.

    ========  ===============   =====================
    paper     name              meaning
    ========  ===============   =====================
    eta       lr_lower          step of y
    E, B      local_steps       tau, the local steps between averages (steps, not epochs)
    n_k / n   client_weights    if x is the clients' weights: these instead of the problem's first x, scaled to sum 1
    -         validation_only   train y on the upper loss instead, on the server if it has validation rows
    ========  ===============   =====================
    """

    citation = (
        'McMahan, Moore, Ramage, Hampson, Aguera y Arcas: "Communication-Efficient Learning of Deep Networks from '
        'Decentralized Data", AISTATS 2017'
    )
    source = "follows the paper"
    assumes = "nothing of the upper level"
    exact = "with more than one local step and constant steps, client drift displaces the limit"
    alone = "SGD"
    costs = (
        "One exchange per round: d floats down and up (x once, to each client, if it is shared); tau Gg per client. "
        "With validation_only, tau Gf instead of tau Gg; or no exchange at all, and tau steps on the server, if it "
        "has the validation rows"
    )

    bilevel = False
    upper_at = "either"

    lr_lower: float = parameter(0.5, "step size of the model y", above=0, tune=(1e-3, 2.0))
    local_steps: int = parameter(5, "local steps between averages", least=1)
    client_weights: tuple[float, ...] = parameter(
        (), "fixed weight of every client, if x is the clients' weights", least=0
    )
    validation_only: bool = parameter(False, "train on the upper loss (the validation rows) only")

    def check(self) -> None:
        if self.client_weights and not 0 < math.fsum(self.client_weights) < math.inf:
            raise FedbilevelError("FedAvg: client_weights must be finite and not all zero.")
        if self.client_weights and self.validation_only:
            raise FedbilevelError("FedAvg: validation_only leaves out the losses that client_weights would weigh.")

    def init(self, clients: Clients, x: Vector, y: Vector) -> Pair:
        if self.client_weights:
            x = Vector(jnp.asarray(self.client_weights) / math.fsum(self.client_weights), "x")
        return Pair(x, y)

    def round(self, clients: Clients, server: Pair) -> Pair:
        x, y = server
        if not (self.validation_only and clients.holds_upper):
            return Pair(x, clients.project_y(y + clients.run(self.train, x, y).mean()))

        def step(clients: Clients, y: Vector) -> Vector:
            return clients.project_y(y - self.lr_lower * clients.f.dy(x, y, clients.next_key()))

        return Pair(x, clients.repeat(self.local_steps, step, y))

    def train(self, client: Client, key: Key, x: Vector, y: Vector) -> Vector:
        self.fits(client)
        loss = client.f if self.validation_only else client.own
        moved = local_sgd(client, key, x, y, self.lr_lower, self.local_steps, loss)
        if client.problem.weighting and not self.validation_only:
            moved = client.clients * x.tree[client.id] * moved
        return moved

    def fits(self, client: Client) -> None:
        """Refuse weights that do not fit the problem, also when costs are only planned."""
        if self.client_weights and not client.problem.weighting:
            raise FedbilevelError(
                "FedAvg: client_weights are for problems with weighting=True; here, give the task weights=."
            )
        if self.client_weights and len(self.client_weights) != client.clients:
            raise FedbilevelError(
                f"FedAvg: client_weights must be {client.clients} numbers, one per client, not "
                f"{len(self.client_weights)}."
            )

    def solution(self, server: Pair, memory: None) -> tuple[Vector, Vector]:
        return server.x, server.y
